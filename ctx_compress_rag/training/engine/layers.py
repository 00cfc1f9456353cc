"""How a decoder's layers run in training: compiled, with frozen weights in bfloat16, or with gradient checkpointing.

With checkpointing, a layer keeps only its input, and runs again when the backward pass reaches it. Another adapter may
be active then, because one decoder serves compressor and reader, each with its own LoRA, and the updates that a method
adds at a prompt's slots are gone. So the layer gets its first run's state again.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.models.adapted import AdaptedLinear
from ctx_compress_rag.models.layers import decoder_layers
from ctx_compress_rag.training.config import OptimConfig
from ctx_compress_rag.training.engine.torch_internals import compile_for_all, cpu_has_bfloat16

logger = logging.getLogger(__name__)


def speed_up_training(model: Any, optim: OptimConfig, dynamic: bool = False, saved: bool = False) -> None:
    """Compile a decoder, and round its frozen weights unless they will be `saved`, in place, as far as `optim` says.

    Trained weights must require gradients before. `dynamic` says that batches differ in shape.
    """
    if optim.bf16 and not saved and bfloat16_pays():
        round_frozen_weights(model)
    if optim.compile:
        compile_decoder_layers(model, dynamic)


def compile_decoder_layers(model: Any, dynamic: bool = False) -> None:
    """Compile each decoder layer for every shape it meets or, if `dynamic`, for all shapes. All layers share the code.

    On a CPU attention is eager, so that it is fused with the operations around it. For rows of a few hundred tokens the
    backward pass of transformers' fused attention is slower there.
    """
    compile_for_all()
    if model.device.type == "cpu":
        model.set_attn_implementation("eager")
    for layer in decoder_layers(model):
        layer.compile(dynamic=dynamic)


def round_frozen_weights(model: Any) -> None:
    """Convert weights that are not trained to bfloat16, in place, so that they are not cast at every use."""
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()


def bfloat16_pays() -> bool:
    """Whether bfloat16 is fast on the training device: True on CUDA, else whether the CPU has instructions for it.

    False is logged. A CPU with AVX2 only took 357 ms for 1920 x 576 x 1536 in bfloat16, and 38 to 75 ms in float32.
    """
    if torch.cuda.is_available():
        return True
    pays = cpu_has_bfloat16()
    if not pays:
        logger.warning("bf16: this CPU has no bfloat16 instructions; training in float32, which is faster on it")
    return pays


def bundle_decoder_layers(bundle: Bundle) -> list[nn.Module]:
    """Return every layer of a bundle's decoder and of its copies."""
    mask = torch.zeros(1, 1, dtype=torch.bool)
    with bundle.reader.decoder(mask) as reader:
        return transformers_layers([bundle.backbone.model, bundle.compressor, bundle.reader, reader])


def transformers_layers(models: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the layers of transformers models anywhere in these modules, each once."""
    modules = dict.fromkeys(module for model in models for module in model.modules())
    return [module for module in modules if isinstance(module, GradientCheckpointingLayer)]


def checkpoint_layers(layers: Sequence[nn.Module], model: nn.Module) -> None:
    """From now on, keep only `layers`' inputs, and run them again in the backward pass.

    Modules of `model` that have `at_slots` add updates to a layer at a prompt's `slots`, or nowhere if that is None.
    """
    updates = [module for module in model.modules() if hasattr(module, "at_slots")]
    for layer in layers:
        adapters = [module for module in layer.modules() if isinstance(module, BaseTunerLayer)]
        layer.forward = partial(_forward, adapters, updates, layer.forward)


def _forward(
    adapters: Sequence[BaseTunerLayer],
    updates: Sequence[Any],
    plain: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not torch.is_grad_enabled():
        return plain(*args, **kwargs)
    # The two runs would both append to a cache.
    kwargs = kwargs | {name: None for name in ("past_key_values", "use_cache") if name in kwargs}
    active = [_active(adapter) for adapter in adapters]
    slots = [update.slots for update in updates]

    @contextmanager
    def as_now() -> Iterator[None]:
        before = [_active(adapter) for adapter in adapters]
        _activate(adapters, active)
        try:
            with ExitStack() as stack:
                for update, own in zip(updates, slots, strict=True):
                    if own is not None:
                        stack.enter_context(update.at_slots(own))
                yield
        finally:
            _activate(adapters, before)

    out: Any = checkpoint(plain, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), as_now()), **kwargs)
    return out


def _active(adapter: BaseTunerLayer) -> Any:
    """Return the plan of an `AdaptedLinear`, else the names of a layer's active adapters, or None if they are off."""
    if isinstance(adapter, AdaptedLinear):
        return adapter.plan
    return None if adapter.disable_adapters else list(adapter.active_adapters)


def _activate(adapters: Sequence[BaseTunerLayer], names: Sequence[Any]) -> None:
    for adapter, wanted in zip(adapters, names, strict=True):
        if isinstance(adapter, AdaptedLinear):
            adapter.plan = wanted
            continue
        if _active(adapter) == wanted:
            continue
        module: Any = adapter
        trained = {p: p.requires_grad for p in module.parameters()}
        if wanted is not None:
            adapter.set_adapter(wanted)
        adapter.enable_adapters(wanted is not None)
        for parameter, flag in trained.items():  # peft freezes what is not active
            parameter.requires_grad_(flag)

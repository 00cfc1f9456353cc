"""Gradient checkpointing: a decoder layer keeps only its input, and runs again when the backward pass reaches it.

By then another adapter is active and hooks are gone: one decoder serves compressor and reader, each with its own LoRA,
and ArcAligner hooks its updates to the layers for one prompt. So a layer's earlier state is restored to run it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from ctx_compress_rag.bundle.bundle import Bundle

# Besides its weights, these determine what a module computes: hooks, peft's active adapters, dropout.
_STATE = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_active_adapter",
    "_disable_adapters",
    "_slots",  # where ArcAligner's updates are added
    "training",
)


def layers_of(bundle: Bundle) -> list[nn.Module]:
    """Every layer of a bundle's decoder and of its copies."""
    mask = torch.zeros(1, 1, dtype=torch.bool)
    with bundle.reader.decoder(mask) as reader:
        return layers_in([bundle.backbone.model, bundle.compressor, bundle.reader, reader])


def layers_in(models: Iterable[nn.Module]) -> list[nn.Module]:
    """The layers of transformers models anywhere in these modules, each once."""
    modules = dict.fromkeys(module for model in models for module in model.modules())
    return [module for module in modules if isinstance(module, GradientCheckpointingLayer)]


def checkpoint_layers(layers: Sequence[nn.Module], model: nn.Module) -> None:
    """Checkpoint a decoder's layers from now on; `model`'s modules that hook updates to them are restored, too."""
    hooking = [module for module in model.modules() if "_slots" in vars(module)]
    for layer in layers:
        layer.forward = partial(_forward, [*layer.modules(), *hooking], layer.forward)


def _forward(modules: list[nn.Module], plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    cache = kwargs.get("past_key_values")
    if not torch.is_grad_enabled() or not (cache is None or isinstance(cache, Cache)):
        return plain(*args, **kwargs)  # ArcAligner's passes over a few slots keep little, and do not run whole layers
    # The two runs would both append to a cache.
    kwargs = kwargs | {name: None for name in ("past_key_values", "use_cache") if name in kwargs}
    now = _state(modules)
    again: Any = checkpoint(
        plain, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), _as_it_was(now)), **kwargs
    )
    return again


def _state(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, dict[str, Any]]]:
    """Each module's state; hooks and lists of adapters are copied, since they change in place."""
    found = []
    for module in modules:
        values = {name: vars(module)[name] for name in _STATE if name in vars(module)}
        copied = {name: value.copy() if isinstance(value, dict | list) else value for name, value in values.items()}
        found.append((module, copied))
    return found


@contextmanager
def _as_it_was(state: list[tuple[nn.Module, dict[str, Any]]]) -> Iterator[None]:
    now = _state(module for module, _ in state)
    try:
        for module, values in state:
            vars(module).update(values)
        yield
    finally:
        for module, values in now:
            vars(module).update(values)

"""Gradient checkpointing: a decoder layer keeps its input alone, and is run again when the backward pass comes to it.

By then another adapter is active and hooks are gone: one decoder serves compressor and reader, each under its own LoRA,
and ArcAligner hooks its updates to the layers for one prompt. So a layer is run again as it was.
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

from ctx_compress_rag.bundle import Bundle

# What decides what a module does, beside its weights: hooks, the active adapters of peft, dropout.
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
    """Every layer of a bundle's decoder and of copies of it."""
    mask = torch.zeros(1, 1, dtype=torch.bool)
    with bundle.reader.decoder(mask) as reader:
        return layers_in([bundle.backbone.model, bundle.compressor, bundle.reader, reader])


def layers_in(models: Iterable[nn.Module]) -> list[nn.Module]:
    """The layers of transformers models, each once, wherever in these modules they are."""
    modules = dict.fromkeys(module for model in models for module in model.modules())
    return [module for module in modules if isinstance(module, GradientCheckpointingLayer)]


def checkpoint_layers(layers: Sequence[nn.Module], model: nn.Module) -> None:
    """Checkpoint a decoder's layers from now on; what of `model` hooks updates to them is restored with them."""
    hooking = [module for module in model.modules() if "_slots" in vars(module)]
    for layer in layers:
        layer.forward = partial(_forward, [*layer.modules(), *hooking], layer.forward)


def _forward(modules: list[nn.Module], plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    cache = kwargs.get("past_key_values")
    if not torch.is_grad_enabled() or not (cache is None or isinstance(cache, Cache)):
        return plain(*args, **kwargs)  # ArcAligner's passes at a few slots keep little, and are no layer's whole pass
    # A cache would be added to twice.
    kwargs = kwargs | {name: None for name in ("past_key_values", "use_cache") if name in kwargs}
    now = _state(modules)
    again: Any = checkpoint(
        plain, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), _as_it_was(now)), **kwargs
    )
    return again


def _state(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, dict[str, Any]]]:
    """Each module's state; hooks and lists of adapters change in place, so these are copied."""
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

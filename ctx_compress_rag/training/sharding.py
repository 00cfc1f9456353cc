"""The frozen weights of decoder layers, shared out: a process keeps its part of each, and gathers a layer's to run it.

By torch's `fully_shard`, one layer at a time. What is trained stays whole on each process, where DDP adds up its
gradients: LoRA, maps and gates are small beside the decoder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed import get_world_size
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel


@contextmanager
def sharded(layers: Sequence[nn.Module], model: nn.Module, device: str) -> Iterator[None]:
    """Within the context, the layers' frozen weights are shared out to all processes.

    After it they are whole again. All processes must run the same layers equally often and in one order: each run
    gathers what all of them hold.

    Args:
        layers: of a decoder.
        model: what DDP is to wrap.
        device: "cpu" or "cuda".
    """
    mesh = init_device_mesh(device, (get_world_size(),))
    modules = [module for layer in layers for module in layer.modules()]
    plain = [(type(module), _hooks(module)) for module in modules]
    for layer in layers:
        trained = {p for p in layer.parameters() if p.requires_grad}
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=trained)
    parts = [name for name, p in model.named_parameters() if isinstance(p, DTensor)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, parts)
    yield
    # Torch has no way back: its class and hooks are taken off the layers, and their weights gathered.
    for module, (kind, hooks) in zip(modules, plain, strict=True):
        module.__class__ = kind
        vars(module).update(hooks)
        for name, part in module.named_parameters(recurse=False):
            if isinstance(part, DTensor):
                setattr(module, name, nn.Parameter(part.full_tensor(), requires_grad=False))


def _hooks(module: nn.Module) -> dict[str, Any]:
    return {name: value.copy() for name, value in vars(module).items() if name.endswith(("_hooks", "_with_kwargs"))}

"""Weights divided among all processes of torchrun: each keeps its part, and gathers a layer's weights to run it.

Uses torch's `fully_shard` (FSDP2; Zhao et al., 2023), one decoder layer at a time. With `shard: frozen` trained weights
stay whole on each process, and DDP combines their gradients. With `shard: all` they are divided, too, with their
gradients and optimiser states; trained weights outside the layers are gathered once per step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import get_rank, get_world_size
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

Shard = Literal["frozen", "all"]


@contextmanager
def sharded(model: nn.Module, layers: Sequence[nn.Module], what: Shard, device: str) -> Iterator[None]:
    """Within the context, weights are divided among all processes.

    Afterwards they are whole again in the main process, on the CPU, to be saved. All processes must run the same layers
    equally often and in the same order: each run gathers parts from all of them.

    Args:
        model: the model to train.
        layers: decoder layers that it runs, whether they are modules of it or not.
        what: "frozen": the frozen weights of the layers; "all": these and all trained weights.
        device: "cpu" or "cuda".
    """
    modules = dict.fromkeys(chain(*(layer.modules() for layer in layers), model.modules()))
    plain = [(module, type(module), _hooks(module)) for module in modules]
    _share_out(model, layers, what, init_device_mesh(device, (get_world_size(),)))
    yield
    # Torch cannot undo `fully_shard`: its class and hooks are removed here, and the weights gathered.
    gathered: dict[nn.Parameter, nn.Parameter] = {}
    for module, kind, hooks in plain:
        module.__class__ = kind
        vars(module).update(hooks)
        for name, part in _own(module):
            if isinstance(part, DTensor):
                if part not in gathered:
                    gathered[part] = nn.Parameter(_for_main(part), requires_grad=part.requires_grad)
                setattr(module, name, gathered[part])


def _share_out(model: nn.Module, layers: Sequence[nn.Module], what: Shard, mesh: DeviceMesh) -> None:
    """Divide the weights. No reference to a whole weight may outlive the call, or the weight would stay in memory."""
    whole = [(module, name, p) for layer in layers for module in layer.modules() for name, p in _own(module)]
    for layer in layers:
        kept = {p for p in layer.parameters() if p.requires_grad} if what == "frozen" else set()
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=kept)
    if what == "frozen":
        parts = [name for name, p in model.named_parameters() if isinstance(p, DTensor)]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, parts)
        return
    # The model also lists the adapters of a decoder that is not one of its modules.
    new = {p: module.get_parameter(name) for module, name, p in whole}
    for module in model.modules():
        for name, p in _own(module):
            setattr(module, name, new.get(p, p))
    kept = {p for p in model.parameters() if isinstance(p, DTensor) or not p.requires_grad}
    fully_shard(model, mesh=mesh, reshard_after_forward=False, ignored_params=kept)


def is_shared_out(model: Any) -> bool:
    """Whether each process holds only a part of the trained weights."""
    return isinstance(model, FSDPModule)


@contextmanager
def at_hand(model: nn.Module) -> Iterator[None]:
    """Within the context, weights outside the layers are whole, as they are during a training step."""
    if not isinstance(model, FSDPModule):
        yield
        return
    model.unshard()
    try:
        yield
    finally:
        model.reshard()


def _for_main(part: DTensor) -> Tensor:
    """The whole tensor on the CPU in the main process; in the others a meta tensor, which takes no memory."""
    tensor = part.full_tensor()
    return tensor.cpu() if get_rank() == 0 else torch.empty_like(tensor, device="meta")


def _own(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters(recurse=False, remove_duplicate=False))


def _hooks(module: nn.Module) -> dict[str, Any]:
    return {name: value.copy() for name, value in vars(module).items() if name.endswith(("_hooks", "_with_kwargs"))}

"""Weights shared out to all processes of a torchrun: each keeps its part, and gathers a layer's to run it.

By torch's `fully_shard` (FSDP2; Zhao et al., 2023), one decoder layer at a time. With `shard: frozen` what is trained
stays whole on each process, where DDP adds up its gradients. With `shard: all` it is shared out, too, and with it
gradients and optimiser states; what lies outside of the layers is gathered once for a step.
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
    """Within the context, weights are shared out to all processes.

    After it they are whole again in the main process, on the CPU, to be saved. All processes must run the same layers
    equally often and in one order: each run gathers what all of them hold.

    Args:
        model: what is trained.
        layers: decoder layers that it runs, whether they are modules of it or not.
        what: weights of the layers that are frozen; or those and all that is trained.
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
    """Share out the weights. No reference to a whole weight may outlive the call: it would keep it in memory."""
    whole = [(module, name, p) for layer in layers for module in layer.modules() for name, p in _own(module)]
    for layer in layers:
        kept = {p for p in layer.parameters() if p.requires_grad} if what == "frozen" else set()
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=kept)
    if what == "frozen":
        parts = [name for name, p in model.named_parameters() if isinstance(p, DTensor)]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, parts)
        return
    # The adapters of a decoder that is no module of the model are listed in it, too.
    new = {p: module.get_parameter(name) for module, name, p in whole}
    for module in model.modules():
        for name, p in _own(module):
            setattr(module, name, new.get(p, p))
    kept = {p for p in model.parameters() if isinstance(p, DTensor) or not p.requires_grad}
    fully_shard(model, mesh=mesh, reshard_after_forward=False, ignored_params=kept)


def is_shared_out(model: Any) -> bool:
    """Whether each process holds a part of what is trained."""
    return isinstance(model, FSDPModule)


@contextmanager
def at_hand(model: nn.Module) -> Iterator[None]:
    """Within the context, what lies outside of the layers is whole, as it is while the model is trained."""
    if not isinstance(model, FSDPModule):
        yield
        return
    model.unshard()
    try:
        yield
    finally:
        model.reshard()


def _for_main(part: DTensor) -> Tensor:
    """The whole tensor on the CPU of the main process; no memory in the others."""
    tensor = part.full_tensor()
    return tensor.cpu() if get_rank() == 0 else torch.empty_like(tensor, device="meta")


def _own(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters(recurse=False, remove_duplicate=False))


def _hooks(module: nn.Module) -> dict[str, Any]:
    return {name: value.copy() for name, value in vars(module).items() if name.endswith(("_hooks", "_with_kwargs"))}

"""Weights sharded among all processes of torchrun: each keeps its part, and gathers a layer's weights to run it.

Uses torch's `fully_shard` (FSDP2; Zhao et al., 2023), one decoder layer at a time, for all weights of decoder layers
and all trained weights, with their gradients and optimizer states. Trained weights outside the layers are gathered once
per step. A sharded model cannot be made whole again: what was trained is saved from a new one, with the weights of the
last checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed import get_world_size
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def shard(model: nn.Module, layers: Sequence[nn.Module], device: str) -> None:
    """Divide the weights among all processes. No reference to a whole weight may outlive the call.

    All processes must run the same layers equally often and in the same order: each run gathers parts from all of them.

    Args:
        model: the model to train.
        layers: decoder layers that it runs, whether they are modules of it or not.
        device: "cpu" or "cuda".
    """
    mesh = init_device_mesh(device, (get_world_size(),))
    whole = [(module, name, p) for layer in layers for module in layer.modules() for name, p in _own(module)]
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    # The model also lists the adapters of a decoder that is not one of its modules.
    new = {p: module.get_parameter(name) for module, name, p in whole}
    for module in model.modules():
        for name, p in _own(module):
            setattr(module, name, new.get(p, p))
    kept = {p for p in model.parameters() if isinstance(p, DTensor) or not p.requires_grad}
    fully_shard(model, mesh=mesh, reshard_after_forward=False, ignored_params=kept)


def _own(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters(recurse=False, remove_duplicate=False))

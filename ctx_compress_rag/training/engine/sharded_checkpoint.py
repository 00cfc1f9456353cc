"""Checkpoints of sharded training: each process writes its parts; any number of processes can read them.

They are torch's distributed checkpoints, in safetensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from ctx_compress_rag.training.engine.parameters import trained

FOLDER = "parts"


def save_parts(model: nn.Module, optimizer: Optimizer, checkpoint: Path) -> None:
    """Write the trained parameters and the optimiser's states; every process must call this."""
    state = {name: p.detach() for name, p in trained(model).items()}
    for name, p in trained(model).items():
        state |= {f"{name}/{key}": value for key, value in optimizer.state[p].items()}
    save(state, storage_writer=HuggingFaceStorageWriter(str(checkpoint / FOLDER), save_distributed=True))


def load_parts(model: nn.Module, optimizer: Optimizer, checkpoint: Path) -> None:
    """Restore what `save_parts` wrote, into parameters that may be sharded in another way, or not at all."""
    reader = HuggingFaceStorageReader(str(checkpoint / FOLDER))
    stored: dict[str, Any] = reader.read_metadata().state_dict_metadata
    state: dict[str, Tensor] = {}
    for name, p in trained(model).items():
        state[name] = p.detach()
        for key in (key for key in stored if key.startswith(f"{name}/")):
            shape, dtype = stored[key].size, stored[key].properties.dtype
            like = torch.zeros_like(p, dtype=dtype) if shape == p.shape else torch.zeros(shape, dtype=dtype)
            state[key] = optimizer.state[p][key.removeprefix(f"{name}/")] = like
    if odd := state.keys() ^ stored.keys():
        raise ValueError(f"the checkpoint is of another model: {len(odd)} tensors differ, for example {min(odd)}")
    load(state, storage_reader=reader)

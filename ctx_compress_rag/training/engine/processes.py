"""The processes of `accelerate launch`, each of which trains on its share of every batch, on its own GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ctx_compress_rag.errors import needs

if TYPE_CHECKING:
    from accelerate import PartialState


def processes() -> PartialState:
    """Return this process's state, connected to the other processes; on GPUs if there are any, else on the CPU."""
    with needs("train"):
        from accelerate import PartialState
    return PartialState(cpu=not torch.cuda.is_available())

"""The processes of torchrun: each trains on its share of every batch, on its own GPU."""

from __future__ import annotations

import os

import torch
from torch import Tensor


def process_count() -> int:
    """How many processes train."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def process_rank() -> int:
    """This process's number, from 0."""
    return int(os.environ.get("RANK", "0"))


def is_main_process() -> bool:
    """Whether this is the process that writes the files of all."""
    return process_rank() == 0


def training_device() -> str:
    """The device to train on; the loop does not use Apple GPUs."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def join_processes() -> None:
    """Choose this process's GPU, and connect it with the others if there are any."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if process_count() > 1 and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")


def summed(value: Tensor) -> Tensor:
    """The sum of the processes' values."""
    if process_count() > 1:
        torch.distributed.all_reduce(value)
    return value


def wait_for_all() -> None:
    """Wait until every process is here."""
    if process_count() > 1:
        torch.distributed.barrier()

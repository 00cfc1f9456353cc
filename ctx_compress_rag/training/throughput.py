"""How fast training is: tokens and operations per second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor


def tokens_of(batch: Mapping[str, Any]) -> Tensor | int:
    """Tokens of a collated batch, padding left out: of passages and of prompts, each once, whatever is made of them.

    Counts tensors named as transformers names them, and what has a `token_count`, alone or in lists.
    """
    total: Tensor | int = 0
    if "input_ids" in batch:
        total = batch["attention_mask"].sum() if "attention_mask" in batch else batch["input_ids"].numel()
    for value in batch.values():
        total = total + _count(value)
    return total


def _count(value: Any) -> Tensor | int:
    if isinstance(value, list):
        return sum(map(_count, value))
    count: Tensor | int = getattr(value, "token_count", 0)
    return count


class Meter:
    """Counts tokens of all micro-batches, and operations of some: a compiled model cannot count its own.

    Attributes:
        tokens: seen so far; on the device, so that counting waits for nothing.
        sampled_at: the last step of which a sample was taken.
    """

    def __init__(self) -> None:
        self.tokens: Tensor | int = 0
        self.sampled_at = -1
        self._counted_tokens: Tensor | int = 0
        self._counted_operations = 0

    def see(self, batch: Mapping[str, Any]) -> None:
        """Count a micro-batch's tokens."""
        self.tokens = self.tokens + tokens_of(batch)

    def count(self, batch: Mapping[str, Any], operations: int) -> None:
        """Take a micro-batch, forward and backward, as a sample of how many operations a token needs."""
        self._counted_tokens = self._counted_tokens + tokens_of(batch)
        self._counted_operations += operations

    def report(self, history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Tokens, tokens per second, operations per second; "unknown" where they are.

        Args:
            history: log rows with running `tokens` and `seconds`; the median over their intervals leaves out compiling.
        """
        speeds = [
            (after["tokens"] - before["tokens"]) / (after["seconds"] - before["seconds"])
            for before, after in pairwise(history)
            if after["seconds"] > before["seconds"]
        ]
        tokens = int(history[-1]["tokens"]) if history else 0
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        speed = median(speeds) if speeds and tokens else None
        counted = int(self._counted_tokens)
        work = speed * self._counted_operations / counted if speed and counted else None
        return {
            "device": name,
            "tokens": tokens,
            "tokens_per_second": round(speed) if speed else "unknown",
            "teraflops_per_second": float(f"{work / 1e12:.4g}") if work else "unknown",
        }

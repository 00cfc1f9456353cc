"""Training speed: tokens and operations per second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor


def tokens_of(batch: Mapping[str, Any]) -> Tensor | int:
    """Number of tokens in a collated batch, without padding: of passages and prompts, each once, however often used.

    Counts tensors with transformers' names, and values that have a `token_count`, alone or in lists.
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
    """Counts the tokens of all micro-batches, and the operations of a few: those run uncompiled, to be counted.

    Attributes:
        tokens: tokens so far; on the device, so that counting does not wait for it.
        sampled_at: the last step that was sampled.
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
        """Add a micro-batch's forward and backward pass to the sample of operations per token."""
        self._counted_tokens = self._counted_tokens + tokens_of(batch)
        self._counted_operations += operations

    def report(self, history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Device, tokens, tokens per second, and operations per second; "unknown" if there are no data.

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

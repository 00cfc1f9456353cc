"""Training speed: tokens and operations per second."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ctx_compress_rag.models.flops import counting
from ctx_compress_rag.training.engine.processes import process_count

_COUNTED_STEPS = 8


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

    Args:
        steps: the training's number of steps.

    Attributes:
        tokens: this process's tokens so far; on the device, so that counting does not wait for it.
    """

    def __init__(self, steps: int) -> None:
        self.tokens: Tensor | int = 0
        self._every = max(1, steps // _COUNTED_STEPS)
        self._counted_tokens: Tensor | int = 0
        self._counted_operations = 0

    @contextmanager
    def counting(self, batch: Mapping[str, Any], step: int | None) -> Iterator[None]:
        """Count a micro-batch's tokens and, at some steps, the operations of its forward and backward pass."""
        tokens = tokens_of(batch)
        self.tokens = self.tokens + tokens
        if step is None or (step - 1) % self._every:
            yield
            return
        with torch.compiler.set_stance("force_eager"), counting() as counter:
            yield
        self._counted_tokens = self._counted_tokens + tokens
        self._counted_operations += counter.get_total_flops()

    def progress(self, began: float) -> dict[str, Any]:
        """Tokens, as if all processes had read as many as this one, and seconds since `began`."""
        seconds = round(time.monotonic() - began, 2)
        return {"tokens": int(self.tokens) * process_count(), "seconds": seconds}

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

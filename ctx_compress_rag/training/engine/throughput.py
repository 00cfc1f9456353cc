"""Training speed in tokens per second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import torch


def tokens_of(batch: Mapping[str, Any]) -> int:
    """Number of tokens in a collated batch, without padding: of passages and prompts, each once, however often used.

    Counts tensors with transformers' names, and values that have a `token_count`, alone or in lists.
    """
    total = sum(map(_count, batch.values()))
    if "attention_mask" in batch:
        total += int(batch["attention_mask"].sum())
    return total


def _count(value: Any) -> int:
    return sum(map(_count, value)) if isinstance(value, list) else int(getattr(value, "token_count", 0))


def speed_report(history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Device, tokens, and tokens per second; "unknown" if there are no data.

    Args:
        history: log rows with running `tokens` and `seconds`; the median over their intervals leaves out compiling.
    """
    speeds = [
        (after["tokens"] - before["tokens"]) / (after["seconds"] - before["seconds"])
        for before, after in pairwise(history)
        if after["seconds"] > before["seconds"]
    ]
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "tokens": int(history[-1]["tokens"]) if history else 0,
        "tokens_per_second": (round(median(speeds)) if speeds else 0) or "unknown",
    }

"""Losses that are means over a whole batch, however it is divided into micro-batches and among processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor


class BatchMean(ABC):
    """A loss whose `forward` divides its sums by `num_items_in_batch`; None: by the number of its own batch's items.

    With means over micro-batches, tokens of short answers would count more than those of long ones, especially in
    small micro-batches.

    Among a loss's base classes, list this one after the module: torch's `fully_shard` replaces a module's class, which
    Python allows only in this order.
    """

    @abstractmethod
    def items(self, **batch: Any) -> Tensor:
        """The number of items in a micro-batch, for each mean that the loss has: float (means,)."""

"""Losses that are means over a whole batch, however it is cut into micro-batches and shared by processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor


class WholeBatchMean(ABC):
    """A loss whose `forward` takes `num_items_in_batch`, what it divides its sums by; None is its own batch's.

    The mean over a micro-batch would make a short answer's tokens count for more than a long one's, and the more so,
    the smaller the micro-batches.

    List it after the module among the bases of a loss: torch's `fully_shard` replaces a module's class, which Python
    allows only in this order.
    """

    accepts_loss_kwargs: ClassVar[bool] = True
    """Tells the Trainer to pass `num_items_in_batch`, and not to divide by the number of micro-batches."""

    @abstractmethod
    def items(self, **batch: Any) -> Tensor:
        """The number of items in a micro-batch, for each mean that the loss has: float (means,)."""

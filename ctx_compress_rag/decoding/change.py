"""Temporary changes to a decoder's model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.bundle.plain_decoder import PlainDecoder


class Change:
    """A temporary change to a decoder's model; this base class changes nothing."""

    @property
    def of_model(self) -> object:
        """Identifies the change, None if there is none: prompts with different changes share no pass."""
        return None

    @property
    def digest(self) -> str | None:
        """Identifies the change across processes, for caches of answers; None if nothing is changed."""
        return None

    def applied(self, model: Any) -> AbstractContextManager[None]:
        """Change a transformers model within the context; the caller holds its lock."""
        return nullcontext()


UNCHANGED = Change()


@contextmanager
def opened(decoder: PlainDecoder, soft: bool, slot_mask: Tensor, change: Change = UNCHANGED) -> Iterator[Any]:
    """Lock a transformers model for this thread, with a change applied to it.

    Args:
        decoder: a decoder, or the bundle that reads the slots.
        soft: whether the model is to read prompts with slots, not plain text.
        slot_mask: bool (batch, length), True at slots.
        change: the change to apply.
    """
    reading = decoder.soft_decoder(slot_mask) if soft and isinstance(decoder, Bundle) else decoder.text_decoder()
    with reading as model, change.applied(model):
        yield model

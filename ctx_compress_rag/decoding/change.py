"""Temporary changes to a decoder: to its prompts, or to its model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor

from ctx_compress_rag.bundle import Bundle
from ctx_compress_rag.prompt import Prompt, PromptLike


class Change:
    """A temporary change to a decoder; this base class changes nothing."""

    @property
    def of_model(self) -> object:
        """Identifies a change of the model: prompts with different ones cannot share a pass. None: no change."""
        return None

    def asked(self, prompt: PromptLike) -> PromptLike:
        """What is asked in place of a prompt."""
        return prompt

    def read(self, prompt: Prompt) -> Prompt:
        """What the model is given in its place."""
        return prompt

    def applied(self, model: Any) -> AbstractContextManager[None]:
        """Change a transformers model, whose lock is held, within the context."""
        return nullcontext()


UNCHANGED = Change()


@contextmanager
def opened(bundle: Bundle, soft: bool, slot_mask: Tensor, change: Change = UNCHANGED) -> Iterator[Any]:
    """A bundle's transformers model with a change on it, held for this thread within the context.

    Args:
        bundle: the bundle.
        soft: whether it is to read prompts with slots, or plain text.
        slot_mask: bool (batch, length), where the slots are.
        change: what is changed of it.
    """
    with bundle.soft_decoder(slot_mask) if soft else bundle.text_decoder() as model, change.applied(model):
        yield model

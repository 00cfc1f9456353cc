"""Retrieve passages for questions that come without passages, and show them in the prompt within a budget."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ctx_compress_rag.indexing.fit import IndexFit
from ctx_compress_rag.indexing.index import PassageIndex
from ctx_compress_rag.marking.mark import Marking
from ctx_compress_rag.prompt import Message
from ctx_compress_rag.store.marker import Marker
from ctx_compress_rag.text.templates import PASSAGE_SEPARATOR, question_messages


@dataclass(frozen=True)
class IndexRetrieval:
    """How many passages are retrieved for a question, and how the prompt shows them."""

    index: PassageIndex
    k: int
    marking: Marking | None  # None shows the passages' whole text
    extractive: bool = False  # whether a server's answers quote, unless a request says otherwise or asks for JSON

    @cached_property
    def _fit(self) -> IndexFit:
        return IndexFit(self.index.bundle)

    def is_question(self, chat: Sequence[Message], scope: str | None) -> bool:
        """Whether a chat ends with a message of the user, and no message of the chat has a readable marker."""
        split = (self.index.store.split(message["content"], scope, "text") for message in chat)
        return chat[-1]["role"] == "user" and not any(isinstance(part, Marker) for parts in split for part in parts)

    def retrieve(self, chat: Sequence[Message], scope: str | None = None) -> tuple[list[Message], list[dict[str, Any]]]:
        """Return the chat with passages in its last message, and the passages of which the prompt shows something.
        Each has `id`, `source`, `similarity`, `text`, `sentences` and `slots` (text and number of slots shown).
        """
        *earlier, last = chat
        question, store = last["content"], self.index.store
        self._fit.warn_of_question(question)
        [hits] = self.index.search([question], self.k)
        shown = [hit.text for hit in hits]
        if self.marking is not None:
            marking = replace(self.marking, scope=scope)
            shown = [each.shown for each in marking.mark(shown, [hit.id for hit in hits], question=question)]
        sources = []
        for hit, each in zip(hits, shown, strict=True):
            parts = store.split(each, scope, "text")
            sentences = " ".join(part.strip() for part in parts if isinstance(part, str)).strip()
            slots = sum(part.slots for part in parts if isinstance(part, Marker))
            if sentences or slots:
                sources.append({**vars(hit), "sentences": sentences, "slots": slots})
        context = PASSAGE_SEPARATOR.join(filter(None, shown))
        *system, asked = question_messages(self.index.bundle.config.template, context, question)
        return [*system, *earlier, asked], sources

"""Questions that come alone: passages are retrieved for them, and what a budget buys of these goes into the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ctx_compress_rag.indexing.index import PassageIndex
from ctx_compress_rag.marking.mark import Marking
from ctx_compress_rag.prompt import Message
from ctx_compress_rag.store.marker import Marker
from ctx_compress_rag.text.templates import PASSAGE_SEPARATOR, messages


@dataclass(frozen=True)
class Retrieval:
    """How many passages are retrieved for a question, and how the decoder is shown them."""

    index: PassageIndex
    k: int
    marking: Marking | None  # None shows the passages' whole text
    extractive: bool = False  # whether a server's answers quote, unless a request says otherwise or asks for JSON

    def is_question(self, chat: Sequence[Message], scope: str | None) -> bool:
        """Whether a chat ends with a question, and no message of it has a marker that can be read."""
        split = (self.index.store.split(message["content"], scope, "text") for message in chat)
        return chat[-1]["role"] == "user" and not any(isinstance(part, Marker) for parts in split for part in parts)

    def ask(self, chat: Sequence[Message], scope: str | None = None) -> tuple[list[Message], list[dict[str, Any]]]:
        """The chat with passages for its last message, and those of which the decoder is shown something.

        Of each: `id`, `source`, `similarity`, `text`, and what is shown of it: `sentences` (text) and the number of
        `slots`.
        """
        *earlier, last = chat
        question, store = last["content"], self.index.store
        [hits] = self.index.search([question], self.k)
        shown = [hit.text for hit in hits]
        if self.marking is not None:
            ids, scores = [hit.id for hit in hits], [hit.similarity for hit in hits]
            shown = [each.shown for each in replace(self.marking, scope=scope).mark(shown, ids, scores, question)]
        sources = []
        for hit, each in zip(hits, shown, strict=True):
            parts = store.split(each, scope, "text")
            sentences = " ".join(part.strip() for part in parts if isinstance(part, str)).strip()
            slots = sum(part.slots for part in parts if isinstance(part, Marker))
            if sentences or slots:
                sources.append({**vars(hit), "sentences": sentences, "slots": slots})
        context = PASSAGE_SEPARATOR.join(filter(None, shown))
        *system, asked = messages(self.index.bundle.config.template, context, question)
        return [*system, *earlier, asked], sources

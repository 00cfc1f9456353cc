"""Questions that come alone: passages are retrieved for them, and the reply says which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ctx_compress_rag.indexing.index import PassageIndex
from ctx_compress_rag.marking.mark import mark
from ctx_compress_rag.prompt import Message
from ctx_compress_rag.store.marker import Marker
from ctx_compress_rag.text.templates import PASSAGE_SEPARATOR, messages


@dataclass(frozen=True)
class Retrieval:
    """What `ctx-compress ask` does before it answers, for the questions of clients.

    Attributes:
        index: where passages are retrieved.
        k: how many.
        extractive: whether answers quote, unless a request says otherwise or asks for JSON.
    """

    index: PassageIndex
    k: int
    extractive: bool = False

    def is_question(self, chat: Sequence[Message], scope: str | None) -> bool:
        """Whether a chat ends with a question, and no message of it has a marker that can be read."""
        split = (self.index.store.split(message["content"], scope, "text") for message in chat)
        return chat[-1]["role"] == "user" and not any(isinstance(part, Marker) for parts in split for part in parts)

    def ask(self, chat: Sequence[Message], scope: str | None) -> tuple[list[Message], list[dict[str, Any]]]:
        """The chat with passages for its last message, and these passages as the reply names them.

        Of each: `id`, `source`, `similarity`, `text`, and what the decoder is shown of it: `sentences` (text) and the
        number of `slots`.
        """
        *earlier, last = chat
        question, store = last["content"], self.index.store
        [hits] = self.index.search([question], self.k)
        texts, ids, scores = [h.text for h in hits], [h.id for h in hits], [h.similarity for h in hits]
        shown = mark(store, texts, ids, scores=scores, scope=scope, question=question)
        sources = []
        for hit, each in zip(hits, shown, strict=True):
            parts = store.split(each, scope, "text")
            sources.append(
                {
                    **vars(hit),
                    "sentences": " ".join(part.strip() for part in parts if isinstance(part, str)).strip(),
                    "slots": sum(part.slots for part in parts if isinstance(part, Marker)),
                }
            )
        context = PASSAGE_SEPARATOR.join(filter(None, shown))
        *system, asked = messages(self.index.bundle.config.template, context, question)
        return [*system, *earlier, asked], sources

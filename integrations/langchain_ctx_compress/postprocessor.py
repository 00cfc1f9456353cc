"""The postprocessor: retrieved documents in, documents whose text is a marker out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.runnables import RunnableConfig, RunnableSerializable
from pydantic import ConfigDict, Field, ValidationError

from ctx_compress_rag.config import explain
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.markers import Marker
from ctx_compress_rag.postprocess import Mode, OnMissing, check_size, mark
from ctx_compress_rag.stores import SoftContextStore
from ctx_compress_rag.stores.passages import content_id


class CompressedContextPostprocessor(BaseDocumentCompressor, RunnableSerializable[Sequence[Document], list[Document]]):
    """Replaces the text of retrieved documents by markers of their stored soft contexts.

    Works as a step of an LCEL chain and wherever a document compressor is expected
    (`ContextualCompressionRetriever`, `DocumentCompressorPipeline`). The documents given are left as they
    are; those returned have the same ids and metadata, in the same order. A document whose text is blank,
    or that stays text by `on_missing`, is returned as it is; one that is a marker already gets a new one.

    A document is looked up in the store by its id, then by its text: the vector store and the soft context
    store need not have been given the same ids.

    With `mode="close_reading"` (RAM bundles) a document keeps the segments that the question needs as text, and
    markers stand for the rest. The question is the `query` of `compress_documents`, which a
    `ContextualCompressionRetriever` gives; a plain LCEL step has none. The LLM must be given the same store.

    Args:
        store: where the soft contexts are.
        ratio: source tokens per slot, a multiple of the bundle's base ratio; None takes the base ratio. In close
            reading, how many times shorter all documents together become, 2 or more; None takes the least that
            the bundle was trained for.
        token_budget: slots that the compressed documents of one call may take together, at one common ratio,
            the finest that fits; not together with `ratio`. Documents left as text do not count.
        on_missing: what to do with a document that is not in the store: "compress" and store it, raise an
            "error", or leave it as "text".
        scope: tenant or user the markers belong to; None takes the one of `markers.scope`, or else the store's.
        mode: "close_reading" for a RAM bundle, "soft" for any other.

    Raises:
        ConfigError: an argument is unknown or has an impossible value, or the mode is not the bundle's.
        RatioError: the ratio cannot be made from what is stored.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    store: SoftContextStore = Field(exclude=True, repr=False)
    ratio: int | None = None
    token_budget: int | None = None
    on_missing: OnMissing = "compress"
    scope: str | None = None
    mode: Mode = "soft"

    def __init__(self, **kwargs: Any) -> None:
        try:
            super().__init__(**kwargs)
        except ValidationError as error:
            raise ConfigError(f"{type(self).__name__}: {explain(error)}") from None
        check_size(self.store, self.ratio, self.token_budget, self.on_missing, self.mode)

    def compress_documents(
        self, documents: Sequence[Document], query: str = "", callbacks: Callbacks | None = None
    ) -> list[Document]:
        """Documents with markers in place of their texts, or of what close reading skims of them.

        Args:
            documents: the documents.
            query: the question; plays a part in close reading alone.
            callbacks: LangChain's own.

        Raises:
            ConfigError: close reading without a query.
            MissingPassageError: a document is not stored and `on_missing` is "error".
            RatioError: there are more documents than slots in `token_budget`.
        """
        done = self.restore_sources(documents)  # a marker from an earlier step is sized anew
        markers = mark(
            self.store,
            [document.page_content for document in done],
            self._names(done),
            ratio=self.ratio,
            token_budget=self.token_budget,
            on_missing=self.on_missing,
            scope=self.scope,
            mode=self.mode,
            question=query,
        )
        for document, marker in zip(done, markers, strict=True):
            document.page_content = marker
        return done

    def invoke(self, input: Sequence[Document], config: RunnableConfig | None = None, **kwargs: Any) -> list[Document]:
        """As a step of a chain: `compress_documents`."""
        return self._call_with_config(self.compress_documents, input, config)

    async def ainvoke(
        self, input: Sequence[Document], config: RunnableConfig | None = None, **kwargs: Any
    ) -> list[Document]:
        """As `invoke`, in a thread: neither compression nor Chroma blocks the event loop."""
        return await self._acall_with_config(self._acompress, input, config)

    async def _acompress(self, documents: Sequence[Document]) -> list[Document]:
        return list(await self.acompress_documents(documents, ""))

    def restore_sources(self, documents: Sequence[Document]) -> list[Document]:
        """Copies of the documents, with the passages' texts in place of markers: for citations, after the answer.

        Only a document with markers of this key and scope is changed; restoring twice is the same as once.

        Raises:
            MissingPassageError: the passage was deleted since, or, after close reading, the store has since kept
                so many slots for other questions that those of this one are gone.
        """
        copies = [document.model_copy(deep=True) for document in documents]
        split = [self.store.split(document.page_content, self.scope) for document in copies]
        markers = [part for parts in split for part in parts if isinstance(part, Marker)]
        texts = iter(self.store.text_of(markers) if markers else [])
        for document, parts in zip(copies, split, strict=True):
            document.page_content = "".join(next(texts) if isinstance(part, Marker) else part for part in parts)
        return copies

    def _names(self, documents: Sequence[Document]) -> list[str]:
        """Each document's id in the store: its own, or that of its text where only that one is known."""
        by_text = [content_id(document.page_content) for document in documents]
        # An id that two different texts share can only stand for the first of them.
        first: dict[str, str] = {}
        names = [document.id or name for document, name in zip(documents, by_text, strict=True)]
        names = [
            name if first.setdefault(name, text) == text else text for name, text in zip(names, by_text, strict=True)
        ]
        places = [place for place, document in enumerate(documents) if document.page_content.strip()]
        texts = [documents[place].page_content for place in places]
        under_own = self.store.has(texts, [names[place] for place in places])
        under_text = under_own if all(under_own) else self.store.has(texts)
        for place, own, other in zip(places, under_own, under_text, strict=True):
            if other and not own:
                names[place] = by_text[place]
        return names

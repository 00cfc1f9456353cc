"""The postprocessor: retrieved documents in, documents whose text is a marker out."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.runnables import RunnableConfig, RunnableSerializable
from pydantic import ConfigDict

from ctx_compress_rag.frameworks.postprocessor import MarkingPostprocessor
from ctx_compress_rag.marking.mark import try_expand
from ctx_compress_rag.store.marker import quietly
from langchain_ctx_compress.sources import checked, restore_sources


class CompressedContextPostprocessor(
    MarkingPostprocessor, BaseDocumentCompressor, RunnableSerializable[Sequence[Document], list[Document]]
):
    """Replaces the text of retrieved documents by markers of their stored soft contexts.

    Works as a step of an LCEL chain and wherever a document compressor is expected
    (`ContextualCompressionRetriever`, `DocumentCompressorPipeline`). The given documents are not changed;
    their copies keep ids, metadata and order. A document whose text is blank, or stays text because of
    `on_missing`, is returned unchanged; if its text is already a marker, it gets a new one.

    A document is looked up in the store by its id, then by its text, so the vector store and the soft context
    store need not use the same ids.

    With a RAM bundle (close reading) a document keeps the segments that the question needs as text, and
    markers stand for the rest. The question is the `query` of `compress_documents`, which a
    `ContextualCompressionRetriever` passes; a plain LCEL step has none. The LLM must have the same store object.

    Args:
        store: where the soft contexts are.
        ratio: source tokens per slot, a multiple of the store's ratio; None takes the store's.
        reduction: in close reading, in place of a ratio: how many times shorter all documents together become, 2 or
            more; None takes the smallest that the bundle was trained for.
        token_budget: in place of a ratio, the maximum number of tokens for all documents of one call together: the
            sum of `llm.get_num_tokens(document.page_content)` over the returned documents never exceeds it; slots
            and text count alike. More relevant documents get finer ratios, and the best stay text if there is
            room; at least 90% of the budget is used if the documents allow it (see
            `ctx_compress_rag.marking.budget.allot`). Template, question and separators are not counted.
        score_key: with a budget, the metadata key of a document's relevance (rerankers write "relevance_score"):
            higher is more relevant, and documents without a number come last. If no document has one, they
            count as sorted, best first, as retrievers return them.
        on_missing: what to do with a document that is not in the store: "compress" and store it, raise an
            "error", or leave it as "text".
        on_unreadable: what to do with a document that holds the marker of a deleted passage: raise an "error", or
            leave the document as text, with a warning ("warn") or without ("text"); see `mark`.
        scope: tenant or user that the markers belong to; None takes that of `stores.markers.scope`, or the store's.
        mode: deprecated: each bundle has its own.

    Raises:
        ConfigError: an argument is unknown or has an impossible value, or the mode is not the bundle's.
        RatioError: the ratio cannot be made from what is stored.
    """

    model_config = ConfigDict(extra="forbid")

    score_key: str = "relevance_score"

    def compress_documents(
        self, documents: Sequence[Document], query: str = "", callbacks: Callbacks | None = None
    ) -> list[Document]:
        """Put markers in place of the documents' texts; in close reading, in place of the parts that are only skimmed.

        Args:
            documents: the documents.
            query: the question; used only in close reading.
            callbacks: LangChain's own.

        Raises:
            ConfigError: close reading without a query.
            MissingPassageError: a document is not stored and `on_missing` is "error".
            RatioError: the documents do not fit into `token_budget` at any ratio.
        """
        done = [document.model_copy(deep=True) for document in checked(documents)]
        for document in done:  # resize markers of an earlier step; `mark` reports unreadable ones
            text = try_expand(self.store, document.page_content, self.scope, quietly(self.on_unreadable))
            document.page_content = document.page_content if text is None else text
        texts = [document.page_content for document in done]
        ids = [document.id for document in done]
        markers = self._marked(texts, ids, self._scores(done), query)
        for document, marker in zip(done, markers, strict=True):
            document.page_content = marker
        return done

    def invoke(self, input: Sequence[Document], config: RunnableConfig | None = None, **kwargs: Any) -> list[Document]:
        """Run `compress_documents` as a step of a chain."""
        return self._call_with_config(self.compress_documents, input, config)

    async def ainvoke(
        self, input: Sequence[Document], config: RunnableConfig | None = None, **kwargs: Any
    ) -> list[Document]:
        """As `invoke`, in a thread: neither compression nor Chroma blocks the event loop."""
        return await self._acall_with_config(self._acompress, input, config)

    async def _acompress(self, documents: Sequence[Document]) -> list[Document]:
        return list(await self.acompress_documents(documents, ""))

    def restore_sources(self, documents: Sequence[Document]) -> list[Document]:
        """Call `restore_sources` with the postprocessor's store and scope; raises the same errors."""
        return restore_sources(documents, self.store, self.scope)

    def _scores(self, documents: Sequence[Document]) -> list[float | None]:
        found = [document.metadata.get(self.score_key) for document in documents]
        return [float(score) if isinstance(score, Real) else None for score in found]  # numpy's are Reals too

"""The postprocessor: retrieved documents in, documents whose text is a marker out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.runnables import RunnableConfig, RunnableSerializable
from pydantic import ConfigDict

from ctx_compress_rag.frameworks.postprocessor import MarkingPostprocessor
from langchain_ctx_compress.documents import CompressedDocument, with_text
from langchain_ctx_compress.sources import checked, restore_sources


class CompressedContextPostprocessor(
    MarkingPostprocessor, BaseDocumentCompressor, RunnableSerializable[Sequence[Document], list[Document]]
):
    """Replaces the text of retrieved documents by markers of their stored soft contexts.

    Works as a step of an LCEL chain and wherever a document compressor is expected
    (`ContextualCompressionRetriever`, `DocumentCompressorPipeline`), last of all steps: to a reranker after it that is
    a document compressor, the documents show their texts, but not to a function. The given documents are not changed;
    their copies keep ids, metadata and order. If a document's text is already a marker, it gets a new one.

    A document is looked up in the store by its id, then by its text, so the vector store and the soft context
    store need not use the same ids.

    With a RAM bundle a document keeps the segments that the question needs as text, and markers stand for the rest.
    The question is the `query` of `compress_documents`, which a `ContextualCompressionRetriever` passes; a plain LCEL
    step has none. The LLM must have the same store object.

    Args:
        store: where the soft contexts are.
        ratio: source tokens per slot, a multiple of the store's ratio; None takes the store's. With a RAM bundle, how
            many times shorter all documents together become, 2 or more; None takes the smallest it was trained for.
        token_budget: in place of a ratio, the maximum number of tokens for all documents of one call together: the
            sum of `llm.get_num_tokens(document.page_content)` over the returned documents never exceeds it; slots
            and text count alike. More relevant documents get finer ratios, and the best stay text if there is
            room; at least 90% of the budget is used if the documents allow it (see
            `ctx_compress_rag.marking.budget.allot`). Template, question and separators are not counted.
        score_key: with a budget, the metadata key of a document's relevance (rerankers write "relevance_score"):
            higher is more relevant, and documents without a number come last. If no document has one, they
            count as sorted, best first, as retrievers return them.
        on_missing: what to do with a document that the store cannot stand in for, each alone: "compress" and store
            it, or keep its text, with a warning, if that is impossible; raise an "error"; or keep its "text". See
            `ctx_compress_rag.marking.mark.OnMissing`.
        scope: tenant or user that the markers belong to; None takes that of `store.marker.scope`, or the store's.

    Raises:
        ConfigError: an argument is unknown or has an impossible value.
        RatioError: the ratio cannot be made from what is stored.
    """

    model_config = ConfigDict(extra="forbid")  # LangChain's bases ignore unknown fields

    score_key: str = "relevance_score"

    def compress_documents(
        self, documents: Sequence[Document], query: str = "", callbacks: Callbacks | None = None
    ) -> list[Document]:
        """Put markers in place of the documents' texts or, with a RAM bundle, of parts of them.

        Args:
            documents: the documents.
            query: the question; used only by a RAM bundle.
            callbacks: LangChain's own.

        Raises:
            ConfigError: a RAM bundle gets no query.
            ConfigError, MissingPassageError, PayloadError: `on_missing` is "error", and the store cannot stand in for
                a document.
            RatioError: the documents do not fit into `token_budget` at any ratio.
        """
        texts = [document.page_content for document in checked(documents)]
        scores = [document.metadata.get(self.score_key) for document in documents]
        marked = self._mark(texts, [document.id for document in documents], scores, query)
        return [_shown(document, *each) for document, each in zip(documents, marked, strict=True)]

    def invoke(self, input: Sequence[Document], config: RunnableConfig | None = None, **kwargs: Any) -> list[Document]:
        """Run `compress_documents` as a step of a chain; `ainvoke` does so in a thread."""
        return self._call_with_config(self.compress_documents, input, config)

    def restore_sources(self, documents: Sequence[Document]) -> list[Document]:
        """Call `restore_sources` with the postprocessor's store and scope; raises the same errors."""
        return restore_sources(documents, self.store, self.scope)


def _shown(document: Document, text: str, shown: str) -> Document:
    restored = with_text(document, text)
    plain = shown == text or type(restored) is not Document  # an app's own class keeps its fields
    return with_text(restored, shown) if plain else CompressedDocument.of(restored, shown)

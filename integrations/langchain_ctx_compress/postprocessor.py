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
from langchain_ctx_compress.sources import checked


class CompressedContextPostprocessor(
    MarkingPostprocessor, BaseDocumentCompressor, RunnableSerializable[Sequence[Document], list[Document]]
):
    """Replaces the text of retrieved documents by markers of their stored soft contexts.

    Works as a step of an LCEL chain and wherever a document compressor is expected
    (`ContextualCompressionRetriever`, `DocumentCompressorPipeline`), last of all steps: to a reranker after it that is
    a document compressor, the documents show their texts, but not to a function. The given documents are not changed;
    their copies keep ids, metadata and order. If a document's text is already a marker, it gets a new one.

    The options are those of `ctx_compress_rag.frameworks.postprocessor.MarkingPostprocessor`, which also says what is
    raised. The question that a RAM bundle needs is the `query` of `compress_documents`, which a
    `ContextualCompressionRetriever` passes; a plain LCEL step has none. The sum of
    `llm.get_num_tokens(document.page_content)` over the returned documents never exceeds a `token_budget`.

    Args:
        score_key: with a budget, the metadata key of a document's relevance, a number, higher for the more relevant.
    """

    model_config = ConfigDict(extra="forbid")  # LangChain's bases ignore unknown fields

    score_key: str = "relevance_score"

    def compress_documents(
        self, documents: Sequence[Document], query: str = "", callbacks: Callbacks | None = None
    ) -> list[Document]:
        """Put markers in place of the documents' texts or, with a RAM bundle, of what the `query` does not need."""
        texts = [document.page_content for document in checked(documents)]
        scores = [document.metadata.get(self.score_key) for document in documents]
        marked = self.mark(texts, [document.id for document in documents], scores, query)
        return [_shown(document, *each) for document, each in zip(documents, marked, strict=True)]

    def invoke(self, input: Sequence[Document], config: RunnableConfig | None = None, **kwargs: Any) -> list[Document]:
        """Run `compress_documents` as a step of a chain; `ainvoke` does so in a thread."""
        return self._call_with_config(self.compress_documents, input, config)


def _shown(document: Document, text: str, shown: str) -> Document:
    restored = with_text(document, text)
    plain = shown == text or type(restored) is not Document  # an app's own class keeps its fields
    return with_text(restored, shown) if plain else CompressedDocument.of(restored, shown)

"""Define the postprocessor, which gives retrieved documents a marker as text."""

from collections.abc import Sequence
from typing import Any

from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.runnables import RunnableConfig, RunnableSerializable
from pydantic import ConfigDict

from ctx_compress_rag.frameworks import MarkingPostprocessor
from langchain_ctx_compress.sources import checked, with_text


class CompressedContextPostprocessor(
    MarkingPostprocessor, BaseDocumentCompressor, RunnableSerializable[Sequence[Document], list[Document]]
):
    """A step that replaces retrieved documents' text by markers, sentences, or both, within a budget.

    Works wherever a document compressor is expected (`ContextualCompressionRetriever`, `DocumentCompressorPipeline`),
    and as a step of an LCEL chain, which has no question and therefore gets markers alone. Returns copies, which keep
    class, ids, metadata and order; documents with no share of the budget are left out, as by a reranker. Put rerankers
    and filters before this step: after it, they would read markers.

    The options and errors are those of `ctx_compress_rag.frameworks.MarkingPostprocessor`. The question
    is the `query` of `compress_documents`, which a `ContextualCompressionRetriever` passes. `llm.get_num_tokens` of the
    documents' contents, joined by blank lines, never exceeds a `token_budget`.

    Args:
        score_key: the metadata key of a document's relevance, a number, higher for the more relevant.
    """

    model_config = ConfigDict(extra="forbid")  # LangChain's bases ignore unknown fields

    score_key: str = "relevance_score"

    def compress_documents(
        self, documents: Sequence[Document], query: str = "", callbacks: Callbacks | None = None
    ) -> list[Document]:
        """Return the documents as a prompt should show them for the question `query`."""
        documents = checked(documents)
        texts = [document.page_content for document in documents]
        scores = [document.metadata.get(self.score_key) for document in documents]
        marked = self.marking.mark(texts, [document.id for document in documents], scores, query)
        each = zip(documents, marked, strict=True)
        return [with_text(document, shown) for document, (text, shown) in each if shown or not text]

    def invoke(self, input: Sequence[Document], config: RunnableConfig | None = None, **kwargs: Any) -> list[Document]:
        """Run `compress_documents` as a step of a chain; `ainvoke` runs it in a thread."""
        return self._call_with_config(self.compress_documents, input, config)

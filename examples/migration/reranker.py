"""From a chain that keeps a reranker's best passage to one that sends all retrieved passages, compressed.

`python -m migration.reranker` in the folder `examples` measures both, the new one at three ratios.
"""

from collections.abc import Sequence
from typing import Any

from langchain_classic.retrievers import ContextualCompressionRetriever
from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document

from ctx_compress_rag.marking.budget import nearest_sentences
from langchain_ctx_compress import CompressedContextPostprocessor
from migration.app import App, answering, compare, make_app

K, TOP_N = 4, 1


class Reranker(BaseDocumentCompressor):
    """A reranker by the sentence nearest to the question, in place of a cross-encoder.

    Attributes:
        top_n: how many passages to keep.
    """

    top_n: int

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> list[Document]:
        """Return the best documents, best first."""
        near = nearest_sentences([document.page_content for document in documents], query)
        best = [max((sentence.similarity for sentence in own), default=-1.0) for own in near]
        order = sorted(range(len(documents)), key=lambda place: -best[place])
        return [documents[place] for place in order[: self.top_n]]


def before(app: App) -> Any:
    """Return the chain that reads one passage."""
    retriever = ContextualCompressionRetriever(base_compressor=Reranker(top_n=TOP_N), base_retriever=app.retriever(K))
    return answering(retriever, app.llm)


def after(app: App, ratio: int) -> Any:
    """Return the chain that reads all retrieved passages with fewer tokens."""
    compressor = CompressedContextPostprocessor(store=app.store, ratio=ratio)
    retriever = ContextualCompressionRetriever(base_compressor=compressor, base_retriever=app.retriever(K))
    return answering(retriever, app.llm)


if __name__ == "__main__":
    print(compare(make_app(), before, after))  # noqa: T201

"""From a chain that shortens retrieved text (LLMLingua and the like) to soft contexts.

`python -m migration.text_compression` in the folder `examples` measures both, the new one at three ratios.
"""

from collections.abc import Sequence
from typing import Any

from langchain_classic.retrievers import ContextualCompressionRetriever
from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document

from ctx_compress_rag.evaluation.baselines import extract_sentences
from ctx_compress_rag.marking.budget import nearest_sentences
from langchain_ctx_compress import CompressedContextPostprocessor
from migration.app import App, answering, compare, make_app

K, RATE = 4, 0.25


class TextCompressor(BaseDocumentCompressor):
    """A compressor that keeps the sentences nearest to the question, in place of LLMLingua, which needs a larger model.

    Attributes:
        tokenizer: the tokenizer that counts tokens.
        rate: share of the tokens to keep.
    """

    tokenizer: Any
    rate: float

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> list[Document]:
        """Shorten the documents, and drop those with no text left."""
        texts = [document.page_content for document in documents]
        budget = int(self.rate * sum(len(self.tokenizer.tokenize(text)) for text in texts))
        kept = extract_sentences(nearest_sentences(texts, query), self.tokenizer.tokenize, budget)
        return [d.model_copy(update={"page_content": text}) for d, text in zip(documents, kept, strict=True) if text]


def before(app: App) -> Any:
    """Return the chain with shorter text."""
    compressor = TextCompressor(tokenizer=app.bundle.tokenizer, rate=RATE)
    retriever = ContextualCompressionRetriever(base_compressor=compressor, base_retriever=app.retriever(K))
    return answering(retriever, app.llm)


def after(app: App, ratio: int) -> Any:
    """Return the chain with another compressor in the same place."""
    compressor = CompressedContextPostprocessor(store=app.store, ratio=ratio)
    retriever = ContextualCompressionRetriever(base_compressor=compressor, base_retriever=app.retriever(K))
    return answering(retriever, app.llm)


if __name__ == "__main__":
    print(compare(make_app(), before, after))  # noqa: T201

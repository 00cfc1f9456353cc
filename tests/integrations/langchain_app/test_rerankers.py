"""LangChain's own rerankers and filters: before the postprocessor they judge texts; prompts always get markers."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from langchain_classic.retrievers import ContextualCompressionRetriever
from langchain_classic.retrievers.document_compressors import CrossEncoderReranker, DocumentCompressorPipeline
from langchain_classic.retrievers.document_compressors.cross_encoder import BaseCrossEncoder
from langchain_core.documents import Document
from langchain_core.prompts import PromptTemplate, format_document
from langchain_core.retrievers import BaseRetriever

from ctx_compress_rag.marking.mark import expand
from ctx_compress_rag.store import SoftContextStore
from helpers.store import WordBundle
from langchain_ctx_compress import CompressedContextPostprocessor, restore_sources

TEXTS = {"mill": "The old mill grinds barley.", "tower": "The tower was built by Orla Finch."}
DOCUMENTS = [Document(text, id=id) for id, text in TEXTS.items()]
QUESTION = "Who built the tower?"


class Words(BaseCrossEncoder):
    """How many words two texts share."""

    def score(self, text_pairs: Sequence[tuple[str, str]]) -> list[float]:  # type: ignore[override]
        return [float(len({*a.lower().split()} & {*b.lower().split()})) for a, b in text_pairs]


class Plain(BaseRetriever):
    def _get_relevant_documents(self, query: str, **_: Any) -> list[Document]:
        return DOCUMENTS


def test_rerankers_go_first_and_lose_no_compression_if_last(tmp_path: Path) -> None:
    reranker = CrossEncoderReranker(model=Words(), top_n=1)
    store = SoftContextStore(tmp_path, WordBundle(), key=b"k" * 32)
    postprocessor = CompressedContextPostprocessor(store=store)
    first = DocumentCompressorPipeline(transformers=[reranker, postprocessor])
    nested = ContextualCompressionRetriever(
        base_compressor=postprocessor,
        base_retriever=ContextualCompressionRetriever(base_compressor=reranker, base_retriever=Plain()),
    )
    for found in (
        first.compress_documents(DOCUMENTS, QUESTION),
        asyncio.run(first.acompress_documents(DOCUMENTS, QUESTION)),
        nested.invoke(QUESTION),
    ):
        [best] = found
        for document in (best, best.model_copy(deep=True)):
            shown = format_document(document, PromptTemplate.from_template("{page_content}"))
            assert expand(store, shown) == TEXTS["tower"] != shown
            assert restore_sources([document], store)[0].page_content == TEXTS["tower"]
    last = DocumentCompressorPipeline(transformers=[postprocessor, reranker]).compress_documents(DOCUMENTS, QUESTION)
    [best] = last
    assert expand(store, best.page_content) in TEXTS.values() and best.page_content not in TEXTS.values()

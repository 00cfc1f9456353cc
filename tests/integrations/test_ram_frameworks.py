"""Close reading in LangChain and LlamaIndex; from a question to its answer: tests/methods/test_methods_in_apps.py."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.runnables import RunnableLambda
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle, TextNode

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.errors import ConfigError, RatioError
from ctx_compress_rag.store import SoftContextStore
from helpers.ram import plain_ids
from helpers.ram_store import PASSAGES, QUESTION, ask, close_bundle, close_store
from langchain_ctx_compress import ChatCompressedContext, CompressedContextPostprocessor
from langchain_ctx_compress import restore_sources as restore_documents
from llama_index.postprocessor.ctx_compress import CompressedContextPostprocessor as LlamaPostprocessor
from llama_index.postprocessor.ctx_compress import restore_sources

DOCUMENTS = [Document(page_content=text, metadata={"n": n}) for n, text in enumerate(PASSAGES)]
NODES = [NodeWithScore(node=TextNode(text=text), score=0.5) for text in PASSAGES]


@pytest.fixture(scope="module")
def bundle(tiny_tokenizer: Any) -> Bundle:
    return close_bundle(tiny_tokenizer)


@pytest.fixture(scope="module")
def store(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> SoftContextStore:
    return close_store(tmp_path_factory.mktemp("ram"), bundle)


async def test_langchain_reads_closely(bundle: Bundle, store: SoftContextStore) -> None:
    postprocessor = CompressedContextPostprocessor(store=store, ratio=4)
    marked = postprocessor.compress_documents(DOCUMENTS, QUESTION)
    assert [document.page_content for document in marked] == ask(store, ratio=4)
    assert await postprocessor.acompress_documents(DOCUMENTS, QUESTION) == marked
    assert restore_documents(marked, store) == DOCUMENTS
    counted = ChatCompressedContext(store=store).get_num_tokens(marked[0].page_content)
    assert counted < len(plain_ids(bundle, PASSAGES[0]))


@pytest.mark.parametrize("replace_text", [False, True])
@pytest.mark.parametrize("query", [{"query_str": QUESTION}, {"query_bundle": QueryBundle(QUESTION)}], ids=list)
def test_llama_index_reads_closely(store: SoftContextStore, query: dict[str, Any], replace_text: bool) -> None:
    for options, reduction in (({"ratio": 4}, 4), ({}, 2)):
        postprocessor = LlamaPostprocessor(store=store, replace_text=replace_text, **options)
        marked = postprocessor.postprocess_nodes(NODES, **query)
        assert [n.node.get_content(MetadataMode.LLM) for n in marked] == ask(store, ratio=reduction)
        assert restore_sources(marked, store) == NODES


def test_a_step_without_a_question_says_how_to_give_it(store: SoftContextStore) -> None:
    with pytest.raises(ConfigError, match="ContextualCompressionRetriever"):
        (RunnableLambda(lambda question: DOCUMENTS) | CompressedContextPostprocessor(store=store)).invoke(QUESTION)
    with pytest.raises(ConfigError, match="query_bundle or query_str"):
        LlamaPostprocessor(store=store).postprocess_nodes(NODES)
    for options, error in (({"token_budget": 9}, ConfigError), ({"ratio": 1}, RatioError)):
        with pytest.raises(error, match="ram bundle"):
            CompressedContextPostprocessor(store=store, **options)

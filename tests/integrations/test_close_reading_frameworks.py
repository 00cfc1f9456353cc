"""Close reading in LangChain and LlamaIndex."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from ctx_compress_rag.bundle import Bundle
from ctx_compress_rag.decoding.decoder import Sampling, TransformersDecoder
from ctx_compress_rag.errors import ConfigError, RatioError
from ctx_compress_rag.stores import SoftContextStore
from helpers.close_reading import PASSAGES, QUESTION, ask, close_bundle, close_store
from helpers.decoding import prefills
from helpers.ram import plain_ids


@pytest.fixture(scope="module")
def bundle(tiny_tokenizer: Any) -> Bundle:
    return close_bundle(tiny_tokenizer)


@pytest.fixture(scope="module")
def store(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> SoftContextStore:
    return close_store(tmp_path_factory.mktemp("ram"), bundle)


# LangChain


@pytest.fixture
def langchain(store: SoftContextStore) -> Any:
    from langchain_core.documents import Document
    from langchain_core.runnables import RunnableLambda

    from langchain_ctx_compress import ChatCompressedContext, CompressedContextPostprocessor

    documents = [Document(page_content=text, metadata={"n": n}) for n, text in enumerate(PASSAGES)]

    class Parts:
        sources = documents
        retriever = RunnableLambda(lambda question: documents)
        llm = ChatCompressedContext(store=store, max_tokens=4)

        @staticmethod
        def postprocessor(**options: Any) -> Any:
            return CompressedContextPostprocessor(store=store, **options)

    return Parts


async def test_a_langchain_chain_reads_closely(bundle: Bundle, store: SoftContextStore, langchain: Any) -> None:
    from langchain_classic.chains import create_retrieval_chain
    from langchain_classic.chains.combine_documents import create_stuff_documents_chain
    from langchain_classic.retrievers import ContextualCompressionRetriever
    from langchain_core.prompts import ChatPromptTemplate
    from langchain_core.retrievers import BaseRetriever

    class Fixed(BaseRetriever):
        def _get_relevant_documents(self, query: str, *, run_manager: Any) -> Any:
            return langchain.sources

    retriever = ContextualCompressionRetriever(
        base_compressor=langchain.postprocessor(reduction=4), base_retriever=Fixed()
    )
    prompt = ChatPromptTemplate.from_messages([("human", "{context}\n\nQuestion: {input}")])
    chain = create_retrieval_chain(retriever, create_stuff_documents_chain(langchain.llm, prompt))
    with prefills(bundle.backbone.model) as seen:
        result = chain.invoke({"input": QUESTION})
        again = await chain.ainvoke({"input": QUESTION})
    assert [document.page_content for document in result["context"]] == ask(store, reduction=4)
    assert result["answer"] == again["answer"]
    content = "\n\n".join(ask(store, reduction=4)) + f"\n\nQuestion: {QUESTION}"
    [done] = TransformersDecoder(bundle, store).generate([[{"role": "user", "content": content}]], Sampling(4))
    assert result["answer"] == done.text and len(seen[0]) == done.prompt_tokens
    assert langchain.postprocessor().restore_sources(result["context"]) == langchain.sources
    assert langchain.llm.get_num_tokens(result["context"][0].page_content) < len(plain_ids(bundle, PASSAGES[0]))


def test_langchain_is_told_what_is_missing(store: SoftContextStore, langchain: Any) -> None:
    from langchain_ctx_compress import CompressedContextPostprocessor

    with pytest.raises(ConfigError, match="ContextualCompressionRetriever"):
        (langchain.retriever | langchain.postprocessor()).invoke(QUESTION)
    for mode in ("soft", "closer"):
        with pytest.raises(ConfigError, match=f"mode='{mode}' is not that of bundle 'tiny'"):
            langchain.postprocessor(mode=mode)
    with pytest.warns(DeprecationWarning, match="mode= is deprecated"):
        assert langchain.postprocessor(mode="close_reading").reduction is None
    with pytest.warns(DeprecationWarning, match="give reduction=4"):
        old = CompressedContextPostprocessor(store=store, ratio=4)
    assert (old.ratio, old.reduction) == (None, 4)
    with pytest.raises(ConfigError, match="ratio=4 and reduction=2: give one"):
        langchain.postprocessor(ratio=4, reduction=2)
    with pytest.raises(RatioError, match="reduction=1"):
        langchain.postprocessor(reduction=1)


# LlamaIndex


class Even(BaseEmbedding):
    """Retrieval that finds every passage."""

    def _get_text_embedding(self, text: str) -> list[float]:
        return [1.0, 0.0]

    def _get_query_embedding(self, query: str) -> list[float]:
        return [1.0, 0.0]

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return [1.0, 0.0]


@pytest.mark.parametrize("replace_text", [False, True])
def test_a_llama_index_engine_reads_closely(bundle: Bundle, store: SoftContextStore, replace_text: bool) -> None:
    from llama_index.core import Settings, VectorStoreIndex
    from llama_index.core.schema import MetadataMode

    from llama_index.llms.ctx_compress import CompressedContextLLM, marker_tokenizer
    from llama_index.postprocessor.ctx_compress import CompressedContextPostprocessor, restore_sources

    nodes = [TextNode(id_=id, text=text) for id, text in zip(store.ensure(PASSAGES), PASSAGES, strict=True)]
    postprocessor = CompressedContextPostprocessor(store=store, reduction=4, replace_text=replace_text)
    Settings.tokenizer = marker_tokenizer(store)
    try:
        index = VectorStoreIndex(nodes, embed_model=Even())
        engine = index.as_query_engine(
            node_postprocessors=[postprocessor], llm=CompressedContextLLM(store=store, max_tokens=4), similarity_top_k=3
        )
        plain = index.as_query_engine(llm=CompressedContextLLM(store=store, max_tokens=4), similarity_top_k=3)
        with prefills(bundle.backbone.model) as seen:
            response = engine.query(QUESTION)
            plain.query(QUESTION)
    finally:
        Settings._tokenizer = None
    texts = [scored.node.text for scored in restore_sources(response, store)]
    assert sorted(texts) == sorted(PASSAGES)
    shown = [scored.node.get_content(MetadataMode.LLM) for scored in response.source_nodes]
    marked = ask(store, texts, reduction=4)
    assert shown == marked
    closely, whole = map(len, seen)
    count = TransformersDecoder(bundle, store).count_tokens
    saved = count("\n\n".join(texts)) - count("\n\n".join(marked))
    assert saved > 20 and whole - closely == pytest.approx(saved, abs=4)


def test_llama_index_is_told_what_is_missing(store: SoftContextStore) -> None:
    from llama_index.postprocessor.ctx_compress import CompressedContextPostprocessor

    nodes = [NodeWithScore(node=TextNode(text=text), score=0.5) for text in PASSAGES]
    with pytest.raises(ConfigError, match="query_bundle or query_str"):
        CompressedContextPostprocessor(store=store).postprocess_nodes(nodes)
    with pytest.raises(ConfigError, match="mode='soft' is not that of bundle"):
        CompressedContextPostprocessor(store=store, mode="soft")
    with pytest.warns(DeprecationWarning, match="give reduction=2"):
        old = CompressedContextPostprocessor(store=store, ratio=2)
    with pytest.warns(DeprecationWarning, match="mode= is deprecated"):
        new = CompressedContextPostprocessor(store=store, reduction=2, mode="close_reading")
    assert (old.ratio, old.reduction) == (new.ratio, new.reduction) == (None, 2)
    by_text, by_bundle = (
        CompressedContextPostprocessor(store=store).postprocess_nodes(nodes, **query)
        for query in ({"query_str": QUESTION}, {"query_bundle": QueryBundle(QUESTION)})
    )
    assert [n.node.marker for n in by_text] == [n.node.marker for n in by_bundle] == ask(store)

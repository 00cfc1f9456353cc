"""Every method from passages to an answer: through the decoder, LangChain and LlamaIndex."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.retrievers import ContextualCompressionRetriever
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from llama_index.core import MockEmbedding, VectorStoreIndex
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import TextNode

from benchmarks.timing.cost import measure
from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.decoding.decoder import Sampling, TransformersDecoder
from ctx_compress_rag.decoding.splice import splice
from ctx_compress_rag.marking.mark import mark
from ctx_compress_rag.methods.registry import METHODS
from ctx_compress_rag.prompt import Prompt
from ctx_compress_rag.store import SoftContextStore
from ctx_compress_rag.store.marker import Marker
from ctx_compress_rag.text.chat import PromptTokenizer, chat_text
from helpers.methods import MATRIX, PASSAGES
from langchain_ctx_compress import ChatCompressedContext, CompressedContextPostprocessor
from llama_index.llms.ctx_compress import CompressedContextLLM
from llama_index.postprocessor.ctx_compress import CompressedContextPostprocessor as LlamaPostprocessor

QUESTION = "Who built the harbour of Velmora?"
TOKENS = 8


@pytest.fixture(
    scope="module", params=[(name, next(iter(MATRIX[name]))) for name in METHODS if name in MATRIX], ids=lambda c: c[0]
)
def app(
    request: pytest.FixtureRequest, make: Callable[..., Bundle], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SoftContextStore]:
    """A store of a bundle whose decoder says something: special tokens have no embedding to be likely by."""
    bundle = make(*request.param, seed=2)
    with torch.no_grad():
        bundle.backbone.embeddings.weight[bundle.tokenizer.all_special_ids] = 0
    with SoftContextStore(tmp_path_factory.mktemp("app"), bundle, key=b"k" * 32) as store:
        store.add(PASSAGES[:3], ids=["a", "b", "c"], progress=False)
        yield store


def options(store: SoftContextStore) -> dict[str, Any]:
    """How a postprocessor is to be asked: at the store's ratio, or 4 of close reading."""
    return {"ratio": 4} if store.bundle.config.method.name == "ram" else {}


def plain_answer(store: SoftContextStore, chat: list[dict[str, str]]) -> tuple[str, int]:
    """The answer to a chat with markers, the whole prompt read again for every token; and the slots in it."""
    bundle = store.bundle
    assert isinstance(bundle, Bundle)
    parts = store.split(chat_text(bundle.tokenizer, chat))
    texts, markers = [""], []
    for part in parts:
        if isinstance(part, Marker):
            markers.append(part)
            texts.append("")
        else:
            texts[-1] += part
    ids = PromptTokenizer(bundle.tokenizer).encode(texts)
    slots = [bundle.embed(soft) for soft in store.fetch(markers)]
    row = [piece for pair in zip(ids, slots, strict=False) for piece in pair] + [ids[-1]]
    said: list[int] = []
    for _ in range(TOKENS):
        batch = splice(bundle.backbone.embeddings, [Prompt.of(*row, torch.tensor(said, dtype=torch.long))])
        with torch.no_grad(), bundle.soft_decoder(batch.slot_mask) as model:
            best = int(model(**batch.model_inputs(), use_cache=False).logits[0, -1].argmax())
        if best == bundle.tokenizer.eos_token_id:
            break
        said.append(best)
    return bundle.tokenizer.decode(said, skip_special_tokens=True), sum(len(part) for part in slots)


def test_the_decoder_answers_from_several_passages(app: SoftContextStore) -> None:
    """With its cache, in a batch, as without: and the answer depends on each passage's slots."""
    bundle = app.bundle
    assert isinstance(bundle, Bundle)
    decoder = TransformersDecoder(bundle, app)
    chats = []
    for texts in (PASSAGES[:3], PASSAGES[1:3], PASSAGES[:1]):
        context = "\n\n".join(mark(app, texts, question=QUESTION, **options(app)))
        chats.append([{"role": "user", "content": f"{context}\n\nQuestion: {QUESTION}"}])
    made = decoder.generate(chats, Sampling(max_new_tokens=TOKENS))
    for chat, generation in zip(chats, made, strict=True):
        assert (generation.text, generation.slots) == plain_answer(app, chat)
    assert len({generation.text for generation in made}) > 1


class Fixed(BaseRetriever):
    """Retrieves the same documents for every question."""

    documents: list[Document]

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return self.documents


def test_langchain_from_retriever_to_answer(app: SoftContextStore) -> None:
    documents = [Document(id=i, page_content=text) for i, text in zip("abc", PASSAGES[:3], strict=True)]
    retriever = ContextualCompressionRetriever(
        base_compressor=CompressedContextPostprocessor(store=app, **options(app)),
        base_retriever=Fixed(documents=documents),
    )
    prompt = ChatPromptTemplate([("system", "Answer.\n\n{context}"), ("human", "{input}")])
    llm = ChatCompressedContext(store=app, max_tokens=TOKENS)
    answered = create_retrieval_chain(retriever, create_stuff_documents_chain(llm, prompt)).invoke({"input": QUESTION})
    context = "\n\n".join(document.page_content for document in answered["context"])
    chat = [{"role": "system", "content": f"Answer.\n\n{context}"}, {"role": "user", "content": QUESTION}]
    expected, slots = plain_answer(app, chat)
    assert (answered["answer"], slots > 0) == (expected, True)
    assert [d.id for d in answered["context"]] == ["a", "b", "c"]
    assert all("[[ctx:" in d.page_content for d in answered["context"])


def test_llama_index_from_retriever_to_answer(app: SoftContextStore) -> None:
    nodes = [TextNode(id_=i, text=text) for i, text in zip("abc", PASSAGES[:3], strict=True)]
    index = VectorStoreIndex(nodes, embed_model=MockEmbedding(8))
    llm = CompressedContextLLM(store=app, max_tokens=TOKENS)
    seen: list[list[dict[str, str]]] = []
    engine = RetrieverQueryEngine.from_args(
        index.as_retriever(similarity_top_k=3),
        llm=llm,
        node_postprocessors=[LlamaPostprocessor(app, **options(app))],
        response_mode="simple_summarize",
    )
    real = type(llm).chat

    def watched(self: Any, messages: Any, **kwargs: Any) -> Any:
        seen.append([{"role": m.role.value, "content": m.content or ""} for m in messages])
        return real(self, messages, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(llm), "chat", watched)
        response = engine.query(QUESTION)
    [chat] = seen
    expected, slots = plain_answer(app, chat)
    # An engine says "Empty Response" for an answer of nothing but spaces.
    assert str(response).strip() == expected.strip() and expected.strip()
    assert slots > 0
    assert {node.text for node in response.source_nodes} == set(PASSAGES[:3])
    assert not any(text in str(chat) for text in PASSAGES[:3])


def test_what_a_question_costs_is_counted(app: SoftContextStore) -> None:
    """Slots at the decoder's own price at least; before it, only a method that knows the question reads anything."""
    bundle = cast(Bundle, app.bundle)
    decoder, texts = TransformersDecoder(bundle, app), PASSAGES[:3]

    def chat() -> list[dict[str, str]]:
        marked = mark(app, texts, ["a", "b", "c"], question=QUESTION, **options(app))
        return [{"role": "user", "content": " ".join([*marked, QUESTION])}]

    cost = measure(decoder, [{"soft": chat}], progress=False)["soft"]
    tokens, model = decoder.count_chat_tokens(chat()), bundle.backbone.model
    weights = sum(m.weight.numel() for n, m in model.named_modules() if n.endswith("_proj") and "lora" not in n)
    assert cost.first_token_flops - cost.context_flops >= 2 * tokens * weights
    assert (cost.context_flops > 0) is (bundle.config.method.name == "ram")

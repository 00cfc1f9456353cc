"""A LlamaIndex app: an index in Chroma on disk, a store beside it, and a (tiny, random) decoder that reads slots."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import chromadb
from llama_index.core import Settings, VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import Field
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent, LLMChatStartEvent
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.vector_stores.chroma import ChromaVectorStore

from ctx_compress_rag import Decoder, SoftContextStore
from ctx_compress_rag.decoding.sampling import Sampling
from ctx_compress_rag.store.marker import Marker
from helpers.langchain import QUESTION, TEXTS, hashed_words
from llama_index.llms.ctx_compress import CompressedContextLLM, marker_tokenizer
from llama_index.postprocessor.ctx_compress import CompressedContextPostprocessor

PASSAGES = list(TEXTS.values())
RATIO = 8
TOP_K = 3
MAX_TOKENS = 8


class HashedWords(BaseEmbedding):
    """Bags of hashed words: retrieval that is deterministic and needs no model."""

    def _get_text_embedding(self, text: str) -> list[float]:
        return hashed_words(text)

    def _get_query_embedding(self, query: str) -> list[float]:
        return hashed_words(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return hashed_words(query)


class Events(BaseEventHandler):
    """What LlamaIndex itself reports: all events, and of those each call of the LLM and its last response."""

    all: list[Any] = Field(default_factory=list)

    def handle(self, event: Any, **kwargs: Any) -> None:
        self.all.append(event)

    @property
    def started(self) -> list[LLMChatStartEvent]:
        return [event for event in self.all if isinstance(event, LLMChatStartEvent)]

    @property
    def ended(self) -> list[LLMChatEndEvent]:
        return [event for event in self.all if isinstance(event, LLMChatEndEvent)]


@contextmanager
def watched() -> Iterator[Events]:
    events, dispatcher = Events(), get_dispatcher()
    before = list(dispatcher.event_handlers)
    dispatcher.add_event_handler(events)
    try:
        yield events
    finally:
        dispatcher.event_handlers = before


class App:
    """Passages n0 to n3, indexed and compressed; tests leave what is in the store."""

    def __init__(self, bundle: Any, folder: Path) -> None:
        self.bundle = bundle
        collection = chromadb.PersistentClient(path=str(folder)).create_collection("app")
        nodes = [TextNode(id_=f"n{i}", text=text, metadata={"page": f"p{i}"}) for i, text in enumerate(PASSAGES)]
        nodes[0].excluded_llm_metadata_keys = ["page"]
        self.index = index_in(collection)
        self.index.insert_nodes(nodes)
        self.store = SoftContextStore(collection, self.bundle, key=b"k" * 32)
        self.store.add(PASSAGES, [f"n{i}" for i in range(len(PASSAGES))], progress=False)

    def llm(self, **fields: Any) -> CompressedContextLLM:
        return CompressedContextLLM(store=self.store, **{"max_tokens": MAX_TOKENS, **fields})

    def postprocessor(self, **arguments: Any) -> CompressedContextPostprocessor:
        chosen = arguments if "token_budget" in arguments else {"ratio": RATIO, **arguments}
        return CompressedContextPostprocessor(store=self.store, **chosen)

    def nodes(self) -> list[NodeWithScore]:
        return self.index.as_retriever(similarity_top_k=TOP_K).retrieve(QUESTION)

    def engine(self, mode: str = "compact", **arguments: Any) -> Any:
        marking = [self.postprocessor()]
        return self.index.as_query_engine(
            llm=self.llm(), similarity_top_k=TOP_K, response_mode=mode, node_postprocessors=marking, **arguments
        )

    def answer(self, prompt: Any) -> Any:
        """What the decoder itself makes of a prompt."""
        return Decoder(self.bundle, self.store).generate([prompt], Sampling(max_tokens=MAX_TOKENS))[0]

    def tokens(self, text: str) -> int:
        return len(self.bundle.tokenizer(text, add_special_tokens=False)["input_ids"])

    def slots(self, text: str) -> list[int]:
        """Slots of each good marker in a text."""
        return [part.slots for part in self.store.split(text) if isinstance(part, Marker)]

    @contextmanager
    def counting(self) -> Iterator[None]:
        """LlamaIndex counts tokens as the decoder does, and asks it where no other LLM is named."""
        Settings.tokenizer, Settings.llm = marker_tokenizer(self.store), self.llm()
        try:
            yield
        finally:
            Settings._tokenizer = Settings._llm = None

    def check_calls(self, events: Events) -> list[str]:
        """Every answer is the decoder's own for the messages, read with all slots; the answers."""
        assert events.ended and len(events.started) == len(events.ended)
        read = 0
        for event in events.ended:
            chat = [{"role": m.role.value, "content": m.content or ""} for m in event.messages]
            direct = self.answer(chat)
            assert event.response is not None and event.response.raw is not None
            assert event.response.message.content == direct.text
            assert event.response.raw["usage"]["prompt_tokens"] == direct.prompt_tokens
            in_prompt = sum(self.slots("\n".join(message["content"] for message in chat)))
            assert event.response.raw["slots"] == direct.slots == in_prompt
            assert not any(passage in str(chat) for passage in PASSAGES)
            read += in_prompt
        assert read > 0
        return [event.response.message.content or "" for event in events.ended if event.response]


def index_in(collection: chromadb.Collection) -> VectorStoreIndex:
    vectors = ChromaVectorStore(chroma_collection=collection)
    return VectorStoreIndex.from_vector_store(vectors, embed_model=HashedWords())


def check_sources(source_nodes: list[NodeWithScore], retrieved: list[NodeWithScore]) -> None:
    both = ([(n.node_id, n.score, n.get_content(), n.metadata) for n in nodes] for nodes in (source_nodes, retrieved))
    assert next(both) == next(both)

"""The parts of a LangChain RAG app for the tests: Chroma retrievers on disk, a tiny real decoder."""

import asyncio
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import chromadb
import torch
from langchain_chroma import Chroma
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from pydantic import BaseModel, Field

from ctx_compress_rag import Decoder, SoftContextStore
from ctx_compress_rag.decoding.sampling import Sampling
from helpers.decoding import held
from langchain_ctx_compress import ChatCompressedContext, CompressedContextPostprocessor

TEXTS = {
    "tower": "The old tower of Brindle stands on a hill and was built by the mason Orla Finch in the year 1204.",
    "mill": "A mill on the river Tane grinds barley for the town; its wheel was carved from one single oak tree.",
    "ferry": "The ferry leaves at noon. It carries nine people and a goat, and never on a Sunday.",
    "school": "Children of the valley learn letters, knots and the names of birds in the school beside the chapel.",
}
SOURCES = [Document(id=name, page_content=text, metadata={"source": f"{name}.txt"}) for name, text in TEXTS.items()]
QUESTION = "Who built the old tower?"
TOKENS = 12
CHAT = ChatPromptTemplate([("system", "Answer from the context.\n\n{context}"), ("human", "{input}")])


class Tower(BaseModel):
    """What a passage says about a tower: a form that random weights can fill, too."""

    built: int = Field(ge=0, le=9999)
    material: Literal["stone", "wood"]


def talkative_bundle(make_tiny_bundle: Any) -> Any:
    """A tiny bundle whose random decoder answers in text that never ends by itself.

    At its initial weights a decoder with tied embeddings repeats the prompt's last token, which is a special
    one. Larger layers outweigh the residual stream; special tokens without an embedding are never the likeliest.
    """
    bundle = make_tiny_bundle(seed=1)
    with torch.no_grad():
        for name, weight in bundle.backbone.model.model.layers.named_parameters():
            if "norm" not in name and "lora" not in name:
                weight.mul_(15)
        bundle.backbone.embeddings.weight[bundle.tokenizer.all_special_ids] = 0
    return bundle


def hashed_words(text: str) -> list[float]:
    """Counts of hashed words: enough for a retriever to rank by."""
    vector = [0.0] * 128
    for word in re.findall(r"\w{4,}", text.lower()):
        vector[crc32(word.encode("utf-8", "replace")) % 128] += 1.0
    return [value / (math.hypot(*vector) or 1.0) for value in vector]


class WordEmbeddings(Embeddings):
    def embed_query(self, text: str) -> list[float]:
        return hashed_words(text)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [self.embed_query(text) for text in texts]


@dataclass
class App:
    """A RAG app's parts: its vector store on disk, with the soft contexts beside it."""

    client: Any
    vectors: Chroma
    store: SoftContextStore
    bundle: Any

    def retriever(self, k: int = 2) -> Any:
        return self.vectors.as_retriever(search_kwargs={"k": k})

    def slots(self, name: str, ratio: int) -> int:
        """Slots of a passage by plain arithmetic: windows of `window` tokens, blocks of `ratio` within each."""
        tokens = len(self.bundle.tokenizer(TEXTS[name], add_special_tokens=False)["input_ids"])
        base_ratio: int = self.bundle.config.base_ratio
        return math.ceil(math.ceil(tokens / base_ratio) / (ratio // base_ratio))

    def llm(self, **options: Any) -> ChatCompressedContext:
        return ChatCompressedContext(store=self.store, **{"max_tokens": TOKENS, **options})

    def postprocessor(self, **options: Any) -> CompressedContextPostprocessor:
        return CompressedContextPostprocessor(**{"store": self.store, **options})


def open_app(folder: Path, bundle: Any, *, indexed: bool = True, key: bytes | None = None) -> App:
    client = chromadb.PersistentClient(str(folder))
    vectors = Chroma("docs", WordEmbeddings(), client=client)
    vectors.add_documents(SOURCES)
    store = SoftContextStore(client, bundle, collection="docs", key=key)
    if indexed:
        store.add(SOURCES, progress=False)
    return App(client, vectors, store, bundle)


def joined(documents: list[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


def direct(app: App, chat: list[dict[str, str]]) -> str:
    return Decoder(app.bundle, app.store).generate([chat], Sampling(max_tokens=TOKENS))[0].text


def rag(app: App, llm: Any = None) -> Any:
    """An LCEL chain with the postprocessor as a step."""
    context = app.retriever() | app.postprocessor(ratio=8) | RunnableLambda(joined)
    return {"context": context, "input": RunnablePassthrough()} | CHAT | (llm or app.llm()) | StrOutputParser()


async def while_the_decoder_is_taken(bundle: Any, work: Any) -> Any:
    """Await work that needs the model while another thread has it; that thread lets go when the loop says so."""
    with held(bundle):
        task = asyncio.ensure_future(work)
        done, _ = await asyncio.wait([task], timeout=0.3)
        assert not done, "it did not need the model"
    return await task

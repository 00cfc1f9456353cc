"""The RAG app that the examples change: forty invented passages in Chroma, thirty questions, the demo bundle's decoder.

The decoder also reads plain text, so one model serves the chain before and after the change.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import chromadb
from langchain_chroma import Chroma
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough

from benchmarks.world import BUNDLE
from benchmarks.world.world import World
from ctx_compress_rag import Bundle, SoftContextStore
from ctx_compress_rag.evaluation.statistics import standard_error
from ctx_compress_rag.models.sentence_embedding import load_embedder
from ctx_compress_rag.text.answers import token_f1
from langchain_ctx_compress import ChatCompressedContext

WORLDS, QUESTIONS_PER_WORLD = 5, 6
RATIOS = (4, 8, 16)
PROMPT = ChatPromptTemplate(
    [("human", "Answer the question from the context.\n\nContext:\n{context}\n\nQuestion: {input}")]
)


class MiniLM(Embeddings):
    """The sentence encoder that comes with the `demo` extra."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        vectors: list[list[float]] = (
            load_embedder().encode(texts, normalize_embeddings=True, show_progress_bar=False).tolist()
        )
        return vectors

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


@dataclass(frozen=True)
class App:
    """An app: passages to retrieve, a model, and questions with known answers."""

    vectors: Chroma
    bundle: Bundle
    store: SoftContextStore
    llm: ChatCompressedContext
    questions: dict[str, tuple[str, ...]]

    def retriever(self, k: int) -> Any:
        """Return the app's own retriever, which finds `k` passages."""
        return self.vectors.as_retriever(search_kwargs={"k": k})


@dataclass(frozen=True)
class Measured:
    """A chain's results on all questions.

    Attributes:
        f1: mean word F1 of the answers.
        error: standard error of the mean.
        prompt_tokens: mean tokens of a prompt; a slot counts as one.
        first_token_ms: median time from the question to the answer's first piece, including retrieval.
    """

    f1: float
    error: float
    prompt_tokens: float
    first_token_ms: float


def make_app(worlds: int = WORLDS) -> App:
    """Make the app in memory, with its passages compressed."""
    made = [World("test", seed) for seed in range(worlds)]
    documents = [
        Document(id=entity.name, page_content=entity.passage, metadata={"source": entity.name})
        for world in made
        for entity in world.entities
    ]
    turns = [
        turn for world in made for turn in [t for t in world.turns(world.entities) if t.subject][:QUESTIONS_PER_WORLD]
    ]
    client = chromadb.EphemeralClient()
    vectors = Chroma("migration", MiniLM(), client=client)
    vectors.add_documents(documents)
    bundle = Bundle.from_pretrained(BUNDLE)
    store = SoftContextStore(client, bundle, collection="migration", key=b"an example's key")
    store.add(documents, progress=False)
    questions = {turn.question: turn.answers for turn in turns}
    return App(vectors, bundle, store, ChatCompressedContext(store=store), questions)


def answering(retriever: Runnable[str, list[Document]], llm: ChatCompressedContext) -> Runnable[str, Any]:
    """Return the chain, the same in all examples: retrieve, fill the prompt, answer."""
    steps: dict[str, Any] = {"context": retriever | RunnableLambda(_joined), "input": RunnablePassthrough()}
    return steps | PROMPT | llm


def _joined(documents: list[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


def measure(app: App, chain: Runnable[str, Any]) -> Measured:
    """Ask all questions, after one as warm-up, and return the results."""
    chain.invoke(next(iter(app.questions)))
    scores, tokens, times = [], [], []
    for question, answers in app.questions.items():
        began = time.perf_counter()
        pieces = chain.stream(question)
        message = next(pieces)
        times.append(1000 * (time.perf_counter() - began))
        for piece in pieces:
            message += piece
        scores.append(token_f1(message.text.strip(), answers))
        tokens.append(message.usage_metadata["input_tokens"])
    return Measured(mean(scores), standard_error(scores), mean(tokens), median(times))


def compare(app: App, before: Callable[[App], Any], after: Callable[[App, int], Any]) -> str:
    """Measure the chain before the change, and after it at each ratio; return a Markdown table."""
    measured = {"before": measure(app, before(app))}
    measured |= {f"after, {ratio}x": measure(app, after(app, ratio)) for ratio in RATIOS}
    rows = [
        f"| {name} | {m.f1:.2f} ± {m.error:.2f} | {m.prompt_tokens:.0f} | {m.first_token_ms:.0f} |"
        for name, m in measured.items()
    ]
    return "\n".join(["| | answer F1 | prompt tokens | first token, ms |", "|---|---|---|---|", *rows])

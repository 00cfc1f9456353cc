"""Index a small corpus, answer a dozen questions and compare, as `ctx-compress demo` does."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from tqdm.auto import tqdm

from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.decoding.sampling import Sampling
from ctx_compress_rag.evaluation.answering import DEFAULT, FULL, NONE, EvaluationPrompts, Key, answer_with_systems
from ctx_compress_rag.evaluation.questions import Question
from ctx_compress_rag.evaluation.report import markdown_table
from ctx_compress_rag.indexing.index import IndexHit, PassageIndex, make_index_passage, open_index
from ctx_compress_rag.prompt import Message
from ctx_compress_rag.store import AddReport, Passage
from ctx_compress_rag.text.answers import token_f1
from ctx_compress_rag.text.templates import TEMPLATES

_WIKIPEDIA = Path(__file__).with_name("demo_passages.json")
_LICENSE = "Wikipedia's authors, as chosen for XQuAD, CC BY-SA 4.0"
_RETRIEVED = 2  # passages per prompt
_ANSWER_TOKENS = 32
_COARSEST = 32
_TIMED_QUESTIONS = 3
_SHOWN = 4  # the ratio whose answers are shown, if the bundle has it


@dataclass(frozen=True)
class DemoQuestion:
    """A question, its accepted answers, and the id of the passage that answers it (`needs`)."""

    text: str
    answers: tuple[str, ...]
    needs: str


@dataclass(frozen=True)
class DemoCorpus:
    """Passages to index and questions to ask, none of which a shipped bundle was trained on."""

    passages: tuple[Passage, ...]
    questions: tuple[DemoQuestion, ...]


def wikipedia_corpus() -> DemoCorpus:
    """Return twenty-four paragraphs and twelve questions of XQuAD's English part (CC BY-SA 4.0), always the same."""
    data = json.loads(_WIKIPEDIA.read_text(encoding="utf-8"))
    passages = tuple(make_index_passage(row["text"], row["title"], "demo") for row in data["passages"])
    questions = tuple(
        DemoQuestion(row["question"], tuple(row["answers"]), str(passages[row["passage"]].id))
        for row in data["questions"]
    )
    return DemoCorpus(passages, questions)


@dataclass(frozen=True)
class DemoSystem:
    """One kind of context for the decoder (full text, soft context or none), and the results of the demo with it."""

    label: str
    ratio: int | None  # how many times shorter the passages become; None for full text and no context
    answers: tuple[str, ...]
    scores: tuple[float, ...]  # token F1 of each answer, 0 to 1
    prompt_tokens: float  # mean length of the prompts, a slot counted as a token
    stored_bytes: int  # bytes stored for the whole corpus
    first_token_ms: float  # median time from the prompt to the first token, reading the store included

    @property
    def score(self) -> float:
        return mean(self.scores)


@dataclass(frozen=True)
class DemoReport:
    """The results of the demo, one system for each kind of context."""

    stored: AddReport
    retrieved: int  # number of questions for which the needed passage was retrieved
    systems: list[DemoSystem]  # full text, what the bundle shows by default at each ratio, finest first, no context
    tables: str


def run_demo(folder: str | Path, bundle: str | None = None) -> DemoReport:
    """Index the demo's corpus in a folder, unless done before, and answer its questions. `bundle`: see `open_index`."""
    corpus = wikipedia_corpus()
    with open_index(folder, bundle, create=True) as index:
        parts = list(tqdm(index.add(corpus.passages), desc="indexing", unit=" batches"))
        hits = index.search([question.text for question in corpus.questions], _RETRIEVED)
        systems = _compare(index, corpus, hits)
    return DemoReport(
        stored=AddReport(sum(part.added for part in parts), 0, sum(part.unchanged for part in parts)),
        retrieved=sum(q.needs in [hit.id for hit in found] for q, found in zip(corpus.questions, hits, strict=True)),
        systems=systems,
        tables=_tables(corpus, systems, hits),
    )


def _compare(index: PassageIndex, corpus: DemoCorpus, hits: list[list[IndexHit]]) -> list[DemoSystem]:
    store, config = index.store, index.bundle.config
    asked = [Question(tuple(h.text for h in f), q.text, q.answers) for q, f in zip(corpus.questions, hits, strict=True)]
    decoder = Decoder(index.bundle, store, batch_size=len(asked))
    prompts = EvaluationPrompts(decoder, store, TEMPLATES[0], ids={hit.text: hit.id for found in hits for hit in found})
    soft: list[Key] = [(DEFAULT, ratio) for ratio in sorted(config.ratios) if ratio <= _COARSEST]
    sampling = Sampling(max_tokens=_ANSWER_TOKENS, extractive=config.extractive)
    answers = answer_with_systems(prompts, asked, [(FULL, None), *soft, (NONE, None)], sampling)
    sizes = {
        FULL: sum(len(passage.text.encode()) for passage in corpus.passages),
        DEFAULT: store.info().payload_bytes,
        NONE: 0,
    }
    return [
        DemoSystem(
            label=f"compressed {ratio}x" if ratio else system,
            ratio=ratio,
            answers=tuple(given.texts),
            scores=tuple(token_f1(text, q.answers) for text, q in zip(given.texts, asked, strict=True)),
            prompt_tokens=mean(given.prompt_tokens),
            stored_bytes=sizes[system],
            first_token_ms=median(
                _first_token_ms(decoder, prompts.make((system, ratio), q)) for q in asked[:_TIMED_QUESTIONS]
            ),
        )
        for (system, ratio), given in answers.items()
    ]


def _first_token_ms(decoder: Decoder, prompt: Sequence[Message]) -> float:
    began = time.perf_counter()
    decoder.generate([prompt], Sampling(max_tokens=1))
    return 1000 * (time.perf_counter() - began)


def _tables(corpus: DemoCorpus, systems: Sequence[DemoSystem], hits: list[list[IndexHit]]) -> str:
    ratios = [s.ratio for s in systems if s.ratio]
    shown = [s for s in systems if s.ratio in (None, _SHOWN if _SHOWN in ratios else ratios[0])]
    answers = [
        {
            "question": _cut(question.text, 46),
            "expected": question.answers[0],
            **{s.label: _cut(s.answers[i], 24) for s in shown},
            "read from": ", ".join(dict.fromkeys(hit.source for hit in found)),
        }
        for i, (question, found) in enumerate(zip(corpus.questions, hits, strict=True))
    ]
    scores = [
        {
            "context": s.label,
            "answer F1": f"{s.score:.2f}",
            "prompt tokens": f"{s.prompt_tokens:.0f}",
            "bytes stored": f"{s.stored_bytes:,}",
            "first token ms": f"{s.first_token_ms:.0f}",
        }
        for s in systems
    ]
    return f"{markdown_table(answers)}\n\n{markdown_table(scores)}\n\npassages: {_LICENSE}"


def _cut(text: str, most: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most - 1]}…"

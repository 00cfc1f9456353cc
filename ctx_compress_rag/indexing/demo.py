"""Index a small corpus, answer a dozen questions and compare, as `ctx-compress demo` does."""

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
from ctx_compress_rag.indexing.demo_corpus import LICENSE, DemoCorpus, wikipedia_corpus
from ctx_compress_rag.indexing.index import IndexHit, PassageIndex, open_index
from ctx_compress_rag.prompt import Message
from ctx_compress_rag.store import AddReport
from ctx_compress_rag.text.answers import token_f1
from ctx_compress_rag.text.templates import TEMPLATES

_RETRIEVED = 2  # passages per prompt
_ANSWER_TOKENS = 32
_COARSEST = 32
_TIMED_QUESTIONS = 3
_SHOWN = 4  # the ratio whose answers are shown, if the bundle has it


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
    rows = [
        [
            question.text,
            question.answers[0],
            *(" ".join(s.answers[i].split()) for s in shown),
            ", ".join(dict.fromkeys(hit.source for hit in found)),
        ]
        for i, (question, found) in enumerate(zip(corpus.questions, hits, strict=True))
    ]
    answers = _table(
        ["question", "expected", *(s.label for s in shown), "read from"], rows, [46, *[24] * (len(shown) + 1), 40]
    )
    scores = _table(
        ["context", "answer F1", "prompt tokens", "bytes stored", "first token ms"],
        [
            [s.label, f"{s.score:.2f}", f"{s.prompt_tokens:.0f}", f"{s.stored_bytes:,}", f"{s.first_token_ms:.0f}"]
            for s in systems
        ],
        [18] * 5,
    )
    return f"{answers}\n\n{scores}\n\npassages: {LICENSE}"


def _table(header: list[str], rows: list[list[str]], widest: list[int]) -> str:
    """Return a table as text, with cells cut to `widest` characters, by column, and columns as wide as needed."""
    cut = [[c if len(c) <= most else f"{c[: most - 1]}…" for c, most in zip(row, widest, strict=True)] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cut, strict=True)]
    lines = [header, ["-" * width for width in widths], *cut]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)

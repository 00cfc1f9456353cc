"""Speed with several callers: shared passes against one batch, and one caller against transformers' `generate`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

from benchmarks.timing.phases import measured
from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.decoding.sampling import Generation, Sampling
from ctx_compress_rag.prompt import PromptLike

_PAIRS = 3


@dataclass(frozen=True)
class Concurrency:
    """Medians over rounds; within a round everything runs in turn, so that other load on the machine slows all alike.

    Attributes:
        callers: how many ask at the same time.
        share: `stream_rate` / `batch_rate`.
        batch_rate: tokens/s of one batch of all prompts.
        stream_rate: tokens/s of one stream for each caller, all at the same time.
        turns_rate: tokens/s if the callers come one after another.
        last_first: time to the last stream's first piece / time to the first stream's.
        first_seconds: time to the first stream's first piece.
        alone: time of one caller / time of transformers' `generate`, with the same prompt.
    """

    callers: int
    share: float
    batch_rate: float
    stream_rate: float
    turns_rate: float
    last_first: float
    first_seconds: float
    alone: float


def concurrency_table(found: Concurrency) -> str:
    """The speeds as a Markdown table."""
    rows = {
        "callers": f"{found.callers}",
        "tokens/s, one caller after the other": f"{found.turns_rate:.0f}",
        "tokens/s, one batch of all": f"{found.batch_rate:.0f}",
        "tokens/s, streams at a time": f"{found.stream_rate:.0f}",
        "streams over the batch": f"{found.share:.2f}",
        "first piece, ms": f"{found.first_seconds * 1e3:.0f}",
        "the last stream's first piece over the first's": f"{found.last_first:.2f}",
        "one caller's time over transformers' generate": f"{found.alone:.3f}",
    }
    return measured(rows)


@contextmanager
def endless(bundle: Bundle) -> Iterator[None]:
    """Let no token end an answer, so that all timed answers have the length asked for."""
    tokenizer, config = bundle.tokenizer, bundle.backbone.model.generation_config
    ends = tokenizer.eos_token, config.eos_token_id
    tokenizer.eos_token = config.eos_token_id = None
    try:
        yield
    finally:
        tokenizer.eos_token, config.eos_token_id = ends


def concurrency(decoder: Decoder, prompts: Sequence[PromptLike], new_tokens: int = 64, rounds: int = 3) -> Concurrency:
    """Time several callers that ask at the same time, each with one of the prompts; the batch should hold them all."""
    sampling = Sampling(max_tokens=new_tokens)
    found = [_round(decoder, prompts, sampling) for _ in range(rounds + 1)][1:]
    shares, batch, streams, turns, last, first, alone = (median(column) for column in zip(*found, strict=True))
    return Concurrency(len(prompts), shares, batch, streams, turns, last, first, alone)


def _round(decoder: Decoder, prompts: Sequence[PromptLike], sampling: Sampling) -> tuple[float, ...]:
    began = time.perf_counter()
    tokens = sum(answer.completion_tokens for answer in decoder.generate(prompts, sampling))
    batch = tokens / (time.perf_counter() - began)

    with ThreadPoolExecutor(len(prompts)) as pool:
        began = time.perf_counter()
        streams = list(pool.map(lambda prompt: _stream(decoder, prompt, sampling, began), prompts))
    shared = sum(answer.completion_tokens for _, answer in streams) / (time.perf_counter() - began)
    firsts = sorted(first for first, _ in streams)

    pairs = [_alone(decoder, prompts[0], sampling) for _ in range(_PAIRS)]
    rate = streams[0][1].completion_tokens / median(own for own, _ in pairs)
    alone = median(own / apart for own, apart in pairs)
    return shared / batch, batch, shared, rate, firsts[-1] / firsts[0], firsts[0], alone


def _alone(decoder: Decoder, prompt: PromptLike, sampling: Sampling) -> tuple[float, float]:
    """Seconds of one caller, and of transformers' own `generate`."""
    began = time.perf_counter()
    decoder.generate([prompt], sampling)
    between = time.perf_counter()
    with decoder.bundle.backbone.lock:  # then it shares no passes
        decoder.generate([prompt], sampling)
    return between - began, time.perf_counter() - between


def _stream(decoder: Decoder, prompt: PromptLike, sampling: Sampling, began: float) -> tuple[float, Generation]:
    pieces = decoder.stream(prompt, sampling)
    piece = next(pieces)
    first = time.perf_counter() - began
    *_, last = [piece, *pieces]
    assert isinstance(last, Generation)
    return first, last

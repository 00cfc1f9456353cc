"""Speed with several callers against one batch, and with one against transformers' own `generate`."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from transformers import GenerationConfig

from benchmarks.timing.phases import measured
from benchmarks.timing.speed import seconds_of
from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.decoding.engines.transformers import merged_model
from ctx_compress_rag.decoding.sampling import Generation, Sampling
from ctx_compress_rag.decoding.splice import splice_prompts
from ctx_compress_rag.prompt import PromptLike


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
    """

    callers: int
    share: float
    batch_rate: float
    stream_rate: float
    turns_rate: float
    last_first: float
    first_seconds: float


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
    shares, batch, streams, turns, last, first = (median(column) for column in zip(*found, strict=True))
    return Concurrency(len(prompts), shares, batch, streams, turns, last, first)


def _round(decoder: Decoder, prompts: Sequence[PromptLike], sampling: Sampling) -> tuple[float, ...]:
    began = time.perf_counter()
    tokens = sum(answer.completion_tokens for answer in decoder.generate(prompts, sampling))
    batch = tokens / (time.perf_counter() - began)

    with ThreadPoolExecutor(len(prompts)) as pool:
        began = time.perf_counter()
        streams = list(pool.map(lambda prompt: _stream(decoder, prompt, sampling, began), prompts))
    shared = sum(answer.completion_tokens for _, answer in streams) / (time.perf_counter() - began)
    firsts = sorted(first for first, _ in streams)

    began = time.perf_counter()
    [alone] = decoder.generate(prompts[:1], sampling)
    rate = alone.completion_tokens / (time.perf_counter() - began)
    return shared / batch, batch, shared, rate, firsts[-1] / firsts[0], firsts[0]


def over_generate(decoder: Decoder, prompt: PromptLike, new_tokens: int, rounds: int = 9) -> dict[str, float]:
    """Time of one answer over that of transformers' `generate` on ready vectors and merged weights.

    Returns: medians over rounds, in which all run in turn: with the reader merged, and apart; and `generate`'s seconds.
    """
    bundle, store = decoder.bundle, decoder.store
    assert isinstance(bundle, Bundle)
    model, batch = merged_model(bundle), splice_prompts(bundle.backbone.inputs, decoder.preparer.prepare([prompt]))
    settings = GenerationConfig(max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
    given: Any = {"inputs_embeds": batch.inputs_embeds, "attention_mask": batch.attention_mask}
    sampling = Sampling(max_tokens=new_tokens)
    asked: dict[str, Callable[[], object]] = {
        "generate": lambda: model.generate(**given, generation_config=settings),
        "merged": partial(Decoder(bundle, store, merge=True).generate, [prompt], sampling),
        "apart": partial(Decoder(bundle, store).generate, [prompt], sampling),
    }
    with endless(bundle), torch.no_grad():
        found = [{name: seconds_of(ask) for name, ask in asked.items()} for _ in range(rounds + 1)][1:]
    over = {name: median(each[name] / each["generate"] for each in found) for name in ("merged", "apart")}
    return over | {"generate": median(each["generate"] for each in found)}


def _stream(decoder: Decoder, prompt: PromptLike, sampling: Sampling, began: float) -> tuple[float, Generation]:
    pieces = decoder.stream(prompt, sampling)
    piece = next(pieces)
    first = time.perf_counter() - began
    *_, last = [piece, *pieces]
    assert isinstance(last, Generation)
    return first, last

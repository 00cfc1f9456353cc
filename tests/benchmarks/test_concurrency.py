"""Timing several callers at a time: the figures fit the tokens made and the time it took."""

from __future__ import annotations

import time
from typing import Any

import pytest

from benchmarks.timing.concurrency import concurrency, endless
from ctx_compress_rag.decoding.decoder import TransformersDecoder
from ctx_compress_rag.decoding.generation import Sampling


def test_figures_fit_the_time_that_all_took(talkative: Any) -> None:
    decoder, prompts = TransformersDecoder(talkative), ["Who?", "What is it?", "Where?"]
    made = [answer.completion_tokens for answer in decoder.generate(prompts, Sampling(12))]
    began = time.perf_counter()
    found = concurrency(decoder, prompts, new_tokens=12, rounds=1)
    elapsed = time.perf_counter() - began
    assert found.callers == 3
    # Each rate's tokens were made in a part of the time: over all of it they would be fewer a second.
    assert min(found.batch_rate, found.stream_rate) > sum(made) / elapsed
    assert found.turns_rate > made[0] / elapsed
    assert 0 < found.first_seconds < elapsed and found.alone > 0
    assert found.last_first >= 1


def test_answers_that_are_timed_do_not_end_by_themselves(tiny_bundle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = TransformersDecoder(tiny_bundle)
    short = [message("Who?"), message("Who kept bees in Pellmouth?")]
    # Random weights repeat a prompt's last token: here it ends the answer.
    last = int(decoder.prepare(short)[0].ids()[-1])
    monkeypatch.setattr(tiny_bundle.backbone.model.generation_config, "eos_token_id", last)
    assert {answer.finish_reason for answer in decoder.generate(short, Sampling(40))} == {"stop"}
    with endless(tiny_bundle):
        made = [*decoder.generate(short, Sampling(40)), decoder.generate_apart(short[0], Sampling(40))]
        *_, streamed = decoder.stream(short[0], Sampling(40))
    assert {answer.completion_tokens for answer in [*made, streamed]} == {40}
    assert decoder.generate(short, Sampling(40))[0].finish_reason == "stop"


def message(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]

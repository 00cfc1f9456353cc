"""Timing callers at a time: the figures fit each other."""

from __future__ import annotations

from typing import Any

import pytest

from ctx_compress_rag.decoding.decoder import TransformersDecoder
from ctx_compress_rag.decoding.generation import Sampling
from ctx_compress_rag.evaluation.concurrency import concurrency, endless


def test_figures_fit_each_other(talkative: Any) -> None:
    found = concurrency(TransformersDecoder(talkative), ["Who?", "What is it?", "Where?"], new_tokens=12, rounds=1)
    assert found.callers == 3
    assert abs(found.share - found.stream_rate / found.batch_rate) < 1e-9
    assert found.turns_rate > 0 and found.first_seconds > 0 and found.alone > 0
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

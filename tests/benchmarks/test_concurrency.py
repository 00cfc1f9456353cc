"""Timing several callers at a time: the figures fit the tokens made and the time it took."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.timing.concurrency import concurrency
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

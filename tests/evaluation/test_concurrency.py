"""Timing callers at a time: the figures fit each other."""

from __future__ import annotations

from typing import Any

from ctx_compress_rag.decoding.decoder import TransformersDecoder
from ctx_compress_rag.evaluation.concurrency import concurrency


def test_figures_fit_each_other(talkative: Any) -> None:
    found = concurrency(TransformersDecoder(talkative), ["Who?", "What is it?", "Where?"], new_tokens=12, rounds=1)
    assert found.callers == 3
    assert abs(found.share - found.stream_rate / found.batch_rate) < 1e-9
    assert found.turns_rate > 0 and found.first_seconds > 0 and found.alone > 0
    assert found.last_first >= 1

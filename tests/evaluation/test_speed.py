"""The speed measurements: what they count is right; how long it takes is not tested."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ctx_compress_rag.data.world import World
from ctx_compress_rag.evaluation.speed import first_token, indexing_speed


def test_indexing_counts_passages_tokens_and_bytes(tiny_bundle: Any, tmp_path: Path) -> None:
    passages = World("test", 0).passages()
    speed = indexing_speed(tiny_bundle, passages, tmp_path / "store", progress=False)
    ids = [tiny_bundle.tokenizer(p, add_special_tokens=False)["input_ids"] for p in passages]
    assert (speed.passages, speed.tokens) == (len(passages), sum(map(len, ids)))
    slots = sum(-(-len(i) // 4) for i in ids)
    assert speed.payload_bytes >= slots * tiny_bundle.compressor.dim  # a byte per number, and the scales
    on_disk = sum(f.stat().st_size for f in (tmp_path / "store").rglob("*") if f.is_file())
    assert speed.payload_bytes < speed.disk_bytes <= on_disk
    assert speed.ratio > 0


def test_first_token_compares_prompts_of_the_right_lengths(tiny_bundle: Any) -> None:
    passages = World("test", 0).passages()[:3]
    first = first_token(tiny_bundle, passages, ratio=16, pairs=2)
    slots = sum(s.merge(4).n_slots for s in tiny_bundle.compress(passages))
    tokens = sum(len(tiny_bundle.tokenizer(p, add_special_tokens=False)["input_ids"]) for p in passages)
    assert slots < first.soft_tokens < slots + 40
    assert tokens < first.text_tokens + 6 < tokens + 46
    assert first.soft_seconds > 0 and first.text_seconds > 0 and first.ratio > 0

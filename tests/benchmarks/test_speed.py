"""The speed measurements: what they count is right, and what they time is what is named; how long it takes is not."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.timing.speed import first_token, indexing_speed
from benchmarks.timing.training_speed import training_speed
from benchmarks.world.world import World


def test_indexing_counts_passages_tokens_and_bytes(tiny_bundle: Any, tmp_path: Path) -> None:
    passages = World("test", 0).passages()
    speed = indexing_speed(tiny_bundle, passages, tmp_path / "store", progress=False)
    ids = [tiny_bundle.tokenizer(p, add_special_tokens=False)["input_ids"] for p in passages]
    assert (speed.passages, speed.tokens) == (len(passages), sum(map(len, ids)))
    slots = sum(-(-len(i) // 4) for i in ids)
    assert speed.payload_bytes >= slots * tiny_bundle.compressor.dim  # a byte per number, and the scales
    on_disk = sum(f.stat().st_size for f in (tmp_path / "store").rglob("*") if f.is_file())
    assert speed.payload_bytes < speed.disk_bytes <= on_disk
    # Passages per second are of the same passages: one round's ratio is that of the two.
    assert speed.ratio == pytest.approx(speed.forward_passages_per_second / speed.passages_per_second)


def test_first_token_compares_prompts_of_the_right_lengths(tiny_bundle: Any) -> None:
    passages = World("test", 0).passages()[:3]
    found = first_token(tiny_bundle, passages, [4, 16], rounds=2)
    tokens = sum(len(tiny_bundle.tokenizer(p, add_special_tokens=False)["input_ids"]) for p in passages)
    softs = tiny_bundle.compress(passages)
    for ratio, first in found.items():
        slots = sum(soft.merge(ratio // 4).n_slots for soft in softs)
        # Template and question are the same in both; what leads the prompt, and where passages meet, takes few tokens.
        assert first.text_tokens - first.soft_tokens == pytest.approx(tokens - slots, abs=2 * len(passages) + 8)
        assert 0 < first.soft_tokens - slots < 50
        assert first.read_seconds > 0 and first.soft_seconds > 0
        assert first.share == pytest.approx(first.soft_tokens / first.text_tokens / first.ratio)
        assert first.parameters == sum(p.numel() for p in tiny_bundle.backbone.own_state().values())
    assert list(found) == [4, 16] and found[16].soft_tokens < found[4].soft_tokens


@pytest.mark.slow
def test_training_steps_that_are_compared_have_one_loss(make_tiny_bundle: Any) -> None:
    bundle = make_tiny_bundle()  # of its own: a CPU that has bfloat16 leaves the frozen weights in it
    before = bundle.fingerprint
    speed = training_speed(bundle, World("test", 0).passages()[:12], pairs=1, progress=False)
    assert speed.packed_loss == pytest.approx(speed.plain_loss, rel=1e-4 if speed.dtype == "float32" else 0.02)
    assert speed.factor == pytest.approx(speed.packed / speed.plain)
    assert bundle.fingerprint == before

"""The speed measurements: what they count is right, and what they time is what is named; how long it takes is not."""

import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.timing.concurrency import concurrency, over_generate
from benchmarks.timing.speed import first_token, indexing_speed
from benchmarks.timing.training_speed import training_speed
from benchmarks.world.world import World
from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.decoding.sampling import Sampling
from ctx_compress_rag.store import SoftContextStore


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


def test_figures_fit_the_time_that_all_took(talkative: Any) -> None:
    decoder, prompts = Decoder(talkative), ["Who?", "What is it?", "Where?"]
    made = [answer.completion_tokens for answer in decoder.generate(prompts, Sampling(max_tokens=12))]
    began = time.perf_counter()
    found = concurrency(decoder, prompts, new_tokens=12, rounds=1)
    elapsed = time.perf_counter() - began
    assert found.callers == 3
    # Each rate's tokens were made in a part of the time: over all of it they would be fewer a second.
    assert min(found.batch_rate, found.stream_rate) > sum(made) / elapsed
    assert found.turns_rate > made[0] / elapsed
    assert 0 < found.first_seconds < elapsed
    assert found.last_first >= 1


def test_one_answer_is_timed_beside_generate(talkative: Any, tmp_path: Path) -> None:
    with SoftContextStore(tmp_path, talkative) as store:
        [marker] = store.markers(store.ensure(["Orla kept bees."]), 4)
        found = over_generate(Decoder(talkative, store), f"{marker} Who?", 3, rounds=1)
    assert set(found) == {"generate", "merged", "apart"} and min(found.values()) > 0


@pytest.mark.slow
def test_training_steps_that_are_compared_have_one_loss(make_tiny_bundle: Any) -> None:
    bundle = make_tiny_bundle()  # of its own: a CPU that has bfloat16 leaves the frozen weights in it
    before = bundle.fingerprint
    speed = training_speed(bundle, World("test", 0).passages()[:12], pairs=1, progress=False)
    assert speed.packed_loss == pytest.approx(speed.plain_loss, rel=1e-4 if speed.dtype == "float32" else 0.02)
    assert speed.factor == pytest.approx(speed.packed / speed.plain)
    assert bundle.fingerprint == before

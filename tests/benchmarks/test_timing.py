"""What the measurements count is right, and what they time is what is named; the lent accelerator, and the crashes."""

import json
import shutil
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.__main__ import main
from benchmarks.crashes import folders
from benchmarks.timing.cold import chroma_reads
from benchmarks.timing.cost import measure
from benchmarks.timing.speed import first_token, indexing_speed
from benchmarks.timing.training_speed import training_speed
from benchmarks.world.world import World, world_examples
from ctx_compress_rag import Decoder, SoftContextStore
from ctx_compress_rag.evaluation.answering import FULL, SOFT, question_chat
from ctx_compress_rag.evaluation.questions import questions_of
from ctx_compress_rag.marking.mark import mark_texts
from ctx_compress_rag.text.templates import TEMPLATES
from helpers.store import WordBundle, passage
from helpers.training import save_decoder, settings_of

LAYERS, WIDTH = 2, 32


def linear(model: Any) -> int:
    """Weights that every token is multiplied with; a frozen decoder's, without its head."""
    return sum(m.weight.numel() for n, m in model.named_modules() if n.endswith("_proj") and "lora" not in n)


def reading(model: Any, tokens: int) -> int:
    """Operations of layers that read so many tokens."""
    return 2 * tokens * linear(model) + LAYERS * 2 * 2 * tokens * tokens * WIDTH


def test_operations_are_those_of_the_matrix_products(tiny_bundle: Any, tmp_path: Path) -> None:
    """Full text: layers and the head at one position; slots: also LoRA and the linear map, but of no passage's text."""
    model = tiny_bundle.backbone.model
    head = 2 * len(tiny_bundle.tokenizer) * WIDTH
    passages = questions_of(world_examples("test", 0, 1, max_turns=1, passages=(3,)))[0].passages
    with SoftContextStore(tmp_path, tiny_bundle) as store:
        store.add(list(passages), progress=False)
        decoder = Decoder(tiny_bundle, store)

        def given(texts: Any) -> Any:
            return question_chat(TEMPLATES[0], texts(), "What is it about?")

        makers = {
            FULL: partial(given, lambda: passages),
            SOFT: partial(given, lambda: mark_texts(store, passages, ratio=8)),
        }
        costs = measure(decoder, [makers], progress=False)
        length = {name: decoder.preparer.count_chat_tokens(make()) for name, make in makers.items()}
        slots = sum(soft.merge(2).n_slots for soft in tiny_bundle.compress(list(passages)))
    assert costs[FULL].context_flops == costs[SOFT].context_flops == 0
    assert costs[FULL].first_token_flops == pytest.approx(reading(model, length[FULL]) + head, rel=1e-3)
    lora = 2 * length[SOFT] * sum(p.numel() for p in tiny_bundle.reader.trained_parameters() if p.ndim == 2)
    map_ = 2 * (slots - length[SOFT]) * WIDTH * WIDTH  # the map is among those parameters, and reads slots alone
    assert costs[SOFT].first_token_flops == pytest.approx(reading(model, length[SOFT]) + head + lora + map_, rel=1e-3)


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
    assert list(found) == [4, 16] and found[16].soft_tokens < found[4].soft_tokens


@pytest.mark.slow
def test_training_steps_that_are_compared_have_one_loss(make_tiny_bundle: Any) -> None:
    bundle = make_tiny_bundle()  # of its own: a CPU that has bfloat16 leaves the frozen weights in it
    before = bundle.fingerprint
    speed = training_speed(bundle, World("test", 0).passages()[:12], pairs=1, progress=False)
    assert speed.packed_loss == pytest.approx(speed.plain_loss, rel=1e-4 if speed.dtype == "float32" else 0.02)
    assert speed.factor == pytest.approx(speed.packed / speed.plain)
    assert bundle.fingerprint == before


@pytest.mark.slow
def test_parts_run_once_and_say_what_became_of_them(tmp_path: Path, tiny_tokenizer: Any) -> None:
    decoder = save_decoder(tmp_path / "decoder", tiny_tokenizer)
    recipe, output = tmp_path / "recipe.yaml", tmp_path / "told"
    command = ["accelerator", "--tiny", "--recipe", str(recipe), "--output", str(output), "--minutes"]

    def states(minutes: str) -> dict[str, str]:
        assert main([*command, minutes]) == 0
        return {name: part["state"] for name, part in json.loads((output / "results.json").read_text()).items()}

    assert states("0") == {"bundle": "not run", "speed tiny": "not run"}
    assert states("9") == {"bundle": "failed", "speed tiny": "done"}  # there is no such recipe
    recipe.write_text(yaml.safe_dump(settings_of(decoder, "packed", tmp_path / "run", {"steps": 1})))
    assert states("9") == {"bundle": "done", "speed tiny": "done"}
    assert (tmp_path / "run" / "bundle").exists()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("cc"), reason="kills need Linux and a C compiler")
@pytest.mark.parametrize(("part", "count"), [("kills", 20), ("stress", 2), ("files", 10)])
def test_a_little_of_each_part_counts_no_fault(part: str, count: int) -> None:
    command = [sys.executable, "-m", "benchmarks.crashes.commands", part, str(count)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done
    assert "(must be 0)" in done.stdout


@pytest.mark.slow
def test_a_loss_and_a_wrong_passage_are_counted(tmp_path: Path) -> None:
    """In a folder where one kept passage was deleted and another stands for a text it was not made of."""
    folders.make(tmp_path)
    assert +folders.look(tmp_path) == Counter(read=206)

    class Mistaken(WordBundle):
        def compress(self, texts: list[str], ratio: int | None = None) -> list[object]:
            return super().compress([passage(99)] * len(texts), ratio)

    with SoftContextStore(tmp_path, Mistaken(), key=folders.KEY) as store:
        store.delete(["p7", "p8"])
        store.add([folders.text_of(8)], ["p8"], progress=False)
    found = folders.look(tmp_path)
    assert found["missing"] == 1 and found["wrong"] == 1 and found["lost"] == 2
    assert folders.look(tmp_path)["missing"] == 0  # mended by the first look


def test_a_question_reads_each_passage_once_to_mark_it_and_once_to_answer(tiny_bundle: Any, tmp_path: Path) -> None:
    """Its ids alone, to find it, before. A second reading of the passages would be twice the characters."""
    texts = questions_of(world_examples("test", 0, 1, max_turns=1, passages=(4,)))[0].passages
    with SoftContextStore(tmp_path, tiny_bundle) as store:
        store.add(list(texts), progress=False)
        decoder, size = Decoder(tiny_bundle, store), len(str(store._records.rows(store._records.ids())))

        def ask() -> None:
            chat = question_chat(TEMPLATES[0], mark_texts(store, texts, token_budget=30), "What is it about?")
            prompt = decoder.preparer.prepare([chat], extractive=True)[0]
            assert prompt.slots and prompt.quotable

        found, marked, answered = chroma_reads(store, ask)
        assert found < 0.2 * size and marked == pytest.approx(size, rel=0.1) and answered <= marked * 1.01

"""Comparisons on files, from a decoder with its teacher merged; their report."""

import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from benchmarks.__main__ import main
from benchmarks.compare.config import Comparison, Ordering, merged, stage_recipes
from benchmarks.compare.decoder import merge_teacher
from benchmarks.compare.operations import operations_per_step
from benchmarks.compare.report import Cell, EntryRow, Results, methods_shown, orderings
from benchmarks.scoring.paired import paired_difference
from benchmarks.world.world import world_examples
from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.data.examples import Example, Turn, read_jsonl, write_jsonl
from ctx_compress_rag.training.prompts import load_training_examples
from helpers.models import draw_lora, save_tiny_llama
from helpers.training import killed

LONG = "A word " * 200


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    """Questions to train on, questions to test with, two of which are in both, a decoder and a teacher."""
    folder = tmp_path_factory.mktemp("files")
    training = world_examples("train", 7, 24, max_turns=2, passages=(1,))
    test = world_examples("train", 900, 12, max_turns=1, passages=(1,))
    asked_again = Example(training[3].passages, (Turn("What does nobody ask?", ("This",)),))
    long = [Example((LONG,), (Turn("How long is it?", ("Long",)),))]
    write_jsonl(folder / "test.jsonl", [*test, asked_again, *long])
    rows = folder / "train.jsonl"
    write_jsonl(rows, [*training, Example(("A passage of its own.",), test[5].turns), *long])
    (folder / "train.jsonl.gz").write_bytes(gzip.compress(rows.read_bytes()))
    decoder = save_tiny_llama(tiny_tokenizer, folder / "model")
    teacher = get_peft_model(decoder, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    draw_lora(teacher, 0.3)
    teacher.save_pretrained(folder / "teacher")
    return folder


@pytest.fixture(scope="module")
def settings(files: Path) -> dict[str, Any]:
    return {
        "ratios": [4, 8],
        "batch_size": 2,
        "data": {"files": [str(files / "train.jsonl.gz")], "test": str(files / "test.jsonl"), "most_words": 150},
        "decoder": str(files / "model"),
        "teacher": str(files / "teacher"),
        "settings": {
            "window": 64,
            "data": {"max_turns": 2, "max_context_tokens": 64},
            "optim": {"learning_rate": 1.0e-3, "log_every": 1},
        },
        "entries": {
            "pooled": {
                "note": "two stages",
                "method": {"name": "mean_pooling"},
                "stages": [{"share": 0.5, "stage": "distillation"}, {"share": 0.5, "stage": "answer"}],
            },
            "one": {
                "note": "one stage",
                "method": {"name": "mean_pooling", "layers": 0, "encoder": {"mode": "frozen"}},
                "settings": {"seed": 3},
                "stages": [{"share": 1, "stage": "answer"}],
            },
        },
    }


def read(settings: dict[str, Any], name: str, steps: list[int], tmp_path: Path, passages: int = 1) -> list[Example]:
    recipes = stage_recipes(Comparison.model_validate(settings), name, steps, passages, "decoder", tmp_path)
    return [example for recipe in recipes for example in load_training_examples(recipe)]


def test_every_entry_reads_the_same_questions(settings: dict[str, Any], files: Path, tmp_path: Path) -> None:
    """In the same order, whatever its stages and its own seed, and from the first again after the last.

    Neither what is held out nor what is too long is read.
    """
    one, two = (read(settings, *each, tmp_path) for each in (("one", [30]), ("pooled", [10, 20])))
    assert one == two
    assert len(one) == 60
    distinct = len({(e.passages, e.turns) for e in one})
    assert one[distinct:] == one[: 60 - distinct]
    other = read(merged(settings, {"data": {"seed": 1}}), "one", [30], tmp_path)
    assert other != one and set(other) == set(one)
    test = read_jsonl(files / "test.jsonl")
    assert not {e.passages for e in one} & {(LONG,), *(e.passages for e in test)}
    assert not {t.question for e in one for t in e.turns} & {t.question for e in test for t in e.turns}


def test_the_merged_decoder_is_the_decoder_with_its_teacher(files: Path, tmp_path: Path) -> None:
    """peft's own model, its sum rounded to bfloat16 as training reads it."""
    merge_teacher(str(files / "model"), str(files / "teacher"), tmp_path / "decoder")
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "decoder", dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(files / "model", dtype=torch.float32)
    ids = torch.arange(40)[None] + 5
    with torch.no_grad():
        without = plain(ids).logits
        wanted = PeftModel.from_pretrained(plain, files / "teacher")(ids).logits
        found = made(ids).logits
    assert (wanted - without).abs().max() > 20 * (wanted - found).abs().max()
    assert all(torch.equal(p, p.bfloat16().float()) for p in made.parameters())


def test_operations_are_those_of_forward_and_backward(settings: dict[str, Any], files: Path, tmp_path: Path) -> None:
    """Two for each frozen weight and position forward, two backward, and fewer for attention, map and head."""
    frozen = {"ratios": [4], "entries": {"one": {"method": {"decoder": {"mode": "frozen"}}}}}
    comparison = Comparison.model_validate(merged(settings, frozen))
    [recipe] = stage_recipes(comparison, "one", [3], 1, str(files / "model"), tmp_path)
    job = recipe.make_job()
    made = [job.collate([job.examples[number] for number in (step, step + 1)]) for step in (0, 2, 4)]
    positions = sum(batch["prompts"].token_count for batch in made) / 3
    layers = AutoModelForCausalLM.from_pretrained(files / "model").model.layers
    weights = sum(p.numel() for p in layers.parameters() if p.ndim == 2)
    assert 4 < operations_per_step(recipe) / (weights * positions) < 9


@pytest.fixture(scope="module")
def command(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    file = tmp_path_factory.mktemp("comparison") / "files.yaml"
    file.write_text(yaml.safe_dump(settings, sort_keys=False))
    return ["compare", str(file), "--budget", "4e-7", "--questions", "2", "--entries", "pooled", "one"]


@pytest.fixture(scope="module")
def finished(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a comparison that was cut off in an entry's second stage."""
    folder = tmp_path_factory.mktemp("compared")
    with killed(after=1, training=2), pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.compare.run._COUNTED_STEPS", 2)
        main([*command, "--output", str(folder)])
    assert main([*command, "--output", str(folder)]) == 0
    return folder


def results(folder: Path, name: str) -> Any:
    return json.loads((folder / "results" / f"{name}.json").read_text())


@pytest.mark.slow
def test_entries_start_from_the_merged_decoder_and_name_it(finished: Path, files: Path) -> None:
    pooled = results(finished, "pooled")
    assert pooled["interrupted"]
    costs = json.loads((finished / "entries" / "pooled" / "operations.json").read_text())["per_step"]
    steps = [round(0.5 * 4e-7 * 1e15 / cost) for cost in costs]
    assert [stage["steps"] for stage in pooled["stages"]] == steps and pooled["examples"] == 2 * sum(steps)
    assert [stage["first_example"] for stage in pooled["stages"]] == [0, 2 * steps[0]]
    for stage in ("1", "2"):
        folder = finished / "entries" / "pooled" / stage / "bundle"
        bundle = Bundle.from_pretrained(folder)
        assert bundle.config.decoder == str((finished / "decoder").resolve())
        assert not (folder / "decoder").exists()
    assert bundle.fingerprint == pooled["fingerprint"]
    report = (finished / "compare.md").read_text()
    assert report.startswith("# 2 test questions, 4e-07 x 10^15 operations of training\n")
    assert "Questions of test.jsonl" in report and f"with the LoRA of {files / 'teacher'} merged" in report


COUNT = 40
CLAIMS = Comparison.model_construct(
    orderings=[
        Ordering(claim="the first claim", better="pooled", worse="coarse"),
        Ordering(claim="the second claim", better="pooled", worse="tokens"),
    ]
)


def scored(
    entries: dict[str, dict[int, list[float]]], none: list[float] | None = None, control: list[float] | None = None
) -> Results:
    """Results with these F1 scores of entries at ratios, without context, and with another question's slots."""
    none, control = none or [0.0] * COUNT, control or [0.0] * COUNT

    def row(name: str, by_ratio: dict[int, list[float]]) -> EntryRow:
        cells = {ratio: Cell(f1, f1, None, 64 / ratio, ratio, 8.0) for ratio, f1 in by_ratio.items()}
        return EntryRow(name, "mean_pooling", cells, {"interrupted": False}, control)

    full = [1.0] * COUNT
    return Results({}, full, none, full, none, [row(*entry) for entry in entries.items()], [])


def test_pairing_narrows_the_interval() -> None:
    """Two systems with the same hard questions, one a little better at each: sure, however spread the scores are."""
    rng = np.random.default_rng(0)
    hard = rng.random(50) * 0.9
    found = paired_difference((hard + 0.05).tolist(), hard.tolist())
    assert (found.low, found.value, found.high) == pytest.approx((0.05, 0.05, 0.05))


def test_orderings_say_what_held() -> None:
    rng = np.random.default_rng(1)
    low, high = (rng.random(COUNT) * 0.3).tolist(), (0.6 + rng.random(COUNT) * 0.3).tolist()
    noise = rng.permutation([0.0, 1.0] * (COUNT // 2)).tolist()
    for coarse, verdict in ((low, "held"), (high, "not shown"), ([1.0] * COUNT, "reversed")):
        first, second = orderings(CLAIMS, scored({"pooled": {4: noise, 8: high}, "coarse": {8: coarse}}))
        assert first.startswith(f"- **{verdict}**: the first claim: pooled over coarse at 8x ")
        assert f"{np.mean(high) - np.mean(coarse):+.3f} (" in first
        assert second == "- **not measured**: the second claim (tokens has no result)"
    line = orderings(CLAIMS, scored({"pooled": {4: noise, 8: high}, "tokens": {4: low, 8: low}}))[1]
    fours, eights = np.mean(noise) - np.mean(low), np.mean(high) - np.mean(low)
    assert f"pooled over tokens {(fours + eights) / 2:+.3f} (" in line
    assert f"; 4x {fours:+.3f} (" in line and f", 8x {eights:+.3f} (" in line


def test_a_method_is_shown_by_three_standard_errors() -> None:
    """No context and other passages answer nothing here, so that a gain is the score itself."""
    rng = np.random.default_rng(2)
    for error, verdict in ((2.9, "not shown"), (3.1, "shown")):
        scores = rng.random(COUNT)
        scores += error * np.std(scores, ddof=1) / math.sqrt(COUNT) - scores.mean()
        gain = f"{scores.mean():+.3f} ± "
        found = scored({"pooled": {4: scores.tolist(), 8: [1.0] * COUNT}, "coarse": {8: [0.0] * COUNT}})
        first, second = methods_shown(found)
        assert first.startswith(f"- **{verdict}**: pooled at 4x: over no context {gain}")
        assert f"over another passage {gain}" in first
        assert second.startswith("- **not shown**: coarse at 8x: over no context +0.000 ")

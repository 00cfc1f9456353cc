"""Comparisons on questions from files, from a decoder that a teacher is merged into."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from benchmarks.__main__ import main
from benchmarks.compare.config import Budget, Comparison, merged, stage_recipes
from benchmarks.compare.decoder import merge_teacher
from benchmarks.world.world import world_examples
from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.data.examples import Example, Turn, read_jsonl, write_jsonl
from ctx_compress_rag.training.examples import load_training_examples
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


def read(settings: dict[str, Any], name: str, steps: int, tmp_path: Path, passages: int = 1) -> list[Example]:
    recipes = stage_recipes(Comparison.model_validate(settings), name, Budget(steps, passages), "decoder", tmp_path)
    return [example for recipe in recipes for example in load_training_examples(recipe)]


def test_every_entry_reads_the_same_questions(settings: dict[str, Any], files: Path, tmp_path: Path) -> None:
    """In the same order, whatever its stages and its own seed, and from the first again after the last.

    Neither what is held out nor what is too long is read.
    """
    one, two = (read(settings, name, 30, tmp_path) for name in ("one", "pooled"))
    assert one == two
    assert len(one) == 60
    distinct = len({(e.passages, e.turns) for e in one})
    assert one[distinct:] == one[: 60 - distinct]
    other = read(merged(settings, {"data": {"seed": 1}}), "one", 30, tmp_path)
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


@pytest.fixture(scope="module")
def command(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    file = tmp_path_factory.mktemp("comparison") / "files.yaml"
    file.write_text(yaml.safe_dump(settings, sort_keys=False))
    return ["compare", str(file), "--budget", "6", "--questions", "4", "--entries", "pooled", "one"]


@pytest.fixture(scope="module")
def finished(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a comparison that was cut off in an entry's second stage."""
    folder = tmp_path_factory.mktemp("compared")
    with killed(after=1, training=2):
        main([*command, "--output", str(folder)])
    assert main([*command, "--output", str(folder)]) == 0
    return folder


def results(folder: Path, name: str) -> Any:
    return json.loads((folder / "results" / f"{name}.json").read_text())


def test_entries_start_from_the_merged_decoder_and_name_it(finished: Path, files: Path) -> None:
    pooled = results(finished, "pooled")
    assert pooled["interrupted"]
    assert [stage["first_example"] for stage in pooled["stages"]] == [0, 6]
    for stage in ("1", "2"):
        folder = finished / "entries" / "pooled" / stage / "bundle"
        bundle = Bundle.from_pretrained(folder)
        assert bundle.config.decoder == str((finished / "decoder").resolve())
        assert not (folder / "decoder").exists()
    assert bundle.fingerprint == pooled["fingerprint"]
    report = (finished / "compare.md").read_text()
    assert report.startswith("# 4 test questions, 12 examples of training\n")
    assert "Questions of test.jsonl" in report and f"with the LoRA of {files / 'teacher'} merged" in report


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"data": {"seed": 1}}, "test_sha256"), ({"entries": {"pooled": {"settings": {"seed": 5}}}}, "has changed since")],
)
def test_results_of_another_comparison_are_not_reported(
    finished: Path, command: list[str], settings: dict[str, Any], tmp_path: Path, capsys: Any, changes: Any, named: str
) -> None:
    file, report = tmp_path / "changed.yaml", (finished / "compare.md").read_text()
    file.write_text(yaml.safe_dump(merged(settings, changes)))
    assert main([command[0], str(file), *command[2:], "--output", str(finished)]) == 2
    assert named in capsys.readouterr().err
    assert (finished / "compare.md").read_text() == report

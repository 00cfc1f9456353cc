"""A batch's loss and gradient are the same in whatever micro-batches, and by however many processes, it is made."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ctx_compress_rag.training.run import run_recipe
from helpers.processes import run_by
from helpers.training import report, saved_weights, write_recipe

LEARNERS = ("retrieval_adapter", "prompt_tuning", "update_predictor", "hypertuning")


def _step(folder: Path) -> list[float]:
    """Loss and gradient norm of the only step."""
    [row] = json.loads((folder / "loss.json").read_text())
    return [row["loss"], row["grad_norm"]]


@pytest.mark.parametrize("stage", ["adapter", "answer", "repetition", *LEARNERS])
def test_micro_batches_change_nothing(decoder: Path, tmp_path: Path, stage: str) -> None:
    optims = [{"steps": 1, "micro_batch_size": micro} for micro in (4, 1)]
    whole, parts = (_step(run_recipe(write_recipe(decoder, stage, tmp_path / str(i), optims[i]))) for i in (0, 1))
    assert parts == pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize("stage", ["answer", "repetition"])
def test_processes_change_nothing(decoder: Path, tmp_path: Path, stage: str) -> None:
    """Two, told who they are as `accelerate launch` tells it; one of them may have no passage to repeat."""
    alone = _step(run_recipe(write_recipe(decoder, stage, tmp_path / "alone", {"steps": 1})))
    shared = write_recipe(decoder, stage, tmp_path / "shared", {"steps": 1, "micro_batch_size": 1})
    run_by(2, ("train", shared))
    assert _step(tmp_path / "shared") == pytest.approx(alone, rel=1e-3)


@pytest.mark.slow
def test_two_processes_resume_and_so_does_one(decoder: Path, tmp_path: Path) -> None:
    """Killed after two of four steps, or out of time in one of them: all end with the weights of one process."""
    steps = {"steps": 4, "save_every": 1}
    run_recipe(write_recipe(decoder, "adapter", tmp_path / "whole", steps))
    names = ("shared", "late", "alone")
    shared, late, alone = (
        write_recipe(decoder, "adapter", tmp_path / name, {"micro_batch_size": 1, **steps}) for name in names
    )
    run_by(2, ("kill", alone, 2), ("hurry", late), ("kill", shared, 2), ("train", shared))
    for recipe in (alone, late):
        run_recipe(recipe)
    for name in names:
        _assert_same_weights(tmp_path / "whole", tmp_path / name)
        assert report(tmp_path / name)["resumed"] is True


@pytest.mark.slow
def test_ten_steps_of_two_processes_make_the_weights_of_one(decoder: Path, tmp_path: Path) -> None:
    """By `accelerate launch`, as several GPUs train, with gradient checkpointing."""
    run_recipe(write_recipe(decoder, "answer", tmp_path / "alone", {"steps": 10}))
    apart = {"steps": 10, "micro_batch_size": 1, "checkpoint_layers": True}
    recipe = write_recipe(decoder, "answer", tmp_path / "shared", apart)
    command = ["accelerate.commands.launch", "--cpu", "--num_processes", "2", "-m", "ctx_compress_rag.cli"]
    done = subprocess.run(
        [sys.executable, "-m", *command, "train", str(recipe)], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    _assert_same_weights(tmp_path / "alone", tmp_path / "shared")


def _assert_same_weights(one: Path, other: Path) -> None:
    a, b = saved_weights(one), saved_weights(other)
    assert a.keys() == b.keys() != set()
    for name, weight in a.items():
        assert (b[name] - weight).abs().max() < 2e-4, name

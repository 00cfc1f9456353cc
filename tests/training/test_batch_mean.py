"""A batch's loss and gradient are the same in whatever micro-batches, and by however many processes, it is made."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ctx_compress_rag.training.run import run_recipe
from helpers.processes import run_by
from helpers.training import saved_weights, write_recipe

LEARNERS = ("retrieval_adapter", "prompt_tuning", "update_predictor", "hypertuning")


def _step(folder: Path) -> list[float]:
    """Loss and gradient norm of the only step."""
    [row] = json.loads((folder / "loss.json").read_text())
    return [row["loss"], row["grad_norm"]]


@pytest.mark.parametrize("stage", ["teacher", "answer", "repetition", *LEARNERS])
def test_micro_batches_change_nothing(decoder: Path, tmp_path: Path, stage: str) -> None:
    optims = [{"steps": 1, "micro_batch_size": micro} for micro in (4, 1)]
    whole, parts = (_step(run_recipe(write_recipe(decoder, stage, tmp_path / str(i), optims[i]))) for i in (0, 1))
    assert parts == pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize(("stage", "shard"), [("answer", True), ("repetition", False)])
def test_processes_change_nothing(decoder: Path, tmp_path: Path, stage: str, shard: bool) -> None:
    """Two, told who they are as torchrun tells it; one of them may have no passage to repeat."""
    alone = _step(run_recipe(write_recipe(decoder, stage, tmp_path / "alone", {"steps": 1})))
    shared = write_recipe(decoder, stage, tmp_path / "shared", {"steps": 1, "micro_batch_size": 1, "shard": shard})
    run_by(2, tmp_path / "told", ("train", shared))
    assert _step(tmp_path / "shared") == pytest.approx(alone, rel=1e-3)


@pytest.mark.slow
def test_ten_steps_of_two_processes_make_the_weights_of_one(decoder: Path, tmp_path: Path) -> None:
    """By torchrun, as several GPUs train, with gradient checkpointing; `shard` is in test_sharding.py."""
    run_recipe(write_recipe(decoder, "answer", tmp_path / "alone", {"steps": 10}))
    apart = {"steps": 10, "micro_batch_size": 1, "checkpoint_layers": True}
    _by_torchrun(write_recipe(decoder, "answer", tmp_path / "shared", apart))
    alone, shared = saved_weights(tmp_path / "alone"), saved_weights(tmp_path / "shared")
    assert alone.keys() == shared.keys() != set()
    for name, weight in alone.items():
        assert (shared[name] - weight).abs().max() < 2e-4, name


def _by_torchrun(recipe: Path) -> None:
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "ctx_compress_rag.cli"]
    done = subprocess.run(
        [sys.executable, "-m", *command, "train", str(recipe)], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]

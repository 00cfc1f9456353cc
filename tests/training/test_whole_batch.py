"""A batch's loss and gradient are the same in whatever micro-batches, and by however many processes, it is made."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from ctx_compress_rag.data.examples import write_jsonl
from ctx_compress_rag.training.run import run_recipe
from helpers.adaptation import random_adapter
from helpers.models import save_tiny_llama
from helpers.processes import run_by
from helpers.training import UNLIKE

STAGES: dict[str, dict[str, Any]] = {
    "teacher": {"tune": {"mode": "full"}, "context_loss_weight": 0.2},
    "answer": {"name": "tiny", "method": {"name": "mean_pooling"}, "ratios": [4, 8], "window": 64},
}
# Of each batch's four passages, three: a micro-batch of one example repeats nothing.
STAGES["distillation"] = STAGES["answer"] | {"reconstruction_weight": 10.0, "repeat_per_batch": 3}
_PREDICTOR = {"demonstrations": 2, "inner_steps": 1, "inner_learning_rate": 0.1, "hidden": 8, "code": 4}
ADAPTATION: dict[str, dict[str, Any]] = {
    "retrieval_adapter": {"rank": 2, "alpha": 4},
    "prompt_tuning": {"virtual_tokens": 3},
    "update_predictor": _PREDICTOR,
    "update_predictor, task": _PREDICTOR | {"loss": "task"},
}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    folder = tmp_path_factory.mktemp("decoder")
    model = save_tiny_llama(tiny_tokenizer, folder)
    random_adapter(model, 2, seed=0).save_pretrained(folder / "base")
    write_jsonl(folder / "data.jsonl", UNLIKE)
    return folder


def _recipe(decoder: Path, stage: str, folder: Path, micro: int, **optim: Any) -> Path:
    recipe = {
        "stage": stage.split(",")[0],
        "output": str(folder),
        "decoder": str(decoder),
        "data": {"files": [str(decoder / "data.jsonl")]} | ({"max_turns": 2} if stage in STAGES else {}),
        "optim": {"steps": 1, "batch_size": 4, "micro_batch_size": micro, "log_every": 1, "warmup_ratio": 0.0, **optim},
        **(STAGES | ADAPTATION)[stage],
    }
    if recipe["stage"] == "update_predictor":
        recipe["base"] = str(decoder / "base")
    path = folder.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(recipe))
    return path


def _step(folder: Path) -> list[float]:
    """Loss and gradient norm of the only step."""
    [row] = json.loads((folder / "loss.json").read_text())
    return [row["loss"], row["grad_norm"]]


@pytest.mark.parametrize("stage", [*STAGES, *ADAPTATION])
def test_micro_batches_change_nothing(decoder: Path, tmp_path: Path, stage: str) -> None:
    steps = [_step(run_recipe(_recipe(decoder, stage, tmp_path / str(micro), micro))) for micro in (4, 1)]
    assert steps[1] == pytest.approx(steps[0], rel=1e-3)


@pytest.mark.parametrize(("stage", "shard"), [("answer", None), ("distillation", "frozen")])
def test_processes_change_nothing(decoder: Path, tmp_path: Path, stage: str, shard: str | None) -> None:
    """Two, told who they are as torchrun tells it; where they share weights out, one that repeats nothing waits for
    no other."""
    alone = _step(run_recipe(_recipe(decoder, stage, tmp_path / "alone", 4)))
    run_by(2, tmp_path / "told", ("train", _recipe(decoder, stage, tmp_path / "shared", 1, shard=shard)))
    assert _step(tmp_path / "shared") == pytest.approx(alone, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("shard", [None, "frozen"])
def test_ten_steps_of_two_processes_make_the_weights_of_one(decoder: Path, tmp_path: Path, shard: str | None) -> None:
    """By torchrun, as several GPUs train, with gradient checkpointing; `shard: all` is in test_sharding.py."""
    options = {"steps": 10, "learning_rate": 1e-3}
    run_recipe(_recipe(decoder, "answer", tmp_path / "alone", 4, **options))
    _by_torchrun(_recipe(decoder, "answer", tmp_path / "shared", 1, **options, checkpoint_layers=True, shard=shard))
    start = run_recipe(_recipe(decoder, "answer", tmp_path / "start", 4, steps=1, learning_rate=1e-9))
    alone, shared, before = (_weights(folder) for folder in (tmp_path / "alone", tmp_path / "shared", start))
    assert alone.keys() == shared.keys() == before.keys()
    moved = [name for name in alone if (alone[name] - before[name]).abs().max() > 1e-3]
    assert len(moved) > 10  # both adapters and the map
    for name, weight in alone.items():
        assert (shared[name] - weight).abs().max() < 2e-4, name


def _by_torchrun(recipe: Path) -> None:
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "ctx_compress_rag.cli"]
    done = subprocess.run(
        [sys.executable, "-m", *command, "train", str(recipe)], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    """Of a checkpoint's last step, all that was trained."""
    return load_file(folder / "checkpoints" / "last" / "trained.safetensors")

"""Weights sharded among two processes: each holds its part, and what they save is what one process saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.training.recipe import parse_recipe
from ctx_compress_rag.training.run import run_recipe
from helpers.processes import run_by
from helpers.training import losses, report, saved_weights, settings_of, write_recipe

STAGES = (
    "teacher", "adapter", "answer, full", "distillation", "ram", "arcaligner", "comprexit", "packed",
)  # fmt: skip
MICRO = {"packed": 1}
"""Examples of a micro-batch in one process: a packed batch is made whole."""


def _recipe(decoder: Path, name: str, folder: Path, micro: int, **optim: Any) -> Path:
    return write_recipe(decoder, name, folder, {"steps": 10, "micro_batch_size": micro, **optim})


def _assert_same_weights(one: Path, other: Path) -> None:
    """Of two trainings' last steps; and that training moved them."""
    a, b = saved_weights(one), saved_weights(other)
    assert a.keys() == b.keys() != set()
    for name, weight in a.items():
        assert (b[name] - weight).abs().max() < 2e-5, name
    assert max(losses(one)) > 1.001 * min(losses(one))


@pytest.mark.slow
def test_two_processes_resume_with_half_of_a_decoder_each(decoder: Path, tmp_path: Path) -> None:
    """Killed after two of four steps, they go on, and so does one process alone: all end with the weights of one."""
    steps = {"steps": 4, "save_every": 1}
    run_recipe(_recipe(decoder, "teacher", tmp_path / "whole", 4, **steps))
    shared, late, alone = (
        _recipe(decoder, "teacher", tmp_path / name, 1, shard=True, **steps) for name in ("shared", "late", "alone")
    )
    tasks = [("kill", alone, 2), ("hurry", late), ("kill", shared, 2), ("train", shared)]
    held = run_by(2, tmp_path / "told", *tasks)
    run_recipe(alone)
    for folder in ("shared", "alone"):
        _assert_same_weights(tmp_path / "whole", tmp_path / folder)
        assert report(tmp_path / folder)["resumed"] is True
    trained = report(tmp_path / "whole")["trained_parameters"]
    assert [each["trained"] for [each] in held] == [trained / 2] * 2
    assert [each["states"] for [each] in held] == [trained] * 2
    # Weights and two states in float32, halved; a tenth for data, positions and whatever else there is.
    assert all(each["bytes"] < 1.1 * 3 * 4 * trained / 2 for [each] in held)


@pytest.mark.parametrize(
    ("named", "change"),
    [
        ("muon_learning_rate", {"optim": {"muon_learning_rate": 1e-3}}),
        ("average", {"optim": {"average": 0.9}}),
        ("each: example", {"curriculum": [{"step": 0, "ratios": [4, 8], "sample": 1, "each": "example"}]}),
        ("reconstruction_weight", {"reconstruction_weight": 0.5}),
    ],
)
def test_what_makes_processes_differ_is_refused(
    decoder: Path, tmp_path: Path, named: str, change: dict[str, Any]
) -> None:
    recipe = settings_of(decoder, "distillation", tmp_path) | change
    with pytest.raises(ConfigError, match=named):
        parse_recipe(recipe | {"optim": {"shard": True, **recipe.get("optim", {})}}, "test")


@pytest.mark.slow
@pytest.mark.parametrize("name", STAGES)
def test_ten_steps_of_two_processes_make_the_weights_of_one(decoder: Path, tmp_path: Path, name: str) -> None:
    """In micro-batches and with gradient checkpointing in the two; and what they save has the same files."""
    run_recipe(_recipe(decoder, name, tmp_path / "alone", MICRO.get(name, 4)))
    shared = _recipe(decoder, name, tmp_path / "shared", 1, shard=True, checkpoint_layers=True)
    [[first], [second]] = run_by(2, tmp_path / "told", ("train", shared))
    _assert_same_weights(tmp_path / "alone", tmp_path / "shared")
    trained = report(tmp_path / "shared")["trained_parameters"]
    # A matrix of an odd number of rows, of which one process has a row more.
    assert first["trained"] + second["trained"] == trained and first["trained"] < 0.51 * trained
    assert first["states"] + second["states"] == 2 * trained and first["states"] < 0.51 * 2 * trained
    one, two = _saved(tmp_path / "alone"), _saved(tmp_path / "shared")
    assert one.keys() == two.keys()
    for file, tensors in one.items():
        torch.testing.assert_close(two[file], tensors, rtol=0, atol=1e-3)  # of half precision; dtypes are compared, too


def _saved(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The files that a stage saves, and the tensors in them."""
    files = {str(f.relative_to(folder)): f for f in folder.rglob("*") if f.is_file() and "checkpoints" not in f.parts}
    return {name: load_file(file) if file.suffix == ".safetensors" else {} for name, file in files.items()}

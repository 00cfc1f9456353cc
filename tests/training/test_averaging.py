"""What is saved with `average` is the moving average of the weights after each step, by its plain formula."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from ctx_compress_rag.training.run import run_recipe
from helpers.training import killed, write_recipe

STEPS = 5
# The same steps are made whatever their number is.
ALIKE = {"learning_rate": 1e-2, "final_learning_rate": 1e-2, "batch_size": 2, "save_every": 2}


def _recipe(decoder: Path, output: Path, steps: int, **optim: Any) -> Path:
    return write_recipe(decoder, "adapter", output, {**ALIKE, "steps": steps, **optim})


def _weights(folder: Path) -> dict[str, Any]:
    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.parametrize("muon", [None, 1e-2])
def test_the_average_is_saved_also_after_an_interruption(decoder: Path, tmp_path: Path, muon: float | None) -> None:
    after = [
        _weights(run_recipe(_recipe(decoder, tmp_path / str(steps), steps, muon_learning_rate=muon)))
        for steps in range(1, STEPS + 1)
    ]
    cut = _recipe(decoder, tmp_path / "cut", STEPS, muon_learning_rate=muon, average=0.6)
    with killed(after=3):
        run_recipe(cut)
    averaged = _weights(run_recipe(cut))
    for name in averaged:
        mean = (after[0][name] + after[1][name]) / 2
        for weights in after[2:]:
            mean = 0.6 * mean + 0.4 * weights[name]
        moved = (after[-1][name] - mean).abs().max()
        assert (averaged[name] - mean).abs().max() < 0.02 * moved, name

"""Recipes of all stages, so small that they train in a second; trainings that break off, and what they tell."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

import benchmarks.adaptation.hypertuning
import benchmarks.adaptation.prompt_tuning  # noqa: F401 - they register stages of the recipes below
from benchmarks.world.task_families import write_families
from ctx_compress_rag.data.examples import Example, Turn, write_jsonl
from helpers.adaptation import random_adapter
from helpers.methods import COMPREXIT
from helpers.models import save_tiny_llama

UNLIKE = [
    Example(("Orla Reedwen keeps a goat.",), (Turn("Which pet?", ("a goat",)),)),
    Example(("Kormoor lies on the river Halen.",), (Turn("Where is it?", ("on the river Halen, near the sea " * 4,)),)),
    Example(("Pell trades in salt.",), (Turn("What?", ("salt",)), Turn("Who?", ("Pell, the town of salt and tin",)))),
    Example(("The ferry leaves at dawn.",), (Turn("When?", ("at dawn, every day but on Sundays, if at all",)),)),
]
"""Answers of few and of many tokens: a mean over tokens is not one over examples."""

FULL, LORA = {"mode": "full"}, {"mode": "lora"}
SLOTS = {"name": "tiny", "ratios": [4, 8], "window": 64}
POOLED = SLOTS | {"method": {"name": "mean_pooling"}}
PREDICTOR = {"stage": "update_predictor", "demonstrations": 2, "inner_steps": 1, "inner_learning_rate": 0.1}
PREDICTOR |= {"hidden": 8, "code": 4}
STAGES: dict[str, dict[str, Any]] = {
    "adapter": {"stage": "teacher", "tune": LORA},
    "answer": {"stage": "answer", **POOLED},
    "distillation": {"stage": "distillation", **POOLED},
    "reconstruction": {"stage": "reconstruction", **POOLED},
    # A micro-batch of one example may repeat nothing.
    "repetition": {"stage": "distillation", **POOLED, "reconstruction_weight": 10.0, "repeat_share": 0.7},
    "packed": {
        "stage": "repeat_and_answer",
        **POOLED,
        "window": 128,
        "packing": {"rows": 2, "passage_rows": 2, "length": 128, "examples": 2},
    },
    "ram": {
        "stage": "ram",
        "name": "tiny",
        "window": 64,
        "method": {"name": "ram", "segment_tokens": 4, "encoder": FULL, "decoder": LORA},
        "base_ratio": 4,
        "ratios": [2, 4, 8],
    },
    "comprexit": {"stage": "next_token", **SLOTS, "method": {"name": "comprexit", **COMPREXIT}},
    "retrieval_adapter": {"stage": "retrieval_adapter", "rank": 2, "alpha": 4},
    "prompt_tuning": {"stage": "prompt_tuning", "virtual_tokens": 3},
    "update_predictor": PREDICTOR,
    "hypertuning": PREDICTOR | {"stage": "hypertuning"},
}


def save_decoder(folder: Path, tokenizer: Any) -> Path:
    """A tiny decoder with a head of its own, an adapter for it, and what STAGES train it on."""
    model = save_tiny_llama(tokenizer, folder, tie_word_embeddings=False)
    random_adapter(model, 2, seed=0).save_pretrained(folder / "base")
    write_jsonl(folder / "data.jsonl", UNLIKE)
    return folder


def settings_of(
    decoder: Path, stage: str, output: Path, optim: dict[str, Any] | None = None, /, **changes: Any
) -> dict[str, Any]:
    """A recipe of one of STAGES for `decoder`; changes take the place of its keys, and None takes one out."""
    data: dict[str, Any] = {"files": [str(decoder / "data.jsonl")]}
    settings: dict[str, Any] = {"output": str(output), "decoder": str(decoder), "data": data}
    if stage in ("update_predictor", "hypertuning"):
        settings["base"] = str(decoder / "base")
    elif stage not in ("retrieval_adapter", "prompt_tuning"):
        settings["data"]["max_turns"] = 2
    settings |= {**STAGES[stage], **changes}
    settings["optim"] = {"batch_size": 4, "learning_rate": 1e-3, "warmup_ratio": 0.0, "log_every": 1, **(optim or {})}
    return {key: value for key, value in settings.items() if value is not None}


def write_recipe(
    decoder: Path, stage: str, output: Path, optim: dict[str, Any] | None = None, /, **changes: Any
) -> Path:
    """The same as a file beside the output's folder."""
    output.parent.mkdir(parents=True, exist_ok=True)
    path = output.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(settings_of(decoder, stage, output, optim, **changes)))
    return path


def small_recipes(folder: Path, bundle: Path, steps: int = 2, **settings: Any) -> dict[str, Path]:
    """A recipe of each stage of adaptation for a bundle, in a folder; `settings` replace keys of all of them."""
    write_families(folder / "families", "dev", 6)
    common = {"decoder": None, "bundle": str(bundle), "data": {"files": [str(folder / "families")]}} | settings
    optim = {"steps": steps, "batch_size": 2, "micro_batch_size": 1, "learning_rate": 0.01, "save_every": 2}
    predictor = {"base": str(folder / "out" / "base"), "inner_learning_rate": 0.5}
    each: dict[str, tuple[str, dict[str, Any]]] = {
        "base": ("retrieval_adapter", {}),
        "prefix": ("prompt_tuning", {}),
        "k1": ("update_predictor", predictor | {"contexts": 3}),
        "k2": ("update_predictor", predictor | {"inner_steps": 2}),
        "task": ("hypertuning", predictor),
    }
    (folder / "recipes").mkdir(parents=True)
    files = {name: folder / "recipes" / f"{name}.yaml" for name in each}
    for name, (stage, changes) in each.items():
        recipe = settings_of(folder, stage, folder / "out" / name, optim, **common, **changes)
        files[name].write_text(yaml.safe_dump(recipe))
    return files


def losses(folder: Path) -> list[float]:
    """A finished training's loss at each step that it logged."""
    return [row["loss"] for row in json.loads((folder / "loss.json").read_text())]


def report(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "training_report.json").read_text()))


def saved_weights(folder: Path) -> dict[str, torch.Tensor]:
    last = max(folder.glob("checkpoints/checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    return dict(load_file(last / "trained.safetensors"))


class Killed(RuntimeError):
    """What ends a training."""


@contextmanager
def killed(after: int, training: int = 1) -> Iterator[None]:
    """The training inside, or the one of this number, breaks off when it has made so many steps."""
    seen: list[Optimizer] = []
    steps = 0

    def stop(optimizer: Optimizer, *_: Any) -> None:
        nonlocal steps
        if optimizer not in seen:
            seen.append(optimizer)
        if seen.index(optimizer) + 1 == training:
            if steps == after:
                raise Killed
            steps += 1

    hook = register_optimizer_step_pre_hook(stop)
    try:
        with pytest.raises(Killed):
            yield
    finally:
        hook.remove()

"""The training loop shared by all stages: transformers' Trainer with our data, saving and plots."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler, SequentialSampler
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.training.data import Example
from ctx_compress_rag.training.recipes import OptimConfig

logger = logging.getLogger(__name__)

_TRAINED_FILE = "trained.safetensors"

StepHook = Callable[[int], None]
Collate = Callable[[Sequence[Example]], dict[str, Any]]


class ExampleDataset(Dataset[Example]):
    """A list of examples, as the Trainer wants it."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        return self.examples[index]


class _OnStep(TrainerCallback):
    """Calls `hook` with the optimiser step about to be made, after a resume too."""

    def __init__(self, hook: StepHook) -> None:
        self.hook = hook

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.hook(state.global_step)


class _Trainer(Trainer):
    """Keeps the examples' order (neighbours share passages) and saves only what is trained."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        return SequentialSampler(self.train_dataset)  # type: ignore[arg-type]

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        folder = Path(output_dir or self.args.output_dir)  # type: ignore[arg-type]
        folder.mkdir(parents=True, exist_ok=True)
        save_file(trainable_state(cast(nn.Module, self.model)), folder / _TRAINED_FILE)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        load_trainable_state(
            cast(nn.Module, model or self.model), load_file(Path(resume_from_checkpoint) / _TRAINED_FILE)
        )


def is_main_process() -> bool:
    """Whether this process writes what all processes of a torchrun have made."""
    return os.environ.get("RANK", "0") == "0"


def trainable_state(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that training changes, by name."""
    return {name: p.detach().cpu().contiguous() for name, p in model.named_parameters() if p.requires_grad}


def load_trainable_state(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Put back what `trainable_state` took."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if parameters.keys() != state.keys():
        odd = sorted(parameters.keys() ^ state.keys())
        raise ValueError(f"the checkpoint is of another model: {len(odd)} parameters differ, for example {odd[0]}")
    with torch.no_grad():
        for name, value in state.items():
            parameters[name].copy_(value)


def train(
    model: nn.Module,
    examples: Sequence[Example],
    collate: Collate,
    optim: OptimConfig,
    output: Path,
    seed: int,
    on_step: StepHook | None = None,
    resume: bool = True,
) -> dict[str, Any]:
    """Train `model`, whose forward takes a collated batch and returns `{"loss": ...}`.

    Checkpoints go to `output/checkpoints`; a run that was cut off goes on from the last one with the
    same data order, learning rate and random state. Writes `loss.json` and `loss.png`.

    Returns: a report: steps, seconds, final loss, trained parameters.
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))  # under torchrun each process takes its share
    micro = min(optim.micro_batch_size or optim.batch_size, optim.batch_size // processes)
    if micro == 0 or optim.batch_size % (micro * processes):
        raise ConfigError(
            f"batch_size {optim.batch_size} cannot be shared by {processes} processes in micro-batches of {micro}: "
            "choose numbers that divide it"
        )
    arguments = TrainingArguments(
        output_dir=str(output / "checkpoints"),
        max_steps=optim.steps,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=optim.batch_size // (micro * processes),
        learning_rate=optim.learning_rate,
        **_schedule(optim),
        warmup_steps=round(optim.warmup_ratio * optim.steps),
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        weight_decay=optim.weight_decay,
        max_grad_norm=optim.clip_norm,
        bf16=optim.bf16,
        use_cpu=not torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
        ddp_backend="gloo" if processes > 1 and not torch.cuda.is_available() else None,
        optim="adamw_torch_fused",
        save_steps=optim.save_every,
        save_total_limit=2,
        logging_steps=optim.log_every,
        seed=seed,
        report_to=[],
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        label_names=[],
    )
    # Several GPUs in one process would make the Trainer use DataParallel, which cannot split our batches:
    # `torchrun` gives each GPU a process of its own.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    trainer = _Trainer(
        model=model,
        args=arguments,
        train_dataset=ExampleDataset(examples),
        data_collator=collate,
        callbacks=[_OnStep(on_step)] if on_step else None,
    )
    folder = output / "checkpoints"
    checkpoint = get_last_checkpoint(str(folder)) if resume and folder.exists() else None
    if checkpoint:
        logger.info("resuming from %s", checkpoint)
    started = time.monotonic()
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model(str(output / "checkpoints" / "last"))
    history = [row for row in trainer.state.log_history if "loss" in row]
    if is_main_process():
        (output / "loss.json").write_text(json.dumps(history, indent=1), encoding="utf-8")
        plot_loss(history, output / "loss.png")
    return {
        "steps": trainer.state.global_step,
        "seconds": round(time.monotonic() - started, 1),
        "resumed": checkpoint is not None,
        "final_loss": history[-1]["loss"] if history else None,
        "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "seed": seed,
    }


def _schedule(optim: OptimConfig) -> dict[str, Any]:
    """The schedule's name and settings for transformers."""
    if optim.schedule == "linear":  # a polynomial of power 1, which can end above zero
        settings = {"lr_end": optim.final_learning_rate, "power": 1.0}
        return {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": settings}
    return {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": optim.final_learning_rate}}


def plot_loss(history: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the logged losses against steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot([row["step"] for row in history], [row["loss"] for row in history])
    axes.set(xlabel="step", ylabel="loss", yscale="log", title="Training loss")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)

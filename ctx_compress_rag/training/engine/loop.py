"""The training loop shared by all stages: transformers' Trainer with our data, saving and plots."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler, SequentialSampler
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import SCHEDULER_NAME

from ctx_compress_rag.errors import ConfigError, TimeUpError, TrainingError
from ctx_compress_rag.evaluation.figures import new_figure, save
from ctx_compress_rag.models.flops import counting
from ctx_compress_rag.training.config import OptimConfig
from ctx_compress_rag.training.engine.averaging import WeightAverage
from ctx_compress_rag.training.engine.batch_mean import WholeBatchMean
from ctx_compress_rag.training.engine.checkpointing import checkpoint_layers
from ctx_compress_rag.training.engine.muon import MuonAdamW
from ctx_compress_rag.training.engine.parameters import all_finite, load_trained_state, trained, trained_state
from ctx_compress_rag.training.engine.resuming import FOLDER as CHECKPOINTS
from ctx_compress_rag.training.engine.resuming import finish_checkpoint, last_checkpoint, progress_of, writing
from ctx_compress_rag.training.engine.sharded_checkpoint import FOLDER, load_parts, save_parts
from ctx_compress_rag.training.engine.sharding import at_hand, is_shared_out, sharded
from ctx_compress_rag.training.engine.speedups import bfloat16_pays
from ctx_compress_rag.training.engine.throughput import Meter

logger = logging.getLogger(__name__)

_TRAINED_FILE = "trained.safetensors"
_AVERAGE_FILE = "average.safetensors"
_COUNTED_STEPS = 8

StepHook = Callable[[int], None]
Collate = Callable[[Sequence[Any]], dict[str, Any]]
Probe = Callable[[], dict[str, Any]]
"""Returns scores of the model in training, by name."""


class Examples(Protocol):
    """A sequence, or a dataset that makes each example on request."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class Job:
    """What to train, on which data, and how to save the result.

    Attributes:
        model: takes a collated batch and returns `{"loss": ...}`; parameters that require no gradient do not change.
        examples: the examples in training order, repeated as needed.
        collate: makes a batch from some of the examples.
        save: writes the result; called with the report.
        about: further entries of the report.
        on_step: called before each step with the step's number.
        probe: called every `probe_every` steps and after the last; the report has its scores and the tokens so far.
        probe_every: steps between two probes.
        layers: the decoder layers that the model runs, for `checkpoint_layers` and `shard` of the optimisation.
        micro_batch_size: the most examples that `collate` takes at once; None: as set in the optimisation.
    """

    model: nn.Module
    examples: Examples
    collate: Collate
    save: Callable[[dict[str, Any]], None]
    about: Mapping[str, Any] = field(default_factory=dict)
    on_step: StepHook | None = None
    probe: Probe | None = None
    probe_every: int = 1
    layers: Sequence[nn.Module] = ()
    micro_batch_size: int | None = None


@dataclass(eq=False)
class ExampleDataset(Dataset[Any]):
    """The items of all steps: the examples, repeated so that every batch is full.

    Several processes would fill up a short batch at the end of the examples; a single process would not.
    """

    examples: Examples
    items: int

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, index: int) -> Any:
        return self.examples[index % len(self.examples)]


@dataclass
class _StopAt(TrainerCallback):
    """Saves a checkpoint and stops training at `deadline`, in seconds of `time.monotonic`."""

    deadline: float

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        over = torch.tensor(int(time.monotonic() >= self.deadline), device=args.device)
        if args.world_size > 1:
            torch.distributed.broadcast(over, 0)  # a process that continued alone would wait for the others
        if over:
            control.should_save = control.should_log = control.should_training_stop = True


@dataclass
class _Hooks(TrainerCallback):
    """Calls a job's `on_step` before each step, also after resuming, and its probe when that is due.

    Updates the average of the weights after each step, before the probe.
    """

    trainer: _Trainer
    job: Job

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.job.on_step:
            self.job.on_step(state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.trainer.average:
            self.trainer.average.add(state.global_step)
        last = state.global_step == state.max_steps
        control.should_log |= last  # the report has the loss and tokens of all steps
        due = state.global_step % self.job.probe_every == 0 or last
        if self.job.probe and due:
            model = cast(nn.Module, self.trainer.model)
            model.eval()
            # Prompts differ in length: compiled layers would be compiled again for each.
            eager = torch.compiler.set_stance("force_eager")
            averaged = self.trainer.average.in_place() if self.trainer.average else nullcontext()
            with torch.no_grad(), eager, at_hand(model), averaged, self.trainer.compute_loss_context_manager():
                scores = self.job.probe()
            model.train()
            loss_is_due = control.should_log
            self.trainer.log({"probe": scores})
            control.should_log = loss_is_due  # logging cleared it


class _Trainer(Trainer):
    """Keeps the examples' order (neighbours share passages), saves only trained parameters, counts tokens and time.

    Each log row has the tokens and seconds of the whole training, including those before a resume.
    """

    optim: OptimConfig
    average: WeightAverage | None
    meter: Meter
    before: dict[str, Any]
    began: float

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        loss = self._metered_step(model, inputs, num_items_in_batch)
        if not loss.isfinite():
            raise self._diverged(f"the loss of step {self.state.global_step + 1} is {loss.item()}")
        return loss

    def _diverged(self, what: str) -> TrainingError:
        return TrainingError(
            f"{self.args.output_dir}: {what}, and further steps cannot change that: lower optim.learning_rate, and "
            "start again without that folder"
        )

    def _metered_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any) -> Tensor:
        self.meter.see(inputs)
        sampled = self.state.global_step % max(1, self.state.max_steps // _COUNTED_STEPS) == 0
        if not sampled or self.meter.sampled_at == self.state.global_step:
            return super().training_step(model, inputs, num_items_in_batch)
        self.meter.sampled_at = self.state.global_step
        plain = getattr(model, "_orig_mod", model)  # a compiled model's operations cannot be counted
        with torch.compiler.set_stance("force_eager"), counting() as counter:
            loss = super().training_step(plain, inputs, num_items_in_batch)
        self.meter.count(inputs, counter.get_total_flops())
        return loss

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if isinstance(self.model, WholeBatchMean):
            # Summed over all micro-batches and processes; the Trainer undoes DDP's mean over processes.
            first, *rest = (self.model.items(**batch) for batch in batches)
            items = self.accelerator.reduce(sum(rest, start=first).to(device), reduction="sum")
        return batches, items

    def progress(self) -> dict[str, Any]:
        """Seconds since training started, and tokens, as if all processes had read as many as this one."""
        return {
            "tokens": self.before.get("tokens", 0) + int(self.meter.tokens) * self.args.world_size,
            "seconds": round(self.before.get("seconds", 0.0) + time.monotonic() - self.began, 2),
        }

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        super().log({**logs, **self.progress()}, start_time)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        rate = self.optim.muon_learning_rate
        if rate is None:
            return super().create_optimizer(model)
        if self.optimizer is None:
            optim = self.optim
            self.optimizer = MuonAdamW(
                cast(nn.Module, self.model), rate, optim.learning_rate, optim.betas, optim.weight_decay
            )
        return self.optimizer

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        return SequentialSampler(self.train_dataset)  # type: ignore[arg-type]

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        if not self.args.should_save:
            return  # all processes call this, only the main one writes
        folder = Path(output_dir or self.args.output_dir)  # type: ignore[arg-type]
        folder.mkdir(parents=True, exist_ok=True)
        if not is_shared_out(self.model):
            save_file(trained_state(cast(nn.Module, self.model)), folder / _TRAINED_FILE)

    def _save_checkpoint(self, model: nn.Module, trial: Any = None) -> None:
        step = self.state.global_step
        if not all_finite(model):
            raise self._diverged(f"weights are NaN or infinite after step {step}")
        folder = Path(self.args.output_dir) / f"checkpoint-{step}"  # type: ignore[arg-type]
        with writing(folder):
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()  # each process writes a part
            if self.args.should_save:
                if self.average:
                    save_file(self.average.state(), folder / _AVERAGE_FILE)
                finish_checkpoint(folder, self.progress())

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not is_shared_out(self.model):
            super()._save_optimizer_and_scheduler(output_dir)
            return
        assert self.optimizer and self.lr_scheduler  # made before the first step
        save_parts(cast(nn.Module, self.model), self.optimizer, Path(output_dir))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        folder = Path(resume_from_checkpoint)
        if (folder / FOLDER).exists():
            return  # trained parameters are loaded with the optimiser's states
        if is_shared_out(self.model):
            raise ConfigError(f"{folder} was saved without `shard: all`: resume without it, or remove the checkpoint")
        load_trained_state(cast(nn.Module, model or self.model), load_file(folder / _TRAINED_FILE))
        if self.average:
            self.average.load_state(load_file(folder / _AVERAGE_FILE))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (Path(checkpoint) / FOLDER).exists():
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        assert self.optimizer and self.lr_scheduler
        load_parts(cast(nn.Module, self.model), self.optimizer, Path(checkpoint))
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True))
        for group, rate in zip(self.optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True):
            group["lr"] = rate


def training_device() -> str:
    """The device to train on; the loop does not use Apple GPUs."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def is_main_process() -> bool:
    """Whether this is the process of torchrun that writes the files of all."""
    return os.environ.get("RANK", "0") == "0"


def train(
    job: Job, optim: OptimConfig, output: Path, seed: int, resume: bool = True, deadline: float | None = None
) -> dict[str, Any]:
    """Train a job's model.

    Checkpoints go to `output/checkpoints`; an interrupted run resumes from the last one with the same data order,
    learning rate and random state. Writes `loss.json` and `loss.png`. `deadline` is in seconds of `time.monotonic`.

    Returns: a report: steps, seconds, tokens and speed, final loss, trained parameters, scores of the probes, and
        the job's `about`.

    Raises:
        ConfigError: the batch size cannot be divided among the processes, or the checkpoint does not fit.
        TimeUpError: the deadline came before the last step; a checkpoint is saved.
        TrainingError: the loss or a weight became NaN or infinite.
        OSError: a file cannot be written.
    """
    model = job.model
    processes = int(os.environ.get("WORLD_SIZE", "1"))  # under torchrun each process takes its share
    wanted = job.micro_batch_size or optim.micro_batch_size or optim.batch_size
    micro = min(wanted, optim.batch_size // processes)
    if micro == 0 or optim.batch_size % (micro * processes):
        raise ConfigError(
            f"batch_size {optim.batch_size} cannot be divided among {processes} processes in micro-batches of {micro}: "
            "choose numbers that divide it"
        )
    if optim.checkpoint_layers:
        checkpoint_layers(job.layers, model)
    arguments = TrainingArguments(
        output_dir=str(output / CHECKPOINTS),
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
        # A copy trained in float32 with embeddings in bfloat16 (a decoder on a GPU) needs autocast.
        bf16=(optim.bf16 and bfloat16_pays()) or any(p.dtype == torch.bfloat16 for p in model.parameters()),
        torch_compile=optim.compile is True,
        dataloader_num_workers=optim.workers,
        use_cpu=not torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
        ddp_backend="gloo" if processes > 1 and not torch.cuda.is_available() else None,
        optim="adamw_torch_fused",
        save_steps=optim.save_every,
        save_total_limit=2,
        logging_steps=optim.log_every,
        logging_nan_inf_filter=False,  # it would log a loss of 0 instead
        seed=seed,
        report_to=[],
        disable_tqdm=False,  # commands that keep transformers quiet (`compare`) also show the bar
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        label_names=[],
    )
    # Several GPUs in one process would make the Trainer use DataParallel, which cannot split our batches:
    # `torchrun` gives each GPU a process of its own.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    if optim.compile:
        # A machine without a compiler still trains, but more slowly.
        torch._dynamo.config.suppress_errors = True
    trainer = _Trainer(
        model=model,
        args=arguments,
        train_dataset=ExampleDataset(job.examples, optim.items),
        data_collator=job.collate,
    )
    trainer.add_callback(_Hooks(trainer, job))
    if deadline is not None:
        trainer.add_callback(_StopAt(deadline))
    checkpoint = last_checkpoint(output, optim.steps, is_main_process()) if resume else None
    if checkpoint:
        logger.info("resuming from %s", checkpoint)
    trainer.optim = optim
    trainer.average = None if optim.average is None else WeightAverage(model, optim.average)
    trainer.meter = Meter()
    trainer.before = progress_of(checkpoint) if checkpoint else {}
    trainer.began = time.monotonic()
    shard = optim.shard if processes > 1 else None
    if shard == "all":
        # In accelerate this means autocast without DDP, which sharded weights do not need.
        prepare = partial(trainer.accelerator.prepare_model, evaluation_mode=True)
        trainer.accelerator.prepare_model = prepare
    with sharded(model, job.layers, shard, arguments.device.type) if shard else nullcontext():
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    step = trainer.state.global_step
    rows: list[dict[str, Any]] = trainer.state.log_history
    history = [row for row in rows if "loss" in row]
    if is_main_process():
        (output / "loss.json").write_text(json.dumps(history, indent=1), encoding="utf-8")
        plot_loss(history, output / "loss.png")
    if step < optim.steps:
        raise TimeUpError(f"{output}: stopped at step {step} of {optim.steps}; the same command resumes there")
    if trainer.average:
        trainer.average.put_in()
    trainer.save_model(str(output / CHECKPOINTS / "last"))
    return {
        "steps": step,
        "seconds": max((row["seconds"] for row in rows if "seconds" in row), default=0.0),
        "resumed": checkpoint is not None,
        **trainer.meter.report(history),
        "probes": [{"step": r["step"], "tokens": r["tokens"], **r["probe"]} for r in rows if "probe" in r],
        "final_loss": history[-1]["loss"] if history else None,
        "trained_parameters": sum(p.numel() for p in trained(model).values()),
        "seed": seed,
        **job.about,
    }


def _schedule(optim: OptimConfig) -> dict[str, Any]:
    """The schedule's name and settings for transformers."""
    if optim.schedule == "linear":  # a polynomial of power 1, which can end above zero
        settings = {"lr_end": optim.final_learning_rate, "power": 1.0}
        return {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": settings}
    return {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": optim.final_learning_rate}}


def plot_loss(history: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot the logged losses against steps."""
    figure = new_figure(7.0, 4.0)
    axes = figure.subplots()
    axes.plot([row["step"] for row in history], [row["loss"] for row in history])
    axes.set(xlabel="step", ylabel="loss", yscale="log", title="Training loss")
    axes.grid(alpha=0.3)
    save(figure, path)

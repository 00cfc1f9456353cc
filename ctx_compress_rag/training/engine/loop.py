"""The training loop of all stages."""

import json
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from ctx_compress_rag.errors import ConfigError, TrainingError, needs
from ctx_compress_rag.training.config import OptimConfig
from ctx_compress_rag.training.engine import optimizers, saved_states
from ctx_compress_rag.training.engine.layers import bfloat16_pays, checkpoint_layers

if TYPE_CHECKING:
    from accelerate import PartialState

logger = logging.getLogger(__name__)

Collate = Callable[[Sequence[Any]], dict[str, Any]]


def training_processes() -> "PartialState":
    """Return accelerate's `PartialState`, which the first call connects to other processes of `accelerate launch`.

    Each process (perhaps only one) trains on its share of every batch, on its own GPU, or the CPU if there is none.
    """
    with needs("train"):
        from accelerate import PartialState
    return PartialState(cpu=not torch.cuda.is_available())


class BatchMeanLoss(ABC):
    """The base class of losses that divide their sums by the number of items (tokens, say) in the whole batch.

    The batch may come in micro-batches. With the mean of each micro-batch, tokens of short answers would count more
    than those of long answers, especially in small micro-batches.
    """

    @abstractmethod
    def items(self, **batch: Any) -> Tensor:
        """Return the number of items in a micro-batch, for each mean that the loss has: float (means,)."""

    @abstractmethod
    def loss(self, items: Tensor, **batch: Any) -> Tensor:
        """Return a micro-batch's part of the loss; `items` are the numbers of items in the whole batch, (means,)."""

    def forward(self, num_items_in_batch: Tensor | None = None, **batch: Any) -> dict[str, Tensor]:
        """Return the loss of a micro-batch; without `num_items_in_batch`, as if it were the whole batch."""
        items = self.items(**batch) if num_items_in_batch is None else num_items_in_batch
        return {"loss": self.loss(items, **batch)}


@dataclass(frozen=True)
class TrainingJob:
    """What to train, on which data, and how to save the result."""

    model: nn.Module  # returns `{"loss": ...}` for a collated batch; parameters that require no gradient do not change
    examples: Any  # a sequence in training order, repeated as needed; may make each example when it is asked for
    collate: Collate  # makes a batch from some of the examples
    save: Callable[[dict[str, Any]], None]  # writes the result; called with the report
    about: Mapping[str, Any] = field(default_factory=dict)  # further entries of the report
    on_step: Callable[[int], None] | None = None  # called before each step with the step's number, from 0
    measure: Callable[[], dict[str, float]] | None = None  # returns further entries of the log at a checkpoint
    layers: Sequence[nn.Module] = ()  # the decoder layers that the model runs, for `OptimConfig.checkpoint_layers`
    micro_batch_size: int | None = None  # most examples for `collate`; None takes `OptimConfig.micro_batch_size`


def train_job(
    job: TrainingJob, optim: OptimConfig, output: Path, seed: int, resume: bool = True, deadline: float | None = None
) -> dict[str, Any]:
    """Train a job's model, write `loss.json`, and return a report.

    Checkpoints go to `output/checkpoints`. With `resume`, training goes on from the last one, if any, with the same
    data order, learning rate and random state. `deadline` and the errors are those of `run.run_recipe`, but for the
    TimeUpError: the report's `steps` are those made.
    """
    training = _Training(job, optim, output, seed)
    resumed = training.begin(resume)
    training.run(deadline)
    training.finish()
    history = training.history
    return {
        "steps": training.step,
        "seconds": training.so_far()["seconds"],
        "resumed": resumed,
        **speed_report(history),
        "final_loss": history[-1]["loss"] if history else None,
        "trained_parameters": sum(p.numel() for p in training.parameters),
        "seed": seed,
        **job.about,
    }


class _Training:
    """What one process trains with, and how far it is: the number of steps made, the log, the tokens it has read."""

    def __init__(self, job: TrainingJob, optim: OptimConfig, output: Path, seed: int) -> None:
        from accelerate import Accelerator

        self.began = time.monotonic()
        self.job, self.optim, self.output = job, optim, output
        self.accelerator = Accelerator(cpu=training_processes().device.type == "cpu", mixed_precision="no")
        self.count = self.accelerator.num_processes
        self.micro = self._micro_batch_size()
        torch.manual_seed(seed)
        self.model = job.model.to(self.accelerator.device).train()
        if optim.checkpoint_layers:
            checkpoint_layers(job.layers, self.model)
        saved_states.keep_trained(self.accelerator, self.model)
        self.parallel = self.accelerator.prepare(self.model)
        made = optimizers.make_optimizers(self.model, optim)
        self.optimizers = [self.accelerator.prepare(optimizer) for optimizer in made]
        self.parameters = nn.ParameterList(optimizers.trained_parameters(self.model).values())
        self.average = None if optim.average is None else optimizers.weight_average(self.parameters, optim.average)
        if self.average is not None:
            self.accelerator.register_for_checkpointing(self.average)
        # A copy trained in float32 with embeddings in bfloat16 (a decoder on a GPU) needs autocast.
        bf16 = (optim.bf16 and bfloat16_pays()) or any(p.dtype == torch.bfloat16 for p in self.model.parameters())
        self.autocast = torch.autocast(self.accelerator.device.type, torch.bfloat16, enabled=bf16)
        self.history = list[dict[str, Any]]()
        self.losses = list[float]()  # since the last row of the history
        self.step = self.tokens = 0

    def _micro_batch_size(self) -> int:
        batch = self.optim.batch_size
        micro: int = min(self.job.micro_batch_size or self.optim.micro_batch_size or batch, batch // self.count)
        if micro == 0 or batch % (micro * self.count):
            raise ConfigError(
                f"batch_size {batch} cannot be divided among {self.count} processes in micro-batches of {micro}: "
                "choose numbers that divide it"
            )
        return micro

    def begin(self, resume: bool) -> bool:
        """Continue from the last checkpoint, if there is one; return whether there is one."""
        checkpoint = saved_states.last_checkpoint(self.accelerator, self.output, self.optim.steps) if resume else None
        self.step = saved_states.checkpoint_step(checkpoint) if checkpoint else 0
        # Draws a random number: before `load_training_state`.
        self.micro_batches = self._micro_batches()
        if checkpoint:
            logger.info("resuming from %s", checkpoint)
            progress = saved_states.load_training_state(self.accelerator, checkpoint)
            self.history = progress["history"]
            self.tokens = progress["tokens"] // self.count
            self.began -= progress["seconds"]
        return checkpoint is not None

    def _micro_batches(self) -> Iterator[dict[str, Any]]:
        """Yield this process's micro-batches from now on; processes take turns, in the order of the examples."""
        examples = self.job.examples
        first = self.step * self.optim.batch_size + self.accelerator.process_index * self.micro
        starts = range(first, self.optim.items, self.micro * self.count)
        numbers = ([number % len(examples) for number in range(start, start + self.micro)] for start in starts)
        return iter(DataLoader(examples, batch_sampler=numbers, collate_fn=self.job.collate))

    def so_far(self) -> dict[str, Any]:
        """Return the seconds, and the tokens, estimated as if all processes had read as many as this one."""
        return {"tokens": self.tokens * self.count, "seconds": round(time.monotonic() - self.began, 2)}

    def run(self, deadline: float | None) -> None:
        optim, late = self.optim, False
        hidden = not self.accelerator.is_main_process
        with tqdm(total=optim.steps, initial=self.step, disable=hidden, unit="step") as bar:
            while self.step < optim.steps and not late:
                late = self._make_step(deadline)
                saves = self.step % optim.save_every == 0 or self.step == optim.steps or late
                if saves or self.step % optim.log_every == 0:
                    self._log()
                    bar.set_postfix(loss=f"{self.history[-1]['loss']:.4g}", refresh=False)
                bar.update()
                if saves:
                    self._save()

    def _make_step(self, deadline: float | None) -> bool:
        """Return whether a process has reached the deadline."""
        if self.job.on_step:
            self.job.on_step(self.step)
        self.rate = optimizers.set_learning_rate(self.optimizers, self.optim, self.step)
        self.step += 1
        batches = [next(self.micro_batches) for _ in range(self.optim.batch_size // (self.micro * self.count))]
        self.tokens += sum(map(count_batch_tokens, batches))
        loss = self._backward(batches)
        late = deadline is not None and time.monotonic() >= deadline
        # One process's NaN or deadline is that of all: a process that continued alone would wait for the others.
        total, late_processes = self.accelerator.reduce(torch.stack((loss, loss.new_tensor(float(late))))).tolist()
        self.losses.append(total / self.count)
        if not math.isfinite(total):
            raise _diverged(self.output, f"the loss of step {self.step} is {total}")
        self.norm = self.accelerator.clip_grad_norm_(self.parameters, self.optim.clip_norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if self.average is not None:
            self.average.update_parameters(self.parameters)
        return bool(late_processes)

    def _backward(self, batches: Sequence[dict[str, Any]]) -> Tensor:
        """Add a step's gradients; return its loss, whose mean over the processes is the loss of the whole batch."""
        accelerator, device = self.accelerator, self.accelerator.device
        total = torch.zeros((), device=device)
        items: dict[str, Tensor] = {}
        batches = [{k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()} for batch in batches]
        # Gradients are averaged over the processes, so a loss that is divided by all their items is multiplied by them.
        scale = 1 / len(batches)
        if isinstance(self.model, BatchMeanLoss):
            first, *others = (self.model.items(**batch) for batch in batches)
            items["num_items_in_batch"] = accelerator.reduce(sum(others, start=first).to(device))
            scale = float(self.count)
        for number, batch in enumerate(batches):
            with nullcontext() if number == len(batches) - 1 else accelerator.no_sync(self.parallel):
                with self.autocast:
                    loss = self.parallel(**batch, **items)["loss"] * scale
                accelerator.backward(loss)
            total += loss.detach()
        return total

    def _log(self) -> None:
        row = {"step": self.step, **self.so_far(), "loss": sum(self.losses) / len(self.losses)}
        self.history.append(row | {"learning_rate": self.rate, "grad_norm": float(self.norm)})
        self.losses.clear()

    def _save(self) -> None:
        if not all(weight.isfinite().all() for weight in self.parameters):
            raise _diverged(self.output, f"weights are NaN or infinite after step {self.step}")
        if self.job.measure:
            self.history[-1] |= self.job.measure()
        progress = {"step": self.step, **self.so_far(), "history": self.history}
        saved_states.save_training_state(self.accelerator, self.output, progress)

    def finish(self) -> None:
        """Write `loss.json`, and replace weights by their average, if any."""
        if self.accelerator.is_main_process:
            (self.output / "loss.json").write_text(json.dumps(self.history, indent=1), encoding="utf-8")
        if self.average is not None:
            with torch.no_grad():
                for weight, mean in zip(self.parameters, self.average.parameters(), strict=True):
                    weight.copy_(mean)


def _diverged(output: Path, what: str) -> TrainingError:
    remedy = "lower optim.learning_rate, and start again without that folder"
    return TrainingError(f"{output / saved_states.FOLDER}: {what}, and further steps cannot change that: {remedy}")


def count_batch_tokens(batch: Mapping[str, Any]) -> int:
    """Return the number of tokens in a collated batch, without padding. Each passage and prompt counts once.

    Tensors with transformers' names are counted, and values that have a `token_count`, alone or in lists.
    """
    total = sum(map(_count, batch.values()))
    if "attention_mask" in batch:
        total += int(batch["attention_mask"].sum())
    return total


def _count(value: Any) -> int:
    return sum(map(_count, value)) if isinstance(value, list) else int(getattr(value, "token_count", 0))


def speed_report(history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return device, tokens, and tokens per second, which is "unknown" if there are no data.

    The log's `tokens` and `seconds` are running sums. The speed is the median over its intervals, without compiling.
    """
    speeds = [
        (after["tokens"] - before["tokens"]) / (after["seconds"] - before["seconds"])
        for before, after in pairwise(history)
        if after["seconds"] > before["seconds"]
    ]
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "tokens": int(history[-1]["tokens"]) if history else 0,
        "tokens_per_second": (round(median(speeds)) if speeds else 0) or "unknown",
    }

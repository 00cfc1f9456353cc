"""The teacher's distributions kept on disk, so that it reads an example once, not in every epoch.

Each distribution keeps its most likely tokens, and groups all others into one more outcome. The divergence between two
distributions grouped in this way is a lower bound of the divergence between the whole ones, and equals it if every
token is kept (the log-sum inequality; Cover and Thomas, 2006, theorem 2.7.1).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import torch
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.bundle.files import TEACHER
from ctx_compress_rag.models.backbone import own_name
from ctx_compress_rag.models.identity import digest_in_memory
from ctx_compress_rag.prompt import Prompt
from ctx_compress_rag.training.engine.resuming import writing

FOLDER = "teacher_targets"


class Target(NamedTuple):
    """The distributions that a student should predict for the tokens of a prompt's answers.

    Attributes:
        log_probs: of the vocabulary, (answer tokens, vocabulary); or of `tokens` and the rest, as `grouped` returns.
        tokens: int64 (answer tokens, top); None: the whole vocabulary, in its order.
    """

    log_probs: Tensor
    tokens: Tensor | None = None


def grouped(log_probs: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities of some tokens in each row, and of all others together, if there are any.

    Shape: (rows, vocabulary), int64 (rows, top) -> (rows, top + 1), or (rows, top) if top is the vocabulary
    """
    top = log_probs.gather(1, tokens)
    if tokens.shape[1] == log_probs.shape[1]:
        return top
    # Sum the others themselves: 1 minus the top tokens' sum would be lost in rounding if it is small.
    rest = log_probs.scatter(1, tokens, -torch.inf).logsumexp(1, keepdim=True)
    return torch.cat((top, rest), 1)


@dataclass(frozen=True)
class KeptTargets:
    """Targets in a folder, a file for each prompt.

    No database: a file gets its name only when it is complete, no process waits for another, and several machines
    may share the folder, on which SQLite's write-ahead log would not work.

    Attributes:
        folder: where the files are.
        top: how many tokens of each distribution to keep.
        teacher: digest that identifies this teacher; see `teacher_digest`.
    """

    folder: Path
    top: int
    teacher: str

    def of(self, prompts: Sequence[Prompt], read: Callable[[Sequence[Prompt]], list[Tensor]]) -> list[Target]:
        """The prompts' targets; `read` computes the teacher's log-probabilities for prompts that have none yet.

        Raises:
            OSError: a file cannot be written.
        """
        files = [self._file(prompt) for prompt in prompts]
        found = {file: kept for file in files if (kept := _load(file))}
        missing = {file: prompt for file, prompt in zip(files, prompts, strict=True) if file not in found}
        if missing:
            for file, log_probs in zip(missing, read(list(missing.values())), strict=True):
                found[file] = self._kept(log_probs)
                _save(found[file], file)
        # New targets are rounded like loaded ones, so that the loss does not depend on whether they were kept.
        return [
            Target(F.log_softmax(kept["log_probs"].float(), dim=1), kept["tokens"].long())
            for kept in map(found.__getitem__, files)
        ]

    def _kept(self, log_probs: Tensor) -> dict[str, Tensor]:
        tokens = log_probs.topk(min(self.top, log_probs.shape[1]), dim=1).indices
        kept = grouped(log_probs, tokens)
        # Relative to the most likely outcome: rounded to 2 bytes, likely outcomes then have the smallest error.
        kept = kept - kept.amax(1, keepdim=True)
        return {"tokens": tokens.int().cpu(), "log_probs": kept.half().cpu()}

    def _file(self, prompt: Prompt) -> Path:
        """The prompt's file, named by everything that its targets depend on: the teacher, `top` and the tokens."""
        digest = hashlib.sha256(f"{self.teacher} {self.top} ".encode())
        digest.update(prompt.ids().numpy().tobytes() + prompt.answers.numpy().tobytes())
        name = digest.hexdigest()
        return self.folder / name[:2] / f"{name[2:]}.safetensors"


def _load(file: Path) -> dict[str, Tensor] | None:
    """A file's tensors; None if it does not exist, or was damaged by a power cut."""
    try:
        return load_file(file)
    except (FileNotFoundError, SafetensorError):
        return None


def _save(kept: dict[str, Tensor], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{uuid4().hex}.part")  # two processes may have the same prompt
    with writing(file):
        save_file(kept, part)
    part.replace(file)


def teacher_digest(bundle: Bundle) -> str:
    """SHA-256 of the decoder that reads plain text: config, weights, and the teacher's adapter if it has one.

    Call it before training rounds or divides the weights. Returns 64 hex digits.
    """
    model = bundle.backbone.model
    digest = hashlib.sha256(digest_in_memory(model, bundle.tokenizer).encode())
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer) and TEACHER in module.scaling:
            digest.update(f"{name} {module.scaling[TEACHER]} ".encode())
    for name, weight in model.named_parameters():
        if "lora_" not in name or f".{TEACHER}." in name:  # other adapters are the student's
            digest.update(f"{own_name(name)} {weight.dtype} {tuple(weight.shape)} ".encode())
            digest.update(weight.detach().cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()

"""Language-model pretraining: texts as one long row of tokens each, cut into windows without padding."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoTokenizer

from ctx_compress_rag.backbone import load_decoder
from ctx_compress_rag.data.config import TextData
from ctx_compress_rag.data.held_out import held_out
from ctx_compress_rag.data.texts import JSONL_SUFFIXES, documents
from ctx_compress_rag.errors import DataError
from ctx_compress_rag.training.checkpointing import layers_in
from ctx_compress_rag.training.config import Guard
from ctx_compress_rag.training.decoder_config import PretrainRecipe
from ctx_compress_rag.training.loop import Job, training_device
from ctx_compress_rag.training.minilm_decoder import minilm_decoder
from ctx_compress_rag.training.stage import Stage, register
from ctx_compress_rag.training.stages.teacher import AnswerLoss, new_decoder, save_decoder
from ctx_compress_rag.training.tokenizer import train_tokenizer

logger = logging.getLogger(__name__)

_DOCUMENTS_AT_ONCE = 256
_TOKENIZER_CHARACTERS = 6_000_000


def checked_documents(text: TextData, guard: Guard, step: int = 1) -> Iterator[str]:
    """Every `step`-th of a text's documents.

    With a guard, passages that English bundles are scored with are left out of files of questions, or refused there,
    and refused elsewhere.

    Raises:
        DataError: see `documents`; or a held-out passage.
    """
    leave_out = guard == "leave out" and text.file.name.endswith(JSONL_SUFFIXES)
    for document in islice(documents(text.file), 0, None, step):
        if not guard or not held_out().has_passage(document):
            yield document
        elif not leave_out:
            raise DataError(f"{text.file} holds a passage that English bundles are scored with, in {document[:80]!r}")


def tokenizer_sample(texts: Sequence[TextData], guard: Guard) -> Iterator[str]:
    """Documents spread evenly over each text, about 6 million characters of each."""
    for text in texts:
        characters = sum(map(len, documents(text.file)))
        yield from checked_documents(text, guard, step=max(1, round(characters / _TOKENIZER_CHARACTERS)))


def token_ids(
    text: TextData, guard: Guard, tokenizer: Any, cache: Path, cached: bool
) -> NDArray[np.uint16 | np.uint32]:
    """A text's token ids, an end token after each document of a file of questions.

    They are kept in the file `cache`, and taken from there if `cached`.
    """
    if cached and cache.exists():
        stored: NDArray[np.uint16 | np.uint32] = np.load(cache)
        return stored
    end = [tokenizer.eos_token_id] if text.file.name.endswith(JSONL_SUFFIXES) else []
    kind = np.uint16 if len(tokenizer) < 2**16 else np.uint32
    parts = []
    waiting = checked_documents(text, guard)
    while batch := list(islice(waiting, _DOCUMENTS_AT_ONCE)):
        encoded = tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]
        parts += [np.array(ids + end, dtype=kind) for ids in encoded]
    if not parts:
        raise DataError(f"{text.file} holds no text to train on")
    ids = np.concatenate(parts)
    half = cache.with_suffix(".part.npy")
    np.save(half, ids)
    half.replace(cache)  # whole or not at all
    logger.info("%s: %d tokens", text.file, len(ids))
    return ids


@dataclass(eq=False)
class PackedText(Sequence[Tensor]):
    """Windows of tokens, cut from several texts.

    A round over the texts cuts each, as many times as its weight, into windows that follow each other from a
    place drawn again each time; then shuffles all windows. A window starts anywhere, in the middle of a word even.

    Args:
        rows: token ids of each text: (tokens,).
        weights: how often each is read in a round.
        window: tokens of a window.
        length: how many windows there are, round after round.
        seed: of places and order.

    Raises:
        DataError: a text has fewer than two windows.
    """

    rows: Sequence[NDArray[np.uint16 | np.uint32]]
    weights: Sequence[int]
    window: int
    length: int
    seed: int

    def __post_init__(self) -> None:
        for number, row in enumerate(self.rows):
            if len(row) < 2 * self.window:
                raise DataError(
                    f"text {number} has {len(row)} tokens, fewer than two windows of {self.window}: leave it out"
                )
        self._round = -1
        self._windows = np.empty((0, 2), dtype=np.int64)

    @property
    def per_round(self) -> int:
        """Windows of a round."""
        return sum(weight * self._fitting(row) for row, weight in zip(self.rows, self.weights, strict=True))

    def _fitting(self, row: NDArray[Any]) -> int:
        return (len(row) - self.window) // self.window  # wherever the first begins

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Tensor:  # type: ignore[override]
        """Window `index`: int64 (window,)."""
        number, place = divmod(index, self.per_round)
        if number != self._round:
            self._windows = self._cut(number)
            self._round = number
        row, start = self._windows[place]
        return torch.from_numpy(self.rows[row][start : start + self.window].astype(np.int64))

    def _cut(self, number: int) -> NDArray[np.int64]:
        """The windows of a round: (windows, 2), text and first token."""
        rng = np.random.default_rng([self.seed, number])
        cuts = [
            np.stack([np.full(count, i), rng.integers(self.window) + self.window * np.arange(count)], axis=1)
            for i, (row, weight) in enumerate(zip(self.rows, self.weights, strict=True))
            for count in [self._fitting(row)]
            for _ in range(weight)
        ]
        return np.asarray(rng.permutation(np.concatenate(cuts)), dtype=np.int64)


def collate_windows(windows: Iterable[Tensor]) -> dict[str, Tensor]:
    """Windows -> the arguments of `AnswerLoss`, under which every token counts."""
    ids = torch.stack(list(windows))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "answers": torch.ones_like(ids, dtype=torch.bool)}


def start(recipe: PretrainRecipe, resume: bool) -> Job:
    """A decoder to train on windows of the recipe's texts."""
    data, guard = recipe.data, recipe.data.guard
    work = recipe.output / "tokens"  # what is learned and made of the texts before training, kept for a resumed run
    if recipe.scratch:
        if resume and (work / "tokenizer.json").exists():
            tokenizer = AutoTokenizer.from_pretrained(work, trust_remote_code=False)
        else:
            sample = tokenizer_sample(data.texts, guard)
            tokenizer = train_tokenizer(
                sample, recipe.scratch.vocab_size, recipe.scratch.config["max_position_embeddings"]
            )
            tokenizer.save_pretrained(work)
        decoder = new_decoder(recipe.scratch.config, tokenizer)
    elif recipe.minilm:
        decoder, tokenizer = minilm_decoder(recipe.minilm)
    else:
        decoder, tokenizer = load_decoder(recipe.decoder or "", recipe.revision, training_device())
    decoder = decoder.float().requires_grad_(True)
    work.mkdir(exist_ok=True)
    rows = [token_ids(text, guard, tokenizer, work / f"{number}.npy", resume) for number, text in enumerate(data.texts)]
    weights = [text.weight for text in data.texts]
    windows = PackedText(rows, weights, recipe.window, recipe.optim.items, recipe.seed)
    return Job(
        AnswerLoss(decoder, 1.0),
        windows,
        collate_windows,
        save=lambda report: save_decoder(decoder, tokenizer, recipe.output),
        about={
            "text_tokens": {str(text.file): len(row) for text, row in zip(data.texts, rows, strict=True)},
            "rounds": round(len(windows) / windows.per_round, 4),
        },
        layers=layers_in([decoder]),
    )


register(Stage(PretrainRecipe, start))

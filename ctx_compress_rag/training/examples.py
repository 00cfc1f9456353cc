"""The examples of a recipe, checked against what is held out."""

from __future__ import annotations

import logging
import random
from pathlib import Path

from benchmarks.datasets.held_out import HeldOut
from benchmarks.datasets.held_out import held_out as never_train_on
from benchmarks.world.world import world_examples
from ctx_compress_rag.data.config import TextData
from ctx_compress_rag.data.examples import Example, check_held_out, read_jsonl, without_long
from ctx_compress_rag.data.mixing import mix
from ctx_compress_rag.data.texts import text_examples
from ctx_compress_rag.errors import DataError
from ctx_compress_rag.training.config import DataConfig, Recipe

logger = logging.getLogger(__name__)


def load_examples(recipe: Recipe) -> list[Example]:
    """The recipe's training examples, checked against its held-out files and its probe's questions."""
    data = recipe.data
    held_out = _held_out(recipe)
    if data.world:
        examples = [
            example
            for part in data.world
            for example in world_examples(
                part.split, part.seed, part.examples, data.max_turns, part.passages, part.named, part.alike
            )
        ]
        check_held_out(examples, [*held_out, *world_examples("test", 0, 400), *world_examples("dev", 0, 400)])
    else:
        files = [_questions(file, data, held_out) for file in data.files]
        files += [_rows(text, data, held_out) * text.weight for text in data.texts]
        seed = data.part.seed if data.part else recipe.seed
        if data.mix:
            examples = mix(files, data.mix, seed, recipe.optim.batch_size)
        else:
            examples = [example for file in files for example in file]
            random.Random(seed).shuffle(examples)  # files are mixed, as the paper mixes its datasets
    if not examples:
        raise DataError("the recipe's data holds no examples: give more data, or leave out fewer examples")
    if data.part:
        return [examples[(data.part.start + number) % len(examples)] for number in range(data.part.examples)]
    return examples


def load_texts(recipe: Recipe) -> list[Example]:
    """The rows of the recipe's texts alone, each as often as its text's weight says, checked like all examples."""
    held_out = _held_out(recipe) if recipe.data.texts else []
    return [row for text in recipe.data.texts for row in _rows(text, recipe.data, held_out) * text.weight]


def _held_out(recipe: Recipe) -> list[Example]:
    """What the recipe must not train on: its held-out files and its probe's questions."""
    files = [*recipe.data.held_out, *([recipe.probe.file] if recipe.probe else [])]
    return [example for file in files for example in read_jsonl(file, unanswerable=True)]


def _questions(file: Path, data: DataConfig, held_out: list[Example]) -> list[Example]:
    """The examples of a file without those that are too long or, with `leave_out_held_out`, held out."""
    examples = without_long(read_jsonl(file, data.max_turns), data.most_words)
    if data.guard == "leave out":
        guards = [never_train_on(), *([HeldOut.of(held_out)] if held_out else [])]
        kept = [example for example in examples if not any(guard.shares(example) for guard in guards)]
        logger.info("%d of %d examples left out: they overlap held-out data", len(examples) - len(kept), len(examples))
        examples = kept
    elif data.guard == "refuse":
        never_train_on().check(examples, file)
    check_held_out(examples, held_out, source=str(file), remedy="remove it, or set data.leave_out_held_out: true")
    return examples


def _rows(text: TextData, data: DataConfig, held_out: list[Example]) -> list[Example]:
    """The rows of a text, checked for passages that are held out."""
    rows = text_examples(text.file, text.words)
    if data.guard:
        never_train_on().check(rows, text.file)
    check_held_out(rows, held_out, source=str(text.file))
    return rows

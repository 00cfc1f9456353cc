"""The examples of a recipe, without what is held out."""

from __future__ import annotations

import random

from ctx_compress_rag.data.examples import Example, read_jsonl, without_long
from ctx_compress_rag.data.held_out import HeldOut
from ctx_compress_rag.data.mixing import mix
from ctx_compress_rag.data.texts import text_examples
from ctx_compress_rag.errors import DataError
from ctx_compress_rag.training.config import Recipe


def load_examples(recipe: Recipe) -> list[Example]:
    """The recipe's training examples, without those that its held-out files or its validation's questions share.

    Raises:
        DataError: a file cannot be read, or no example is left.
    """
    data, held_out = recipe.data, _held_out(recipe)
    files = [
        held_out.without(without_long(read_jsonl(file, data.max_turns), data.most_words), file) for file in data.files
    ]
    files += _texts(recipe, held_out)
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
    """The rows of the recipe's texts alone, each as often as its text's weight says; held-out ones are left out."""
    if not recipe.data.texts:
        return []
    return [row for rows in _texts(recipe, _held_out(recipe)) for row in rows]


def _texts(recipe: Recipe, held_out: HeldOut) -> list[list[Example]]:
    """The rows of each text, as often as its weight says."""
    return [
        held_out.without(text_examples(text.file, text.words), text.file) * text.weight for text in recipe.data.texts
    ]


def _held_out(recipe: Recipe) -> HeldOut:
    """What the recipe must not train on: its held-out files and its validation's questions."""
    files = [*recipe.data.held_out, *([recipe.validation.file] if recipe.validation else [])]
    return HeldOut(example for file in files for example in read_jsonl(file, unanswerable=True))

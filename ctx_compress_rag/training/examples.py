"""The examples of a recipe, without those that share a question or passage with held-out data."""

import random
from collections.abc import Sequence

from ctx_compress_rag.data.examples import Example, Turn, read_jsonl, text_examples, without_long_passages
from ctx_compress_rag.data.held_out import HeldOut
from ctx_compress_rag.data.mixing import mix_examples
from ctx_compress_rag.errors import DataError
from ctx_compress_rag.training.config import DataConfig, Recipe


def load_training_examples(recipe: Recipe) -> list[Example]:
    """Return the recipe's training examples, without those that share a question or passage with held-out files.

    A stage that `recites` gets each distinct passage as an example; one that `repeats_texts` loads the texts itself.
    Raises DataError if no example is left.
    """
    data, held_out = recipe.data, _held_out(recipe.data)
    files = [
        held_out.without(without_long_passages(read_jsonl(file, data.max_turns), data.most_words), file)
        for file in data.files
    ]
    if not recipe.repeats_texts or not files:
        files += _texts(data, held_out)
    seed = data.part.seed if data.part else recipe.seed
    if data.mix:
        examples = mix_examples(files, data.mix, seed, recipe.optim.batch_size)
    else:
        examples = [example for file in files for example in file]
        random.Random(seed).shuffle(examples)  # files are mixed, as the paper mixes its datasets
    if not examples:
        raise DataError("the recipe's data holds no examples: give more data, or leave out fewer examples")
    if data.part:
        examples = [examples[(data.part.start + number) % len(examples)] for number in range(data.part.examples)]
    return passage_examples(examples) if recipe.recites else examples


def load_training_texts(recipe: Recipe) -> list[Example]:
    """Return the examples of the recipe's plain texts, without those that share a passage with held-out files."""
    return [row for rows in _texts(recipe.data, _held_out(recipe.data)) for row in rows]


def recitation_example(passage: str) -> Example:
    """Return an example without a question, whose answer is the passage itself."""
    return Example((passage,), (Turn("", (passage,)),))


def passage_examples(examples: Sequence[Example]) -> list[Example]:
    """Return the distinct passages of examples, in order, each as an example of its own without a question."""
    return [recitation_example(passage) for passage in dict.fromkeys(p for e in examples for p in e.passages)]


def _texts(data: DataConfig, held_out: HeldOut) -> list[list[Example]]:
    return [held_out.without(text_examples(text.file, text.words), text.file) for text in data.texts]


def _held_out(data: DataConfig) -> HeldOut:
    return HeldOut(example for file in data.held_out for example in read_jsonl(file, unanswerable=True))

"""A recipe's examples, without those that share a question or passage with held-out data, and the prompts made of them.

Prompts are in the chat format and tokenized, with the places of the answers.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ctx_compress_rag.data.examples import (
    Example,
    Turn,
    distinct_passages,
    read_jsonl,
    text_examples,
    without_long_passages,
)
from ctx_compress_rag.data.held_out import HeldOut
from ctx_compress_rag.data.mixing import mix_examples
from ctx_compress_rag.errors import DataError
from ctx_compress_rag.prompt import Prompt, PromptTemplate
from ctx_compress_rag.text.chat import PromptTokenizer, answer_ids, chat_text
from ctx_compress_rag.text.templates import PASSAGE_SEPARATOR, question_messages
from ctx_compress_rag.text.tokenizing import text_ids
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
    return [recitation_example(passage) for passage in distinct_passages(examples)]


def _texts(data: DataConfig, held_out: HeldOut) -> list[list[Example]]:
    return [held_out.without(text_examples(text.file, text.words), text.file) for text in data.texts]


def _held_out(data: DataConfig) -> HeldOut:
    return HeldOut(example for file in data.held_out for example in read_jsonl(file, unanswerable=True))


def draw_prompt_template(templates: Sequence[str], example: Example, seed: int) -> str:
    """Return a random template, always the same for an example and seed, so that a resumed run is the same."""
    return random.Random(f"{seed}:{example.passages}:{example.turns[0].question}").choice(templates)


def passage_token_shares(lengths: Sequence[int], total: int) -> list[int]:
    """Return how much of `total` each length gets: an even share, and a share of what shorter lengths leave.

    No share exceeds its length, and shares that are cut differ by at most 1.
    """
    kept = [0] * len(lengths)
    left = total
    waiting = len(lengths)
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        kept[index] = min(lengths[index], left // waiting)
        left -= kept[index]
        waiting -= 1
    return kept


@dataclass
class TrainingPromptBuilder:
    """A maker of prompts from examples, for one tokenizer. An answer has the same token ids after text and after slots.

    Longer answers are cut to `max_answer_tokens`, end token included. `separator` stands between the slots of two
    passages. `answer_prefix` is prompt text before an answer from slots.
    """

    # Stands for slots until the prompt is split there. Icon fonts use private-use characters, one at a time.
    HOLE = "\ue000slots\ue000"
    _ANSWER = "\ue000answer\ue000"

    tokenizer: Any
    max_answer_tokens: int = 256
    separator: str = PASSAGE_SEPARATOR
    answer_prefix: str = ""

    def __post_init__(self) -> None:
        self._prompt_tokenizer = PromptTokenizer(self.tokenizer)

    def passage_ids(self, passage: str) -> Tensor:
        """Return the token ids of a passage on its own: (L,)."""
        return torch.tensor(text_ids(self.tokenizer, passage), dtype=torch.long)

    def shortened(self, passages: Sequence[str], max_tokens: int) -> list[tuple[str, Tensor]]:
        """Return passages with token ids (L,), at most `max_tokens` in all; a cut passage's text is its ids decoded."""
        tokenized = [self.passage_ids(passage) for passage in passages]
        return [
            (passage, ids) if len(ids) <= share else (self.tokenizer.decode(ids[:share]), ids[:share])
            for passage, ids, share in zip(
                passages, tokenized, passage_token_shares([len(t) for t in tokenized], max_tokens), strict=True
            )
        ]

    def _turn_texts(self, example: Example, template: str, context: str) -> list[str]:
        """Return the prompt text before each answer; turns after the first are plain questions."""
        as_text = self._prompt_tokenizer.as_text
        first = question_messages(template, as_text(context), as_text(example.turns[0].question))
        later = [self._later_turn(first, as_text(turn.question)) for turn in example.turns[1:]]
        return [chat_text(self.tokenizer, first), *later]

    def _later_turn(self, first: list[dict[str, str]], question: str) -> str:
        """Return the chat format's text between an answer and the next one, without the first answer's end token."""
        asked = question_messages("{question}", "", question)
        if getattr(self.tokenizer, "chat_template", None):
            chat = [*first, {"role": "assistant", "content": self._ANSWER}, *asked]
            _, found, text = chat_text(self.tokenizer, chat).rpartition(self._ANSWER)
            if found:
                return text.removeprefix(self.tokenizer.eos_token or "")
        return chat_text(self.tokenizer, asked).removeprefix(self.tokenizer.bos_token or "")

    def _answer_ids(self, answer: str) -> NDArray[np.int64]:
        end = self.tokenizer.eos_token_id
        ids = answer_ids(self.tokenizer, answer) + ([] if end is None else [end])
        return np.array(ids[: self.max_answer_tokens], np.int64)

    def text_prompt(self, example: Example, template: str, passages: Sequence[str] | None = None) -> Prompt:
        """Return the example as a prompt with its passages as text, or with `passages` in their place."""
        context = PASSAGE_SEPARATOR.join(example.passages if passages is None else passages)
        first, *later = self._turn_texts(example, template, context)
        return self._with_answers(example, self._prompt_tokenizer.encode([first]), later).fill([])

    def holed_prompt(self, example: Example, template: str, context: str | None = None) -> PromptTemplate:
        """Return the example as a prompt with a hole for each passage, or for each `HOLE` in the text `context`."""
        if context is None:
            context = self.separator.join([self.HOLE] * len(example.passages))
        first, *later = self._turn_texts(example, template, context)
        parts = (first + self.answer_prefix).split(self.HOLE)
        return self._with_answers(example, self._prompt_tokenizer.encode(parts), later)

    def _with_answers(
        self, example: Example, first: Sequence[NDArray[np.int64]], later: Sequence[str]
    ) -> PromptTemplate:
        """Join all turns: the tokens around holes before the first answer, all answers, and the texts between them."""
        *before, last = first
        texts = [last, *(self._prompt_tokenizer.encode([text])[0] for text in later)]
        answers = [self._answer_ids(turn.answers[0]) for turn in example.turns]
        end = [part for pair in zip(texts, answers, strict=True) for part in pair]
        flags = [np.full(part.shape, bool(place % 2)) for place, part in enumerate(end)]
        holed = PromptTemplate.without_answers(before)
        return PromptTemplate((*holed.ids, np.concatenate(end)), (*holed.answers, np.concatenate(flags)))

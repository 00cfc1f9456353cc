"""Prompts for training and evaluation: templates, chat format, and where the answers are."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ctx_compress_rag.data.examples import Example
from ctx_compress_rag.text.prompt_tokenizer import PromptTokenizer, answer_ids, chat_text
from ctx_compress_rag.text.tokenising import text_ids

PASSAGE_SEPARATOR = "\n\n"

# What LangChain's and LlamaIndex's own chains send, and plain forms. A system part, where there is
# one, stands before "|||".
TEMPLATES: tuple[str, ...] = (
    "{context}\n\nQuestion: {question}",
    "Answer the question from the context.\n\nContext:\n{context}\n\nQuestion: {question}",
    "Answer the question from the context.\n\n{context}|||{question}",
    "Context information is below.\n---------------------\n{context}\n---------------------\n"
    "Given the context information and not prior knowledge, answer the query.\nQuery: {question}\nAnswer: ",
)

# ArcAligner, table 7, up to [T], the text, which is the answer; {context} is [B], the slots.
PARAPHRASES: tuple[str, ...] = (
    "Background: {context}. This is equivalent to:",
    "Rewrite the background in your own words: {context} \N{RIGHTWARDS ARROW}",
    "Provide a restatement of the background: {context}. Return:",
    "{context} is a paraphrase of what? Answer with:",
    "These two expressions convey the same meaning: (1) {context} (2)",
    "Restate {context} using a single sentence. Output only",
)


def messages(template: str, context: str, question: str) -> list[dict[str, str]]:
    """Chat messages for a question; a template's part before "|||" is the system message."""
    parts = template.split("|||")
    roles = ("user",) if len(parts) == 1 else ("system", "user")
    # In one pass, and not by str.format: what is filled in may hold braces, even the names of the places.
    places = {"{question}": question, "{context}": context}
    filled = [re.sub(r"\{question\}|\{context\}", lambda place: places[place[0]], part) for part in parts]
    return [{"role": role, "content": text} for role, text in zip(roles, filled, strict=True)]


def draw_template(templates: Sequence[str], example: Example, seed: int) -> str:
    """A template for an example, always the same one: a resumed run continues with the same prompts."""
    return random.Random(f"{seed}:{example.passages}:{example.turns[0].question}").choice(templates)


def shares(lengths: Sequence[int], total: int) -> list[int]:
    """What each of several lengths may keep of `total`: an even share, and of what shorter ones leave, too.

    No share is longer than its length, and no two that are cut differ by more than 1.
    """
    kept = [0] * len(lengths)
    left = total
    waiting = len(lengths)
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        kept[index] = min(lengths[index], left // waiting)
        left -= kept[index]
        waiting -= 1
    return kept


@dataclass(frozen=True)
class TokenRow:
    """A prompt with answers as token ids; `answers` is True on answer tokens. Both (L,)."""

    ids: Tensor
    answers: Tensor


@dataclass(frozen=True)
class SlotRow:
    """A prompt with answers whose passages are holes.

    Attributes:
        ids: token ids of the text between the holes; hole i is between ids[i] and ids[i + 1].
        answers: bool masks of the same lengths, True on answer tokens.
    """

    ids: tuple[Tensor, ...]
    answers: tuple[Tensor, ...]


class PromptBuilder:
    """Renders examples for one tokenizer. The answers' ids are the same in both kinds of row."""

    # Stands for slots until the prompt is split there. Icon fonts use private-use characters, one at a time.
    HOLE = "\ue000slots\ue000"
    _ANSWER = "\ue000answer\ue000"

    def __init__(self, tokenizer: Any, max_answer_tokens: int = 256) -> None:
        self.tokenizer = tokenizer
        self.max_answer_tokens = max_answer_tokens
        self._prompt_tokenizer = PromptTokenizer(tokenizer)

    def passage_ids(self, passage: str) -> Tensor:
        """Token ids of a passage on its own: (L,)."""
        return torch.tensor(text_ids(self.tokenizer, passage), dtype=torch.long)

    def shortened(self, passages: Sequence[str], max_tokens: int) -> list[tuple[str, Tensor]]:
        """Passages and their token ids (L,), cut by `shares` where they have more than `max_tokens` together."""
        tokenized = [self.passage_ids(passage) for passage in passages]
        return [
            (passage, ids) if len(ids) <= share else (self.tokenizer.decode(ids[:share]), ids[:share])
            for passage, ids, share in zip(
                passages, tokenized, shares([len(t) for t in tokenized], max_tokens), strict=True
            )
        ]

    def _turn_texts(self, example: Example, template: str, context: str) -> list[str]:
        """The prompt text before each answer; later turns are plain questions after the first."""
        as_text = self._prompt_tokenizer.as_text
        first = messages(template, as_text(context), as_text(example.turns[0].question))
        later = [self._later_turn(first, as_text(turn.question)) for turn in example.turns[1:]]
        return [chat_text(self.tokenizer, first), *later]

    def _later_turn(self, first: list[dict[str, str]], question: str) -> str:
        """What the chat format puts between an answer, its end token included, and the answer to the next question."""
        asked = messages("{question}", "", question)
        if getattr(self.tokenizer, "chat_template", None):
            chat = [*first, {"role": "assistant", "content": self._ANSWER}, *asked]
            _, found, text = chat_text(self.tokenizer, chat).rpartition(self._ANSWER)
            if found:
                return text.removeprefix(self.tokenizer.eos_token or "")
        return chat_text(self.tokenizer, asked).removeprefix(self.tokenizer.bos_token or "")

    def _answer_ids(self, answer: str) -> Tensor:
        end = self.tokenizer.eos_token_id
        ids = answer_ids(self.tokenizer, answer) + ([] if end is None else [end])
        return torch.tensor(ids[: self.max_answer_tokens], dtype=torch.long)

    def text_row(self, example: Example, template: str, passages: Sequence[str] | None = None) -> TokenRow:
        """The example with its passages (or `passages` in their place) as text."""
        context = PASSAGE_SEPARATOR.join(example.passages if passages is None else passages)
        ids: list[Tensor] = []
        answers: list[Tensor] = []
        for text, turn in zip(self._turn_texts(example, template, context), example.turns, strict=True):
            for part, is_answer in (
                (self._prompt_tokenizer.encode([text])[0], False),
                (self._answer_ids(turn.answers[0]), True),
            ):
                ids.append(part)
                answers.append(torch.full(part.shape, is_answer))
        return TokenRow(torch.cat(ids), torch.cat(answers))

    def slot_row(self, example: Example, template: str, context: str | None = None) -> SlotRow:
        """The example with a hole for each passage, or with `context`, text with a `HOLE` for each run of slots."""
        if context is None:
            context = PASSAGE_SEPARATOR.join(self.HOLE for _ in example.passages)
        ids: list[Tensor] = []
        answers: list[Tensor] = []
        for number, (text, turn) in enumerate(
            zip(self._turn_texts(example, template, context), example.turns, strict=True)
        ):
            parts = self._prompt_tokenizer.encode(text.split(self.HOLE) if number == 0 else [text])
            masks = [torch.zeros(part.shape, dtype=torch.bool) for part in parts]
            answer = self._answer_ids(turn.answers[0])
            parts[-1] = torch.cat((parts[-1], answer))
            masks[-1] = torch.cat((masks[-1], torch.ones(answer.shape, dtype=torch.bool)))
            if number == 0:
                ids, answers = parts, masks
            else:
                ids[-1] = torch.cat((ids[-1], parts[0]))
                answers[-1] = torch.cat((answers[-1], masks[0]))
        return SlotRow(tuple(ids), tuple(answers))

"""Tasks, and episodes drawn from them: demonstrations of a task, and a question of the same task."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from pathlib import Path

from ctx_compress_rag.adaptation.demonstrations import Demonstration
from ctx_compress_rag.data.examples import Example, read_jsonl
from ctx_compress_rag.errors import DataError
from ctx_compress_rag.training.prompts import PromptBuilder


@dataclass(frozen=True)
class Episode:
    """Demonstrations of a task (the support context C), and the query, a question of the same task with its answer.

    `answers` are all accepted answers. If it is empty, the query's own answer is the accepted one.
    """

    task: str
    support: tuple[Demonstration, ...]
    query: Demonstration
    answers: tuple[str, ...] = ()

    @property
    def accepted(self) -> tuple[str, ...]:
        return self.answers or (self.query.answer,)


@dataclass
class Tasks:
    """JSONL files (see `data.examples.read_jsonl`), each of which is a task named after its file.

    The arguments are settings of `TaskData`. Accepted answers are not cut.
    """

    files: InitVar[Sequence[Path]]
    builder: PromptBuilder
    max_context_tokens: int
    max_answer_tokens: int
    passages: int | None = None
    examples: dict[str, list[Example]] = field(init=False)

    def __post_init__(self, files: Sequence[Path]) -> None:
        self.examples = {file.stem: _distinct(read_jsonl(file)) for file in files}
        if len(self.examples) < len(files):
            raise DataError(f"two of the files {sorted(map(str, files))} have one name, endings aside: rename one")
        for name, examples in self.examples.items():
            if len(examples) < 2:
                raise DataError(f"the task {name} has one question: give it more, to demonstrate with")
            for turn in (example.turns[0] for example in examples):
                if not turn.answers[0].strip():
                    raise DataError(f"the task {name}: the first answer to {turn.question!r} is blank: give one")

    def draw(self, number: int, demonstrations: int, seed: int) -> Episode:
        """Return an episode of a random task; the same number and seed give the same episode."""
        rng = random.Random(f"{seed}:{number}")
        name = rng.choice(list(self.examples))
        examples = self.examples[name]
        if len(examples) <= demonstrations:
            raise DataError(f"the task {name} has {len(examples)} questions: {demonstrations} demonstrations need more")
        *support, query = rng.sample(examples, demonstrations + 1)
        return self.episode(name, support, query)

    def episode(self, name: str, support: Sequence[Example], query: Example) -> Episode:
        """Return an episode of these examples of a task, with passages and answers cut."""
        shown = tuple(self._cut(example) for example in support)
        return Episode(name, shown, self._cut(query), query.turns[0].answers)

    def _cut(self, example: Example) -> Demonstration:
        turn = example.turns[0]
        read = example.passages[: self.passages]
        passages = tuple(text for text, _ in self.builder.shortened(read, self.max_context_tokens))
        [(answer, _)] = self.builder.shortened([turn.answers[0]], self.max_answer_tokens)
        return Demonstration(turn.question, passages, answer)


def _distinct(examples: Sequence[Example]) -> list[Example]:
    """Return the examples without repeated rows, so that no demonstration gives the answer to the query."""
    first: dict[tuple[tuple[str, ...], str], Example] = {}
    for example in examples:
        first.setdefault((example.passages, example.turns[0].question), example)
    return list(first.values())

"""Tasks, and episodes drawn from them: demonstrations of a task, and a question of the same task."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from ctx_compress_rag.adaptation.adapt import Demonstration
from ctx_compress_rag.adaptation.config import TaskData
from ctx_compress_rag.data.examples import Example, read_jsonl
from ctx_compress_rag.data.held_out import HeldOut
from ctx_compress_rag.errors import DataError
from ctx_compress_rag.training.prompts import TrainingPromptBuilder


@dataclass(frozen=True)
class Episode:
    """Demonstrations of a task (the support context C), and the query, a question of the same task with its answer."""

    task: str
    support: tuple[Demonstration, ...]
    query: Demonstration
    answers: tuple[str, ...]  # all accepted answers to the query


class AdaptationTasks:
    """JSONL files (see `data.examples.read_jsonl`), each of which is a task named after its file.

    Passages and answers are cut as `data` says, but not the accepted answers. `builder` has the decoder's tokenizer.
    `examples` has each task's examples by its name, without those that share a question with held-out files.
    """

    def __init__(self, data: TaskData, builder: TrainingPromptBuilder) -> None:
        self.data, self.builder = data, builder
        self.examples = {file.stem: _distinct(read_jsonl(file)) for file in data.files}
        if len(self.examples) < len(data.files):
            raise DataError(f"two of the files {sorted(map(str, data.files))} have one name, endings aside: rename one")
        for name, examples in self.examples.items():
            if len(examples) < 2:
                raise DataError(f"the task {name} has one question: give it more, to demonstrate with")
            for turn in (example.turns[0] for example in examples):
                if not turn.answers[0].strip():
                    raise DataError(f"the task {name}: the first answer to {turn.question!r} is blank: give one")
        held_out = HeldOut(example for file in data.held_out for example in read_jsonl(file))
        self.examples = {name: held_out.without(rows, name, passages=False) for name, rows in self.examples.items()}

    def draw(self, number: int, demonstrations: int, seed: int) -> Episode:
        """Return the episode of this number (its index), of a random task; the same number and seed give the same."""
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
        turn, data = example.turns[0], self.data
        read = example.passages[: data.passages]
        passages = tuple(text for text, _ in self.builder.shortened(read, data.max_context_tokens))
        [(answer, _)] = self.builder.shortened([turn.answers[0]], data.max_answer_tokens)
        return Demonstration(turn.question, passages, answer)


def _distinct(examples: Sequence[Example]) -> list[Example]:
    """Return the examples without repeated rows, so that no demonstration gives the answer to the query."""
    first: dict[tuple[tuple[str, ...], str], Example] = {}
    for example in examples:
        first.setdefault((example.passages, example.turns[0].question), example)
    return list(first.values())

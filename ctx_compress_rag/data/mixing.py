"""Turn question-answering examples into realistic prompts: longer passages, distractors, unanswerable questions."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

from pydantic import Field, PositiveInt, model_validator

from ctx_compress_rag.data.examples import Example, distinct_passages
from ctx_compress_rag.strict import Strict
from ctx_compress_rag.text.answers import NO_ANSWER, mentions_answer

_NEAR = 30  # passages before and after in the file
_DRAWS = 20


class MixData(Strict):
    """Settings that turn question-answering examples into realistic prompts.

    Attributes:
        shortest, longest: a passage of fewer than `shortest` words (0: none) is padded with other short passages, to a
            number of words drawn between `shortest` and `longest`.
        passages: for each prompt, one of these numbers is drawn. Passages of other examples (distractors) are added
            until the prompt has that many passages.
        near: the share of distractors from the example's own file. The file of each other distractor is drawn at
            random. A distractor from the example's own file is at most 30 passages away, where subjects are similar.
        unanswerable: the share of examples whose own passages are removed. The answer is then `NO_ANSWER`.
    """

    shortest: int = Field(default=0, ge=0)
    longest: int = Field(default=120, gt=0)
    passages: list[PositiveInt] = Field(default=[1], min_length=1)
    near: float = Field(default=0.5, ge=0, le=1)
    unanswerable: float = Field(default=0.0, ge=0, lt=1)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.shortest > self.longest:
            raise ValueError(f"shortest {self.shortest} must not exceed longest {self.longest}")
        return self


def mix_examples(files: Sequence[Sequence[Example]], config: MixData, seed: int, block: int) -> list[Example]:
    """Mix the examples of several files into prompts; the same seed gives the same prompts.

    The result consists of blocks of `block` examples (the batch size) of similar length, so that a batch needs little
    padding. A file's examples must be in the file's order, in which neighbors have similar subjects.
    """
    mixer = _Mixer(files, config, random.Random(f"mix:{seed}"))
    mixed = [mixer.prompt(example, number) for number, file in enumerate(files) for example in file]
    mixer.rng.shuffle(mixed)
    return _by_length(mixed, block, mixer.rng)


def _by_length(examples: Sequence[Example], block: int, rng: random.Random) -> list[Example]:
    """Sort examples into blocks of similar length and shuffle the blocks, separately for every 32 blocks."""
    ordered: list[Example] = []
    for start in range(0, len(examples), 32 * block):
        stretch = sorted(examples[start : start + 32 * block], key=lambda e: sum(map(len, e.passages)))
        blocks = [stretch[i : i + block] for i in range(0, len(stretch), block)]
        rng.shuffle(blocks)
        ordered += (example for each in blocks for example in each)
    return ordered


class _Mixer:
    def __init__(self, files: Sequence[Sequence[Example]], config: MixData, rng: random.Random) -> None:
        self.config = config
        self.rng = rng
        self.passages = [distinct_passages(file) for file in files]
        self.places = [{passage: i for i, passage in enumerate(passages)} for passages in self.passages]
        self.short = [[p for p in passages if self._is_short(p)] for passages in self.passages]

    def prompt(self, example: Example, file: int) -> Example:
        """Return the example with distractors and padding, and perhaps without its own passages."""
        own = example.passages
        taken_away = self.rng.random() < self.config.unanswerable
        kept = [] if taken_away else list(own)
        wanted = max(self.rng.choice(self.config.passages), len(own)) - len(kept)
        barred = [answer for turn in example.turns for answer in turn.answers] if taken_away else []
        company = self._company(own, file, wanted, barred)
        if taken_away and company:
            turns = tuple(replace(turn, answers=(NO_ANSWER,), evidence=()) for turn in example.turns)
            return Example(tuple(self._padded(p, f, own, barred) for p, f in company), turns)
        together = [(p, file) for p in own] + company
        self.rng.shuffle(together)
        return Example(tuple(self._padded(p, f, own, ()) for p, f in together), example.turns)

    def _company(self, own: Sequence[str], file: int, wanted: int, barred: Sequence[str]) -> list[tuple[str, int]]:
        """Draw distractors and the numbers of their files; return fewer than `wanted` if too few are suitable."""
        company: dict[str, int] = {}
        for _ in range(_DRAWS * wanted):
            if len(company) == wanted:
                break
            where = file if self.rng.random() < self.config.near else self.rng.randrange(len(self.passages))
            passages = self.passages[where]
            if where == file:
                middle = self.places[file][own[0]]
                drawn = passages[self.rng.randint(max(0, middle - _NEAR), min(len(passages) - 1, middle + _NEAR))]
            else:
                drawn = self.rng.choice(passages)
            if drawn not in own and not (barred and mentions_answer(drawn, barred)):
                company[drawn] = where
        return list(company.items())

    def _is_short(self, passage: str) -> bool:
        return len(passage.split()) < self.config.shortest

    def _padded(self, passage: str, file: int, own: Sequence[str], barred: Sequence[str]) -> str:
        """Return a short passage among other short passages of its file, and a long passage as it is."""
        if not self._is_short(passage):
            return passage
        wanted = self.rng.randint(self.config.shortest, self.config.longest)
        sentences = [passage]
        for _ in range(_DRAWS):
            if sum(len(sentence.split()) for sentence in sentences) >= wanted:
                break
            drawn = self.rng.choice(self.short[file])
            if drawn not in sentences and drawn not in own and not (barred and mentions_answer(drawn, barred)):
                sentences.insert(self.rng.randint(0, len(sentences)), drawn)
        return " ".join(sentences)

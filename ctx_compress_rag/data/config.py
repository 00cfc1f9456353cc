"""Parts of recipes: texts, mixing of questions into prompts, and data sources."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from ctx_compress_rag.strict import Strict


class TextData(Strict):
    """Plain text: a .txt or .txt.xz file, or the contexts of a .jsonl or .jsonl.gz file.

    Attributes:
        words: minimum number of words in a row; the last row of a document may be shorter.
    """

    file: Path
    words: int = Field(default=256, gt=0)


class MixData(Strict):
    """How to turn question-answering examples into realistic prompts.

    Attributes:
        shortest, longest: passages of fewer words than `shortest` are padded with other short passages, to a length
            drawn from this range.
        passages: the numbers of passages to draw from for a prompt; passages of other examples (distractors) are added.
        near: share of distractors from the example's file; the file of the others is drawn at random. All that come
            from the example's file are within 30 passages of its own, where subjects are similar.
        unanswerable: share of examples whose own passages are removed; their answer is `NO_ANSWER`.
    """

    shortest: int = Field(default=0, ge=0)
    longest: int = Field(default=120, gt=0)
    passages: list[int] = Field(default=[1], min_length=1)
    near: float = Field(default=0.5, ge=0, le=1)
    unanswerable: float = Field(default=0.0, ge=0, lt=1)

    @model_validator(mode="after")
    def _possible(self) -> MixData:
        if min(self.passages) < 1:
            raise ValueError(f"passages contains {min(self.passages)}: give numbers of at least 1")
        if self.shortest > self.longest:
            raise ValueError(f"shortest {self.shortest} must not exceed longest {self.longest}")
        return self


class PartData(Strict):
    """Consecutive examples for one stage of a comparison, which may start where the previous stage stopped.

    Attributes:
        start: how many examples to skip; after the last example, the first follows.
        examples: how many to use.
        seed: for the order and the mixing of examples, instead of the recipe's.
    """

    start: int = Field(ge=0)
    examples: int = Field(gt=0)
    seed: int = 0


class SourceConfig(Strict):
    """Data that a bundle or its decoder was trained on, for its model card."""

    data: str
    license: str

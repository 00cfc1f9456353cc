"""Settings of a recipe's data: plain text, mixing of questions into prompts, a part of the examples, sources."""

from pathlib import Path
from typing import Self

from pydantic import Field, PositiveInt, model_validator

from ctx_compress_rag.strict import Strict


class TextData(Strict):
    """A file of plain text (.txt, .txt.xz), or a file of questions (.jsonl, .jsonl.gz) whose passages are used as text.

    Attributes:
        file: the file's path.
        words: the least words of a training example, which has whole lines. The last of a document may have fewer.
    """

    file: Path
    words: int = Field(default=256, gt=0)


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


class PartData(Strict):
    """A run of consecutive examples for one stage of a comparison. It may start where an earlier stage's part ended.

    Attributes:
        start: the number of examples to skip, after mixing. After the last example, counting continues with the first.
        examples: the number of examples to use.
        seed: the seed for the order and the mixing of examples, used in place of the recipe's seed.
    """

    start: int = Field(ge=0)
    examples: int = Field(gt=0)
    seed: int = 0


class SourceConfig(Strict):
    """A data set that a bundle or its decoder was trained on, with its license, as the model card lists it."""

    data: str
    license: str

"""The settings in recipes for adaptation."""

from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator

from ctx_compress_rag.models.gguf import GgufDecoder
from ctx_compress_rag.strict import Strict
from ctx_compress_rag.training.config import BaseRecipe


class TaskData(Strict):
    """The files that demonstrations come from, and how much of a question's passages and answers is used.

    Attributes:
        files: JSONL files, one for each task. A folder stands for all JSONL files in it.
        held_out: files whose questions are left out of `files`. Their passages are not, because the paper retrieves all
            passages from one corpus (appendix F).
        passages: how many of a question's passages are read, from the first on; None reads all.
        max_context_tokens: the most tokens of a question's passages together. Longer passages are cut.
        max_answer_tokens: the most tokens of an answer. Longer answers are cut.
    """

    files: list[Path] = Field(min_length=1)
    held_out: list[Path] = Field(default=[])
    passages: int | None = Field(default=None, gt=0)
    max_context_tokens: int = Field(default=1024, gt=0)
    max_answer_tokens: int = Field(default=256, gt=0)

    @field_validator("files")
    @classmethod
    def _files_in(cls, files: list[Path]) -> list[Path]:
        return [file for path in files for file in sorted(path.glob("*.jsonl*")) or [path]]


class AdaptationRecipe(BaseRecipe):
    """The settings of all recipes that adapt a frozen decoder to demonstrations (In-Context Optimization).

    Attributes:
        bundle: the bundle whose decoder is adapted.
        decoder: in place of a bundle, the decoder's folder, hub id or GGUF file.
        revision: the revision of the bundle or decoder on the hub.
    """

    bundle: str | None = None
    decoder: str | GgufDecoder | None = None
    revision: str | None = None
    data: TaskData

    @model_validator(mode="after")
    def _one_decoder(self) -> Self:
        if (self.decoder is None) == (self.bundle is None):
            raise ValueError("give either decoder (a folder, hub id or GGUF file) or bundle")
        return self


class PredictorSettings(Strict):
    """The settings that a recipe gives to a predictor, and that the predictor keeps.

    Attributes:
        inner_steps: K of eq. 8.
        inner_learning_rate: eta of eq. 8.
        demonstrations: N, the number of demonstrations in a support context, in training and in use.
        hidden, code: the widths of the encoder's layers.
        layer: the decoder's layer after which the demonstrations' hidden states are read; None means the last layer.
    """

    inner_steps: int = Field(default=5, gt=0)
    inner_learning_rate: float = Field(default=1e-2, gt=0)
    demonstrations: int = Field(default=3, gt=0)
    hidden: int = Field(default=256, gt=0)
    code: int = Field(default=64, gt=0)
    layer: int | None = Field(default=None, gt=0)

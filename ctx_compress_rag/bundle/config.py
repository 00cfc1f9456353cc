"""The configuration of a bundle. Unknown keys and impossible values are refused by name."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from ctx_compress_rag.methods.registry import AnyMethodConfig
from ctx_compress_rag.models.gguf import GgufDecoder
from ctx_compress_rag.strict import Strict
from ctx_compress_rag.text.templates import PASSAGE_SEPARATOR, TEMPLATES


class Source(Strict):
    """Where a bundle was imported from.

    Attributes:
        name: the published checkpoint: a hub id, or a folder's name.
        revision: its commit on the hub.
        subfolder: the part of the repository that was read.
        format: the importer's name for its format.
        licenses: of its weights ("checkpoint"), of the decoder, and of an encoder with weights of its own.
        shareable: whether the licenses of all that the bundle holds let anyone publish it.
    """

    name: str
    revision: str | None = None
    subfolder: str | None = None
    format: str
    licenses: dict[str, str]
    shareable: bool = False

    def __str__(self) -> str:
        place = "/".join(filter(None, (self.name, self.subfolder)))
        licenses = ", ".join(f"{part} {license}" for part, license in self.licenses.items())
        return f"{place}{f' at {self.revision[:12]}' if self.revision else ''} (licenses: {licenses})"


class BundleConfig(Strict):
    """The contents of a bundle's config.json.

    Attributes:
        format: version of the bundle format.
        name: the bundle's name.
        method: the compression method and its settings.
        decoder: hub id or path of the decoder, or its GGUF file; None when the bundle ships it in `decoder/`.
        revision: the decoder's revision on the hub.
        subfolder: where the decoder is in there.
        base_ratio: source tokens per slot in the store.
        ratios: the ratios it was trained for.
        max_tokens: the encoder's window; longer passages are compressed window by window.
        reads: one line about the texts it is meant for.
        template: the prompt template that it was trained with, see `text.templates`.
        answer_tokens: tokens of the longest answer that it was trained on.
        extractive: whether it answers best by quoting (`Sampling.extractive`), which is then the default of commands
            and LLM classes.
        decoder_digest: SHA-256 of the decoder's files when the bundle was saved; "" if it has a commit on the hub, or
            its own SHA-256.
        text_share: the share of a prompt's budget for several passages that is best spent on sentences as text, if the
            bundle was measured (see `marking.mark.mark`); None shows each passage as slots.
        separator: what stands between two passages in a prompt.
        answer_prefix: with what an answer from passages begins, as part of the prompt.
        chat_template: the chat format it was trained with, in place of the decoder's own; None for the decoder's.
        source: where it was imported from; None for a bundle trained here.
    """

    format: Literal[1] = 1
    name: str = Field(min_length=1)
    method: AnyMethodConfig
    decoder: str | GgufDecoder | None = None
    revision: str | None = None
    subfolder: str | None = None
    base_ratio: int = Field(gt=0)
    ratios: list[int] = Field(min_length=1)
    max_tokens: int = Field(gt=0)
    reads: str = "general text"
    template: str = TEMPLATES[0]
    answer_tokens: int = Field(default=64, gt=0)
    extractive: bool = False
    text_share: float | None = Field(default=None, ge=0, le=1)
    decoder_digest: str = ""
    separator: str = PASSAGE_SEPARATOR
    answer_prefix: str = ""
    chat_template: str | None = None
    source: Source | None = None

    @property
    def decoder_name(self) -> str | None:
        """The decoder's name; None if the bundle ships it."""
        return None if self.decoder is None else str(self.decoder)

    @model_validator(mode="after")
    def _ratios_fit(self) -> BundleConfig:
        self.method.check_ratios(self.base_ratio, self.ratios)
        if self.max_tokens % self.base_ratio:
            raise ValueError(f"max_tokens {self.max_tokens} is not a multiple of base_ratio {self.base_ratio}")
        return self

"""The settings of a bundle. Errors name unknown keys and impossible values."""

from typing import Literal, Self

from pydantic import Field, model_validator

from ctx_compress_rag.methods.registry import AnyMethodConfig
from ctx_compress_rag.models.gguf import GgufDecoder
from ctx_compress_rag.strict import Strict
from ctx_compress_rag.text.templates import PASSAGE_SEPARATOR, TEMPLATES


class BundleSource(Strict):
    """The published checkpoint that a bundle was imported from.

    Attributes:
        name: hub id of the checkpoint, or the name of its folder.
        revision: commit of the checkpoint on the hub; None for a folder.
        subfolder: folder of the checkpoint in its repository or folder; None for the root.
        format: name of the checkpoint's format, as in `published.importing`.
        licenses: licenses of "checkpoint", "decoder" and, if it has weights of its own, "encoder".
        shareable: whether the licenses of all that the bundle holds let anyone publish the bundle.
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
    """The settings in a bundle's config.json.

    Attributes:
        format: version of the bundle format.
        name: the bundle's name.
        method: the compression method and its settings.
        decoder: hub id or path of the decoder, or its GGUF file; None when the bundle ships it in `decoder/`.
        revision: the decoder's revision on the hub; None for the newest.
        subfolder: the decoder's folder in its repository or folder; None for the root.
        base_ratio: source tokens per slot, in a new store and in `Bundle.compress`, if no ratio is given.
        ratios: the ratios (source tokens per slot) that the bundle was trained for.
        window: the encoder's window in tokens; longer passages are compressed window by window.
        reads: one line about the texts that the bundle is meant for.
        template: the prompt template of the bundle's training, see `text.templates`.
        answer_tokens: number of tokens of the longest answer in training; the default limit of commands.
        extractive: whether the bundle answers best by quoting (`Sampling.extractive`), which is then the default of
            commands and LLM classes.
        decoder_digest: SHA-256 of the decoder's files when the bundle was saved; "" if the decoder is on the hub (then
            the commit identifies the decoder) or a GGUF file (then the file's SHA-256 does).
        text_share: the share (0 to 1) of the budget for several passages to spend on sentences as text, as measured
            for the bundle (see `marking.mark.mark_texts`); None shows each passage as slots.
        reader_share: the share (0 to 1) of the reader's LoRA in the weights that read a prompt with slots and text
            beside them; the teacher's LoRA has the rest. 1: the reader's weights read it.
        separator: the text between two passages in a prompt.
        answer_prefix: the text that an answer from passages begins with, as part of the prompt.
        chat_template: the chat format of the bundle's training; None for the decoder's own.
        source: where the bundle was imported from; None if it was trained with this library.
    """

    format: Literal[1] = 1
    name: str = Field(min_length=1)
    method: AnyMethodConfig
    decoder: str | GgufDecoder | None = None
    revision: str | None = None
    subfolder: str | None = None
    base_ratio: int = Field(gt=0)
    ratios: list[int] = Field(min_length=1)
    window: int = Field(gt=0)
    reads: str = "general text"
    template: str = TEMPLATES[0]
    answer_tokens: int = Field(default=64, gt=0)
    extractive: bool = False
    text_share: float | None = Field(default=None, ge=0, le=1)
    reader_share: float = Field(default=1.0, ge=0, le=1)
    decoder_digest: str = ""
    separator: str = PASSAGE_SEPARATOR
    answer_prefix: str = ""
    chat_template: str | None = None
    source: BundleSource | None = None

    @property
    def decoder_name(self) -> str | None:
        """Hub id, path or GGUF file of the decoder; None if the bundle ships the decoder."""
        return None if self.decoder is None else str(self.decoder)

    @model_validator(mode="after")
    def _ratios_fit(self) -> Self:
        self.method.check_ratios(self.base_ratio, self.ratios)
        if self.window % self.base_ratio:
            raise ValueError(f"window {self.window} is not a multiple of base_ratio {self.base_ratio}")
        return self

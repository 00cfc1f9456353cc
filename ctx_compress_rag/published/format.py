"""The base class of published formats, and the tools with which they convert checkpoints."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ctx_compress_rag.errors import BundleError, ConfigError
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.models.transformers_internals import set_hub_commit
from ctx_compress_rag.published.remote_files import PublishedCheckpoint, short_error
from ctx_compress_rag.text.chat import PromptTokenizer
from ctx_compress_rag.text.tokenizing import text_ids

EMBEDDINGS = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class ConvertedCheckpoint:
    """A converted checkpoint: tensors by name, and settings of `BundleConfig` but for name, ratios, decoder, source."""

    settings: Mapping[str, Any]
    compressor: Mapping[str, Tensor] = field(default_factory=dict)
    reader: Mapping[str, Tensor] = field(default_factory=dict)
    adapters: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)  # LoRA of "compressor" and "reader"


class PublishedFormat(ABC):
    """A project's format of checkpoints, with how they are recognized (by file names and JSON) and converted."""

    name: str
    known: tuple[tuple[str, str], ...] = ()  # arguments of `ctx-compress import` and license of each published one
    decoder_tensors: tuple[str, ...] = ()  # names of the decoder's tensors that `convert` reads
    caution: str = ""  # what the user has to check, because the files do not say it

    def license(self, checkpoint: PublishedCheckpoint) -> str:
        return checkpoint.license

    @abstractmethod
    def matches(self, checkpoint: PublishedCheckpoint) -> bool:
        """Whether a checkpoint has this format, by its file names and JSON."""

    @abstractmethod
    def files(self, checkpoint: PublishedCheckpoint) -> list[str]:
        """Return the names of the files that `convert` reads."""

    @abstractmethod
    def decoder(self, checkpoint: PublishedCheckpoint, given: str | None) -> PublishedCheckpoint:
        """Return the decoder's transformers folder, `given` by the user, or else the one that the checkpoint names."""

    def encoder(self, checkpoint: PublishedCheckpoint, given: str | None) -> PublishedCheckpoint | None:
        """Return the transformers folder of an encoder that has its own weights (`given` or named), else None."""
        if given is not None:
            raise ConfigError(f"encoder={given!r}: {checkpoint} needs no other encoder: leave it out")
        return None

    @abstractmethod
    def convert(self, checkpoint: PublishedCheckpoint, decoder: "PublishedDecoder") -> ConvertedCheckpoint:
        """Convert a checkpoint. Raise BundleError if a part is missing, or the checkpoint does not fit the decoder."""


class PublishedDecoder(Backbone):
    """A decoder whose weights are not loaded, to write a bundle for it without reading gigabytes."""

    def __init__(self, files: PublishedCheckpoint) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.files = files
        for name in files.of_transformers:
            if not name.endswith(".safetensors"):
                files.path(name)
        model = files.model_without_weights(AutoModelForCausalLM)
        try:
            tokenizer = AutoTokenizer.from_pretrained(files.path("config.json").parent, trust_remote_code=False)
        except Exception as error:  # of transformers, tokenizers or a parser
            raise BundleError(
                f"cannot read the tokenizer of {files} ({short_error(error)}): give another decoder"
            ) from error
        set_hub_commit(model.config, files.revision)
        super().__init__(model, tokenizer)

    @property
    def device(self) -> torch.device:
        """The CPU, on which the bundle's own tensors are."""
        return torch.device("cpu")

    def add_adapter(self, name: str, config: Callable[[], Any], layers: int | None = None) -> None:
        super().add_adapter(name, config, layers)
        for part in [module for key, module in self.model.named_modules() if "lora_" in key]:
            for key, value in [*part.named_parameters(recurse=False)]:
                if value.is_meta:
                    setattr(part, key, torch.nn.Parameter(torch.zeros(value.shape), requires_grad=False))

    @cached_property
    def spaces(self) -> str:
        """Where the tokenizer adds a space: before "every" text after a control token, the "first" text, or "none"."""
        prompts = PromptTokenizer(self.tokenizer)
        alone = text_ids(self.tokenizer, "a")
        if alone != prompts.encode(["", "a"])[1].tolist():
            return "first"
        return "every" if str(self.tokenizer.convert_ids_to_tokens(alone)[0]).startswith("▁") else "none"

    @cached_property
    def vocabulary(self) -> Tensor:
        """The decoder's input embeddings (tokens, dim), read from its files."""
        found = self.files.tensor(EMBEDDINGS)
        if found is None:
            raise BundleError(f"the decoder {self.files} has no {EMBEDDINGS}: it is of another architecture")
        return found

    def token(self, text: str) -> Tensor:
        """Return the embedding (1, dim) of a special token. Raise BundleError if the decoder has no such token."""
        id = self.tokenizer.convert_tokens_to_ids(text)
        if id is None or id == self.tokenizer.unk_token_id or id >= len(self.vocabulary):
            raise BundleError(f"the decoder {self.files} has no token {text}: give the one it was trained with")
        return self.vocabulary[id : id + 1]

    def check_rows(self, what: str, published: Tensor) -> None:
        """Raise BundleError if the embeddings or the head (`what`) are not the first rows of the published ones."""
        rows, own = len(self.tokenizer), None if what == EMBEDDINGS else self.files.tensor(what)
        own = self.vocabulary if own is None else own  # a head may be tied to them
        if not torch.equal(published[:rows].float(), own[:rows].float()):
            raise BundleError(
                f"the checkpoint was not trained on the decoder {self.files}, whose {what} differs: give the right one "
                "with --decoder (decoder= in Python)"
            )

    def instruct_format(self, begin: str) -> str:
        """Return Mistral's chat format without a system role, with `begin` before a user's message.

        A space's token belongs before `begin`. The format adds it if the tokenizer's `spaces` are "first".
        """
        begin = f" {begin}" if self.spaces == "first" else begin
        return (
            "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '"
            + begin
            + "' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ message['content'] + "
            "eos_token }}{% else %}{{ raise_exception('no system role') }}{% endif %}{% endfor %}"
        )

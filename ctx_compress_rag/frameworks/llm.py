"""What the LLM classes of both frameworks share: one decoder, its scope, adapting it, and copies within the process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal, NoReturn, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, SecretStr, ValidationError

from ctx_compress_rag.adaptation import llm as serving
from ctx_compress_rag.adaptation.decoder import Adaptation, AdaptiveDecoder
from ctx_compress_rag.adaptation.demonstrations import Demonstration
from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.bundle.config import explain
from ctx_compress_rag.decoding.decoder import BATCH_SIZE, Sampling
from ctx_compress_rag.decoding.generation import given_options
from ctx_compress_rag.decoding.vllm import ServerDecoder
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.store import SoftContextStore
from ctx_compress_rag.store.marker import OnUnreadable, check_scope, scope

LOADING = ("device", "dtype", "device_map", "attn_implementation", "quantization_config")
"""Fields of the LLM classes that are options of `Bundle.from_pretrained`."""


class DecoderLLM(BaseModel):
    """The base of a framework's LLM class; comes before the framework's own base class, which documents the fields.

    The fields from `device` to `quantization_config` load the store's bundle a second time, for this LLM; without any
    of them, the store's own bundle answers.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    # Frozen: what the decoder is made with, which a later assignment would not change.
    store: SoftContextStore = Field(exclude=True, repr=False, frozen=True)
    max_tokens: int = Sampling.max_new_tokens
    temperature: float = Sampling.temperature
    top_p: float = Sampling.top_p
    top_k: int = Sampling.top_k
    stop: list[str] | None = None
    seed: int | None = None
    extractive: bool = False
    on_missing: Literal["error", "text"] = Field(default="error", frozen=True)
    on_unreadable: OnUnreadable = Field(default="error", frozen=True)
    scope: str | None = None
    predictor: str | Path | None = None
    batch_size: int = Field(default=BATCH_SIZE, ge=1, frozen=True)
    device: str | torch.device | None = Field(default=None, exclude=True, frozen=True)
    dtype: str | torch.dtype | None = Field(default=None, exclude=True, frozen=True)
    device_map: str | dict[str, Any] | None = Field(default=None, frozen=True)
    attn_implementation: str | None = Field(default=None, frozen=True)
    quantization_config: Any = Field(default=None, exclude=True, repr=False, frozen=True)
    server: str | None = Field(default=None, frozen=True)
    api_key: SecretStr | None = Field(default=None, exclude=True, frozen=True)
    timeout: float = Field(default=120.0, frozen=True)
    max_retries: int = Field(default=2, frozen=True)

    _decoder: AdaptiveDecoder | None = PrivateAttr(None)

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**given_options(fields))
        except ValidationError as error:
            raise ConfigError(f"{type(self).__name__}: {explain(error)}") from None
        if self.scope is not None:
            check_scope(self.scope)
        Sampling.of(self, {})  # impossible values are refused here, not at the first question

    def __getstate__(self) -> NoReturn:
        """Refuse to be pickled: the model and the store belong to this process."""
        raise ConfigError(f"{type(self).__name__} holds a model of this process: create it in the other process")

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """A copy with options of its own; the model and the store are shared."""
        return self.model_copy()

    @property
    def decoder(self) -> AdaptiveDecoder:
        """The decoder that answers."""
        if self._decoder is None:
            bundle = self.store.bundle
            if not isinstance(bundle, Bundle):
                raise ConfigError(f"bundle {bundle.config.name!r} has no decoder: open the store with a Bundle")
            if loading := self._loading:
                bundle = bundle.loaded_again(**loading)
            if self.server is None:
                self._decoder = AdaptiveDecoder(
                    bundle,
                    self.store,
                    on_missing=self.on_missing,
                    on_unreadable=self.on_unreadable,
                    batch_size=self.batch_size,
                )
            else:
                self._decoder = ServerDecoder(
                    bundle,
                    self.store,
                    server=self.server,
                    api_key=None if self.api_key is None else self.api_key.get_secret_value(),
                    timeout=self.timeout,
                    max_retries=self.max_retries,
                    on_missing=self.on_missing,
                    on_unreadable=self.on_unreadable,
                )
        return self._decoder

    @property
    def _loading(self) -> dict[str, Any]:
        """The options for loading the decoder that were given."""
        return {name: value for name in LOADING if (value := getattr(self, name)) is not None}

    def adapt(
        self,
        demonstrations: Sequence[Demonstration],
        adaptation: Adaptation | str | Path | None = None,
        ratio: int | None = None,
    ) -> Self:
        """An LLM that answers as the demonstrations do (RAG-GD); this one stays unchanged.

        All LLMs adapted from one share its weights in memory, and may be used side by side in threads.
        `ctx_compress_rag.adaptation.generate_together` answers with several of their `decoder`s in one batch.

        Args:
            demonstrations: solved examples: question, passages, answer.
            adaptation: a way to adapt, or the folder of an update predictor or a peft adapter; by default the
                LLM's own `predictor`.
            ratio: read the demonstrations' passages as soft contexts of the store with this many source tokens per
                slot (missing ones are compressed); None reads them as they are, texts or markers.

        Raises:
            ConfigError: there are no demonstrations, or no adaptation.
            BundleError: the folder holds nothing for this decoder.
        """
        chosen = adaptation or self.predictor
        if chosen is None:
            raise ConfigError(f"{type(self).__name__} has no predictor: give predictor=, or adapt() an adaptation")
        with self._in_scope():
            return self._with_decoder(serving.adapt(self.decoder, demonstrations, chosen, ratio))

    def with_adapter(self, folder: str | Path) -> Self:
        """An LLM with a saved peft adapter of this decoder's Q/K/V projections; this one stays unchanged.

        Raises:
            BundleError: the folder holds no adapter for this decoder.
        """
        return self._with_decoder(serving.with_adapter(self.decoder, folder))

    def save_adapter(self, folder: str | Path) -> None:
        """Write what `adapt` changed as an ordinary peft adapter, which `with_adapter` and other engines load.

        Raises:
            ConfigError: nothing was changed that an adapter can hold.
        """
        serving.save_adapter(self.decoder, folder)

    def _with_decoder(self, decoder: AdaptiveDecoder) -> Self:
        other = self.model_copy()
        other._decoder = decoder
        return other

    def _in_scope(self) -> AbstractContextManager[None]:
        return nullcontext() if self.scope is None else scope(self.scope)

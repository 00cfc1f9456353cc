"""A decoder in this process that adapts to demonstrations; adapted decoders share its weights."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ctx_compress_rag.adaptation.adapter import Adapter, applied
from ctx_compress_rag.adaptation.demonstrations import Demonstration
from ctx_compress_rag.decoding.change import UNCHANGED, Change
from ctx_compress_rag.decoding.decoder import TransformersDecoder
from ctx_compress_rag.decoding.generation import Generation, Sampling
from ctx_compress_rag.decoding.splice import in_batches
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.prompt import Prompt, PromptLike
from ctx_compress_rag.store.marker import Marker
from ctx_compress_rag.text.chat import answer_ids

_GREEDY = Sampling()


@dataclass(frozen=True, eq=False)
class Adapted(Change):
    """A change of the decoder's Q/K/V projections; None changes nothing."""

    adapter: Adapter | None = None

    @property
    def of_model(self) -> object:
        return None if self.adapter is None else id(self.adapter)

    def applied(self, model: Any) -> AbstractContextManager[None]:
        return applied(model, self.adapter)

    @cached_property
    def digest(self) -> str | None:
        """16 hex digits that identify the change; None if nothing is changed."""
        if self.adapter is None:
            return None
        found = hashlib.sha256(str(self.adapter.scale).encode())
        for factors in (self.adapter.a, self.adapter.b):
            for name, factor in sorted(factors.items()):
                found.update(f"{name} {tuple(factor.shape)}".encode())
                found.update(factor.detach().to("cpu", torch.float32).contiguous().numpy().tobytes())
        return found.hexdigest()[:16]


class Adaptation(ABC):
    """A way to make a decoder follow demonstrations. RAG-GD is one, and so are its baselines."""

    @abstractmethod
    def adapt(self, decoder: AdaptiveDecoder, demonstrations: Sequence[Demonstration]) -> Adapted:
        """The changes for these demonstrations; the decoder itself stays as it is."""


class AdaptiveDecoder(TransformersDecoder):
    """A TransformersDecoder that can adapt; the arguments are the same.

    >>> adapted = decoder.adapt(demonstrations, adaptation)     # doctest: +SKIP
    >>> adapted.generate(prompts)                               # doctest: +SKIP
    """

    @property
    def adapted(self) -> Adapted:
        """The changes of this decoder."""
        return self.change if isinstance(self.change, Adapted) else Adapted()

    def adapt(self, demonstrations: Sequence[Demonstration], adaptation: Adaptation) -> AdaptiveDecoder:
        """A decoder that answers as the demonstrations do. This decoder and its weights do not change.

        Both share the model; adapting an adapted decoder starts again from the original.

        Raises:
            ConfigError: there are no demonstrations, an answer is empty, or one is longer than the model's window.
        """
        if not demonstrations:
            raise ConfigError("there is nothing to adapt to: give one demonstration or more")
        return self.with_change(adaptation.adapt(self.with_change(Adapted()), demonstrations))

    @classmethod
    def of(cls, decoder: TransformersDecoder) -> AdaptiveDecoder:
        """The same decoder, unchanged, as one that can adapt; both share the model."""
        if isinstance(decoder, AdaptiveDecoder):
            return decoder
        decoder.with_change(UNCHANGED)  # refused if the model is not in this process
        return cls(
            decoder.bundle,
            decoder.store,
            on_unreadable=decoder.on_unreadable,
            batch_size=decoder.batch_size,
            max_prompt_tokens=decoder.max_prompt_tokens,
        )

    def fingerprint(self, ratio: int | None) -> str:
        """64 hex digits that identify what updates are made for: the bundle if passages are slots, else the decoder.

        Fine-tuning the decoder changes it, and so does a bundle that holds a copy of it in half precision, or a
        teacher, which reads its text.
        """
        return self.bundle.weights_digest if ratio is None else self.bundle.fingerprint

    def rows(self, demonstrations: Sequence[Demonstration]) -> list[Prompt]:
        """The demonstrations as this decoder reads them, with nothing adapted.

        Raises:
            ConfigError: an answer is empty, or a demonstration is longer than the model's window.
            MissingPassageError, PayloadError: a marker's slots cannot be read.
        """
        rows = []
        chats = [demonstration.chat() for demonstration in demonstrations]
        for number, (prompt, demonstration) in enumerate(zip(self.prepare(chats), demonstrations, strict=True)):
            row = prompt.then(self._answer_ids(demonstration.answer))
            window = self.bundle.backbone.window
            if window is not None and row.length > window:
                raise ConfigError(
                    f"demonstration {number} has {row.length} tokens, more than the model's window of {window}: "
                    "give it fewer or shorter passages"
                )
            rows.append(row)
        return rows

    def ratios(self, demonstration: Demonstration) -> set[int | None]:
        """The ratios of a demonstration's passages; None stands for text."""
        found: set[int | None] = {*self._ratios_in(demonstration.question)}
        for passage in filter(str.strip, demonstration.passages):
            found |= self._ratios_in(passage) or {None}
        return found

    def _ratios_in(self, text: str) -> set[int]:
        if self.store is None:
            return set()
        markers = [part for part in self._split(text, "text") if isinstance(part, Marker)]
        return {self.store.base_ratio * marker.factor for marker in markers}

    def _answer_ids(self, answer: str) -> Tensor:
        tokenizer = self.bundle.tokenizer
        if not answer.strip():
            raise ConfigError("a demonstration's answer is empty: give the answer as it should be")
        if tokenizer.eos_token_id is None:
            raise ConfigError("this decoder's tokenizer has no end token, which adapting needs: use another decoder")
        return torch.tensor([*answer_ids(tokenizer, answer), tokenizer.eos_token_id])


def generate_together(
    decoders: Sequence[TransformersDecoder], prompts: Sequence[PromptLike], sampling: Sampling = _GREEDY
) -> list[Generation]:
    """Answer each prompt with its own decoder, in shared batches: one forward pass for all prompts of a batch.

    Args:
        decoders: for each prompt the decoder that answers it; all adapted from one decoder.
        prompts: the prompts, as `generate` takes them.
        sampling: how tokens are chosen and when answers end.

    Raises:
        ConfigError: there is not one decoder for each prompt, or they were not adapted from one decoder.
    """
    if len(decoders) != len(prompts):
        raise ConfigError(f"{len(prompts)} prompts need as many decoders, got {len(decoders)}")
    if not decoders:
        return []
    first, *others = [AdaptiveDecoder.of(decoder) for decoder in decoders]
    if any(other.bundle is not first.bundle or other.store is not first.store for other in others):
        raise ConfigError("decoders that answer together must be adapted from one decoder")
    adapters = [decoder.adapted.adapter for decoder in (first, *others)]
    prepared = first.prepare(prompts, extractive=sampling.extractive)

    def run(batch: Sequence[int]) -> list[Generation]:
        adapter = Adapter.stack([adapters[i] for i in batch])
        return first.run([prepared[i] for i in batch], sampling, Adapted(adapter))

    return in_batches(prepared, first.batch_size, run)

"""A decoder in this process that adapts to demonstrations; several adapted ones share its weights."""

from __future__ import annotations

import copy
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ctx_compress_rag.adaptation.adapter import Adapter, applied
from ctx_compress_rag.adaptation.demonstrations import Demonstration, shots
from ctx_compress_rag.backbone import Backbone, load_decoder
from ctx_compress_rag.bundle import TEACHER, Bundle
from ctx_compress_rag.config import BundleConfig
from ctx_compress_rag.decoding.decoder import Prompt, TransformersDecoder
from ctx_compress_rag.decoding.generation import Generation, Sampling
from ctx_compress_rag.decoding.splice import Piece, Spliced, splice
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.gguf import GgufDecoder
from ctx_compress_rag.methods.base.config import TuneConfig
from ctx_compress_rag.methods.mean_pooling.config import MeanPoolingConfig
from ctx_compress_rag.text.prompt_tokenizer import answer_ids

if TYPE_CHECKING:
    from ctx_compress_rag.decoding.decoder import _Prepared

_GREEDY = Sampling()
_SAMPLED = 1024  # numbers of each weight


@dataclass(frozen=True, eq=False)
class Adapted:
    """What an adaptation changes: the decoder's Q/K/V projections, or its prompts.

    Attributes:
        adapter: what is added to the projections; None adds nothing.
        shots: demonstrations put before the question.
        prefix: (tokens, dim), vectors put before the prompt, in the decoder's embedding space.
    """

    adapter: Adapter | None = None
    shots: tuple[Demonstration, ...] = ()
    prefix: Tensor | None = None


class Adaptation(ABC):
    """A way to make a decoder follow demonstrations. RAG-GD is one, and so are its baselines."""

    @abstractmethod
    def adapt(self, decoder: AdaptiveDecoder, demonstrations: Sequence[Demonstration]) -> Adapted:
        """What to change after these demonstrations; the decoder itself stays as it is."""


@dataclass(frozen=True)
class Row:
    """A demonstration as the decoder reads it.

    Attributes:
        pieces: token ids and slots; the last tokens are the answer and the end token.
        answers: bool (length,), True on the answer and the end token.
    """

    pieces: list[Piece]
    answers: Tensor

    @property
    def soft(self) -> bool:
        """Whether it has slots."""
        return any(piece.is_floating_point() for piece in self.pieces)


class AdaptiveDecoder(TransformersDecoder):
    """A TransformersDecoder that can adapt; the arguments are the same.

    >>> adapted = decoder.adapt(demonstrations, adaptation)     # doctest: +SKIP
    >>> adapted.generate(prompts)                               # doctest: +SKIP

    Attributes:
        adapted: what is changed, nothing at first.
    """

    adapted = Adapted()

    def adapt(self, demonstrations: Sequence[Demonstration], adaptation: Adaptation) -> AdaptiveDecoder:
        """A decoder that answers as the demonstrations do. This one stays as it is, and so do its weights.

        Both share the model; adapting an adapted decoder starts from the original again.

        Raises:
            ConfigError: there are no demonstrations, or one is empty or longer than the model's window.
        """
        if not demonstrations:
            raise ConfigError("there is nothing to adapt to: give one demonstration or more")
        return self.with_adapted(adaptation.adapt(self.with_adapted(Adapted()), demonstrations))

    def with_adapted(self, adapted: Adapted) -> AdaptiveDecoder:
        """This decoder with other changes in place of its own."""
        other = copy.copy(self)
        other.adapted = adapted
        return other

    def fingerprint(self, ratio: int | None) -> str:
        """What updates are made for, with passages as slots the bundle, as text the decoder: 64 hex digits.

        Of the decoder that is a sample of each weight, in bfloat16: it is the same in every precision, and
        fine-tuning changes it.
        """
        if ratio is not None:
            return self.bundle.fingerprint
        digest = hashlib.sha256()
        for name, weight in self.bundle.backbone.model.named_parameters():
            if "lora_" not in name or f".{TEACHER}." in name:
                part = weight.detach().flatten()[:_SAMPLED].bfloat16().float().cpu()
                digest.update(f"{name.replace('.base_layer.', '.')} {tuple(weight.shape)}".encode())
                digest.update(part.numpy().tobytes())
        return digest.hexdigest()

    def rows(self, demonstrations: Sequence[Demonstration]) -> list[Row]:
        """The demonstrations as this decoder reads them, with nothing adapted.

        Raises:
            ConfigError: one is empty, or longer than the model's window.
            MissingPassageError, PayloadError: a marker's slots cannot be read.
        """
        rows = []
        prepared = super()._prepare([demonstration.chat() for demonstration in demonstrations])
        for number, (prompt, demonstration) in enumerate(zip(prepared, demonstrations, strict=True)):
            answer = self._answer_ids(demonstration.answer)
            length = prompt.length + len(answer)
            if self._window is not None and length > self._window:
                raise ConfigError(
                    f"demonstration {number} has {length} tokens, more than the model's window of {self._window}: "
                    "give it fewer or shorter passages"
                )
            flags = torch.zeros(length, dtype=torch.bool)
            flags[prompt.length :] = True
            rows.append(Row([*prompt.pieces, answer], flags))
        return rows

    def _answer_ids(self, answer: str) -> Tensor:
        tokenizer = self.bundle.tokenizer
        if not answer.strip():
            raise ConfigError("a demonstration's answer is empty: give the answer as it should be")
        if tokenizer.eos_token_id is None:
            raise ConfigError("this decoder's tokenizer has no end token, whose hidden state is what is adapted by")
        return torch.tensor([*answer_ids(tokenizer, answer), tokenizer.eos_token_id])

    def splice(self, rows: Sequence[Sequence[Piece]]) -> Spliced:
        """Rows of pieces as one batch, padded on the left."""
        return splice(self.bundle.backbone.embeddings, rows)

    def model_for(self, batch: Spliced, soft: bool) -> AbstractContextManager[Any]:
        """The transformers model as it reads slots, or plain text, held for this thread.

        Args:
            batch: what it is to read.
            soft: whether that has slots.
        """
        return self.bundle.soft_decoder(batch.slot_mask) if soft else self.bundle.text_decoder()

    def _prepare(self, prompts: Sequence[Prompt]) -> list[_Prepared]:
        return self._prepare_each(prompts, [self.adapted] * len(prompts))

    def _prepare_each(self, prompts: Sequence[Prompt], adapted: Sequence[Adapted]) -> list[_Prepared]:
        whole = [_with_shots(prompt, each.shots) for prompt, each in zip(prompts, adapted, strict=True)]
        prepared = super()._prepare(whole)
        for index, each in enumerate(adapted):
            if each.prefix is not None:
                prompt = prepared[index]
                longer = replace(prompt, pieces=[each.prefix, *prompt.pieces], length=prompt.length + len(each.prefix))
                self._check_length(index, longer)
                prepared[index] = longer
        return prepared

    def _as_changed(self) -> tuple[Bundle, object]:
        adapter = self.adapted.adapter
        return (self.bundle, None) if adapter is None else (_AdaptedBundle(self.bundle, adapter), id(adapter))

    def _run(
        self,
        prompts: Sequence[_Prepared],
        sampling: Sampling,
        on_text: Callable[[str], object] | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> list[Generation]:
        return self._run_with(self.adapted.adapter, prompts, sampling, on_text, cancelled)

    def _run_with(self, adapter: Adapter | None, prompts: Sequence[_Prepared], *rest: Any) -> list[Generation]:
        """One batch, its rows changed as the adapter says."""
        view = copy.copy(self)
        view.bundle = _AdaptedBundle(self.bundle, adapter)
        return TransformersDecoder._run(view, prompts, *rest)


def generate_together(
    decoders: Sequence[AdaptiveDecoder], prompts: Sequence[Prompt], sampling: Sampling = _GREEDY
) -> list[Generation]:
    """Answer each prompt with a decoder of its own, in common batches: one forward pass for all of them.

    Args:
        decoders: for each prompt the decoder that answers it; all adapted from one decoder.
        prompts: the prompts, as `generate` takes them.
        sampling: how tokens are chosen and when to end.

    Raises:
        ConfigError: there is not one decoder for each prompt, or they are of different bundles.
    """
    if len(decoders) != len(prompts):
        raise ConfigError(f"{len(prompts)} prompts need as many decoders, got {len(decoders)}")
    if not decoders:
        return []
    first = decoders[0]
    if any(decoder.bundle is not first.bundle or decoder.store is not first.store for decoder in decoders):
        raise ConfigError("decoders that answer together must be adapted from one decoder")
    prepared = first._prepare_each(prompts, [decoder.adapted for decoder in decoders])
    done: dict[int, Generation] = {}
    for soft in (False, True):
        group = [i for i, prompt in enumerate(prepared) if (prompt.slots > 0) is soft]
        group.sort(key=lambda i: prepared[i].length)
        for start in range(0, len(group), first.batch_size):
            batch = group[start : start + first.batch_size]
            adapter = Adapter.stack([decoders[i].adapted.adapter for i in batch])
            answers = first._run_with(adapter, [prepared[i] for i in batch], sampling)
            done.update(zip(batch, answers, strict=True))
    return [done[i] for i in range(len(prepared))]


def text_bundle(
    decoder: str | Path | GgufDecoder, revision: str | None = None, device: str | torch.device | None = None
) -> Bundle:
    """A bundle for a decoder that reads text alone: its compressor and reader are untrained and never asked.

    Args:
        decoder: a folder, hub id or GGUF file.
        revision: the decoder's revision on the hub.
        device: where to put it; None takes CUDA, MPS or the CPU, in that order.
    """
    model, tokenizer = load_decoder(decoder, revision, device)
    nothing = TuneConfig(mode="frozen")
    config = BundleConfig(
        name="text",
        method=MeanPoolingConfig(encoder=nothing, decoder=nothing, linear=False),
        decoder=decoder if isinstance(decoder, GgufDecoder) else str(decoder),
        revision=revision,
        base_ratio=4,
        ratios=[4],
        max_tokens=1024,
    )
    return Bundle.build(config, Backbone(model, tokenizer))


class _AdaptedBundle(Bundle):
    """A bundle's parts, shared, with an adapter on its decoder."""

    def __init__(self, bundle: Bundle, adapter: Adapter | None) -> None:
        vars(self).update(vars(bundle))
        self._adapter = adapter

    @contextmanager
    def soft_decoder(self, slot_mask: Tensor) -> Iterator[Any]:
        with super().soft_decoder(slot_mask) as model, applied(model, self._adapter):
            yield model

    @contextmanager
    def text_decoder(self) -> Iterator[Any]:
        with super().text_decoder() as model, applied(model, self._adapter):
            yield model


def _with_shots(prompt: Prompt, demonstrations: Sequence[Demonstration]) -> Prompt:
    if not demonstrations:
        return prompt
    if isinstance(prompt, str):
        raise ConfigError("demonstrations can stand before a chat only, and a prompt is a plain string")
    return [*shots(demonstrations), *prompt]

"""Demonstrations, and decoders adapted to them, which share the original's weights and put an adapter on top."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from ctx_compress_rag.adaptation.adapter import Adapter, apply_adapter
from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.bundle.plain_decoder import PlainDecoder
from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.decoding.engines.transformers import TransformersEngine
from ctx_compress_rag.errors import ConfigError, short_repr
from ctx_compress_rag.frameworks import DecoderLLM
from ctx_compress_rag.prompt import Prompt, Side
from ctx_compress_rag.text.chat import answer_ids
from ctx_compress_rag.text.templates import PASSAGE_SEPARATOR, TEMPLATES, question_messages

LLM = TypeVar("LLM", bound=DecoderLLM)


@dataclass(frozen=True)
class Demonstration:
    """A solved example of the task, (x, D, y) in the paper: a question, the texts retrieved for it, and its answer."""

    question: str
    passages: tuple[str, ...]
    answer: str

    def __post_init__(self) -> None:
        if isinstance(self.passages, str):  # a string is a sequence too, of one-letter passages
            raise ConfigError(
                f"a demonstration's passages are the string {short_repr(self.passages)}: give a tuple of strings"
            )

    def chat(self) -> list[dict[str, str]]:
        """Return the chat messages that ask the question about the passages, without the answer."""
        return question_messages(TEMPLATES[0], PASSAGE_SEPARATOR.join(self.passages), self.question)


class Adaptation(ABC):
    """A way to make a decoder answer as demonstrations do. RAG-GD is one, and its baselines are others."""

    @abstractmethod
    def adapt(self, decoder: Decoder, demonstrations: Sequence[Demonstration]) -> Adapter | None:
        """Return the adapter that these solved examples, one or more, call for; None leaves the decoder as it is.

        `decoder` has not been adapted, and stays as it is.
        """


def adapt(llm: LLM, demonstrations: Sequence[Demonstration], adaptation: Adaptation) -> LLM:
    """Return an LLM that answers as the demonstrations do (RAG-GD); `llm` stays unchanged.

    All LLMs adapted from one LLM share its weights in memory, and different threads may use them at the same time. The
    result's adapter is `result.decoder.bundle.adapter`, whose `save_pretrained` writes a peft adapter.

    Args:
        llm: an LLM of either framework. An LLM that is already adapted is adapted from its original again.
        demonstrations: solved examples: question, passages, answer.
        adaptation: a way to adapt, such as `PredictedUpdate.from_pretrained(folder, llm.decoder)`.

    Raises:
        ConfigError: there are no demonstrations; an answer is empty; a demonstration holds a marker or is longer than
            the model's window; or another engine than transformers runs the decoder.
    """
    if not demonstrations:
        raise ConfigError("there is nothing to adapt to: give one demonstration or more")
    return with_adapter(llm, adaptation.adapt(adapted_decoder(llm.decoder, None), demonstrations))


def with_adapter(llm: LLM, adapter: Adapter | None) -> LLM:
    """Return an LLM whose decoder has `adapter` in place of its own, or no adapter if None; `llm` stays unchanged.

    Raises ConfigError if another engine than transformers runs the decoder.
    """
    return llm.with_decoder(adapted_decoder(llm.decoder, adapter))


def adapted_decoder(decoder: Decoder, adapter: Adapter | None) -> Decoder:
    """Return a new decoder with `adapter` in place of its own, or no adapter if None. Both share the model.

    Raises ConfigError if another engine than transformers runs the decoder.
    """
    if not isinstance(decoder.engine, TransformersEngine):
        raise ConfigError(f"engine={decoder.engine.identity['engine']!r} cannot adapt: use the engine 'transformers'")
    bundle: PlainDecoder = decoder.bundle
    if isinstance(bundle, AdaptedDecoder | AdaptedBundle):
        bundle = bundle.original
    if adapter is not None:
        bundle = AdaptedBundle(bundle, adapter) if isinstance(bundle, Bundle) else AdaptedDecoder(bundle, adapter)
    return Decoder(
        bundle,
        decoder.store,
        on_unreadable=decoder.preparer.on_unreadable,
        max_prompt_tokens=decoder.preparer.max_prompt_tokens,
        batch_size=decoder.engine.batch_size,
    )


class AdaptedDecoder(PlainDecoder):
    """A decoder, `original`, that reads text with an adapter."""

    def __init__(self, original: PlainDecoder, adapter: Adapter) -> None:
        super().__init__(original.backbone, original.decoder_name, original.separator, original.answer_prefix)
        self.original = original
        self.adapter = adapter

    def text_decoder(self) -> AbstractContextManager[Any]:
        return open_adapted_model(self.original.text_decoder(), self.adapter)


class AdaptedBundle(Bundle):
    """A bundle, `original`, whose decoder reads text and slots with an adapter."""

    def __init__(self, original: Bundle, adapter: Adapter) -> None:
        super().__init__(original.config, original.backbone, original.compressor, original.reader, original.report)
        self.original = original
        self.adapter = adapter

    @property
    def fingerprint(self) -> str:
        """Return the original bundle's fingerprint, because the adapter does not change slots."""
        return self.original.fingerprint

    def text_decoder(self) -> AbstractContextManager[Any]:
        return open_adapted_model(self.original.text_decoder(), self.adapter)

    def soft_decoder(self, slot_mask: Tensor, side: Side = "reader") -> AbstractContextManager[Any]:
        return open_adapted_model(self.original.soft_decoder(slot_mask, side), self.adapter)


@contextmanager
def open_adapted_model(reading: AbstractContextManager[Any], adapter: Adapter | None) -> Iterator[Any]:
    """Yield the model that `reading` (a `text_decoder` or `soft_decoder`) gives, with `adapter` on it, if any."""
    with reading as model, apply_adapter(model, adapter):
        yield model


def demonstration_prompts(decoder: Decoder, demonstrations: Sequence[Demonstration]) -> list[Prompt]:
    """Return the demonstrations, with their answers, as prompts for the decoder. Raise ConfigError as `adapt` says."""
    tokenizer, window = decoder.bundle.tokenizer, decoder.bundle.backbone.window
    if tokenizer.eos_token_id is None:
        raise ConfigError("this decoder's tokenizer has no end token, which adapting needs: use another decoder")
    rows = []
    chats = [demonstration.chat() for demonstration in demonstrations]
    for number, (prompt, shown) in enumerate(zip(decoder.preparer.prepare(chats), demonstrations, strict=True)):
        if not shown.answer.strip():
            raise ConfigError(f"the answer of demonstration {number} is empty: give the answer as it should be")
        if prompt.side != "text":
            raise ConfigError(f"demonstration {number} holds markers: give the text that they stand for")
        row = prompt.then([*answer_ids(tokenizer, shown.answer), tokenizer.eos_token_id])
        if window is not None and row.length > window:
            raise ConfigError(
                f"demonstration {number} has {row.length} tokens, more than the model's window of {window}: "
                "give it fewer or shorter passages"
            )
        rows.append(row)
    return rows

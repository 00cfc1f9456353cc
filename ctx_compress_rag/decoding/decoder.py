"""A decoder in this process, run by transformers: prompts with markers in, text out."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.bundle.plain_decoder import PlainDecoder
from ctx_compress_rag.decoding.answering import Answering
from ctx_compress_rag.decoding.change import UNCHANGED, Change, opened
from ctx_compress_rag.decoding.generation import Generation, Put, Sampling
from ctx_compress_rag.decoding.sharing import Row, Sharing, memory_error
from ctx_compress_rag.decoding.splice import Spliced, in_batches, splice
from ctx_compress_rag.errors import (
    ConfigError,
    CtxCompressError,
    FingerprintMismatchError,
    MissingPassageError,
    PayloadError,
)
from ctx_compress_rag.models.transformers_internals import can_share
from ctx_compress_rag.prompt import Message, Prompt, PromptLike, PromptTemplate, Quotable
from ctx_compress_rag.store import SoftContextStore
from ctx_compress_rag.store.marker import Marker, OnUnreadable, check_on_unreadable
from ctx_compress_rag.store.passage import MAX_CHARACTERS
from ctx_compress_rag.strict import as_positive_int
from ctx_compress_rag.text.chat import PromptTokenizer, chat_text
from ctx_compress_rag.text.quoting import quotable
from ctx_compress_rag.text.templates import PASSAGE_SEPARATOR
from ctx_compress_rag.text.tokenizing import check_characters

__all__ = ["BATCH_SIZE", "Generation", "Message", "Sampling", "TransformersDecoder"]

logger = logging.getLogger(__name__)
T = TypeVar("T")
Pieces = SimpleQueue[str | Generation | BaseException]

_GREEDY = Sampling()
BATCH_SIZE = 8
"""Default for the most prompts in a forward pass."""


class TransformersDecoder:
    """Answers prompts with a bundle's decoder, which reads stored slots in place of markers.

    A prompt with markers is read by the decoder as the bundle's reader tuned it; a prompt without markers, by
    the decoder for plain text. Several threads may call it: concurrent calls share forward passes.

    Args:
        bundle: the bundle, or a decoder alone, which reads no markers.
        store: the store of the markers' passages; without one, markers are literal text.
        on_unreadable: what to do with a marker whose slots cannot be read (its key or scope is another one, it was
            changed, its passage is gone or damaged): "error" raises; "text" reads the passage's text if the store
            has it, else the marker as literal text, with a warning.
        batch_size: most prompts in one forward pass.
        max_prompt_tokens: longest prompt, in tokens and slots; None allows what fits the decoder's window.

    Raises:
        FingerprintMismatchError: the store was made with another bundle.
        ConfigError: an argument has an impossible value.

    Attributes:
        change: a change to the bundle's decoder, made by an adaptation; by default none.
    """

    change: Change = UNCHANGED

    def __init__(
        self,
        bundle: PlainDecoder,
        store: SoftContextStore | None = None,
        *,
        on_unreadable: OnUnreadable = "error",
        batch_size: int = BATCH_SIZE,
        max_prompt_tokens: int | None = None,
    ) -> None:
        check_on_unreadable(on_unreadable)
        if store is not None and bundle.fingerprint != store.fingerprint:
            raise FingerprintMismatchError(
                f"the store holds slots of bundle {store.fingerprint[:12]}, but this decoder belongs to bundle "
                f"{bundle.fingerprint[:12]}: load the store's bundle, or index again with this one"
            )
        self.bundle = bundle
        self.store = store
        self.on_unreadable = on_unreadable
        self.batch_size = as_positive_int("batch_size", batch_size)
        self.max_prompt_tokens = (
            None if max_prompt_tokens is None else as_positive_int("max_prompt_tokens", max_prompt_tokens)
        )
        self._tokenizer = PromptTokenizer(bundle.tokenizer)

    def with_change(self, change: Change) -> Self:
        """This decoder with another change in place of its own; both share the model."""
        other = copy.copy(self)
        other.change = change
        return other

    def generate(self, prompts: Sequence[PromptLike], sampling: Sampling = _GREEDY) -> list[Generation]:
        """Answer prompts, in order; some may have markers and others not.

        Args:
            prompts: raw prompts (strings, used as they are) or chats (lists of messages, put through
                the tokenizer's chat template). Control tokens in a chat's messages are read as text. In a raw prompt
                for a decoder with a chat template they keep their function: put text from others into chats.
            sampling: how tokens are chosen and when to end.

        Raises:
            ConfigError: a prompt is empty, malformed, or longer than the model's window.
            UnreadableMarkerError: a marker has another key or scope, and `on_unreadable` is "error".
            MissingPassageError: a marker's passage is not in the store, and `on_unreadable` is "error".
            PayloadError: a stored record is damaged, and the options allow no substitute for it.
            DecoderMemoryError: the device does not have enough memory; the decoder can still be used.
        """
        if not self._shares:
            prepared = self.prepare(prompts, extractive=sampling.extractive)
            return in_batches(prepared, self.batch_size, lambda batch: self.run([prepared[i] for i in batch], sampling))
        with Sharing.of(self.bundle.backbone).reading():
            prepared = self.prepare(prompts, extractive=sampling.extractive)
            queues = [Pieces() for _ in prepared]
            cancel = self.begin(prepared, sampling, [queue.put for queue in queues], stream=False)
        try:
            return [piece for queue in queues for piece in _received(queue) if isinstance(piece, Generation)]
        finally:
            cancel()

    @property
    def _shares(self) -> bool:
        """Whether a call waits for a thread that answers all callers; else its own thread runs the model."""
        return can_share(self.bundle.backbone.model) and not self.bundle.backbone.lock.held

    def generate_apart(self, prompt: PromptLike, sampling: Sampling = _GREEDY) -> Generation:
        """Answer one prompt with transformers' own `generate`, in unshared passes; raises as `generate`."""
        return self.run(self.prepare([prompt], extractive=sampling.extractive), sampling)[0]

    def stream(self, prompt: PromptLike, sampling: Sampling = _GREEDY) -> Iterator[str | Generation]:
        """Yield the answer to one prompt piece by piece, then the whole Generation.

        The joined pieces are the Generation's text. The prompt is checked and its passages are
        fetched before this returns; the model runs once iteration begins, in its own thread, so
        any thread may consume the iterator at any speed. Closing it (or leaving the loop and
        dropping it) ends the generation after the token in progress.

        Raises:
            ConfigError, MissingPassageError, PayloadError: as `generate`.
            DecoderMemoryError: during iteration, as `generate`.
            CtxCompressError: during iteration, if this thread itself holds the decoder.
        """
        with Sharing.of(self.bundle.backbone).reading():
            [prepared] = self.prepare([prompt], extractive=sampling.extractive)
        return self._pieces(prepared, sampling)

    def start(self, prompt: PromptLike, sampling: Sampling, put: Put) -> Callable[[], None]:
        """Answer one prompt in the background, for callers that cannot wait in a thread, such as a server.

        The prompt is checked and its passages are fetched before this returns.

        Args:
            prompt: as `stream` takes it.
            sampling: how tokens are chosen and when to end.
            put: called with each piece of text, then with the Generation or the error that ended it, from another
                thread, which it must not block.

        Returns: a function that ends the generation after the token in progress; `put` is then no longer called.

        Raises: as `stream` at the call.
        """
        with Sharing.of(self.bundle.backbone).reading():
            [prepared] = self.prepare([prompt], extractive=sampling.extractive)
            return self.begin([prepared], sampling, [put])

    def token_ids(self, text: str) -> list[int]:
        """Token ids of `text`, without a BOS; each slot is a padding token, which no text encodes to."""
        texts, markers = self._around_markers(self._split(text))
        first, *rest = (part.tolist() for part in self._tokenizer.encode([self._tokenizer.as_text(t) for t in texts]))
        ids: list[int] = first
        for marker, part in zip(markers, rest, strict=True):
            ids += [self.bundle.tokenizer.pad_token_id] * self.bundle.positions(marker.slots) + part
        return ids

    def count_chat_tokens(self, chat: Sequence[Message]) -> int:
        """Number of positions of a chat: the chat template's tokens, its text and its slots."""
        around = [self._around_markers(self._split(message["content"])) for message in chat]
        ids = self._chat_ids(chat, [texts for texts, _ in around])
        slots = sum(self.bundle.positions(marker.slots) for _, markers in around for marker in markers)
        return sum(map(len, ids)) + slots

    # From text to what the model reads

    def prepare(self, prompts: Sequence[PromptLike], *, extractive: bool = False) -> list[Prompt]:
        """Check and tokenize prompts, and insert their passages' slots.

        Args:
            prompts: as `generate` takes them.
            extractive: whether answers are extractive (`Sampling`), which also needs the passages' texts.

        Raises: as `generate`.
        """
        if not isinstance(prompts, Sequence) or isinstance(prompts, str | bytes):
            raise ConfigError(f"prompts is one {type(prompts).__name__}: give a list of prompts")
        contents = [self._contents(index, prompt) for index, prompt in enumerate(prompts)]
        split = [[self._split(text, self.on_unreadable) for text in texts] for texts in contents]
        markers = list(dict.fromkeys(p for texts in split for parts in texts for p in parts if isinstance(p, Marker)))
        soft, texts_of = self._read(markers)
        # Control tokens in a raw prompt come from the caller, but those in its passages are text.
        in_raw = {marker: self._tokenizer.apart(text) for marker, text in texts_of.items()}
        said = dict(texts_of)
        if extractive and self.store is not None:
            said |= self._found(self.store.bundle.compressor.text_of, list(soft), "some passages cannot be quoted")
        prepared = []
        for index, (prompt, messages) in enumerate(zip(prompts, split, strict=True)):
            shown = in_raw if isinstance(prompt, str) else texts_of
            read = [[shown.get(p, p) if isinstance(p, Marker) else p for p in parts] for parts in messages]
            # Before joining: a prompt may contain the marker of a long passage thousands of times.
            check_characters(
                f"prompt {index}", sum(len(p) for r in read for p in r if isinstance(p, str)), self._window
            )
            around = [self._around_markers(parts) for parts in read]
            texts = [texts for texts, _ in around]
            ids = self._raw_ids(texts[0]) if isinstance(prompt, str) else self._chat_ids(prompt, texts)
            slots = [soft[marker] for _, markers in around for marker in markers]
            made = PromptTemplate.without_answers(ids).fill(slots)
            self._check_length(index, made)
            if extractive:
                made = replace(made, quotable=self._quotable(index, messages, said))
            prepared.append(made)
        return prepared

    def _contents(self, index: int, prompt: PromptLike) -> list[str]:
        """A raw prompt, or the contents of a chat's messages.

        Raises:
            ConfigError: the prompt is malformed, empty, or too long, as its characters already show.
        """
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if not isinstance(messages, Iterable):
            raise ConfigError(f"prompt {index} is a {type(prompt).__name__}: give a string or a list of messages")
        contents = []
        for message in messages:
            match message:
                case {"role": str(), "content": str(content)}:
                    contents.append(content)
                case _:
                    raise ConfigError(
                        f"prompt {index}: a message needs a role and a content, both strings, got {message!r}"
                    )
        if not contents or not contents[-1].strip():
            raise ConfigError(f"prompt {index} is empty: its last message must ask something")
        check_characters(f"prompt {index}", sum(map(len, contents)), self._window)
        if self._window is not None and len(contents) > self._window:  # each takes at least one token
            raise ConfigError(
                f"prompt {index} has {len(contents)} messages, more than the model's window of {self._window} tokens: "
                "leave old ones out"
            )
        return contents

    def _raw_ids(self, texts: Sequence[str]) -> list[Tensor]:
        """Token ids of a raw prompt around its holes, from the `texts` around them.

        If the decoder has a chat format, the caller wrote the prompt in that format; otherwise it is all text.
        """
        bos = self.bundle.tokenizer.bos_token or ""
        begun = bool(bos) and texts[0].startswith(bos)
        if not self.bundle.tokenizer.chat_template:
            lead = bos if begun else ""
            first, *rest = [texts[0].removeprefix(lead), *texts[1:]]
            texts = [lead + self._tokenizer.as_text(first), *map(self._tokenizer.as_text, rest)]
        return self._tokenizer.encode(texts, add_special_tokens=not begun)

    def _chat_ids(self, chat: Sequence[Message], texts: Sequence[Sequence[str]]) -> list[Tensor]:
        """Token ids of a chat around its holes, from the `texts` around the holes of each message."""
        hole = self._tokenizer.hole
        contents = [hole.join(map(self._tokenizer.as_text, parts)) for parts in texts]
        whole = [{"role": message["role"], "content": text} for message, text in zip(chat, contents, strict=True)]
        asked = chat_text(self.bundle.tokenizer, whole)
        if any(len(parts) > 1 for parts in texts):
            asked += self.bundle.answer_prefix
        return self._tokenizer.encode(asked.split(hole))

    def _around_markers(self, parts: Sequence[str | Marker]) -> tuple[list[str], list[Marker]]:
        """The texts before, between and after the markers (one more than the markers), and the markers.

        Between two markers, the separator that everyone writes becomes the bundle's.
        """
        texts, markers = [""], []
        for part in parts:
            if isinstance(part, Marker):
                markers.append(part)
                texts.append("")
            else:
                texts[-1] += part
        for place in range(1, len(markers)):
            if texts[place] == PASSAGE_SEPARATOR:
                texts[place] = self.bundle.separator
        return texts, markers

    def _split(self, text: str, on_unreadable: OnUnreadable = "text") -> list[str | Marker]:
        return [text] if self.store is None else self.store.split(text, None, on_unreadable)

    def _read(self, markers: Sequence[Marker]) -> tuple[dict[Marker, Tensor], dict[Marker, str]]:
        """What each marker stands for: slots in the decoder's embedding space, or text where there are none."""
        if self.store is None:
            return {}, {}
        bundle = cast(Bundle, self.bundle)  # only a bundle has a store
        reading = self.store.bundle.compressor
        slots = self._found(reading.fetch, markers, "some slots cannot be read, so texts are used where possible")
        lost = [marker for marker in markers if marker not in slots]
        texts = self._found(reading.text_of, lost, "some passages cannot be read at all")
        return {m: bundle.embed(soft) for m, soft in slots.items()}, {m: texts.get(m, m.text) for m in lost}

    def _found(
        self, read: Callable[[SoftContextStore, Sequence[Marker]], list[T]], markers: Sequence[Marker], said: str
    ) -> dict[Marker, T]:
        """What the store has for markers, in one call unless something is missing.

        What is missing or damaged raises the store's error, or is left out with a warning, as the options say.
        """
        if self.store is None or not markers:
            return {}
        try:
            return dict(zip(markers, read(self.store, markers), strict=True))
        except (MissingPassageError, PayloadError) as error:
            if self.on_unreadable == "error":
                raise
            logger.warning("%s: %s", said, error)
        found: dict[Marker, T] = {}
        for marker in markers:
            with suppress(MissingPassageError, PayloadError):
                [found[marker]] = read(self.store, [marker])
        return found

    def _quotable(self, index: int, messages: Sequence[Sequence[str | Marker]], said: Mapping[Marker, str]) -> Quotable:
        texts = dict.fromkeys(said.get(p, "") if isinstance(p, Marker) else p for parts in messages for p in parts)
        if (length := sum(map(len, texts))) > MAX_CHARACTERS:
            raise ConfigError(
                f"prompt {index} and its passages have {length:,} characters, but an extractive answer quotes from "
                f"{MAX_CHARACTERS:,} at most: use fewer passages"
            )
        return quotable(texts, self.bundle.tokenizer)

    @property
    def _window(self) -> int | None:
        return self.bundle.backbone.window

    def _check_length(self, index: int, prompt: Prompt) -> None:
        most, window = self.max_prompt_tokens, self._window
        if most is not None and prompt.length > most:
            reason = f"at most {most} are allowed here"
        elif window is not None and prompt.length >= window:
            reason = f"the model's window of {window} must hold an answer too"
        else:
            return
        raise ConfigError(
            f"prompt {index} has {prompt.length} tokens ({prompt.slots} of them slots), but {reason}: use a coarser "
            "ratio, fewer passages or a shorter prompt"
        )

    # From there to text

    def run(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        change: Change | None = None,
        on_text: Callable[[str], object] | None = None,
        canceled: Callable[[], bool] = lambda: False,
    ) -> list[Generation]:
        """Answer one batch, either all soft or all plain text, in unshared passes.

        Args:
            prompts: prompts from `prepare`.
            sampling: how tokens are chosen and when to end.
            change: the change to the model; None means this decoder's own change.
            on_text: called with each new piece of the first prompt's answer.
            canceled: called at every token; True ends all answers.

        Returns: an answer to each prompt; no answers if canceled.

        Raises:
            DecoderMemoryError: as `generate`.
        """
        try:
            batch = splice(self.bundle.backbone.embeddings, prompts)
            with torch.no_grad(), opened(self.bundle, prompts[0].soft, batch.slot_mask, change or self.change) as model:
                if canceled():
                    return []
                tokenizer = self.bundle.tokenizer
                answering = Answering(model, tokenizer, sampling, prompts, self._window, on_text, canceled)
                _generate(model, batch, answering, tokenizer.pad_token_id)
                return [answer for answer in answering.done if answer is not None]
        except (RuntimeError, MemoryError) as error:
            short = memory_error(error, prompts)
            if short is None:
                raise
        raise short

    def begin(
        self, prompts: Sequence[Prompt], sampling: Sampling, puts: Sequence[Put], stream: bool = True
    ) -> Callable[[], None]:
        """Like `start`, for prompts from `prepare`, each with a `put` of its own.

        Args:
            prompts: the prompts.
            sampling: how tokens are chosen and when to end.
            puts: as `start` calls it.
            stream: whether they are called with pieces of text.
        """
        # The lock belongs to the thread that takes it, and a consumer may pause forever or come from
        # a different thread each time: so a worker runs the model, and never waits for the consumer.
        canceled = threading.Event()
        asked = list(zip(prompts, puts, strict=True))
        if can_share(self.bundle.backbone.model):
            Sharing.of(self.bundle.backbone).add(
                [
                    Row(self.bundle, prompt, self.change, sampling, put, self.batch_size, stream, canceled)
                    for prompt, put in asked
                ]
            )
            return canceled.set

        def run() -> None:
            for prompt, put in asked:
                try:
                    for generation in self.run([prompt], sampling, None, put, canceled.is_set):
                        put(generation)
                except BaseException as error:
                    put(error)

        threading.Thread(target=run, name="ctx-compress-stream").start()
        return canceled.set

    def _pieces(self, prompt: Prompt, sampling: Sampling) -> Iterator[str | Generation]:
        if self.bundle.backbone.lock.held:
            raise CtxCompressError(
                "this thread holds the decoder, for example in soft_decoder(): stream outside that context"
            )
        queue = Pieces()
        cancel = self.begin([prompt], sampling, [queue.put])
        try:
            yield from _received(queue)
        finally:
            cancel()


def _generate(model: Any, batch: Spliced, answering: Answering, pad: int) -> None:
    """Answer a batch with transformers' own `generate`."""
    # It would fill what is not given here with the model's own settings, which are among the processors.
    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        model.generate(
            # It counts positions from the mask: before transformers 5.2, given position ids would not advance.
            inputs_embeds=batch.inputs_embeds,
            attention_mask=batch.attention_mask,
            generation_config=GenerationConfig(
                max_new_tokens=max(answering.limits),
                do_sample=False,  # for sampling, the processors make the likeliest token a sample
                num_beams=1,
                eos_token_id=sorted(answering.end_ids) or None,
                pad_token_id=pad,
            ),
            logits_processor=answering.processors,
            stopping_criteria=StoppingCriteriaList([answering]),
        )
    finally:
        model.generation_config = own


def _received(queue: Pieces) -> Iterator[str | Generation]:
    """An answer piece by piece, as another thread puts them; raises the error that ended it."""
    while isinstance(piece := queue.get(), str):
        yield piece
    if isinstance(piece, BaseException):
        raise piece
    yield piece

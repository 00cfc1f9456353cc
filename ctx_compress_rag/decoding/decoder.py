"""A decoder in this process, on transformers: prompts with markers in, text out."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Literal

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList

from ctx_compress_rag.bundle import Bundle
from ctx_compress_rag.decoding.generation import Generation, Sampling, TextWatch, sampler
from ctx_compress_rag.decoding.splice import splice
from ctx_compress_rag.errors import (
    ConfigError,
    CtxCompressError,
    DecoderMemoryError,
    FingerprintMismatchError,
    MissingPassageError,
    PayloadError,
)
from ctx_compress_rag.soft_context import SoftContext
from ctx_compress_rag.stores import SoftContextStore
from ctx_compress_rag.stores.markers import Marker
from ctx_compress_rag.text.prompt_tokenizer import PromptTokenizer, chat_text

__all__ = ["Generation", "Message", "Sampling", "TransformersDecoder"]

logger = logging.getLogger(__name__)

Message = Mapping[str, str]
"""A chat message: `role` ("system", "user" or "assistant") and `content`, which may hold markers."""

Prompt = str | Sequence[Message]

_GREEDY = Sampling()


@dataclass(frozen=True)
class _Prepared:
    """A prompt as pieces of token ids (int64) and slots (float, in the decoder's embedding space).

    `soft` where it had a marker, perhaps one of no slots: the reader's decoder is to read it.
    """

    pieces: list[Tensor]
    length: int
    slots: int
    soft: bool


class TransformersDecoder:
    """Answers prompts with a bundle's decoder, reading stored slots where the prompt has markers.

    A prompt with markers is read by the decoder as the bundle's reader tuned it; one without by the
    decoder for plain text. May be called from several threads; the model serves one at a time.

    Args:
        bundle: the bundle.
        store: where markers' passages are; without one, markers are literal text.
        on_missing: what to do where a marker's slots cannot be read: "error", or "text" for the
            passage's own text. A passage that is not in the store at all has none, and is an error.
        batch_size: most prompts in one forward pass.
        max_prompt_tokens: longest prompt, in tokens and slots; None for what the decoder's window allows.

    Raises:
        FingerprintMismatchError: the store was made with another bundle.
        ConfigError: an argument has an impossible value.
    """

    def __init__(
        self,
        bundle: Bundle,
        store: SoftContextStore | None = None,
        *,
        on_missing: Literal["error", "text"] = "error",
        batch_size: int = 8,
        max_prompt_tokens: int | None = None,
    ) -> None:
        if on_missing not in ("error", "text"):
            raise ConfigError(f"on_missing={on_missing!r}: choose 'error' or 'text'")
        if batch_size < 1:
            raise ConfigError(f"batch_size={batch_size}: give 1 or more")
        if max_prompt_tokens is not None and max_prompt_tokens < 1:
            raise ConfigError(f"max_prompt_tokens={max_prompt_tokens}: give 1 or more")
        if store is not None and store.fingerprint != bundle.fingerprint:
            raise FingerprintMismatchError(
                f"the store holds slots of bundle {store.fingerprint[:12]}, this decoder is of bundle "
                f"{bundle.fingerprint[:12]}: load the store's bundle, or index again with this one"
            )
        self.bundle = bundle
        self.store = store
        self.on_missing = on_missing
        self.batch_size = batch_size
        self.max_prompt_tokens = max_prompt_tokens
        self._tokenizer = PromptTokenizer(bundle.tokenizer)

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling = _GREEDY) -> list[Generation]:
        """Answer prompts, in order; ones with and without markers may be mixed.

        Args:
            prompts: raw prompts (strings, used as they are) or chats (lists of messages, put through
                the tokenizer's chat template).
            sampling: how tokens are chosen and when to end.

        Raises:
            ConfigError: a prompt is empty, malformed, or longer than the model's window.
            MissingPassageError: a marker's passage is not in the store.
            PayloadError: a stored record is damaged (and `on_missing` is not "text").
            DecoderMemoryError: the device has not enough memory; the decoder can be asked again.
        """
        prepared = self._prepare(prompts)
        done: dict[int, Generation] = {}
        for soft in (False, True):
            # Neighbours of like length, so that little of a batch is padding.
            group = [i for i, prompt in enumerate(prepared) if prompt.soft is soft]
            group.sort(key=lambda i: prepared[i].length)
            for start in range(0, len(group), self.batch_size):
                batch = group[start : start + self.batch_size]
                done.update(zip(batch, self._run([prepared[i] for i in batch], sampling), strict=True))
        return [done[i] for i in range(len(prepared))]

    def stream(self, prompt: Prompt, sampling: Sampling = _GREEDY) -> Iterator[str | Generation]:
        """Answer one prompt piece by piece, then give the whole Generation.

        The pieces joined are the Generation's text. The prompt is checked and its passages are
        fetched before this returns; the model runs once iteration begins, in a thread of its own, so
        the iterator may be consumed by any thread at any speed. Closing it (or leaving the loop and
        dropping it) ends the generation after the token in progress.

        Raises:
            ConfigError, MissingPassageError, PayloadError: as `generate`.
            DecoderMemoryError: at iteration, as `generate`.
            CtxCompressError: at iteration, when this thread holds the decoder itself.
        """
        [prepared] = self._prepare([prompt])
        return self._pieces(prepared, sampling)

    def start(
        self, prompt: Prompt, sampling: Sampling, put: Callable[[str | Generation | BaseException], object]
    ) -> Callable[[], None]:
        """Answer one prompt in the background, for callers that cannot wait in a thread, such as a server.

        The prompt is checked and its passages are fetched before this returns.

        Args:
            prompt: as `stream` takes it.
            sampling: how tokens are chosen and when to end.
            put: is given each piece of text, then the Generation, or the error that ended it; from another
                thread, which it must not keep waiting.

        Returns: what ends the generation after the token in progress; nothing more is put then.

        Raises: as `stream` at the call.
        """
        [prepared] = self._prepare([prompt])
        return self._start(prepared, sampling, put)

    def pieces(self, prompts: Sequence[Prompt]) -> list[list[Tensor]]:
        """What the model is given for prompts: token ids (int64) and slots (float, in its embedding space), in order.

        Raises: as `generate`.
        """
        return [prompt.pieces for prompt in self._prepare(prompts)]

    def count_tokens(self, text: str) -> int:
        """Tokens of `text`, no BOS added; a valid marker counts as its slots."""
        return len(self.token_ids(text))

    def token_ids(self, text: str) -> list[int]:
        """Token ids of `text`, no BOS added; the padding token stands for each slot of a valid marker."""
        texts, markers = _around_markers(self._split(text))
        first, *rest = (part.tolist() for part in self._tokenizer.encode(texts))
        ids: list[int] = first
        for marker, part in zip(markers, rest, strict=True):
            ids += [self.bundle.tokenizer.pad_token_id] * marker.slots + part
        return ids

    # From prompts to pieces

    def _prepare(self, prompts: Sequence[Prompt]) -> list[_Prepared]:
        if isinstance(prompts, str):
            raise ConfigError("prompts is one string: give a list of prompts")
        rendered = [self._render(index, prompt) for index, prompt in enumerate(prompts)]
        split = [self._split(text) for text, _ in rendered]
        contexts = self._contexts(list(dict.fromkeys(p for parts in split for p in parts if isinstance(p, Marker))))
        embedded = {m: self._embed(c) for m, c in contexts.items() if isinstance(c, SoftContext)}
        texts_of = {m: c for m, c in contexts.items() if isinstance(c, str)}
        prepared = []
        for index, (parts, (_, add_bos)) in enumerate(zip(split, rendered, strict=True)):
            texts, markers = _around_markers([texts_of.get(p, p) if isinstance(p, Marker) else p for p in parts])
            ids = self._tokenizer.encode(texts, add_special_tokens=add_bos)
            slots = [embedded[marker] for marker in markers]
            pieces = [piece for pair in zip(ids, slots, strict=False) for piece in pair] + [ids[-1]]
            prompt = _Prepared(pieces, sum(len(p) for p in pieces), sum(len(s) for s in slots), bool(markers))
            self._check_length(index, prompt)
            prepared.append(prompt)
        return prepared

    def _render(self, index: int, prompt: Prompt) -> tuple[str, bool]:
        """The prompt's text, and whether the tokenizer is to add its BOS."""
        if isinstance(prompt, str):
            if not prompt.strip():
                raise ConfigError(f"prompt {index} is empty: ask something")
            bos = self.bundle.tokenizer.bos_token
            return prompt, not (bos and prompt.startswith(bos))
        for message in prompt:
            fields = (message.get("role"), message.get("content")) if isinstance(message, Mapping) else (None,)
            if not all(isinstance(field, str) for field in fields):
                raise ConfigError(f"prompt {index}: a message needs a role and a content, two strings, got {message!r}")
        if not prompt or not prompt[-1]["content"].strip():
            raise ConfigError(f"prompt {index} is empty: its last message must ask something")
        return chat_text(self.bundle.tokenizer, prompt), False

    def _split(self, text: str) -> list[str | Marker]:
        return [text] if self.store is None else self.store.split(text)

    def _contexts(self, markers: Sequence[Marker]) -> dict[Marker, SoftContext | str]:
        """What each marker stands for: one call to the store, unless something is missing."""
        if self.store is None or not markers:
            return {}
        try:
            return dict(zip(markers, self.store.fetch(markers), strict=True))
        except (MissingPassageError, PayloadError) as error:
            if self.on_missing == "error":
                raise
            logger.warning("some slots cannot be read, their passages' texts are used: %s", error)
        return {marker: self._context_or_text(self.store, marker) for marker in markers}

    @staticmethod
    def _context_or_text(store: SoftContextStore, marker: Marker) -> SoftContext | str:
        try:
            return store.fetch([marker])[0]
        except PayloadError:
            return store.text_of([marker])[0]

    def _embed(self, soft: SoftContext) -> Tensor:
        return self.bundle.embed(soft).to(self.bundle.backbone.embeddings.weight.dtype)

    @property
    def _window(self) -> int | None:
        config = self.bundle.backbone.model.config.get_text_config()
        window: int | None = getattr(config, "max_position_embeddings", None)
        return window

    def _check_length(self, index: int, prompt: _Prepared) -> None:
        if self.max_prompt_tokens is not None and prompt.length > self.max_prompt_tokens:
            raise ConfigError(
                f"prompt {index} has {prompt.length} tokens ({prompt.slots} of them slots) and "
                f"{self.max_prompt_tokens} are allowed here: use a coarser ratio, fewer passages or a shorter prompt"
            )
        if self._window is not None and prompt.length >= self._window:
            raise ConfigError(
                f"prompt {index} has {prompt.length} tokens ({prompt.slots} of them slots) and the model's window of "
                f"{self._window} must hold an answer too: use a coarser ratio, fewer passages or a shorter prompt"
            )

    # From pieces to text

    def _run(
        self,
        prompts: Sequence[_Prepared],
        sampling: Sampling,
        on_text: Callable[[str], object] | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> list[Generation]:
        """One batch, with or without slots; empty when cancelled."""
        try:
            return self._generated(prompts, sampling, on_text, cancelled)
        except (RuntimeError, MemoryError) as error:
            if not _out_of_memory(error):
                raise
            said = str(error).partition("\n")[0]
        # Raised out here: as its cause, the error would keep the frames and with them the memory they hold.
        raise DecoderMemoryError(
            f"not enough memory for a batch of {len(prompts)} prompts, the longest of {max(p.length for p in prompts)} "
            f"tokens, and {sampling.max_new_tokens} more ({said}): use a coarser ratio, fewer passages, a shorter "
            "answer or a smaller batch_size"
        )

    def _generated(
        self,
        prompts: Sequence[_Prepared],
        sampling: Sampling,
        on_text: Callable[[str], object] | None,
        cancelled: Callable[[], bool],
    ) -> list[Generation]:
        backbone = self.bundle.backbone
        limits = [min(sampling.max_new_tokens, (self._window or 1 << 62) - p.length) for p in prompts]
        batch = splice(backbone.embeddings, [p.pieces for p in prompts])
        decoder = self.bundle.soft_decoder(batch.slot_mask) if prompts[0].soft else self.bundle.text_decoder()
        with torch.no_grad(), decoder as model:
            if cancelled():
                return []
            end_ids = self._end_ids(model.generation_config.eos_token_id, sampling.stop)
            watch = TextWatch(backbone.tokenizer, sampling.stop, end_ids, limits, on_text, cancelled)
            model.generate(
                # Positions it counts itself, from the mask: before transformers 5.2 given ones do not advance.
                inputs_embeds=batch.inputs_embeds,
                attention_mask=batch.attention_mask,
                generation_config=GenerationConfig(
                    max_new_tokens=max(limits),
                    do_sample=False,  # where it is to sample, the processors make the likeliest token a sample
                    num_beams=1,
                    eos_token_id=sorted(end_ids) or None,
                    pad_token_id=backbone.tokenizer.pad_token_id,
                ),
                logits_processor=sampler(sampling, len(prompts)),
                stopping_criteria=StoppingCriteriaList([watch]),
            )
        rows = zip(prompts, watch.done, strict=True)
        return [Generation(row[0], prompt.length, prompt.slots, *row[1:]) for prompt, row in rows if row]

    def _end_ids(self, model_ids: int | list[int] | None, stop: Sequence[str]) -> set[int]:
        """The model's and the tokenizer's end tokens, and stop strings that are special tokens: no text shows those."""
        tokenizer = self.bundle.tokenizer
        ids = {tokenizer.eos_token_id, *(model_ids if isinstance(model_ids, list) else [model_ids])}
        special = tokenizer.get_added_vocab()
        return {i for i in ids if i is not None} | {special[s] for s in stop if s in special}

    def _start(
        self, prompt: _Prepared, sampling: Sampling, put: Callable[[str | Generation | BaseException], object]
    ) -> Callable[[], None]:
        # The lock belongs to the thread that takes it, and a consumer may pause for ever or come from
        # another thread each time: so a worker runs the model, and never waits for the consumer.
        cancelled = threading.Event()

        def run() -> None:
            try:
                done = self._run([prompt], sampling, put, cancelled.is_set)
            except BaseException as error:
                put(error)
            else:
                for generation in done:
                    put(generation)

        threading.Thread(target=run, name="ctx-compress-stream").start()
        return cancelled.set

    def _pieces(self, prompt: _Prepared, sampling: Sampling) -> Iterator[str | Generation]:
        if self.bundle.backbone.held:
            raise CtxCompressError(
                "this thread holds the decoder, inside soft_decoder() or the like: stream outside it"
            )
        queue: SimpleQueue[str | Generation | BaseException] = SimpleQueue()
        cancel = self._start(prompt, sampling, queue.put)
        try:
            while isinstance(piece := queue.get(), str):
                yield piece
            if isinstance(piece, BaseException):
                raise piece
            yield piece
        finally:
            cancel()


def _out_of_memory(error: Exception) -> bool:
    # torch's CPU allocator and MPS raise a plain RuntimeError.
    said = str(error)
    return (
        isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in said or "out of memory" in said
    )


def _around_markers(parts: Sequence[str | Marker]) -> tuple[list[str], list[Marker]]:
    """The texts before, between and after the markers (one more than those), and the markers."""
    texts, markers = [""], []
    for part in parts:
        if isinstance(part, Marker):
            markers.append(part)
            texts.append("")
        else:
            texts[-1] += part
    return texts, markers

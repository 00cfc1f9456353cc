"""Unfinished answers: rows that share forward passes, join while others run, and leave when they end."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessorList

from ctx_compress_rag.bundle.decoder import Decoder
from ctx_compress_rag.decoding.change import Change, opened
from ctx_compress_rag.decoding.generation import Generation, Put, Sampling, TextWatch, end_ids, processors
from ctx_compress_rag.decoding.logprobs import Recorder
from ctx_compress_rag.decoding.splice import splice
from ctx_compress_rag.prompt import Prompt
from ctx_compress_rag.store.marker import current_scope

logger = logging.getLogger(__name__)

_KEPT_BY_POSITION = {"full_attention", "sliding_attention"}


@dataclass(eq=False)
class Row:
    """A prompt and its answer so far.

    Attributes:
        bundle: the bundle or decoder that answers.
        prompt: the prompt.
        change: the change to the decoder.
        sampling: how tokens are chosen and when to end.
        put: gets the answer.
        stream: whether `put` also gets pieces of text.
        cancelled: whether the answer is no longer wanted.
        scope: the tenant or user of `stores.markers.scope` who asked; scopes take turns.
    """

    bundle: Decoder
    prompt: Prompt
    change: Change
    sampling: Sampling
    put: Put
    stream: bool = False
    cancelled: bool = False
    scope: str | None = field(default_factory=current_scope)
    ids: list[int] = field(default_factory=list)
    _watch: TextWatch | None = None
    _processors: LogitsProcessorList | None = None

    def prepare(self, model: Any) -> None:
        """Make the row's logits processors and its watch.

        Raises:
            ConfigError: its JSON schema cannot be enforced.
        """
        tokenizer, config = self.bundle.tokenizer, model.generation_config
        ends = end_ids(tokenizer, config.eos_token_id, self.sampling.stop)
        limit = self.sampling.room(self.prompt.length, self.bundle.backbone.window)
        recorder = Recorder(tokenizer, self.sampling.top_logprobs, 1) if self.sampling.logprobs else None
        self._processors = processors(self.sampling, model, tokenizer, ends, [self.prompt], [limit], recorder)
        put = self.put if self.stream else None
        self._watch = TextWatch(tokenizer, self.sampling.stop, ends, [limit], put, recorder=recorder)

    def take(self, scores: Tensor, likeliest: int) -> Generation | None:
        """Take the next token; returns the answer if the token ends it.

        Args:
            scores: (vocabulary,).
            likeliest: its argmax.
        """
        assert self._watch is not None and self._processors is not None
        if self._processors:
            so_far: Any = torch.tensor([self.ids], dtype=torch.long, device=scores.device)
            own: Any = scores.float().unsqueeze(0)
            likeliest = int(self._processors(so_far, own)[0].argmax())
        self.ids.append(likeliest)
        self._watch.look(0, self.ids)
        done = self._watch.done[0]
        return None if done is None else Generation(done[0], self.prompt.length, self.prompt.slots, *done[1:])

    def give(self, answer: Generation | BaseException) -> None:
        """Call `put` with the answer or error. Errors from the caller's `put` are logged and stop no other row."""
        try:
            self.put(answer)
        except Exception:
            logger.exception("a caller's `put` failed")

    def opened(self, slot_mask: Tensor) -> AbstractContextManager[Any]:
        """A context manager that locks the transformers model for this thread, set up to read this row."""
        return opened(self.bundle, self.prompt.soft, slot_mask, self.change)


def can_share(model: Any) -> bool:
    """Whether a model's cache holds keys and values by position, so that rows can join and leave."""
    config = model.config.get_text_config()
    types = set(getattr(config, "layer_types", None) or ())
    shared = getattr(config, "num_kv_shared_layers", None)
    return types <= _KEPT_BY_POSITION and not shared and not getattr(model, "_is_stateful", False)


class Rows:
    """Rows of one decoder that share a cache: every pass gives each row a token."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._ended: list[tuple[Row, Generation | Exception]] = []
        self._cache: Any = None
        self._mask = torch.zeros(0, 0, dtype=torch.long)

    def join(self, new: Sequence[Row]) -> None:
        """Read prompts and give each its first token; rows that have not ended continue with the others.

        Raises: whatever the model raises; then no row has joined, and no `put` of `new` was called.
        """
        with torch.no_grad():
            batch = splice(new[0].bundle.backbone.embeddings, [row.prompt for row in new])
            with new[0].opened(batch.slot_mask) as model:
                for row in new:
                    row.prepare(model)
                # Without a config all layers keep all positions: layers cut to a sliding window could not be merged.
                # The mask hides what is outside a window.
                cache: Any = DynamicCache()
                last = {"logits_to_keep": 1} if _keeps(model) else {}
                out = model(**batch.model_inputs(), past_key_values=cache, use_cache=True, **last)
            self._merge(cache, batch.attention_mask)
            self.rows += new
            self._take(out.logits[:, -1], len(self.rows) - len(new))

    def step(self, model: Any) -> None:
        """Run one pass: a token for each row. Ended and cancelled rows leave."""
        self._keep([not row.cancelled for row in self.rows], 0)
        if not self.rows:
            return
        with torch.no_grad():
            device = self._mask.device
            ids = torch.tensor([[row.ids[-1]] for row in self.rows], device=device)
            places = torch.tensor([[row.prompt.length + len(row.ids) - 1] for row in self.rows], device=device)
            self._mask = torch.cat([self._mask, self._mask.new_ones(len(self.rows), 1)], dim=1)
            out = model(
                input_ids=ids,
                attention_mask=self._mask,
                position_ids=places,
                past_key_values=self._cache,
                use_cache=True,
            )
            self._take(out.logits[:, -1], 0)

    def hand_out(self) -> None:
        """Give ended rows their answers or errors."""
        ended, self._ended = self._ended, []
        for row, answer in ended:
            row.give(answer)

    def _take(self, scores: Tensor, first: int) -> None:
        going = []
        for row, own, likeliest in zip(self.rows[first:], scores, scores.argmax(-1).tolist(), strict=True):
            answer: Generation | Exception | None
            try:
                answer = None if row.cancelled else row.take(own, likeliest)
            except Exception as error:  # from this row alone: its schema, or its caller's code
                answer = error
            if answer is not None:
                self._ended.append((row, answer))
            going.append(answer is None and not row.cancelled)
        self._keep(going, first)

    def _keep(self, going: Sequence[bool], first: int) -> None:
        """Keep all rows before `first`, and of the rest those marked in `going`."""
        if all(going):
            return
        kept = [*range(first), *(first + place for place, stays in enumerate(going) if stays)]
        self.rows = [self.rows[place] for place in kept]
        if not kept:
            self._cache, self._mask = None, self._mask[:0, :0]
            return
        rows = torch.tensor(kept, device=self._mask.device)
        mask = self._mask[rows]
        unused = int(mask.argmax(1).min())  # padding that only the rows that left needed
        self._mask = mask[:, unused:]
        for layer in self._cache.layers:
            layer.keys, layer.values = layer.keys[rows, :, unused:], layer.values[rows, :, unused:]

    def _merge(self, cache: Any, mask: Tensor) -> None:
        if not self.rows:
            self._cache, self._mask = cache, mask
            return
        rows, own = self._mask.shape
        length = max(mask.shape[1], own)
        try:
            merged = torch.cat([_padded(self._mask, length, 1), _padded(mask, length, 1)])
            for mine, new in zip(self._cache.layers, cache.layers, strict=True):
                keys = torch.cat([_padded(mine.keys, length, 2), _padded(new.keys, length, 2)])
                values = torch.cat([_padded(mine.values, length, 2), _padded(new.values, length, 2)])
                mine.keys, mine.values = keys, values
        except BaseException:
            # Memory ran out half way: the rows that were here continue with what they had.
            for mine in self._cache.layers:
                mine.keys, mine.values = mine.keys[:rows, :, -own:], mine.values[:rows, :, -own:]
            raise
        self._mask = merged


def _padded(x: Tensor, length: int, dim: int) -> Tensor:
    """`x` with zeros before it along `dim`."""
    missing = length - x.shape[dim]
    if not missing:
        return x
    shape = [*x.shape]
    shape[dim] = missing
    return torch.cat([x.new_zeros(shape), x], dim)


def _keeps(model: Any) -> bool:
    return "logits_to_keep" in inspect.signature(model.forward).parameters

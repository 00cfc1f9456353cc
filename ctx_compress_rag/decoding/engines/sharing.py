"""Concurrent calls share forward passes: prompts join while others are answered, and leave when they end.

A thread runs the model for all callers, who wait for it: eight callers are answered nearly as fast as one batch of
eight prompts. This module can go once the continuous batching of transformers takes a prompt as embeddings (today:
token ids only), has logits processors and a seed for each prompt, can cancel one, and runs on a CPU under adapters.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import DynamicCache

from ctx_compress_rag.bundle.plain_decoder import PlainDecoder
from ctx_compress_rag.decoding.answering import Answering
from ctx_compress_rag.decoding.engines.merging import merged_model
from ctx_compress_rag.decoding.engines.workers import ENDING, WORKERS, deliver
from ctx_compress_rag.decoding.sampling import Generation, Put, Sampling
from ctx_compress_rag.decoding.splice import open_model, splice
from ctx_compress_rag.errors import DecoderMemoryError
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.models.transformers_internals import cache_name, cut_cache, join_cache, left_padded
from ctx_compress_rag.prompt import Prompt
from ctx_compress_rag.store.marker import current_scope

_STEPS = 8  # passes of one group before the next group's turn
_PADDING = 1.5  # a batch's positions, padding included, are at most this many times its prompts' own


@dataclass(eq=False)
class Request:
    """A prompt and its answer so far.

    Attributes:
        put: gets the answer.
        most: most requests in one of its passes.
        stream: whether `put` also gets pieces of text.
        canceled: set when the answer is no longer wanted.
        merge: whether the reader is merged into the weights that read slots.
        scope: the tenant or user of `store.marker.scope` who asked; scopes take turns.
    """

    bundle: PlainDecoder
    prompt: Prompt
    sampling: Sampling
    put: Put
    most: int
    stream: bool
    canceled: threading.Event
    merge: bool = False
    scope: str | None = field(default_factory=current_scope)
    answering: Answering = field(init=False)

    @property
    def read_by(self) -> Hashable:
        """What reads the prompt: only prompts that the same reads share passes."""
        return self.bundle, self.prompt.soft, self.merge

    def begin(self) -> None:
        backbone, put = self.bundle.backbone, self.put if self.stream else None
        self.answering = Answering(
            self.prompt,
            self.sampling,
            self.bundle.tokenizer,
            backbone.generation_config,
            backbone.window,
            backbone.device,
            put,
        )

    def deliver(self, answer: Generation | BaseException) -> None:
        deliver(self.put, answer)

    @contextmanager
    def open_model(self, slot_mask: Tensor) -> Iterator[Any]:
        """Lock the transformers model for this thread, set up to read the prompt."""
        if self.merge and self.prompt.soft:
            with self.bundle.backbone.lock:
                yield merged_model(self.bundle)
        else:
            with open_model(self.bundle, self.prompt.soft, slot_mask) as model:
                yield model


class RunningBatch:
    """Requests that one model answers with a shared cache, a token for each in every pass; and those that wait."""

    def __init__(self) -> None:
        self.rows: list[Request] = []
        self.waiting: deque[Request] = deque()
        self._ended: list[tuple[Request, Generation | Exception]] = []
        self._cache: Any = None
        self._mask = torch.zeros(0, 0, dtype=torch.long)

    @property
    def free(self) -> bool:
        """Whether the row that waits longest could be answered now."""
        return bool(self.waiting) and len(self.rows) < self.waiting[0].most

    def join(self, new: Sequence[Request]) -> None:
        """Read prompts and give each its first token; rows that have not ended continue with the others.

        Raises: whatever the model raises; then no row has joined, and no `put` of `new` was called.
        """
        with torch.no_grad():
            batch = splice(new[0].bundle.backbone.embeddings, [row.prompt for row in new])
            with new[0].open_model(batch.slot_mask) as model:
                for row in new:
                    row.begin()
                # Without a config all layers keep all positions: layers cut to a sliding window could not be merged.
                # The mask hides what is outside a window.
                cache: Any = DynamicCache()
                own = {cache_name(model): cache}
                out = model(**batch.model_inputs(), **own, use_cache=True, logits_to_keep=1)
            self._merge(cache, batch.attention_mask)
            self.rows += new
            self._take(out.logits[:, -1], len(self.rows) - len(new))

    def step(self, model: Any) -> None:
        """Run one pass: a token for each row. Ended and canceled rows leave."""
        self._keep([not row.canceled.is_set() for row in self.rows], 0)
        if not self.rows:
            return
        with torch.no_grad():
            device = self._mask.device
            ids = torch.tensor([[row.answering.ids[-1]] for row in self.rows], device=device)
            lengths = [row.prompt.length + len(row.answering.ids) for row in self.rows]
            places = torch.tensor(lengths, device=device).unsqueeze(1) - 1
            self._mask = torch.cat([self._mask, self._mask.new_ones(len(self.rows), 1)], dim=1)
            own = {cache_name(model): self._cache}
            out = model(input_ids=ids, attention_mask=self._mask, position_ids=places, **own, use_cache=True)
            self._take(out.logits[:, -1], 0)

    def hand_out(self) -> None:
        ended, self._ended = self._ended, []
        for row, answer in ended:
            row.deliver(answer)

    def fail(self, error: BaseException) -> None:
        self.hand_out()
        failed, self.rows, self._cache = self.rows, [], None
        fail_all(failed, error)

    def _take(self, scores: Tensor, first: int) -> None:
        going = []
        for row, own, likeliest in zip(self.rows[first:], scores, scores.argmax(-1).tolist(), strict=True):
            answer: Generation | Exception | None
            try:
                answer = None if row.canceled.is_set() else row.answering.take(own, likeliest)
            except Exception as error:  # from this row alone: its schema, or its caller's code
                answer = error
            if answer is not None:
                self._ended.append((row, answer))
            going.append(answer is None and not row.canceled.is_set())
        self._keep(going, first)

    def _keep(self, going: Sequence[bool], first: int) -> None:
        """Keep all rows before `first`, and of the rest those marked in `going`."""
        if all(going):
            return
        kept = [*range(first), *(first + place for place, stays in enumerate(going) if stays)]
        self.rows = [self.rows[place] for place in kept]
        if not kept:
            self._cache = None
            return
        rows = torch.tensor(kept, device=self._mask.device)
        mask = self._mask[rows]
        unused = int(mask.argmax(1).min())  # padding that only the rows that left needed
        self._mask = mask[:, unused:]
        cut_cache(self._cache, rows, unused)

    def _merge(self, cache: Any, mask: Tensor) -> None:
        if not self.rows:
            self._cache, self._mask = cache, mask
            return
        rows, own = self._mask.shape
        length = max(mask.shape[1], own)
        try:
            merged = torch.cat([left_padded(self._mask, length, 1), left_padded(mask, length, 1)])
            join_cache(self._cache, cache, length)
        except BaseException:
            # Memory ran out half way: the rows that were here continue with what they had.
            cut_cache(self._cache, slice(rows), -own)
            raise
        self._mask = merged


class BatchScheduler:
    """The calls of one backbone, from any decoder, framework or thread.

    A thread runs the model while there is something to answer, and then ends. Between passes it takes in new
    prompts and lets other threads that wait for the model have it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._groups: dict[Hashable, RunningBatch] = {}
        self._running = False

    @classmethod
    def of(cls, backbone: Backbone) -> BatchScheduler:
        with _MAKING:
            return _OF.setdefault(backbone, cls())

    def add(self, rows: Sequence[Request]) -> None:
        """Answer rows; each gets its answer through its `put`."""
        with self._changed:
            for group in self._groups.values():  # the prompts of canceled rows would stay in memory until their turn
                group.waiting = deque(row for row in group.waiting if not row.canceled.is_set())
            for row in sorted(rows, key=lambda row: (row.prompt.soft, row.prompt.length)):
                self._groups.setdefault(row.read_by, RunningBatch()).waiting.append(row)
            if not self._running:
                self._running = True
                thread = threading.Thread(target=self._run, name="ctx-compress-stream", daemon=True)
                WORKERS.add(thread)
                thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._groups = {key: group for key, group in self._groups.items() if group.waiting or group.rows}
                groups = list(self._groups.values())
                if not groups or ENDING.is_set():
                    self._running = False
                    return
            for group in groups:
                try:
                    self._admit(group)
                    self._advance(group)
                    # Only after the model is restored: the caller who gets the last answer may inspect the model.
                    group.hand_out()
                except BaseException as error:
                    group.fail(error)

    def _admit(self, group: RunningBatch) -> None:
        new: list[Request] = []
        with self._changed:
            while group.waiting and len(group.rows) + len(new) < group.waiting[0].most:
                row = _next(group, new)
                if not row.canceled.is_set():
                    new.append(row)
        for batch in _alike(new):
            try:
                group.join(batch)
            except Exception as error:
                if len(batch) == 1:
                    fail_all(batch, error)
                    continue
                del error
                for row in batch:  # one of them caused the error, or together they need too much memory
                    try:
                        group.join([row])
                    except Exception as own:
                        fail_all([row], own)

    def _advance(self, group: RunningBatch) -> None:
        """Run passes until the group's rows have ended, or someone else wants the model."""
        if not group.rows:
            return
        first = group.rows[0]
        with first.open_model(torch.zeros(1, 1, dtype=torch.bool)) as model:
            for steps in count(1):
                group.hand_out()
                group.step(model)
                turn_ends = steps >= _STEPS and len(self._groups) > 1
                if not group.rows or turn_ends or self._wanted(group, first.bundle.backbone) or ENDING.is_set():
                    return

    def _wanted(self, group: RunningBatch, backbone: Backbone) -> bool:
        """Whether a thread waits for the model, or a row that could be answered now."""
        with self._changed:
            others = (other for other in self._groups.values() if other is not group)
            return backbone.lock.waiting > 0 or group.free or any(other.waiting and not other.rows for other in others)


_OF: WeakKeyDictionary[Backbone, BatchScheduler] = WeakKeyDictionary()
_MAKING = threading.Lock()


def _next(group: RunningBatch, new: Sequence[Request]) -> Request:
    """Take the next row: the first to arrive from the scope with the fewest running rows."""
    busy = Counter(row.scope for row in (*group.rows, *new))
    row = min(group.waiting, key=lambda each: busy[each.scope])
    group.waiting.remove(row)
    return row


def _alike(rows: Sequence[Request]) -> Iterator[list[Request]]:
    batch: list[Request] = []
    for row in sorted(rows, key=lambda row: row.prompt.length):
        length = row.prompt.length
        own = sum(each.prompt.length for each in batch) + length
        if batch and length * (len(batch) + 1) > _PADDING * own:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def fail_all(rows: Sequence[Request], error: BaseException) -> None:
    """Give requests of one batch the error that ended it."""
    for row in rows:
        row.deliver(_memory_error(error, [row.prompt for row in rows]) or error)


def _memory_error(error: BaseException, prompts: Sequence[Prompt]) -> DecoderMemoryError | None:
    """What to show for an error in a batch of prompts if the device's memory was too small; else None.

    Never raise it from the allocator's error, whose frames would keep their memory.
    """
    said = str(error)  # torch's CPU allocator and MPS raise a RuntimeError
    if not isinstance(error, MemoryError) and not (
        isinstance(error, RuntimeError) and ("allocate memory" in said or "out of memory" in said)
    ):
        return None
    longest = max(prompt.length for prompt in prompts)
    return DecoderMemoryError(
        f"not enough memory for a batch of {len(prompts)} prompts, the longest of {longest} tokens "
        f"({said.partition(chr(10))[0]}): use a coarser ratio, fewer passages, a shorter answer or a smaller batch_size"
    )

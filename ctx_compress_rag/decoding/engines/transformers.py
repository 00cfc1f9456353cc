"""Run the decoder in this process with transformers; prompts are answered in shared forward passes.

The sharing can go once the continuous batching of transformers takes a prompt as embeddings (today only token ids), has
logits processors and a seed for each prompt, can cancel a prompt, and runs on a CPU with adapters.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import DynamicCache

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.bundle.plain_decoder import PlainDecoder
from ctx_compress_rag.decoding.answering import GrowingAnswer
from ctx_compress_rag.decoding.engines.protocol import EngineOptions, Halt
from ctx_compress_rag.decoding.engines.scheduling import DecodingGroup, DecodingRequest, DecodingScheduler
from ctx_compress_rag.decoding.sampling import Generation, Put, Sampling
from ctx_compress_rag.decoding.splice import open_decoder_model, splice_prompts
from ctx_compress_rag.errors import ConfigError, DecoderMemoryError
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.models.generation import continue_prompt
from ctx_compress_rag.models.layers import merged_copy
from ctx_compress_rag.models.transformers_internals import (
    cache_argument,
    can_share_cache,
    cut_kv_cache,
    join_kv_caches,
    pad_left,
)
from ctx_compress_rag.prompt import Prompt, Side
from ctx_compress_rag.text.tokenizing import batched

_PADDING = 1.5  # a batch's positions, padding included, are at most this many times its prompts' own
_MERGED: WeakKeyDictionary[PlainDecoder, dict[Side, Any]] = WeakKeyDictionary()
_MERGING = threading.Lock()


def merged_model(bundle: Bundle, side: Side = "reader") -> Any:
    """Return a bundle's model with the LoRA of one side merged, made by the first call; no adapter may be active."""
    with _MERGING:
        made = _MERGED.setdefault(bundle, {})
        if side not in made:
            made[side] = merged_copy(bundle.backbone.model, bundle.adapter_shares(side))
        return made[side]


@dataclass(frozen=True)
class LocalModel:
    """A bundle's model in this process, with the weights of one side; LoRA is merged if `merged`, but not for text."""

    bundle: PlainDecoder
    side: Side
    merged: bool

    @contextmanager
    def open(self, slot_mask: Tensor) -> Iterator[Any]:
        """Yield the transformers model, locked for this thread and ready for prompts; see `open_decoder_model`."""
        if self.merged and self.side != "text":
            with self.bundle.backbone.lock:
                yield merged_model(cast(Bundle, self.bundle), self.side)
        else:
            with open_decoder_model(self.bundle, self.side, slot_mask) as model:
                yield model


class DecodingBatch(DecodingGroup):
    """Requests that one model answers with a shared cache, a token for each request in every pass."""

    def __init__(self, model: LocalModel) -> None:
        super().__init__()
        self._model = model
        self._cache: Any = None
        self._mask = torch.zeros(0, 0, dtype=torch.long)

    def advance(self, turn_ends: Callable[[int], bool]) -> None:
        for batch in _alike(self.new):
            self._join(batch)
        if not self.rows:
            return
        with self._model.open(torch.zeros(1, 1, dtype=torch.bool)) as model:
            for passes in count(1):
                self.hand_out()
                self._step(model)
                if not self.rows or self._model.bundle.backbone.lock.waiting or turn_ends(passes):
                    return

    def clear(self) -> None:
        self._cache = None

    def fail(self, error: BaseException) -> None:
        super().fail(decoder_memory_error(error, [row.prompt for row in (*self.rows, *self.new)]))

    def _join(self, new: list[DecodingRequest]) -> None:
        """Read prompts, whose answers then continue with the others; if that fails, read each prompt alone."""
        failure: BaseException | None = None
        try:
            scores = self._read(new)
        except Exception as error:
            failure = decoder_memory_error(error, [row.prompt for row in new])
        if failure is None:
            self.rows += new
            self.new = [row for row in self.new if row not in new]
            self._take(scores, len(self.rows) - len(new))
        elif len(new) == 1:
            self.new.remove(new[0])
            new[0].deliver(failure)
        else:
            for row in new:  # one of them caused the error, or together they need too much memory
                self._join([row])

    @torch.no_grad()
    def _read(self, new: Sequence[DecodingRequest]) -> Tensor:
        """Read prompts; return the scores (new, vocabulary) of the first tokens of their answers."""
        batch = splice_prompts(self._model.bundle.backbone.inputs, [row.prompt for row in new])
        with self._model.open(batch.slot_mask) as model:
            # Without a config all layers keep all positions: layers cut to a sliding window could not be merged.
            # The mask hides what is outside a window.
            cache: Any = DynamicCache()
            own = {cache_argument(model): cache}
            out = model(**batch.model_inputs(), **own, use_cache=True, logits_to_keep=1)
        self._merge(cache, batch.attention_mask)
        scores: Tensor = out.logits[:, -1]
        return scores

    @torch.no_grad()
    def _step(self, model: Any) -> None:
        """Run one pass, which gives each row a token; rows that have ended or were canceled leave."""
        places, ids = torch.tensor([row.last for row in self.rows], device=self._mask.device).T.unsqueeze(-1)
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(self.rows), 1)], dim=1)
        own = {cache_argument(model): self._cache}
        out = model(input_ids=ids, attention_mask=self._mask, position_ids=places, **own, use_cache=True)
        self._take(out.logits[:, -1], 0)

    def _take(self, scores: Tensor, first: int) -> None:
        """Give a token to the rows from index `first` on, and keep those whose answers go on."""
        going = self.take(self.rows[first:], scores)
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
        cut_kv_cache(self._cache, rows, unused)

    def _merge(self, cache: Any, mask: Tensor) -> None:
        if not self.rows:
            self._cache, self._mask = cache, mask
            return
        rows, own = self._mask.shape
        length = max(mask.shape[1], own)
        try:
            merged = torch.cat([pad_left(self._mask, length, 1), pad_left(mask, length, 1)])
            join_kv_caches(self._cache, cache, length)
        except BaseException:
            # Memory ran out half way: the rows that were here continue with what they had.
            cut_kv_cache(self._cache, slice(rows), -own)
            raise
        self._mask = merged


def _alike(rows: Sequence[DecodingRequest]) -> Iterator[list[DecodingRequest]]:
    def fits(batch: Sequence[DecodingRequest]) -> bool:
        own = sum(row.prompt.length for row in batch)
        return len(batch) * batch[-1].prompt.length <= _PADDING * own

    return batched(sorted(rows, key=lambda row: row.prompt.length), fits)


def decoder_memory_error(error: BaseException, prompts: Sequence[Prompt]) -> BaseException:
    """Return a DecoderMemoryError if `error` says that memory was too small for a batch of prompts, else `error`.

    Never raise the DecoderMemoryError from the allocator's error, whose frames would keep their memory.
    """
    said = str(error)  # torch's CPU allocator and MPS raise a RuntimeError
    if not isinstance(error, MemoryError) and not (
        isinstance(error, RuntimeError) and ("allocate memory" in said or "out of memory" in said)
    ):
        return error
    longest = max((prompt.length for prompt in prompts), default=0)
    return DecoderMemoryError(
        f"not enough memory for a batch of {len(prompts)} prompts, the longest of {longest} tokens "
        f"({said.partition(chr(10))[0]}): use a coarser ratio, fewer passages, a shorter answer or a smaller batch_size"
    )


_SCHEDULERS: WeakKeyDictionary[Backbone, DecodingScheduler] = WeakKeyDictionary()
_MAKING = threading.Lock()


class TransformersEngine:
    """An engine that answers with a bundle's own model; all engines of one model share its forward passes."""

    def __init__(self, bundle: PlainDecoder, options: EngineOptions) -> None:
        self._bundle = bundle
        _ = bundle.backbone.base  # loaded now rather than by the first question
        self.batch_size, self._merge = options.batch_size, options.merge
        if self._merge and (not (isinstance(bundle, Bundle) and bundle.reader.mergeable) or bundle.backbone.quantized):
            raise ConfigError("merge=True needs a reader with LoRA, on weights that are not quantized: leave it out")

    @property
    def identity(self) -> Mapping[str, str]:
        backbone = self._bundle.backbone
        return {
            "engine": "transformers",
            "dtype": str(backbone.dtype),
            "quantized": str(backbone.quantized),
            "merge": str(self._merge),
        }

    def begin(self, prompts: Sequence[Prompt], sampling: Sampling, puts: Sequence[Put], *, stream: bool = True) -> Halt:
        """Start to answer, as `protocol.Engine.begin` says; if this thread locked the model, first end all answers."""
        backbone, canceled = self._bundle.backbone, threading.Event()
        tokenizer, settings = self._bundle.tokenizer, backbone.generation_config
        window = backbone.window
        requests = []
        for prompt, put in zip(prompts, puts, strict=True):
            model = LocalModel(self._bundle, prompt.side, self._merge)
            answering = GrowingAnswer(prompt, sampling, tokenizer, settings, window, put if stream else None)
            requests.append(DecodingRequest(model, prompt, answering, put, canceled, self.batch_size))
        if backbone.lock.held:  # another thread would wait for this one forever
            _answer_alone(requests)
        elif can_share_cache(backbone.base):
            with _MAKING:
                scheduler = _SCHEDULERS.setdefault(backbone, DecodingScheduler(DecodingBatch))
            scheduler.add(sorted(requests, key=lambda each: (each.prompt.side, each.prompt.length)))
        else:
            threading.Thread(target=_answer_alone, args=(requests,), name="ctx-compress-answers").start()
        return canceled.set

    def close(self) -> None:
        """Do nothing, because the engine holds nothing besides the bundle."""


def _answer_alone(requests: Sequence[DecodingRequest]) -> None:
    """Answer one prompt after the other with transformers' own `generate`, which runs any model."""
    for request in requests:
        try:
            answer = _generate(request)
        except BaseException as error:
            request.deliver(decoder_memory_error(error, [request.prompt]))
        else:
            if answer is not None:
                request.deliver(answer)


def _generate(request: DecodingRequest) -> Generation | None:
    answer: Generation | None = None

    def choose(scores: Tensor) -> int | None:
        nonlocal answer
        answer = request.answering.take(scores)
        return None if answer is not None or request.canceled.is_set() else request.answering.ids[-1]

    reader: LocalModel = request.read_by
    batch = splice_prompts(reader.bundle.backbone.inputs, [request.prompt])
    with reader.open(batch.slot_mask) as model:
        if request.canceled.is_set():
            return None
        continue_prompt(model, batch.inputs, choose, request.answering.limit)
    return answer

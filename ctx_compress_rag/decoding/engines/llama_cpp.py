"""The decoder in this process, run by llama.cpp: fast on a CPU, without the transformers model.

Callers share passes: prompts that wait are read together, and every pass after gives each answer its next token.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.bundle.plain_decoder import PlainDecoder
from ctx_compress_rag.decoding.answering import Answering
from ctx_compress_rag.decoding.engines.gguf_weights import Side, digest, gguf_weights, sides
from ctx_compress_rag.decoding.engines.llama_cpp_context import LlamaCppContext, load_llama_cpp
from ctx_compress_rag.decoding.engines.workers import ENDING, WORKERS, deliver
from ctx_compress_rag.decoding.sampling import Generation, Put, Sampling
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.prompt import Prompt
from ctx_compress_rag.store.marker import current_scope
from ctx_compress_rag.strict import as_positive_int

_CLOSED = ConfigError("this engine is closed: make a new one")


@dataclass(eq=False)
class _Row:
    """A prompt and its answer so far.

    Attributes:
        put: gets the answer.
        canceled: set when it is no longer wanted.
        reserved: positions that prompt and answer may take.
        scope: the tenant or user who asked; scopes take turns.
        number: of its sequence.
    """

    prompt: Prompt
    answering: Answering
    put: Put
    canceled: threading.Event
    reserved: int
    scope: str | None = field(default_factory=current_scope)
    number: int = -1

    def deliver(self, answer: Generation | BaseException) -> None:
        deliver(self.put, answer)


class _Group:
    """The rows that one model answers, and those that wait for it."""

    def __init__(self, context: LlamaCppContext, most: int) -> None:
        self.context = context
        self.rows: list[_Row] = []
        self.waiting: list[_Row] = []
        self._free = set(range(most))

    def admit(self) -> list[_Row]:
        """Take rows that can be answered now out of those that wait."""
        self.waiting = [row for row in self.waiting if not row.canceled.is_set()]
        new: list[_Row] = []
        while self.waiting and self._free:
            running = [*self.rows, *new]
            busy = Counter(row.scope for row in running)
            row = min(self.waiting, key=lambda each: busy[each.scope])
            if sum(each.reserved for each in running) + row.reserved > self.context.size:
                break
            self.waiting.remove(row)
            row.number = self._free.pop()
            new.append(row)
        return new

    def advance(self, new: list[_Row]) -> None:
        """Read new rows' prompts, then give each row a token; rows that have ended or are canceled leave."""
        self.rows += new  # before anything can fail
        if new:
            self._take(new, self.context.read([(row.number, row.prompt) for row in new]))
        self._leave([row for row in self.rows if row.canceled.is_set()])
        if self.rows:
            ids = [row.answering.ids for row in self.rows]
            self._take(
                self.rows,
                self.context.step(
                    [
                        (row.number, row.prompt.length + len(own) - 1, own[-1])
                        for row, own in zip(self.rows, ids, strict=True)
                    ]
                ),
            )

    def fail(self, error: BaseException) -> None:
        """Give all rows that are being answered an error."""
        failed = self.rows
        self.context.clear()
        self._leave(failed)
        for row in failed:
            if not row.canceled.is_set():
                row.deliver(error)

    def _take(self, rows: list[_Row], scores: Tensor) -> None:
        ended: list[tuple[_Row, Generation | Exception]] = []
        for row, own, likeliest in zip(rows, scores, scores.argmax(-1).tolist(), strict=True):
            try:
                answer: Generation | Exception | None = row.answering.take(own, likeliest)
            except Exception as error:  # from this row alone: its schema, or its caller's code
                answer = error
            if answer is not None:
                ended.append((row, answer))
        self._leave([row for row, _ in ended])
        for row, answer in ended:
            if not row.canceled.is_set():
                row.deliver(answer)

    def _leave(self, rows: list[_Row]) -> None:
        for row in rows:
            self.context.drop(row.number)
            self._free.add(row.number)
        self.rows = [row for row in self.rows if row not in rows]


class LlamaCppEngine:
    """Answers with a bundle's reader and decoder in GGUF files, which are written on first use.

    Args:
        bundle: the bundle.
        weights: "BF16" (default), "F32", "Q8_0" or "Q4_0", or a folder that `ctx-compress export` wrote.
        context_size: most positions that prompts and answers have together.
        batch_size: most answers at a time.

    Raises:
        ConfigError: an argument has an impossible value, or llama.cpp cannot run the bundle's reader.
        MissingExtraError: llama-cpp-python is not installed.
    """

    def __init__(
        self, bundle: PlainDecoder, weights: str = "BF16", context_size: int = 4096, batch_size: int = 8
    ) -> None:
        load_llama_cpp()
        if type(bundle) is not Bundle:
            raise ConfigError(f"engine='llama.cpp' runs a bundle as it was saved, not a {type(bundle).__name__}")
        self._bundle = bundle
        self._batch_size = as_positive_int("batch_size", batch_size)
        size = as_positive_int("context_size", context_size)
        self._size = size if bundle.backbone.window is None else min(size, bundle.backbone.window)
        self._sides = sides(bundle)
        self._weights = weights
        self._folder = gguf_weights(bundle, weights)
        self._changed = threading.Condition()
        self._groups: dict[str, _Group] = {}
        self._running = self._closed = False

    @property
    def identity(self) -> Mapping[str, str]:
        """The name, and the weights' type."""
        return {"engine": "llama.cpp", "weights": self._weights}

    def check(self, sampling: Sampling) -> None:
        """Nothing is refused."""

    def begin(
        self, prompts: Sequence[Prompt], sampling: Sampling, puts: Sequence[Put], *, stream: bool = True
    ) -> Callable[[], None]:
        """See `protocol.Engine`."""
        canceled = threading.Event()
        rows = []
        for index, (prompt, put) in enumerate(zip(prompts, puts, strict=True)):
            if prompt.length >= self._size:
                raise ConfigError(
                    f"prompt {index} has {prompt.length} tokens, but context_size={self._size} must hold an answer, "
                    "too: give a larger one"
                )
            answering = self._answering(prompt, sampling, put if stream else None)
            rows.append(_Row(prompt, answering, put, canceled, prompt.length + answering.limit))
        with self._changed:
            for row in rows:
                self._group(row.prompt.soft).context.check(row.prompt)
            for row in rows:
                self._group(row.prompt.soft).waiting.append(row)
            if not self._running:
                self._running = True
                thread = threading.Thread(target=self._run, name="ctx-compress-llama.cpp", daemon=True)
                WORKERS.add(thread)
                thread.start()
        return canceled.set

    def close(self) -> None:
        """Free the models; running answers end with an error."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._running)
            for group in self._groups.values():
                group.context.close()
            self._groups.clear()

    def _answering(self, prompt: Prompt, sampling: Sampling, put: Put | None) -> Answering:
        settings = self._bundle.backbone.generation_config
        return Answering(prompt, sampling, self._bundle.tokenizer, settings, self._size, on_text=put)

    def _group(self, soft: bool) -> _Group:
        """The group of prompts with or without slots; its model is loaded on first use."""
        side: Side = "reader" if soft and "reader" in self._sides else "text"
        with self._changed:
            if self._closed:
                raise _CLOSED
            if side not in self._groups:
                backbone = self._bundle.backbone
                vocabulary = backbone.config.get_text_config().vocab_size
                file, wanted = self._folder / f"{side}.gguf", digest(self._bundle, side)
                context = LlamaCppContext(file, wanted, backbone.dim, vocabulary, self._size, self._batch_size)
                self._groups[side] = _Group(context, self._batch_size)
            return self._groups[side]

    def _run(self) -> None:
        """Answer while there is something to answer."""
        while True:
            with self._changed:
                groups = [group for group in self._groups.values() if group.waiting or group.rows]
                if not groups or self._closed or ENDING.is_set():
                    for group in groups:
                        waiting, group.waiting = group.waiting, []
                        group.fail(_CLOSED)
                        for row in waiting:
                            row.deliver(_CLOSED)
                    self._running = False
                    self._changed.notify_all()
                    return
            for group in groups:
                try:
                    with self._changed:
                        new = group.admit()
                    group.advance(new)
                except BaseException as error:
                    group.fail(error)

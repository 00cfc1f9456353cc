"""Run the decoder in this process with llama.cpp, which is fast on a CPU and needs no transformers model."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctx_compress_rag import __version__
from ctx_compress_rag.bundle import SHIPPED
from ctx_compress_rag.bundle.exported import EXPORTED_FILE, AnyDecoder, ExportedBundle
from ctx_compress_rag.decoding.answering import GrowingAnswer
from ctx_compress_rag.decoding.engines.llama_cpp_context import LlamaCppContext, load_llama_cpp
from ctx_compress_rag.decoding.engines.llama_cpp_proof import prove
from ctx_compress_rag.decoding.engines.protocol import EngineOptions, Halt
from ctx_compress_rag.decoding.engines.scheduling import DecodingGroup, DecodingRequest, DecodingScheduler
from ctx_compress_rag.decoding.sampling import Put, Sampling
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.prompt import Prompt, Side

if TYPE_CHECKING:
    from ctx_compress_rag.bundle.bundle import Bundle


class LlamaCppEngine:
    """An engine that answers with a bundle's GGUF files; the first engine for a bundle writes them."""

    def __init__(self, bundle: AnyDecoder, options: EngineOptions) -> None:
        load_llama_cpp()
        self._bundle = bundle
        self._batch_size, self._weights = options.batch_size, options.weights
        if isinstance(bundle, ExportedBundle):
            most = bundle.window
            self._folder, self._digests = bundle.folder, bundle.digests
            self._embeddings = bundle.dim, bundle.vocabulary
        else:
            from ctx_compress_rag.decoding.engines import gguf_weights as files

            saved = files.saved_bundle(bundle)
            most = files.longest(saved.backbone.config.get_text_config(), saved.window)
            self._folder, self._digests = files.gguf_weights(saved, options.weights), files.weights_digests(saved)
            self._embeddings = saved.backbone.dim, saved.backbone.config.get_text_config().vocab_size
        self._size = min(options.context_size, most or options.context_size)
        self._loading = threading.Lock()
        self._contexts: dict[Side, LlamaCppContext] = {}
        self._scheduler = DecodingScheduler(_Sequences)

    @property
    def identity(self) -> Mapping[str, str]:
        return {"engine": "llama.cpp", "weights": self._weights}

    def begin(self, prompts: Sequence[Prompt], sampling: Sampling, puts: Sequence[Put], *, stream: bool = True) -> Halt:
        tokenizer, settings = self._bundle.tokenizer, self._bundle.generation_config
        canceled, requests = threading.Event(), []
        for index, (prompt, put) in enumerate(zip(prompts, puts, strict=True)):
            if prompt.length >= self._size:
                raise ConfigError(
                    f"prompt {index} has {prompt.length} tokens, but context_size={self._size} must hold an answer, "
                    "too: give a larger one"
                )
            context = self._context(prompt.side if prompt.side in self._digests else "text")
            context.check(prompt)
            on_text = put if stream else None
            answering = GrowingAnswer(prompt, sampling, tokenizer, settings, self._size, on_text=on_text)
            requests.append(DecodingRequest(context, prompt, answering, put, canceled, self._batch_size))
        self._scheduler.add(requests)
        return canceled.set

    def close(self) -> None:
        """Free the models; answers in progress end with an error."""
        self._scheduler.close()
        with self._loading:
            for context in self._contexts.values():
                context.close()

    def _context(self, side: Side) -> LlamaCppContext:
        with self._loading:
            self._scheduler.check_open()
            if side not in self._contexts:
                file = self._folder / f"{side}.gguf"
                prove(file, self._digests[side], *self._embeddings, self._size)
                self._contexts[side] = LlamaCppContext(
                    file, self._digests[side], *self._embeddings, self._size, self._batch_size
                )
            return self._contexts[side]


class _Sequences(DecodingGroup):
    """Requests that one llama.cpp model answers, each in a sequence with its own number."""

    def __init__(self, context: LlamaCppContext) -> None:
        super().__init__()
        self._context = context
        self._numbers: dict[DecodingRequest, int] = {}

    def has_room(self, row: DecodingRequest, running: Sequence[DecodingRequest]) -> bool:
        return super().has_room(row, running) and _positions([*running, row]) <= self._context.size

    def advance(self, turn_ends: Callable[[int], bool]) -> None:
        new, self.new = self.new, []
        self.rows += new
        for row in new:
            self._numbers[row] = min(set(range(row.most)).difference(self._numbers.values()))
        if new:
            self._context.make_room(_positions(self.rows))
            self._take(new, self._context.read([(self._numbers[row], row.prompt) for row in new]))
        if self.rows:
            self._take(self.rows, self._context.step([(self._numbers[row], *row.last) for row in self.rows]))

    def clear(self) -> None:
        self._context.clear()
        self._numbers.clear()

    def _take(self, rows: Sequence[DecodingRequest], scores: Any) -> None:
        for row, goes_on in zip(list(rows), self.take(rows, scores), strict=True):
            if not goes_on:
                self._context.drop(self._numbers.pop(row))
                self.rows.remove(row)


def _positions(rows: Sequence[DecodingRequest]) -> int:
    return sum(row.prompt.length + row.answering.limit for row in rows)


logger = logging.getLogger(__name__)


def open_for_llama_cpp(name: str, weights: str = "BF16") -> ExportedBundle | Bundle:
    """Return the exported bundle in folder `weights`, or of a bundle's folder or name, exported if its files changed.

    The bundle itself is returned if answering needs its compressor (RAM), and for a bundle on the hub. Errors: see
    `Bundle.from_pretrained` and `gguf_weights`.
    """
    if Path(weights, EXPORTED_FILE).is_file():
        return ExportedBundle(weights)
    note = _note(name, weights)
    if note is not None and note.is_file() and Path(note.read_text(encoding="utf-8"), EXPORTED_FILE).is_file():
        return ExportedBundle(note.read_text(encoding="utf-8"))
    from ctx_compress_rag.bundle.bundle import Bundle
    from ctx_compress_rag.decoding.engines.gguf_weights import gguf_weights

    bundle = Bundle.from_pretrained(name)
    folder = gguf_weights(bundle, weights)
    if note is None or not (folder / EXPORTED_FILE).is_file():
        return bundle
    note.write_text(str(folder.resolve()), encoding="utf-8")
    return ExportedBundle(folder)


def _note(name: str, weights: str) -> Path | None:
    """Return the file that names the folder of a bundle's export; None for a bundle on the hub."""
    from huggingface_hub import cached_assets_path

    folder = SHIPPED.get(name, Path(name)).resolve()
    if not folder.is_dir():
        return None
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    stamps = [f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files]
    key = hashlib.sha256("\n".join([__version__, weights, *stamps]).encode()).hexdigest()
    return Path(cached_assets_path("ctx_compress_rag", "llama.cpp"), f"{key}.folder")

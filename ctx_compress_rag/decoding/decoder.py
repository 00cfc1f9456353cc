"""Answer prompts that have markers with a bundle's decoder, which one of several engines runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, cast

from ctx_compress_rag.decoding.engines.protocol import Engine, EngineOptions
from ctx_compress_rag.decoding.preparer import PromptPreparer
from ctx_compress_rag.decoding.sampling import Generation, Sampling
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.prompt import PromptLike
from ctx_compress_rag.store import SoftContextStore
from ctx_compress_rag.store.marker import OnUnreadable
from ctx_compress_rag.strict import check_known_options, faults_raised_as

if TYPE_CHECKING:  # they import torch
    from ctx_compress_rag.bundle.exported import ExportedBundle
    from ctx_compress_rag.bundle.plain_decoder import PlainDecoder

_GREEDY = Sampling()
_Pieces = SimpleQueue[str | Generation | BaseException]


_OPTIONS = {"transformers": ("batch_size", "merge"), "llama.cpp": ("weights", "context_size", "batch_size")}
_SERVER_OPTIONS = ("api_key", "timeout", "max_retries")


class Decoder:
    """A bundle's decoder, which answers prompts and reads stored slots in place of markers.

    The decoder reads a prompt with markers with weights that were trained for slots, and a prompt without markers with
    weights for plain text. Several threads may use one Decoder. Calls from several threads share forward passes.

    Args:
        bundle: the bundle, exported for llama.cpp or not, or a `PlainDecoder`, which reads no markers.
        store: the store with the markers' passages; None reads markers as ordinary text.
        engine: what runs the decoder. "transformers" and "llama.cpp" run the decoder in this process. The address of a
            vLLM server (http://...) needs a server that was started as `ctx-compress export` says.
        on_unreadable: what to do with a marker that was changed, that has another key or scope, or whose passage is
            missing or damaged in the store. "error" raises. "text" logs a warning and reads the passage's text if the
            store can give it, else the marker as ordinary text.
        max_prompt_tokens: most tokens and slots of a prompt together; None allows what fits the decoder's window.
        options: options of the engine, which `EngineOptions` explains. "transformers" has `batch_size` and `merge`,
            "llama.cpp" `weights`, `context_size` and `batch_size`, a server `api_key`, `timeout` and `max_retries`.

    Raises:
        FingerprintMismatchError: the store was made with another bundle.
        ConfigError: an argument has an impossible value, or the engine cannot run this bundle.
        MissingExtraError: the engine's extra is not installed.

    ```python
    bundle = Bundle.from_pretrained("smollm2-135m")
    store = SoftContextStore("./soft_contexts", bundle)
    store.add(["The pump's warranty lasts five years."], ids=["pump"])
    decoder = Decoder(bundle, store)
    content = f"{store.marker('pump', ratio=4)} How long does the warranty last?"
    [answer] = decoder.generate([[{"role": "user", "content": content}]])
    answer.text, answer.slots
    ```
    """

    def __init__(
        self,
        bundle: PlainDecoder | ExportedBundle,
        store: SoftContextStore | None = None,
        *,
        engine: str = "transformers",
        on_unreadable: OnUnreadable = "error",
        max_prompt_tokens: int | None = None,
        **options: Any,
    ) -> None:
        self.bundle = cast("PlainDecoder", bundle)  # an exported one has what answering reads of it
        self.store = store
        self.preparer = PromptPreparer(bundle, store, on_unreadable=on_unreadable, max_prompt_tokens=max_prompt_tokens)
        self.engine = _open(engine, self.bundle, check_engine_options(engine, options))
        self._engine_name = engine

    def __repr__(self) -> str:
        return f"Decoder({self.bundle!r}, {self.store!r}, engine={self._engine_name!r})"

    def generate(self, prompts: Sequence[PromptLike], sampling: Sampling = _GREEDY) -> list[Generation]:
        """Return the answers to prompts, in the order of the prompts; some may have markers and others not.

        Args:
            prompts: raw prompts (strings, used without changes) or chats (lists of messages, put through the
                tokenizer's chat template). Control tokens in a chat's messages are read as text. In a raw prompt for a
                decoder with a chat template these tokens keep their function, so put text from others into chats.
            sampling: how tokens are chosen and when answers end.

        Raises:
            ConfigError: a prompt is empty, malformed or longer than the window, or the engine cannot do as asked.
            UnreadableMarkerError: a marker was changed or has another key or scope, and `on_unreadable` is "error".
            MissingPassageError: a marker's passage is not in the store, and `on_unreadable` is "error".
            PayloadError: a stored record is damaged, and `on_unreadable` is "error".
            DecoderMemoryError: the device does not have enough memory; the decoder can still be used.
            ServerError: the server cannot be reached, refuses the request, or ends in the middle of an answer.
        """
        prepared = self.preparer.prepare(prompts, extractive=sampling.extractive)
        queues = [_Pieces() for _ in prepared]
        cancel = self.engine.begin(prepared, sampling, [queue.put for queue in queues], stream=False)
        try:
            return [piece for queue in queues for piece in _received(queue) if isinstance(piece, Generation)]
        finally:
            cancel()

    def stream(self, prompt: PromptLike, sampling: Sampling = _GREEDY) -> Iterator[str | Generation]:
        """Yield the answer to one prompt piece by piece, then the whole Generation.

        The joined pieces are the Generation's text. Before this method returns, it checks the prompt and fetches the
        passages. The model starts at the first step of the iteration, in another thread, so any thread may iterate at
        any speed. Closing or deleting the iterator ends the answer after the token in progress.

        Raises: what `generate` raises; an error of the engine is raised during iteration.
        """
        prepared = self.preparer.prepare([prompt], extractive=sampling.extractive)

        def pieces() -> Iterator[str | Generation]:
            queue = _Pieces()
            cancel = self.engine.begin(prepared, sampling, [queue.put])
            try:
                yield from _received(queue)
            finally:
                cancel()

        return pieces()

    async def astream(self, prompt: PromptLike, sampling: Sampling = _GREEDY) -> AsyncGenerator[str | Generation, None]:
        """Return, when awaited, an asynchronous generator of what `stream` yields; the event loop is not blocked."""
        prepared = await asyncio.to_thread(self.preparer.prepare, [prompt], extractive=sampling.extractive)

        async def pieces() -> AsyncGenerator[str | Generation, None]:
            loop = asyncio.get_running_loop()
            queue: asyncio.Queue[str | Generation | BaseException] = asyncio.Queue()

            def put(piece: str | Generation | BaseException) -> None:
                with suppress(RuntimeError):  # the loop has ended: nobody waits
                    loop.call_soon_threadsafe(queue.put_nowait, piece)

            begun = asyncio.ensure_future(asyncio.to_thread(self.engine.begin, prepared, sampling, [put]))
            try:
                await asyncio.shield(begun)
                while isinstance(piece := await queue.get(), str):
                    yield piece
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
            finally:
                begun.add_done_callback(_cancel)

        return pieces()

    def close(self) -> None:
        """Free what the engine holds besides the bundle; the bundle and the store stay open."""
        self.engine.close()


def check_engine_options(engine: str, given: Mapping[str, object]) -> EngineOptions:
    """Return an engine's options; raise ConfigError if the engine, an option or an option's value is not allowed."""
    if engine not in _OPTIONS and not is_server_address(engine):
        known = ", ".join(map(repr, _OPTIONS))
        raise ConfigError(f"engine={engine!r} is unknown: give {known} or the address of a vLLM server (http://...)")
    check_known_options(f"engine={engine!r}", given, _OPTIONS.get(engine, _SERVER_OPTIONS))
    with faults_raised_as(ConfigError):
        return EngineOptions.model_validate(given)


def _open(engine: str, bundle: PlainDecoder, options: EngineOptions) -> Engine:
    if engine == "llama.cpp":
        from ctx_compress_rag.decoding.engines.llama_cpp import LlamaCppEngine

        return LlamaCppEngine(bundle, options)
    if not hasattr(bundle, "backbone"):
        raise ConfigError(f"engine={engine!r}: {bundle!r} is for the engine 'llama.cpp': load the bundle itself")
    if is_server_address(engine):
        from ctx_compress_rag.decoding.engines.vllm import VllmEngine

        return VllmEngine(bundle, engine, options)
    from ctx_compress_rag.decoding.engines.transformers import TransformersEngine

    return TransformersEngine(bundle, options)


def is_server_address(engine: str) -> bool:
    """Whether an engine's name is the address of a server."""
    return engine.startswith(("http://", "https://"))


def quotes_by_default(bundle: PlainDecoder | ExportedBundle, engine: str) -> bool:
    """Whether answers are quotations by default, as the bundle answers best with them and the engine is no server."""
    return bundle.config is not None and bundle.config.extractive and not is_server_address(engine)


def _received(queue: _Pieces) -> Iterator[str | Generation]:
    """Yield an answer piece by piece, as another thread puts the pieces; raise the error that ended the answer."""
    while isinstance(piece := queue.get(), str):
        yield piece
    if isinstance(piece, BaseException):
        raise piece
    yield piece


def _cancel(begun: asyncio.Future[Callable[[], None]]) -> None:
    if not begun.cancelled() and begun.exception() is None:
        begun.result()()

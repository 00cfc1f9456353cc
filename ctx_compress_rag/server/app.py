"""The app: OpenAI's routes, `compress`, health and metrics, on one decoder and its store."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.decoding.sampling import Generation, Sampling
from ctx_compress_rag.errors import ConfigError, CtxCompressError, StoreWriteError
from ctx_compress_rag.extras import needs
from ctx_compress_rag.marking.mark import Marking
from ctx_compress_rag.prompt import PromptLike
from ctx_compress_rag.server import replies
from ctx_compress_rag.server.answers import ClientGoneError, answer, unless_gone
from ctx_compress_rag.server.api_keys import ApiKeys
from ctx_compress_rag.server.faults import RequestError, as_fault
from ctx_compress_rag.server.guard import Guard, Limits
from ctx_compress_rag.server.metrics import Metrics
from ctx_compress_rag.server.requests import ChatCompletion, Completion, Compress, Generate, malformed
from ctx_compress_rag.server.retrieval import Retrieval
from ctx_compress_rag.store import SoftContextStore
from ctx_compress_rag.store.marker import escaped_markers

with needs("serve"):
    from fastapi import FastAPI, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
    from fastapi.routing import APIRoute
    from starlette.exceptions import HTTPException

_THREADS = 4  # for reading prompts; the model and writing have threads of their own
_PAGE = Path(__file__).with_name("page.html")
_PAGE_MAY = "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"
_TEXTS_AT_A_TIME = 32  # of one request; then other requests are compressed


def create_app(
    decoder: Decoder,
    keys: ApiKeys | None = None,
    limits: Limits | None = None,
    hosts: Collection[str] = (),
    retrieval: Retrieval | None = None,
) -> FastAPI:
    """An ASGI app that answers with a decoder and compresses into its store.

    Args:
        decoder: what answers; it reads its store's markers in the scope of each request's API key.
        keys: which key opens which scope; None lets everyone on this machine in, in the store's own scope.
        limits: what clients may ask for.
        hosts: without keys, the names besides this machine's own under which it may be asked, such as a proxy's.
        retrieval: what finds passages for a chat without markers, and gives the app a page to ask on; None leaves
            such chats as they are.

    Raises:
        ConfigError: the decoder has no store.
        MissingExtraError: FastAPI is not installed.
    """
    if decoder.store is None:
        raise ConfigError("the server's decoder has no store: give it the store whose markers clients send")
    limits = limits or Limits()
    metrics = Metrics()
    service = _Service(decoder, decoder.store, metrics, limits, retrieval)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        for threads in (service.threads, service.writer):
            threads.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(title="ctx-compress", openapi_url=None, lifespan=lifespan)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatCompletion, request: Request) -> Response:
        return await service.chat(body, request)

    @app.post("/v1/completions")
    async def complete(body: Completion, request: Request) -> Response:
        return await service.generate("text", body, body.prompt, request)

    @app.post("/v1/compress")
    async def compress(body: Compress, request: Request) -> Response:
        return await service.compress(body, request)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.model()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return service.model()

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics")
    async def measured() -> Response:
        return PlainTextResponse(metrics.text(), media_type="text/plain; version=0.0.4")

    if retrieval is not None:

        @app.get("/")
        async def page() -> Response:
            return FileResponse(_PAGE, headers={"Content-Security-Policy": _PAGE_MAY})

    async def refuse(request: Request, error: Exception) -> Response:
        status, body = as_fault(_explained(request, error))
        return JSONResponse(body, status)

    async def note_gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it; nginx's status, for the metrics

    app.add_exception_handler(ClientGoneError, note_gone)
    for kind in (Exception, CtxCompressError, RequestError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, refuse)
    app.add_middleware(Guard, metrics=metrics, keys=keys, limits=limits, hosts=hosts)
    return app


class _Service:
    """What the routes do."""

    def __init__(
        self,
        decoder: Decoder,
        store: SoftContextStore,
        metrics: Metrics,
        limits: Limits,
        retrieval: Retrieval | None,
    ) -> None:
        self.threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="ctx-compress-serve")
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="ctx-compress-write")
        self._decoder = decoder
        self._store = store
        self._metrics = metrics
        self._limits = limits
        self._retrieval = retrieval
        self._name = store.bundle.config.name
        self._started = int(time.time())

    def model(self) -> dict[str, Any]:
        return {"id": self._name, "object": "model", "created": self._started, "owned_by": "ctx-compress"}

    def check_model(self, name: str) -> None:
        if name != self._name:
            raise RequestError(404, f"no model {name!r}: this server has {self._name!r}", "model_not_found", "model")

    async def chat(self, body: ChatCompletion, request: Request) -> Response:
        chat, scope, retrieval = body.prompt(), request.state.tenant, self._retrieval
        if retrieval is None or not retrieval.is_question(chat, scope):
            return await self.generate("chat", body, [chat], request)
        self.check_model(body.model)
        # Where the store is written to: a passage may be missing.
        asked = asyncio.get_running_loop().run_in_executor(self.writer, retrieval.ask, chat, scope)
        prompt, sources = await unless_gone(request.receive, asked)
        return await self.generate("chat", body, [prompt], request, sources, retrieval.extractive)

    async def generate(
        self,
        kind: replies.Kind,
        body: Generate,
        prompts: Sequence[PromptLike],
        request: Request,
        sources: Sequence[Mapping[str, Any]] | None = None,
        extractive: bool = False,
    ) -> Response:
        self.check_model(body.model)
        sampling = body.sampling(self._limits.answer_tokens, self._limits.longest_answer, extractive)
        head = {
            "id": f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": self._name,
        }
        found = {} if sources is None else {"sources": sources}
        if body.stream:
            if len(prompts) > 1:
                raise RequestError(400, f"{len(prompts)} prompts cannot be streamed: send one", param="prompt")
            count = body.stream_options.include_usage
            return await self._stream(kind, head, prompts[0], sampling, request, count, found)
        answers = await unless_gone(request.receive, self._whole(prompts, sampling, request.state.tenant))
        return JSONResponse(replies.whole(kind, head | found, answers))

    async def _whole(self, prompts: Sequence[PromptLike], sampling: Sampling, scope: str | None) -> list[Generation]:
        async def one(prompt: PromptLike) -> Generation:
            async with aclosing(self._answer(prompt, sampling, scope)) as pieces:
                *_, done = [piece async for piece in pieces]
            assert isinstance(done, Generation)
            return done

        tasks = [asyncio.ensure_future(one(prompt)) for prompt in prompts]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:  # one has failed, or the client has disconnected
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _stream(
        self,
        kind: replies.Kind,
        head: dict[str, Any],
        prompt: PromptLike,
        sampling: Sampling,
        request: Request,
        count: bool,
        found: dict[str, Any],
    ) -> Response:
        pieces = self._answer(prompt, sampling, request.state.tenant)
        # Wait for the first piece here, so that a refused prompt has a status of its own.
        first = await unless_gone(request.receive, anext(pieces))

        async def events() -> AsyncIterator[str]:
            async with aclosing(pieces):
                try:
                    yield replies.chunk(kind, head | found, first if isinstance(first, str) else "", first=True)
                    done = first
                    async for piece in pieces:
                        done = piece
                        if isinstance(piece, str):
                            yield replies.chunk(kind, head, piece)
                    assert isinstance(done, Generation)
                    yield replies.chunk(kind, head, "", ended=done)
                    if count:
                        yield replies.last_chunk(kind, head, done)
                    yield replies.DONE
                except Exception as error:
                    yield replies.event(as_fault(error)[1])

        return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def _answer(self, prompt: PromptLike, sampling: Sampling, scope: str | None) -> Any:
        began, first = time.perf_counter(), True
        async with aclosing(answer(self._decoder, prompt, sampling, scope, self.threads)) as pieces:
            async for piece in pieces:
                if first:
                    self._metrics.first_token.observe(time.perf_counter() - began)
                    first = False
                if isinstance(piece, Generation):
                    self._metrics.count(piece)
                yield piece

    async def compress(self, body: Compress, request: Request) -> Response:
        """Make markers for texts. A passage's id is a hash of its text: no client can change or name another's.

        A part of the texts that has begun is finished; parts that wait when the client disconnects are canceled.
        """
        if body.model is not None:
            self.check_model(body.model)
        scope = request.state.tenant
        marking = Marking(self._store, body.ratio, body.token_budget, scope=scope)
        shown = await unless_gone(request.receive, self._marked(body, marking, scope))
        self._metrics.passages.inc(len(body.input))
        data = [{"object": "marker", "index": index, "text": text} for index, text in enumerate(shown)]
        return JSONResponse({"object": "list", "model": self._name, "data": data})

    async def _marked(self, body: Compress, marking: Marking, scope: str | None) -> list[str]:
        def store(part: Sequence[str]) -> None:
            # `mark` expands the others.
            plain = [text for text in part if text.strip() and escaped_markers(text) == text]
            with suppress(StoreWriteError):  # `mark` leaves them as text
                self._store.ensure(plain, scope=scope)

        loop, texts = asyncio.get_running_loop(), body.input
        for start in range(0, len(texts), _TEXTS_AT_A_TIME):
            await loop.run_in_executor(self.writer, store, texts[start : start + _TEXTS_AT_A_TIME])
        for text in texts:
            self._store.split(text, scope, "error")  # a marker of another tenant is no passage
        marked = await loop.run_in_executor(self.writer, partial(marking.mark, texts, question=body.question))
        return [each.shown for each in marked]


def _explained(request: Request, error: Exception) -> Exception:
    """Turn FastAPI's and Starlette's own errors into this server's."""
    if isinstance(error, RequestValidationError):
        return malformed(error.errors())
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        asked = f"{request.method} {request.url.path}"
        routes = [route for route in request.app.routes if isinstance(route, APIRoute)]
        served = ", ".join(
            f"{method} {route.path_format}" for route in routes for method in sorted(route.methods or ())
        )
        return RequestError(error.status_code, f"{asked[:80]!r} is not served here: there are {served}")
    if isinstance(error, HTTPException) and error.status_code == 400:
        return RequestError(400, "the body cannot be read as JSON: send UTF-8, not nested deeply")
    if isinstance(error, HTTPException):
        return RequestError(error.status_code, str(error.detail))
    return error

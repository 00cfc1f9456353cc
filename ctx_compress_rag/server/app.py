"""Build the app with OpenAI's routes, `compress`, health and metrics, on one decoder and its store."""

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.errors import ConfigError, CtxCompressError, StoreWriteError, needs
from ctx_compress_rag.indexing.retrieval import IndexRetrieval
from ctx_compress_rag.marking.mark import Marking
from ctx_compress_rag.prompt import PromptLike
from ctx_compress_rag.server import requests
from ctx_compress_rag.server.guard import (
    ApiKeys,
    RequestError,
    RequestGuard,
    ServerLimits,
    ServerMetrics,
    error_response,
)
from ctx_compress_rag.server.replies import Kind, OpenAIReply, gather_answers, stream_answer, unless_client_gone
from ctx_compress_rag.store import SoftContextStore
from ctx_compress_rag.store.marker import escaped_markers
from ctx_compress_rag.store.marker import scope as in_scope

with needs("serve"):
    from fastapi import FastAPI, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
    from fastapi.routing import APIRoute
    from starlette.exceptions import HTTPException

_PAGE = Path(__file__).with_name("page.html")
_PAGE_MAY = "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"
_TEXTS_AT_A_TIME = 32  # of one request; then other requests are compressed


def create_app(
    decoder: Decoder,
    keys: ApiKeys | None = None,
    limits: ServerLimits | None = None,
    hosts: Collection[str] = (),
    retrieval: IndexRetrieval | None = None,
) -> FastAPI:
    """Return an ASGI app that answers with a decoder and compresses texts into the decoder's store.

    Each request has the scope of its API key. Without `keys`, the app answers only requests to a name of this machine
    or of `hosts`, in the store's own scope. Without `limits`, the defaults of `ServerLimits` hold. With `retrieval`, it
    finds passages for chats without markers, and has a page to ask on. Raises ConfigError if the decoder has no store.
    """
    if decoder.store is None:
        raise ConfigError("the server's decoder has no store: give it the store whose markers clients send")
    limits, metrics = limits or ServerLimits(), ServerMetrics()
    service = _Service(decoder, decoder.store, metrics, limits, retrieval)
    app = FastAPI(title="ctx-compress", openapi_url=None, lifespan=service.lifespan)
    app.post("/v1/chat/completions")(service.chat)
    app.post("/v1/completions")(service.complete)
    app.post("/v1/compress")(service.compress)
    app.get("/v1/models")(service.models)
    app.get("/v1/models/{name:path}")(service.model)
    app.get("/health")(_health)
    app.get("/metrics")(service.measured)
    if retrieval is not None:
        app.get("/")(_page)
    for kind in (Exception, CtxCompressError, RequestError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _refuse)
    app.add_middleware(RequestGuard, metrics=metrics, keys=keys, limits=limits, hosts=hosts)
    return app


@dataclass(eq=False)
class _Service:
    """The routes' functions, and what they share."""

    decoder: Decoder
    store: SoftContextStore
    metrics: ServerMetrics
    limits: ServerLimits
    retrieval: IndexRetrieval | None

    def __post_init__(self) -> None:
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="ctx-compress-write")
        self.name = self.store.bundle.config.name
        self.started = int(time.time())

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        yield
        self.writer.shutdown(wait=False, cancel_futures=True)

    async def measured(self) -> Response:
        return PlainTextResponse(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [await self.model(self.name)]}

    async def model(self, name: str) -> dict[str, Any]:
        if name != self.name:
            raise RequestError(404, f"no model {name!r}: this server has {self.name!r}", "model_not_found", "model")
        return {"id": name, "object": "model", "created": self.started, "owned_by": "ctx-compress"}

    async def chat(self, body: requests.ChatCompletionRequest, request: Request) -> Response:
        await self.model(body.model)
        chat, scope, retrieval = body.prompt(), request.state.tenant, self.retrieval
        if retrieval is None or not retrieval.is_question(chat, scope):
            return await self._generate("chat", body, [chat], request)
        # Where the store is written to: a passage may be missing.
        asked = asyncio.get_running_loop().run_in_executor(self.writer, retrieval.retrieve, chat, scope)
        prompt, sources = await unless_client_gone(request.receive, asked)
        return await self._generate("chat", body, [prompt], request, sources, retrieval.extractive)

    async def complete(self, body: requests.CompletionRequest, request: Request) -> Response:
        await self.model(body.model)
        return await self._generate("text", body, body.prompt, request)

    async def _generate(
        self,
        kind: Kind,
        body: requests.GenerationRequest,
        prompts: Sequence[PromptLike],
        request: Request,
        sources: Sequence[Mapping[str, Any]] | None = None,
        extractive: bool = False,
    ) -> Response:
        config = self.store.bundle.config
        sampling = body.sampling(self.limits, config, extractive)
        reply, scope = OpenAIReply(kind, self.name, sources), request.state.tenant
        answers = [stream_answer(self.decoder, prompt, sampling, self.metrics) for prompt in prompts]
        with nullcontext() if scope is None else in_scope(scope):
            if not body.stream:
                return JSONResponse(reply.whole(await unless_client_gone(request.receive, gather_answers(answers))))
            if len(prompts) > 1:
                raise RequestError(400, f"{len(prompts)} prompts cannot be streamed: send one", param="prompt")
            # Wait for the first piece here, so that a refused prompt has a status of its own.
            first = await unless_client_gone(request.receive, anext(answers[0]))
        events = reply.events(first, answers[0], body.stream_options.include_usage)
        return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def compress(self, body: requests.CompressionRequest, request: Request) -> Response:
        """Return markers for texts; ids are hashes of texts, so that no client can change or name another's passage.

        The part that is being compressed when the client disconnects is finished; later parts are canceled.
        """
        if body.model is not None:
            await self.model(body.model)
        scope = request.state.tenant
        marking = Marking(self.store, body.ratio, body.token_budget, scope=scope)
        shown = await unless_client_gone(request.receive, self._marked(body, marking, scope))
        self.metrics.passages.inc(len(body.input))
        data = [{"object": "marker", "index": index, "text": text} for index, text in enumerate(shown)]
        return JSONResponse({"object": "list", "model": self.name, "data": data})

    async def _marked(self, body: requests.CompressionRequest, marking: Marking, scope: str | None) -> list[str]:
        def store(part: Sequence[str]) -> None:
            # `mark` expands the others.
            plain = [text for text in part if text.strip() and escaped_markers(text) == text]
            with suppress(StoreWriteError):  # `mark` leaves them as text
                self.store.ensure(plain, scope=scope)

        loop, texts = asyncio.get_running_loop(), body.input
        for start in range(0, len(texts), _TEXTS_AT_A_TIME):
            await loop.run_in_executor(self.writer, store, texts[start : start + _TEXTS_AT_A_TIME])
        for text in texts:
            self.store.split(text, scope, "error")  # another tenant's marker must not be stored as a passage
        marked = await loop.run_in_executor(self.writer, partial(marking.mark, texts, question=body.question))
        return [each.shown for each in marked]


async def _health() -> dict[str, str]:
    return {"status": "ok"}


async def _page() -> Response:
    return FileResponse(_PAGE, headers={"Content-Security-Policy": _PAGE_MAY})


async def _refuse(request: Request, error: Exception) -> Response:
    status, body = error_response(_explained(request, error))
    return JSONResponse(body, status)


def _explained(request: Request, error: Exception) -> Exception:
    """Return this server's error for an error of FastAPI or Starlette, and other errors as they are."""
    if isinstance(error, RequestValidationError):
        return requests.malformed_request(error.errors())
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        asked = f"{request.method} {request.url.path}"
        routes = [route for route in request.app.routes if isinstance(route, APIRoute)]
        served = ", ".join(
            f"{method} {route.path_format}" for route in routes for method in sorted(route.methods or ())
        )
        return RequestError(error.status_code, f"{asked[:80]!r} is not served here: there are {served}")
    if isinstance(error, HTTPException) and error.status_code == 400:
        return RequestError(400, "the body cannot be read as JSON: send UTF-8, not nested deeply")
    return error

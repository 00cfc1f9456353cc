"""Run the decoder in a vLLM server, which gets vectors and returns text."""

import asyncio
import base64
import io
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import httpx
import torch

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.bundle.plain_decoder import PlainDecoder
from ctx_compress_rag.decoding.engines.protocol import EngineOptions, Halt
from ctx_compress_rag.decoding.export import vllm_dtype_name, vllm_models
from ctx_compress_rag.decoding.filters import closed_json_schema, generation_settings
from ctx_compress_rag.decoding.sampling import Generation, Put, Sampling, TokenLogprob, logprobs_from_openai
from ctx_compress_rag.decoding.splice import splice_prompts
from ctx_compress_rag.errors import ConfigError, CtxCompressError, ServerError, needs
from ctx_compress_rag.prompt import Prompt

_HERE = "use the engine 'transformers'"
_BUSY = (429, 502, 503, 504)


class VllmEngine:
    """An engine that has a vLLM server answer, which was started with the command of `ctx-compress export`.

    Prompts with slots are sent as `prompt_embeds`, others as token ids. A prompt that does not fit the server's window,
    or whose vectors are not finite, is refused. Requests share connections. The bundle must be in the server's dtype.
    """

    def __init__(self, bundle: PlainDecoder, server: str, options: EngineOptions) -> None:
        if not isinstance(bundle, Bundle):
            raise ConfigError(f"engine={server!r} needs a bundle: this is a decoder alone")
        self._bundle = bundle
        self.server = server.rstrip("/").removesuffix("/v1")
        self._base, self._models = bundle.config.name, vllm_models(bundle)
        self._windows: dict[str, int | None] | None = None
        with needs("vllm"):
            import openai
        self._openai: Any = openai
        # A key of its own: without one, the client would send the user's OPENAI_API_KEY to this server.
        try:
            if not urlsplit(server).hostname or urlsplit(server).port == 0:
                raise ValueError("it names no host or port")
            self._client: Any = openai.AsyncOpenAI(
                base_url=f"{self.server}/v1",
                api_key=options.api_key.get_secret_value() if options.api_key else "none",
                timeout=openai.Timeout(options.timeout, connect=min(options.timeout, 10.0)),
                max_retries=options.max_retries,
            )
        except Exception as error:  # InvalidURL is no common class of the client's versions
            raise ConfigError(f"engine={server!r} is no address ({error}): give one like http://host:8000") from error

    @property
    def identity(self) -> Mapping[str, str]:
        """Return the server's address and the dtype; nothing else is known of how the server computes."""
        return {"engine": self.server, "dtype": vllm_dtype_name(self._bundle.backbone.dtype)}

    def begin(self, prompts: Sequence[Prompt], sampling: Sampling, puts: Sequence[Put], *, stream: bool = True) -> Halt:
        if sampling.extractive:
            raise ConfigError(f"extractive answers need the decoder in this process, not {self.server}: {_HERE}")
        asked = [(self._body(prompt, sampling), prompt, put) for prompt, put in zip(prompts, puts, strict=True)]
        loop = _loop()
        futures = [
            asyncio.run_coroutine_threadsafe(self._answer(body, prompt, sampling, put, stream), loop)
            for body, prompt, put in asked
        ]

        def cancel() -> None:
            for future in futures:
                future.cancel()

        return cancel

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._client.close(), _loop()).result()

    def _body(self, prompt: Prompt, sampling: Sampling) -> dict[str, Any]:
        special = self._bundle.tokenizer.get_added_vocab()
        extra: dict[str, Any] = {
            "top_k": max(sampling.top_k, 0),
            "min_p": 0.0,  # the server would take this and the next from the decoder's generation_config
            "repetition_penalty": self._repetition_penalty(sampling),
            "stop_token_ids": [special[each] for each in sampling.stop if each in special],
        }
        if sampling.json_schema is not None:
            schema = {"name": "answer", "schema": closed_json_schema(sampling.json_schema)}
            extra["response_format"] = {"type": "json_schema", "json_schema": schema}
        soft = prompt.side != "text"
        if soft:
            extra["prompt_embeds"] = self._embeds(prompt)
        return {
            "model": self._models[prompt.side],
            "prompt": None if soft else prompt.ids().tolist(),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stop": list(sampling.stop),
            "logprobs": sampling.top_logprobs if sampling.logprobs else None,
            "seed": sampling.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            "extra_body": extra,
        }

    def _repetition_penalty(self, sampling: Sampling) -> float:
        """Return the decoder's repetition penalty, which vLLM applies; raise ConfigError if it has other settings."""
        own = generation_settings(self._bundle.backbone.generation_config) if sampling.decoder_settings else {}
        penalty = float(own.pop("repetition_penalty", 1.0))
        if own:
            raise ConfigError(
                f"the decoder's generation_config has {next(iter(own))}, which {self.server} cannot apply: give "
                f"decoder_settings=False, or {_HERE}"
            )
        return penalty

    def _embeds(self, prompt: Prompt) -> str:
        """Return the prompt's vectors in base64; raise ServerError for NaN, with which vLLM spoils others' answers."""
        backbone = self._bundle.backbone
        with torch.no_grad():
            [vectors] = splice_prompts(backbone.inputs, [prompt]).inputs_embeds
        vectors = vectors.detach().to("cpu", backbone.dtype)
        if not torch.isfinite(vectors).all():
            raise ServerError(
                f"a prompt holds NaN or infinity in {vllm_dtype_name(vectors.dtype)} and was not sent: its passages' "
                "slots are damaged, or too large for this dtype"
            )
        buffer = io.BytesIO()
        torch.save(vectors.clone(), buffer)  # a view would be saved with its whole base
        return base64.b64encode(buffer.getvalue()).decode()

    async def _answer(self, body: dict[str, Any], prompt: Prompt, sampling: Sampling, put: Put, stream: bool) -> None:
        try:
            await self._fit(body, prompt)
            async for piece in self._pieces_of(body, prompt, sampling):
                if stream or isinstance(piece, Generation):
                    put(piece)
        except Exception as error:
            put(self._as_server_error(error))

    async def _fit(self, body: dict[str, Any], prompt: Prompt) -> None:
        """Raise an error if the server lacks the request's model or window; shorten the answer to the window."""
        if self._windows is None:
            found = await self._client.models.list()
            self._windows = {model.id: getattr(model, "max_model_len", None) for model in found.data}
        if body["model"] not in self._windows:
            raise ServerError(
                f"{self.server} has no model {body['model']!r} (it has {sorted(self._windows)}): start it with the "
                "command that `ctx-compress export` prints"
            )
        window = self._windows[body["model"]] or self._windows.get(self._base)
        if window is None:
            return
        if prompt.length >= window:
            raise ConfigError(
                f"the prompt has {prompt.length} tokens ({prompt.slots} of them slots) and the server's window of "
                f"{window} must hold an answer too: use a coarser ratio, fewer passages or a shorter prompt"
            )
        body["max_tokens"] = min(body["max_tokens"], window - prompt.length)

    async def _pieces_of(
        self, body: dict[str, Any], prompt: Prompt, sampling: Sampling
    ) -> AsyncIterator[str | Generation]:
        text, reason, tokens = "", None, None
        noted: list[TokenLogprob] = []
        async with await self._client.completions.create(**body) as chunks:
            async for chunk in chunks:
                for choice in chunk.choices:
                    if choice.text:
                        text += choice.text
                        yield choice.text
                    noted += logprobs_from_openai(choice.logprobs, sampling.top_logprobs)
                    reason = choice.finish_reason or reason
                tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        if reason not in ("stop", "length") or tokens is None:
            raise ServerError(f"{self.server} ended in the middle of an answer ({reason}): ask again")
        special = {str(token) for token in self._bundle.tokenizer.added_tokens_decoder.values() if token.special}
        lengths = [0 if each.token in special else len(each.token) for each in noted]
        while noted and sum(lengths[: len(noted) - 1]) >= len(text):
            noted.pop()  # an end token, or one of a stop string
        logprobs = tuple(noted) if sampling.logprobs else None
        yield Generation(text, prompt.length, prompt.slots, tokens, reason, logprobs)

    def _as_server_error(self, error: Exception) -> Exception:
        status = getattr(error, "status_code", None)
        if isinstance(error, CtxCompressError):
            return error
        if status in _BUSY or isinstance(error, self._openai.APIConnectionError | httpx.HTTPError):
            said = f"status {status}" if status else str(error.__cause__ or error) or type(error).__name__
            return ServerError(f"{self.server} did not answer ({said}): check that it runs, or give a longer timeout")
        if status is not None:
            hint = ": give the server's api_key" if status in (401, 403) else ""
            return ServerError(f"{self.server} refused the request ({str(error)[:300]}){hint}")
        if isinstance(error, self._openai.APIError):  # sent among the pieces
            return ServerError(f"{self.server} failed: {str(error)[:300]}")
        if isinstance(error, ValueError | AttributeError | TypeError):
            return ServerError(f"{self.server} sent something other than an answer ({error!r}): check the address")
        return error


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop, in its own thread, that runs all requests of this process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="ctx-compress-http", daemon=True).start()
    return loop

"""A stand-in for vLLM's server: keeps what it is sent, answers it with the bundle's own model by transformers."""

import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import torch
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from ctx_compress_rag.decoding.export import vllm_models

KEY = "vllm-key"


class FakeVllm:
    """`faults` are given out before any answer: a status, or "cut" to end in the middle, or an event to send.

    `starting` are statuses that the list of models has before it is there.
    """

    def __init__(self, bundle: Any) -> None:
        self.bundle = bundle
        self.bodies: list[dict[str, Any]] = []
        self.faults: list[Any] = []
        self.starting: list[int] = []
        models = {model: bundle.adapter_shares(side) for side, model in vllm_models(bundle).items()}
        self.shares = {bundle.config.name: {}, **models}
        self.names = list(self.shares)
        self.app = FastAPI()
        self.app.get("/v1/models")(self._models)
        self.app.post("/v1/completions")(self._complete)

    async def _models(self, request: Request) -> Any:
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return JSONResponse({"error": {"message": "Unauthorized"}}, 401)
        if self.starting:
            return JSONResponse({"error": {"message": "not yet"}}, self.starting.pop(0))
        data = [{"id": name, "max_model_len": None if place else 256} for place, name in enumerate(self.names)]
        return {"object": "list", "data": data}

    async def _complete(self, request: Request) -> Any:
        assert request.headers.get("authorization") == f"Bearer {KEY}"
        body = await request.json()
        self.bodies.append(body)
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, int):
            return JSONResponse({"error": {"message": "not now"}}, fault)
        return StreamingResponse(self._events(body, fault), media_type="text/event-stream")

    def _events(self, body: dict[str, Any], fault: Any) -> Any:
        ids: list[int] = []
        end, shown = self.bundle.tokenizer.eos_token_id, ""
        for id, scores in self.tokens(body):
            ids.append(id)
            reason = "stop" if id == end else "length" if len(ids) == body["max_tokens"] else None
            text = self.bundle.tokenizer.decode(ids, skip_special_tokens=True)
            text = text if reason else text.rstrip("\ufffd")
            choice = {"index": 0, "text": text[len(shown) :], "finish_reason": None, "logprobs": None}
            if body["logprobs"] is not None:
                choice["logprobs"] = self.logprobs(scores, id, body["logprobs"])
            yield event({"choices": [choice]})
            shown = text
            if fault is not None:
                if fault != "cut":
                    yield fault
                return
        yield event({"choices": [{"index": 0, "text": "", "finish_reason": reason}]})
        yield event({"choices": [], "usage": {"prompt_tokens": 0, "completion_tokens": len(ids)}})
        yield "data: [DONE]\n\n"

    def logprobs(self, scores: torch.Tensor, id: int, top: int) -> dict[str, Any]:
        """In the form of completions: the chosen token is among the likeliest ones, whatever their number."""
        found = scores.log_softmax(-1)
        text, value = self.bundle.tokenizer.decode([id]), float(found[id])
        likeliest = {self.bundle.tokenizer.decode([i]): float(found[i]) for i in found.topk(top).indices}
        return {"tokens": [text], "token_logprobs": [value], "top_logprobs": [{**likeliest, text: value}]}

    def tokens(self, body: dict[str, Any]) -> Iterator[tuple[int, torch.Tensor]]:
        """Greedy, by whole passes: each token's id and the scores that it is chosen by."""
        backbone = self.bundle.backbone
        if "prompt_embeds" in body:
            loaded = torch.load(io.BytesIO(base64.b64decode(body["prompt_embeds"])), weights_only=True)
            embeds = loaded.unsqueeze(0)
        else:
            embeds = backbone.embeddings(torch.tensor([body["prompt"]]))
        for _ in range(body["max_tokens"]):
            with torch.no_grad(), backbone.use(self.shares[body["model"]]) as model:
                scores = model(inputs_embeds=embeds, use_cache=False).logits[0, -1]
            yield (id := int(scores.argmax())), scores
            if id == self.bundle.tokenizer.eos_token_id:
                return
            embeds = torch.cat([embeds, backbone.embeddings(torch.tensor([[id]]))], dim=1)


def event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"

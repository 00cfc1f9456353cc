"""Count requests, tokens and times in Prometheus' format, without anything that clients send."""

from functools import partial

from ctx_compress_rag.decoding.sampling import Generation
from ctx_compress_rag.errors import needs

with needs("serve"):
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class ServerMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        timed = partial(Histogram, buckets=_SECONDS, registry=self.registry)
        self.requests = counter("ctx_compress_requests_total", "Requests answered.", ["route", "status"])
        self.seconds = timed("ctx_compress_request_seconds", "From a request to the end of its answer.", ["route"])
        self.first_token = timed("ctx_compress_first_token_seconds", "From a request to the first piece of its answer.")
        self.running = Gauge("ctx_compress_requests_running", "Requests being answered.", registry=self.registry)
        about = "Tokens of prompts (slots counted in), of slots in them, and of answers."
        self._tokens = counter("ctx_compress_tokens_total", about, ["kind"])
        self.passages = counter("ctx_compress_passages_total", "Texts that clients asked markers for.")

    def count(self, answer: Generation) -> None:
        self._tokens.labels("prompt").inc(answer.prompt_tokens)
        self._tokens.labels("slot").inc(answer.slots)
        self._tokens.labels("completion").inc(answer.completion_tokens)

    def text(self) -> bytes:
        return generate_latest(self.registry)

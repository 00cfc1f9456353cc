"""What the server counts, in Prometheus' format; it holds nothing that clients send."""

from __future__ import annotations

from ctx_compress_rag.decoding.sampling import Generation
from ctx_compress_rag.extras import needs

with needs("serve"):
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "ctx_compress_requests_total", "Requests answered.", ["route", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "ctx_compress_request_seconds",
            "From a request to the end of its answer.",
            ["route"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.first_token = Histogram(
            "ctx_compress_first_token_seconds",
            "From a request to the first piece of its answer.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.running = Gauge("ctx_compress_requests_running", "Requests being answered.", registry=self.registry)
        self._tokens = Counter(
            "ctx_compress_tokens_total",
            "Tokens of prompts (slots counted in), of slots in them, and of answers.",
            ["kind"],
            registry=self.registry,
        )
        self.passages = Counter(
            "ctx_compress_passages_total", "Texts that clients asked markers for.", registry=self.registry
        )

    def count(self, answer: Generation) -> None:
        self._tokens.labels("prompt").inc(answer.prompt_tokens)
        self._tokens.labels("slot").inc(answer.slots)
        self._tokens.labels("completion").inc(answer.completion_tokens)

    def text(self) -> bytes:
        return generate_latest(self.registry)

"""The commands export and serve, and the parts of bench that time a bundle's own decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ctx_compress_rag.cli.command import command
from ctx_compress_rag.cli.shared import (
    BatchSize,
    Device,
    Dtype,
    OwnBundle,
    Server,
    ServerKey,
    Store,
    note_what_it_reads,
    print_report,
    quiet_models,
)
from ctx_compress_rag.indexing.defaults import STORE

if TYPE_CHECKING:
    from ctx_compress_rag.bundle.bundle import Bundle


@command("export", "runs/mine/bundle ./for-vllm")
def export(
    bundle: Annotated[str, typer.Argument(metavar="BUNDLE", help="A bundle's folder, hub id or shipped name.")],
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Where to write.")],
) -> None:
    """Write a bundle's decoder for vLLM.

    Also writes its LoRA adapters, and prints the command that serves both.
    """
    import shlex

    from ctx_compress_rag.bundle.bundle import Bundle
    from ctx_compress_rag.decoding import export as exporting

    quiet_models()
    print(shlex.join(exporting.export(Bundle.from_pretrained(bundle), folder)))


@command("serve", "--store ./chroma --port 8000")
def serve(
    store: Store = STORE,
    bundle: OwnBundle = None,
    server: Server = None,
    server_key: ServerKey = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", help="0 takes a free one.")] = 8000,
    api_keys: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="A file with an API key and its scope on each line.  [default: the variable CTX_COMPRESS_API_KEYS]",
        ),
    ] = None,
    collection: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Serve the soft contexts of your app's collection in place of an index (needs --bundle).",
        ),
    ] = None,
    batch_size: BatchSize = 8,
    device: Device = None,
    dtype: Dtype = None,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="Longest answer if a request gives no limit.")] = 512,
    longest_answer: Annotated[
        int | None,
        typer.Option(metavar="N", help="Longest answer in tokens, whatever a request says.  [default: no limit]"),
    ] = None,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Longest prompt.  [default: the decoder's window]")
    ] = None,
    max_body: Annotated[int, typer.Option(metavar="BYTES", help="Longest request.")] = 4 << 20,
    max_requests: Annotated[int, typer.Option(metavar="N", help="Maximum requests at a time.")] = 256,
    grace: Annotated[int, typer.Option(metavar="S", help="Seconds for running answers to finish after SIGTERM.")] = 30,
) -> None:
    """Serve an index to OpenAI clients.

    They send markers to chat completions and completions. `POST /v1/compress` makes markers and stores what is missing;
    `GET /metrics` has metrics. Markers belong to the scope of the request's API key; without keys, the server answers
    only this machine, in the store's own scope.
    """
    from ctx_compress_rag.decoding.decoder import TransformersDecoder
    from ctx_compress_rag.decoding.vllm import ServerDecoder
    from ctx_compress_rag.server import run
    from ctx_compress_rag.server.api_keys import find_keys
    from ctx_compress_rag.server.app import Limits, create_app
    from ctx_compress_rag.server.open import open_store

    keys = find_keys(api_keys)
    run.check_exposure(host, keys is not None)
    limits = Limits(max_body, max_requests, max_tokens, longest_answer)
    quiet_models()
    with open_store(store, bundle, collection, device=device, dtype=dtype) as (served, opened):
        note_what_it_reads(served)
        decoder: TransformersDecoder
        if server is not None:
            decoder = ServerDecoder(served, opened, server=server, api_key=server_key)
            decoder.max_prompt_tokens = max_prompt_tokens
        else:
            decoder = TransformersDecoder(served, opened, batch_size=batch_size, max_prompt_tokens=max_prompt_tokens)
        run.serve(
            create_app(decoder, keys, limits),
            host,
            port,
            grace=grace,
            started=lambda url: print(f"serving {served.config.name!r} at {url}", flush=True),
        )


def time_callers(bundle: Bundle, passages: Sequence[str], callers: int, ratio: int, output: str) -> None:
    """Print the speed of concurrent callers: each sends four passages as soft contexts and gets 64 tokens."""
    import tempfile
    from dataclasses import asdict

    from benchmarks.timing.concurrency import concurrency, concurrency_table, endless
    from ctx_compress_rag.decoding.decoder import TransformersDecoder
    from ctx_compress_rag.errors import ConfigError
    from ctx_compress_rag.marking.mark import mark
    from ctx_compress_rag.store import SoftContextStore
    from ctx_compress_rag.text.templates import PASSAGE_SEPARATOR, TEMPLATES, messages

    if callers < 2:
        raise ConfigError(f"--concurrency {callers}: give 2 or more callers")
    if not passages:
        raise ConfigError("the text has no passages: give a longer one")
    with tempfile.TemporaryDirectory() as folder, SoftContextStore(folder, bundle) as store, endless(bundle):
        chats = []
        for caller in range(callers):
            own = [passages[(4 * caller + place) % len(passages)] for place in range(4)]
            text = PASSAGE_SEPARATOR.join(mark(store, own, ratio=ratio))
            chats.append(messages(TEMPLATES[0], text, "What is it about?"))
        found = concurrency(TransformersDecoder(bundle, store, batch_size=callers), chats)
    print_report(output, "concurrency", concurrency_table(found), {**asdict(found), "ratio": ratio})


def time_first_tokens(
    bundle: Bundle, passages: Sequence[str], count: int, server: str | None, server_key: str | None, output: str
) -> None:
    """Print how long the first token takes from `count` of the passages, at each of the bundle's ratios up to 16."""
    from dataclasses import asdict
    from functools import partial

    from benchmarks.timing.speed import first_token, first_token_table
    from ctx_compress_rag.decoding.decoder import TransformersDecoder
    from ctx_compress_rag.decoding.vllm import ServerDecoder
    from ctx_compress_rag.errors import ConfigError

    if not 1 <= count <= len(passages):
        raise ConfigError(f"--prompt {count}: give 1 to {len(passages)}, the number of passages in the text")
    there = partial(ServerDecoder, server=server, api_key=server_key) if server is not None else TransformersDecoder
    longest = sorted(passages, key=len)[-count:]
    found = first_token(bundle, longest, [ratio for ratio in bundle.config.ratios if ratio <= 16], 5, there)
    record = {str(ratio): asdict(first) for ratio, first in found.items()}
    print_report(output, "first_token", first_token_table(found), record)

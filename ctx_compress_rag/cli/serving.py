"""The commands that serve, serve and export, and the part of bench that times callers at a time."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ctx_compress_rag.cli.shared import bundle_option, note_what_it_reads, quiet_models, store_option

if TYPE_CHECKING:
    from ctx_compress_rag.bundle import Bundle


def server_options(parser: argparse.ArgumentParser) -> None:
    """Where the decoder runs, if not here."""
    parser.add_argument("--server", metavar="URL", help="a vLLM server that runs the decoder; see export")
    parser.add_argument(
        "--server-key", metavar="KEY", help="its API key (default: the variable CTX_COMPRESS_SERVER_KEY)"
    )


def server_key(args: argparse.Namespace) -> str | None:
    """The server's API key."""
    key: str | None = args.server_key or os.environ.get("CTX_COMPRESS_SERVER_KEY")
    return key


def export_options(parser: argparse.ArgumentParser) -> None:
    """Arguments of export."""
    parser.add_argument("bundle", help="a bundle's folder, shipped name or hub id")
    parser.add_argument("folder", metavar="DIR", help="where to write")


def run_export(args: argparse.Namespace) -> None:
    """Write a bundle's decoder and LoRA adapters as vLLM wants them, and print the command that serves them."""
    from ctx_compress_rag.bundle import Bundle
    from ctx_compress_rag.serving.export import export, shown

    quiet_models()
    print(shown(export(Bundle.from_pretrained(args.bundle), args.folder)))


def serve_options(parser: argparse.ArgumentParser) -> None:
    """Arguments of serve."""
    store_option(parser)
    bundle_option(parser)
    server_options(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
    parser.add_argument(
        "--api-keys",
        metavar="FILE",
        help="each line an API key and the scope it opens (default: the variable CTX_COMPRESS_API_KEYS)",
    )
    parser.add_argument(
        "--collection",
        metavar="NAME",
        help="serve the soft contexts beside this collection of an app, in place of an index (needs --bundle)",
    )
    parser.add_argument(
        "--batch-size", type=int, default=8, metavar="N", help="most prompts in a forward pass (default: %(default)s)"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=512, metavar="N", help="longest answer if not said (default: %(default)s)"
    )
    parser.add_argument(
        "--max-prompt-tokens", type=int, metavar="N", help="longest prompt (default: the decoder's window)"
    )
    parser.add_argument(
        "--max-body", type=int, default=4 << 20, metavar="BYTES", help="longest request (default: %(default)s)"
    )
    parser.add_argument(
        "--max-requests", type=int, default=256, metavar="N", help="most requests at a time (default: %(default)s)"
    )
    parser.add_argument(
        "--grace", type=int, default=30, metavar="S", help="seconds that answers get at the end (default: %(default)s)"
    )


def run_serve(args: argparse.Namespace) -> None:
    """Serve an index to OpenAI clients that send markers: chat completions, completions, compress, metrics.

    `POST /v1/compress` stores what is missing. Markers belong to the scope of the request's API key; without keys
    the server answers this machine only, in the store's own scope.
    """
    from ctx_compress_rag.decoding.decoder import TransformersDecoder
    from ctx_compress_rag.serving.app import Limits, create_app
    from ctx_compress_rag.serving.client import ServerDecoder
    from ctx_compress_rag.serving.keys import find_keys
    from ctx_compress_rag.serving.run import check_exposure, open_store, serve

    keys = find_keys(args.api_keys)
    check_exposure(args.host, keys is not None)
    limits = Limits(args.max_body, args.max_requests, args.max_tokens)
    quiet_models()
    with open_store(args.store, args.bundle, args.collection) as (bundle, store):
        note_what_it_reads(bundle)
        decoder: TransformersDecoder
        if args.server is not None:
            decoder = ServerDecoder(bundle, store, server=args.server, api_key=server_key(args))
            decoder.max_prompt_tokens = args.max_prompt_tokens
        else:
            decoder = TransformersDecoder(
                bundle, store, batch_size=args.batch_size, max_prompt_tokens=args.max_prompt_tokens
            )
        serve(
            create_app(decoder, keys, limits),
            args.host,
            args.port,
            grace=args.grace,
            started=lambda url: print(f"serving {bundle.config.name!r} at {url}", flush=True),
        )


def time_callers(bundle: Bundle, passages: Sequence[str], callers: int, ratio: int) -> None:
    """Print what callers at a time get, each with four of the passages as soft contexts."""
    import tempfile

    from ctx_compress_rag.errors import ConfigError
    from ctx_compress_rag.evaluation.concurrency import EndlessDecoder, concurrency
    from ctx_compress_rag.marking.mark import mark
    from ctx_compress_rag.stores import SoftContextStore
    from ctx_compress_rag.text.prompts import PASSAGE_SEPARATOR, TEMPLATES, messages

    if callers < 2:
        raise ConfigError(f"--concurrency {callers}: give 2 or more callers")
    if not passages:
        raise ConfigError("the text has no passages: give a longer one")
    with tempfile.TemporaryDirectory() as folder, SoftContextStore(folder, bundle) as store:
        chats = []
        for caller in range(callers):
            own = [passages[(4 * caller + place) % len(passages)] for place in range(4)]
            text = PASSAGE_SEPARATOR.join(mark(store, own, ratio=ratio))
            chats.append(messages(TEMPLATES[0], text, "What is it about?"))
        found = concurrency(EndlessDecoder(bundle, store, batch_size=callers), chats)
    print(f"{callers} callers, 4 passages each at {ratio}x, 64 tokens of the bundle's own decoder")
    print(f"tokens/s one after the other {found.turns_rate:.0f}")
    print(f"tokens/s in one batch {found.batch_rate:.0f}")
    print(f"tokens/s as streams at a time {found.stream_rate:.0f}, over the batch {found.share:.2f}")
    first = f"first piece after {found.first_seconds * 1e3:.0f} ms"
    print(f"{first}; the last stream's over the first's {found.last_first:.2f}")
    print(f"one caller's time over that of transformers' generate {found.alone:.3f}")

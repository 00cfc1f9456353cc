"""Commands about an index: index, ask, info, demo."""

from __future__ import annotations

import argparse
from pathlib import Path

from ctx_compress_rag.cli.serving import server_key, server_options
from ctx_compress_rag.cli.shared import bundle_option, note_what_it_reads, quiet_models, store_option

_ANSWER_TOKENS = 256


def index_options(parser: argparse.ArgumentParser) -> None:
    """Arguments of index."""
    parser.add_argument(
        "folder", metavar="DIR", help="folder to index, with the folders in it; hidden files are left out"
    )
    store_option(parser)
    bundle_option(parser)
    parser.add_argument(
        "--chunk-tokens",
        type=int,
        metavar="N",
        help="most decoder tokens of a passage (default: 256, or the bundle's window if less)",
    )
    parser.add_argument("--prune", action="store_true", help="remove the passages of files that are gone from DIR")
    parser.add_argument("--codec", help="how a new store keeps vectors: int8 or fp16")


def run_index(args: argparse.Namespace) -> None:
    """Index a folder of .txt and .md files.

    Only new and changed passages are compressed; run it again to go on after an interruption. Passages of a
    changed file are replaced; those of a deleted file stay unless --prune is given.
    """
    from ctx_compress_rag.app.indexing import scan_folder, update_index
    from ctx_compress_rag.app.passage_index import open_index

    scan = scan_folder(args.folder)  # before models are loaded and a store is made
    quiet_models()
    with open_index(args.store, args.bundle, codec=args.codec, create=True) as index:
        note_what_it_reads(index.bundle)
        report = update_index(index, scan, chunk_tokens=args.chunk_tokens, prune=args.prune)
    print(f"{report.files} files in {args.folder}: {report.added} passages compressed, {report.unchanged} unchanged")
    if report.empty or report.unread:
        print(f"skipped files: {report.empty} empty, {report.unread} unreadable")
    if report.replaced or report.pruned:
        print(f"removed passages: {report.replaced} of changed files, {report.pruned} of deleted ones")
    if report.vanished:
        print(f"kept passages of deleted files: {report.vanished} (--prune removes them)")


def ask_options(parser: argparse.ArgumentParser) -> None:
    """Arguments of ask."""
    parser.add_argument("question", help="what to ask")
    store_option(parser)
    bundle_option(parser)
    parser.add_argument(
        "--ratio", type=int, default=16, help="source tokens per slot, a multiple of the store's (default: %(default)s)"
    )
    parser.add_argument("--k", type=int, default=4, help="passages to retrieve (default: %(default)s)")
    parser.add_argument("--text", action="store_true", help="give the decoder the passages' text, for comparison")
    server_options(parser)


def run_ask(args: argparse.Namespace) -> None:
    """Answer a question from the nearest passages, read by the decoder as soft contexts."""
    from ctx_compress_rag.app.asking import question_prompt
    from ctx_compress_rag.app.passage_index import open_index
    from ctx_compress_rag.errors import ConfigError

    if not args.question.strip():
        raise ConfigError("the question is empty: ask something")
    quiet_models()
    with open_index(args.store, args.bundle) as index:
        from ctx_compress_rag.decoding.decoder import Sampling, TransformersDecoder
        from ctx_compress_rag.serving.client import ServerDecoder

        note_what_it_reads(index.bundle)
        [hits] = index.search([args.question], args.k)
        prompt = question_prompt(index.store, args.question, hits, None if args.text else args.ratio)
        decoder = (
            TransformersDecoder(index.bundle, index.store)
            if args.server is None
            else ServerDecoder(index.bundle, index.store, server=args.server, api_key=server_key(args))
        )
        begun = False
        for piece in decoder.stream(prompt, Sampling(max_new_tokens=_ANSWER_TOKENS)):
            if isinstance(piece, str):
                # Some tokenizers start an answer with a space.
                print(piece if begun else piece.lstrip(), end="", flush=True)
                begun = begun or bool(piece.strip())
            else:
                print(f"\n\n{piece.prompt_tokens} prompt tokens, {piece.slots} of them slots. Sources:")
    for hit in hits:
        print(f"  {hit.similarity:.2f}  {hit.source}: {' '.join(hit.text.split())[:80]}")


def info_options(parser: argparse.ArgumentParser) -> None:
    """Arguments of info."""
    store_option(parser)


def run_info(args: argparse.Namespace) -> None:
    """Say what is in an index."""
    from ctx_compress_rag.app.passage_index import inspect_index

    info = inspect_index(args.store)
    store = info.store
    rows = {
        "bundle": f"{store.bundle} ({info.bundle_name})",
        "fingerprint": store.fingerprint,
        "passages": f"{store.passages:,} from {info.sources:,} files",
        "source tokens": f"{store.source_tokens:,}",
        "slots": f"{store.slots:,} at ratio {store.base_ratio}",
        "codec": store.codec,
        "payload bytes": f"{store.payload_bytes:,}",
        "bytes on disk": f"{store.disk_bytes:,}, with texts, retrieval vectors and Chroma's own",
        "payload share": f"{store.payload_share or 0:.0%}",
    }
    for name, value in rows.items():
        print(f"{name:<14} {value}")


def demo_options(parser: argparse.ArgumentParser) -> None:
    """Arguments of demo."""
    parser.add_argument(
        "--store", default="ctx-compress-demo", metavar="DIR", help="Chroma folder (default: ./%(default)s)"
    )
    bundle_option(parser)


def run_demo(args: argparse.Namespace) -> None:
    """Index a small corpus about invented people and places, and answer a dozen questions about it.

    Each is answered with the full text, with soft contexts and without context, and the answers are scored.
    """
    from ctx_compress_rag.app.demo import run_demo

    quiet_models()
    report = run_demo(args.store, args.bundle)
    new, known = report.stored.added, report.stored.unchanged
    print(
        f"{new} passages compressed into {args.store}"
        if new
        else f"all {known} passages found in {args.store}: nothing compressed"
    )
    print(f"retrieval found every passage needed for {report.retrieved} of {len(report.questions)} questions\n")
    print(report.tables())
    print(f"\nscore against ratio: {Path(report.picture).resolve()}")

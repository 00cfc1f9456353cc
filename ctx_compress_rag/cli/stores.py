"""Commands about an index: index, ask, info, demo."""

from __future__ import annotations

from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Annotated

import typer

from ctx_compress_rag.cli.command import command
from ctx_compress_rag.cli.shared import (
    AnswerTokens,
    Device,
    Dtype,
    Embedder,
    Extractive,
    OwnBundle,
    Server,
    ServerKey,
    Store,
    Temperature,
    Template,
    check_template,
    note_what_it_reads,
    printable,
    quiet_models,
)
from ctx_compress_rag.indexing.defaults import ENGLISH, STORE

if TYPE_CHECKING:
    from ctx_compress_rag.indexing.build import IndexReport
    from ctx_compress_rag.indexing.fill import Added

_ANSWER_TOKENS = 512


@command("index", "./my_docs")
def index(
    path: Annotated[
        str | None,
        typer.Argument(
            metavar="PATH",
            help="Folder to index, with its subfolders but without hidden files, or a .jsonl or .parquet file with "
            "rows of text and, optionally, id.",
        ),
    ] = None,
    *,
    store: Store = STORE,
    collection: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="In place of PATH: your app's own collection in the Chroma folder; soft contexts are kept beside it.",
        ),
    ] = None,
    bundle: OwnBundle = None,
    chunk_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Maximum decoder tokens per passage.  [default: 256, or the bundle's window if less]"
        ),
    ] = None,
    prune: Annotated[bool, typer.Option("--prune", help="Remove the passages of files deleted from PATH.")] = False,
    codec: Annotated[
        str | None, typer.Option(metavar="CODEC", help="How a new store keeps slots: int8, fp16 or int4.")
    ] = None,
    embedder: Embedder = None,
    device: Device = None,
    dtype: Dtype = None,
    ray: Annotated[
        int | None,
        typer.Option(
            "--ray", metavar="N", min=1, help="Embed and compress on N Ray workers, in a cluster or on this machine."
        ),
    ] = None,
) -> None:
    """Index a folder of files, or a file of texts.

    Takes .txt and .md files and, with the `documents` extra, .pdf, .docx and .html. Only new and changed passages
    are compressed; run it again to resume after an interruption. Passages of a changed file are replaced; those of a
    deleted file stay unless --prune is given.
    """
    from ctx_compress_rag.errors import ConfigError
    from ctx_compress_rag.indexing.build import compress_collection, update_index
    from ctx_compress_rag.indexing.index import open_index
    from ctx_compress_rag.indexing.inputs import open_input

    if (path is None) == (collection is None):
        raise ConfigError("give either a folder or file to index, or --collection NAME")
    if collection is not None:
        not_for_it = {"--embedder": embedder, "--prune": prune or None, "--chunk-tokens": chunk_tokens}
        if refused := [name for name, value in not_for_it.items() if value is not None]:
            raise ConfigError(
                f"--collection takes no {', '.join(refused)}: your app's collection keeps its own passages and vectors"
            )
        quiet_models()
        bundle = bundle or ENGLISH
        done = compress_collection(store, collection, bundle, codec, ray, device=device, dtype=dtype)
        print(_compressed(f"collection {collection}", done, bundle))
        return
    given = open_input(str(path))  # before models are loaded and a store is made
    quiet_models()
    with open_index(store, bundle, codec=codec, create=True, embedder=embedder, device=device, dtype=dtype) as opened:
        note_what_it_reads(opened.bundle)
        report = update_index(opened, given, chunk_tokens=chunk_tokens, prune=prune, ray_workers=ray)
    print(printable(_compressed(f"{report.files} {given.kind} in {path}", report, opened.bundle.config.name)))
    if skipped := given.skipped():
        print(printable(skipped))
    if report.replaced or report.pruned:
        print(f"removed passages: {report.replaced} of changed files, {report.pruned} of deleted ones")
    if report.vanished:
        print(f"kept passages of deleted files: {report.vanished} (--prune removes them)")


def _compressed(what: str, done: Added | IndexReport, bundle: str) -> str:
    return f"{what}: {done.added} passages compressed, {done.unchanged} unchanged, with {bundle}"


@command("ask", '"How long does the warranty last?" --ratio 8')
def ask(
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="What to ask.")],
    store: Store = STORE,
    bundle: OwnBundle = None,
    ratio: Annotated[
        int | None,
        typer.Option(
            "--ratio",
            "--reduction",
            metavar="R",
            help="Source tokens per slot, a multiple of the store's; for a ram bundle, how many times shorter the "
            "passages become.  [default: the smallest]",
        ),
    ] = None,
    token_budget: Annotated[
        int | None,
        typer.Option(
            "--token-budget",
            metavar="N",
            help="In place of a ratio: maximum tokens of all passages; the nearest get the finest ratios.",
        ),
    ] = None,
    k: Annotated[int, typer.Option("--k", metavar="N", help="Passages to retrieve.")] = 4,
    text: Annotated[bool, typer.Option("--text", help="Give the decoder the passages' text, for comparison.")] = False,
    template: Template = None,
    max_tokens: AnswerTokens = None,
    temperature: Temperature = 0.0,
    extractive: Extractive = False,
    device: Device = None,
    dtype: Dtype = None,
    embedder: Embedder = None,
    server: Server = None,
    server_key: ServerKey = None,
) -> None:
    """Answer a question from an index.

    The decoder reads the nearest passages as soft contexts. Prints the answer, then the passages with their files.
    """
    from ctx_compress_rag.errors import ConfigError
    from ctx_compress_rag.indexing.ask import question_prompt
    from ctx_compress_rag.indexing.index import open_index

    if not question.strip():
        raise ConfigError("the question is empty: ask something")
    check_template(template)
    quiet_models()
    with open_index(store, bundle, embedder=embedder, device=device, dtype=dtype) as opened:
        from ctx_compress_rag.decoding.decoder import Sampling, TransformersDecoder
        from ctx_compress_rag.decoding.vllm import ServerDecoder

        note_what_it_reads(opened.bundle)
        [hits] = opened.search([question], k)
        config = opened.bundle.config
        asked_by = template or config.asked_by
        prompt = question_prompt(opened.store, question, hits, ratio, asked_by, token_budget=token_budget, as_text=text)
        decoder = (
            TransformersDecoder(opened.bundle, opened.store)
            if server is None
            else ServerDecoder(opened.bundle, opened.store, server=server, api_key=server_key)
        )
        sampling = Sampling(
            max_tokens or config.answer_tokens or _ANSWER_TOKENS, temperature=temperature, extractive=extractive
        )
        begun = False
        for piece in decoder.stream(prompt, sampling):
            if isinstance(piece, str):
                # Some tokenizers start an answer with a space.
                print(printable(piece if begun else piece.lstrip()), end="", flush=True)
                begun = begun or bool(piece.strip())
            else:
                print(f"\n\n{piece.prompt_tokens} prompt tokens, {piece.slots} of them slots. Sources:")
    for number, hit in enumerate(hits, 1):
        print(printable(f"\n[{number}] {hit.source} ({hit.similarity:.2f})\n{indent(hit.text, '    ')}"))


@command("info", "--store ./chroma")
def info(
    store: Store = STORE,
    prune: Annotated[
        bool,
        typer.Option("--prune", help="First delete soft contexts without a passage in the index, also those of apps."),
    ] = False,
) -> None:
    """Print what an index holds."""
    from ctx_compress_rag.indexing.index import inspect_index
    from ctx_compress_rag.indexing.index import prune as prune_index

    if prune:
        print(f"deleted soft contexts without a passage: {len(prune_index(store))}")
    found = inspect_index(store)
    kept = found.store
    rows = {
        "bundle": f"{kept.bundle} ({found.bundle_name})",
        "embedder": found.embedder,
        "fingerprint": kept.fingerprint,
        "passages": f"{kept.passages:,} from {found.sources:,} files",
        "source tokens": f"{kept.source_tokens:,}",
        "slots": f"{kept.slots:,} at ratio {kept.base_ratio}",
        "codec": kept.codec,
        "payload bytes": f"{kept.payload_bytes:,}",
        "bytes on disk": f"{kept.disk_bytes:,}, with texts, retrieval vectors and Chroma's own data",
        "payload share": f"{kept.payload_share or 0:.0%}",
    }
    if found.orphans:
        rows["orphans"] = f"{len(found.orphans):,} soft contexts without a passage (--prune deletes them)"
    for name, value in rows.items():
        print(f"{name:<14} {value}")


@command("demo", "--invented")
def demo(
    store: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Chroma folder.  [default: ctx-compress-wikipedia, or ctx-compress-demo]"),
    ] = None,
    bundle: OwnBundle = None,
    invented: Annotated[
        bool, typer.Option("--invented", help="Passages about an invented world, and the bundle that reads it.")
    ] = False,
) -> None:
    """Try it on a small corpus.

    Indexes paragraphs of Wikipedia and answers a dozen questions about them. Each is answered with the full text, with
    soft contexts and without context, and the answers are scored.
    """
    from ctx_compress_rag.indexing.demo import run_demo

    quiet_models()
    store = store or ("ctx-compress-demo" if invented else "ctx-compress-wikipedia")
    report = run_demo(store, bundle, invented)
    new, known = report.stored.added, report.stored.unchanged
    print(
        f"{new} passages compressed into {store}"
        if new
        else f"all {known} passages found in {store}: nothing compressed"
    )
    print(f"retrieval found every passage needed for {report.retrieved} of {len(report.questions)} questions\n")
    print(report.tables())
    print(f"\nscore against ratio: {Path(report.picture).resolve()}")

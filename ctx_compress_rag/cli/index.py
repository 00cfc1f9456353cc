"""The commands `index`, `info`, `backup` and `demo`, about indexes in Chroma folders."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from ctx_compress_rag.cli import shared
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.indexing import DEFAULT_BUNDLE, MIN_CHUNK_TOKENS


@shared.command("./my_docs")
def index(
    path: Annotated[
        str | None,
        Argument(metavar="PATH", help="A folder, of which hidden files are left out, or a .jsonl file of rows."),
    ] = None,
    *,
    index: shared.Index = shared.INDEX,
    collection: Annotated[
        str | None,
        Option(metavar="NAME", help="In place of PATH: your app's collection, beside which soft contexts are kept."),
    ] = None,
    bundle: shared.OwnBundle = None,
    chunk_tokens: Annotated[
        int | None,
        Option(
            metavar="N", min=MIN_CHUNK_TOKENS, help="Longest passage in tokens.  [default: 256, or the window if less]"
        ),
    ] = None,
    prune: Annotated[bool, Option("--prune", help="Remove the passages of files deleted from PATH.")] = False,
    repair: Annotated[
        bool, Option("--repair", help="First check all passages, and compress damaged ones again.")
    ] = False,
    codec: Annotated[shared.Codec | None, Option(help="How a new store keeps slots.  [default: int8]")] = None,
    embedder: Annotated[
        str | None, Option(metavar="NAME", help="A sentence-transformers model.  [default: the index's, else MiniLM]")
    ] = None,
    device: shared.Device = None,
    dtype: shared.Dtype = None,
) -> None:
    """Index a folder of files, or a file of texts.

    Takes .txt, .md, .rst and .json files and, with the `index` extra, .pdf, .docx, .pptx, .xlsx, .csv, .tsv and .html.
    Only new and changed passages are compressed, so run the command again to resume after an interruption. Passages of
    a changed file are replaced. Passages of a deleted file stay unless --prune is given.
    """
    from ctx_compress_rag.indexing.build import compress_collection, update_index
    from ctx_compress_rag.indexing.index import open_index
    from ctx_compress_rag.indexing.inputs import open_index_input

    if (path is None) == (collection is None):
        raise ConfigError("give either a folder or file to index, or --collection NAME")
    if collection is not None:
        # Your app's collection keeps its own passages and vectors.
        own = {"embedder": embedder, "prune": prune, "repair": repair, "chunk_tokens": chunk_tokens}
        shared.check_options_apart(collection=collection, **own)
        bundle = bundle or DEFAULT_BUNDLE
        done = compress_collection(index, collection, bundle, codec, device=device, dtype=dtype)
        print(_compressed(f"collection {collection}", done.added + done.updated, done.unchanged, bundle))
        return
    given = open_index_input(str(path))  # before models are loaded and a store is made
    with open_index(index, bundle, codec=codec, create=True, embedder=embedder, device=device, dtype=dtype) as opened:
        report = update_index(opened, given, chunk_tokens=chunk_tokens, prune=prune, repair=repair)
    what, config = f"{report.files} {given.kind} in {path}", opened.bundle.config
    with_what = f"{config.name}, which reads {config.reads}"
    print(shared.printable(_compressed(what, report.added, report.unchanged, with_what)))
    if skipped := given.skipped():
        print(shared.printable(skipped))
    if report.replaced or report.pruned:
        print(f"removed passages: {report.replaced} of changed files, {report.pruned} of deleted ones")
    if report.vanished:
        moved = "".join(f" and of {root}, which no longer exists" for root in report.moved)
        print(shared.printable(f"kept passages of deleted files{moved}: {report.vanished} (--prune removes them)"))


def _compressed(what: str, added: int, unchanged: int, bundle: str) -> str:
    return f"{what}: {added} passages compressed, {unchanged} unchanged, with {bundle}"


@shared.command("--index ./chroma")
def info(
    index: shared.Index = shared.INDEX,
    prune: Annotated[
        bool, Option("--prune", help="First delete soft contexts without a passage in the index, also those of apps.")
    ] = False,
) -> None:
    """Print what an index holds."""
    from ctx_compress_rag.indexing.index import inspect_index

    found = inspect_index(index, prune)
    if prune:
        print(f"deleted soft contexts without a passage: {len(found.orphans)}")
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
    if found.orphans and not prune:
        rows["orphans"] = f"{len(found.orphans):,} soft contexts without a passage (--prune deletes them)"
    for name, value in rows.items():
        print(f"{name:<14} {value}")


@shared.command("--index ./chroma ./chroma-copy")
def backup(
    index: shared.Index,
    target: Annotated[str, Argument(metavar="FOLDER", help="Where the copy goes; must not exist.")],
) -> None:
    """Copy a whole index.

    Other programs may write to the index meanwhile. The copy contains the store's key and can be used at once.
    """
    from ctx_compress_rag.indexing.index import check_index_exists
    from ctx_compress_rag.store.place import StoreFolder

    check_index_exists(index)
    StoreFolder(Path(index)).back_up(Path(target))
    print(f"{index} copied to {target}")


@shared.command("--index ./wikipedia")
def demo(index: shared.Index = "ctx-compress-wikipedia", bundle: shared.OwnBundle = None) -> None:
    """Try soft contexts on a small corpus.

    Indexes paragraphs of Wikipedia and answers a dozen questions about them. Each question is answered from full text,
    from passages as the bundle compresses them by default, and without context, and the answers are scored.
    """
    from ctx_compress_rag.indexing.demo import run_demo

    report = run_demo(index, bundle)
    new, known = report.stored.added, report.stored.unchanged
    print(
        f"{new} passages compressed into {index}"
        if new
        else f"all {known} passages found in {index}: nothing compressed"
    )
    questions = len(report.systems[0].answers)
    print(f"retrieval found every passage needed for {report.retrieved} of {questions} questions\n")
    print(report.tables)

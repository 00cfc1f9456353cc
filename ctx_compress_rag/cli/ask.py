"""`ctx-compress ask`: answer a question from an index."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from textwrap import indent
from typing import TYPE_CHECKING, Annotated

import typer

from ctx_compress_rag.cli import shared
from ctx_compress_rag.cli.command import command
from ctx_compress_rag.errors import ConfigError

if TYPE_CHECKING:
    from ctx_compress_rag.decoding.decoder import Decoder
    from ctx_compress_rag.decoding.sampling import Sampling
    from ctx_compress_rag.indexing.index import Hit
    from ctx_compress_rag.marking.mark import Marking
    from ctx_compress_rag.store import SoftContextStore


@command('"How long does the warranty last?" --ratio 8')
def ask(
    question: Annotated[
        str | None,
        typer.Argument(metavar="QUESTION", help="What to ask.  [default: each line of the standard input]"),
    ] = None,
    store: shared.Store = shared.STORE,
    bundle: shared.OwnBundle = None,
    ratio: Annotated[
        int | None,
        typer.Option(
            metavar="R",
            min=1,
            help="Source tokens per slot, a multiple of the store's; for a ram bundle, how many times shorter the "
            "passages become.  [default: the smallest]",
        ),
    ] = None,
    token_budget: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="In place of a ratio: maximum tokens of all passages, sentences and slots together.",
        ),
    ] = None,
    text_share: shared.TextShare = None,
    k: shared.Retrieved = 4,
    text: Annotated[bool, typer.Option("--text", help="Give the decoder the passages' text, for comparison.")] = False,
    template: shared.Template = None,
    max_tokens: shared.AnswerTokens = None,
    extractive: shared.Extractive = None,
    device: shared.Device = None,
    dtype: shared.Dtype = None,
    engine: shared.Engine = "transformers",
    server_key: shared.ServerKey = None,
) -> None:
    """Answer a question from an index, or question after question until the input ends.

    The decoder reads the nearest passages as soft contexts. Prints the answer, then the passages with their files.
    """
    from ctx_compress_rag.indexing.index import open_index

    if question is not None and not question.strip():
        raise ConfigError("the question is empty: ask something")
    shared.check_apart(ratio=ratio, token_budget=token_budget, text=text)
    shared.check_apart(text_share=text_share, text=text)
    is_server = engine.startswith("http")
    if extractive and is_server:
        raise ConfigError(f"--extractive: {engine} cannot quote: leave it out, or use another --engine")
    shared.check_template(template)
    shared.quiet_models()
    with open_index(store, bundle, device=device, dtype=dtype) as opened:
        from ctx_compress_rag.decoding.decoder import Decoder
        from ctx_compress_rag.decoding.sampling import Sampling
        from ctx_compress_rag.marking.mark import Marking

        config, options = opened.bundle.config, shared.engine_options(engine, server_key)
        marking = None if text else Marking(opened.store, ratio, token_budget, text_share)
        decoder = Decoder(opened.bundle, opened.store, engine=engine, **options)
        if extractive is None:
            extractive = config.extractive and not is_server
        sampling = Sampling(max_tokens=max_tokens or config.answer_tokens, extractive=extractive)
        for each in _asked() if question is None else [question]:
            [hits] = opened.search([each], k)
            _answer(each, hits, opened.store, marking, decoder, template or config.template, sampling)


def _asked() -> Iterator[str]:
    """The lines of the standard input, but for blank ones; a terminal shows where to write."""
    while True:
        if sys.stdin.isatty():
            print("\nQuestion: ", end="", file=sys.stderr, flush=True)
        if not (line := sys.stdin.readline()):
            return
        if line.strip():
            yield line.strip()


def _answer(
    question: str,
    hits: Sequence[Hit],
    store: SoftContextStore,
    marking: Marking | None,
    decoder: Decoder,
    template: str,
    sampling: Sampling,
) -> None:
    """Print the answer and its sources; without `marking`, the decoder reads their text."""
    from ctx_compress_rag.text.templates import PASSAGE_SEPARATOR, messages

    texts = [hit.text for hit in hits]
    if marking is not None:
        marked = marking.mark(texts, [hit.id for hit in hits], [hit.similarity for hit in hits], question)
        texts = [each.shown for each in marked]
    prompt = messages(template, PASSAGE_SEPARATOR.join(filter(None, texts)), question)
    begun = False
    for piece in decoder.stream(prompt, sampling):
        if isinstance(piece, str):
            # Some tokenizers start an answer with a space.
            print(shared.printable(piece if begun else piece.lstrip()), end="", flush=True)
            begun = begun or bool(piece.strip())
        else:
            shares = enumerate([share(store, each) for each in texts], 1)
            shown = (f"[{place}] {each}" for place, each in shares if each)
            print(f"\n\n{'Quoted' if sampling.extractive else 'Free answer'}, from {', '.join(shown)}.")
            print(f"{piece.prompt_tokens} prompt tokens, {piece.slots} of them slots. Sources:")
    for number, hit in enumerate(hits, 1):
        print(shared.printable(f"\n[{number}] {hit.source} ({hit.similarity:.2f})\n{indent(hit.text, '    ')}"))


def share(store: SoftContextStore, shown: str) -> str:
    """What the prompt has of a passage: "text", "14 slots", "text and 14 slots", or ""."""
    parts = store.split(shown)
    slots = sum(0 if isinstance(part, str) else part.slots for part in parts)
    text = any(isinstance(part, str) and part.strip() for part in parts)
    return " and ".join([*["text"] * text, *[f"{slots} slots"] * (slots > 0)])

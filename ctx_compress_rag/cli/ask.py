"""The command `ctx-compress ask`, which answers questions from an index."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from textwrap import indent
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from ctx_compress_rag.cli import shared
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.text.answers import quoted_from

if TYPE_CHECKING:
    from ctx_compress_rag.decoding.sampling import Generation


@shared.command('"How long does the warranty last?" --ratio 8')
def ask(
    question: Annotated[
        str | None, Argument(metavar="QUESTION", help="What to ask.  [default: each line of the standard input]")
    ] = None,
    index: shared.Index = shared.INDEX,
    bundle: shared.OwnBundle = None,
    ratio: shared.Ratio = None,
    token_budget: Annotated[
        int | None,
        Option(metavar="N", min=1, help="In place of a ratio: maximum tokens of all passages, sentences and slots."),
    ] = None,
    text_share: shared.TextShare = None,
    k: shared.Retrieved = 4,
    text: Annotated[bool, Option("--text", help="Give the decoder the passages' text, for comparison.")] = False,
    max_tokens: shared.AnswerTokens = None,
    extractive: shared.Extractive = None,
    device: shared.Device = None,
    dtype: shared.Dtype = None,
    engine: shared.Engine = "transformers",
    server_key: shared.ServerKey = None,
    weights: shared.Weights = None,
) -> None:
    """Answer questions from an index.

    The decoder reads what the options show of the nearest passages. Prints the answer, then these passages.
    """
    from ctx_compress_rag.indexing.index import open_index

    shared.check_options_apart(ratio=ratio, token_budget=token_budget, text=text)
    shared.check_options_apart(text_share=text_share, text=text)
    options = shared.engine_options(engine, server_key, weights=weights)
    llama_cpp = (weights or "BF16") if engine == "llama.cpp" else None
    with open_index(index, bundle, device=device, dtype=dtype, llama_cpp=llama_cpp) as opened:
        from ctx_compress_rag.decoding.decoder import Decoder, quotes_by_default
        from ctx_compress_rag.decoding.sampling import Sampling
        from ctx_compress_rag.indexing.retrieval import IndexRetrieval
        from ctx_compress_rag.marking.mark import Marking

        config = opened.bundle.config
        decoder = Decoder(opened.bundle, opened.store, engine=engine, **options)
        if extractive is None:
            extractive = quotes_by_default(opened.bundle, engine)
        sampling = Sampling(max_tokens=max_tokens or config.answer_tokens, extractive=extractive)
        marking = None if text else Marking(opened.store, ratio, token_budget, text_share)
        retrieval = IndexRetrieval(opened, k, marking)
        for each in _asked() if question is None else [question]:
            prompt, sources = retrieval.retrieve([{"role": "user", "content": each}])
            _print(decoder.stream(prompt, sampling), sources, extractive)


def _asked() -> Iterator[str]:
    """Yield the lines of the standard input that are not blank; ask for each on a terminal, else print each."""
    typed = asked = sys.stdin.isatty()
    while True:
        if typed:
            print("\nQuestion: ", end="", file=sys.stderr, flush=True)
        if not (line := sys.stdin.readline()):
            break
        if line.strip():
            asked = True
            if not typed:
                print(shared.printable(f"\nQuestion: {line.strip()}"))
            yield line.strip()
    if not asked:
        raise ConfigError("the input holds no question: give one as the argument, or one a line")


def _print(pieces: Iterator["str | Generation"], sources: Sequence[Mapping[str, Any]], extractive: bool) -> None:
    begun = False
    for piece in pieces:
        if isinstance(piece, str):
            # Some tokenizers start an answer with a space.
            print(shared.printable(piece if begun else piece.lstrip()), end="", flush=True)
            begun = begun or bool(piece.strip())
        else:
            found = [f"[{number}]" for number, each in enumerate(sources, 1) if quoted_from(piece.text, each["text"])]
            how = "Quoted" if extractive else "Free answer"
            where = f", found in {', '.join(found)}" if found else ""
            print(f"\n\n{how}{where}. {piece.prompt_tokens} prompt tokens, {piece.slots} of them slots. Read:")
    for number, each in enumerate(sources, 1):
        share = " and ".join(["text"] * bool(each["sentences"]) + [f"{each['slots']} slots"] * bool(each["slots"]))
        text = indent(each["text"], "    ")
        print(shared.printable(f"\n[{number}] {each['source']} ({each['similarity']:.2f}), {share}\n{text}"))

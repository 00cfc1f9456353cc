"""The command that tries GGUF files: transformers' reading, llama.cpp's conversion and its scores."""

from typing import Annotated

import typer

from benchmarks.lab import lab
from ctx_compress_rag.cli.shared import command


@command("./llama.cpp", lab)
def gguf(
    converter: Annotated[str, typer.Argument(metavar="FILE", help="llama.cpp's converter, or a folder with it.")],
    only: Annotated[list[str] | None, typer.Option(metavar="NAME", help="A row; repeatable.")] = None,
) -> None:
    """Print, for tiny models, whether their GGUF files are read, and whether llama.cpp runs them, or why not.

    Without --only, also which tokenizers that are read from GGUF files have other tokens than llama.cpp's.
    """
    from pathlib import Path
    from tempfile import TemporaryDirectory

    from benchmarks.gguf_files.shapes import SHAPES
    from benchmarks.gguf_files.tokenizers import compared
    from benchmarks.gguf_files.trial import tried

    print("| model | GGUF read | llama.cpp |\n|---|---|---|")
    for name in only or SHAPES:
        with TemporaryDirectory() as folder:
            print(f"| {name} | {' | '.join(tried(name, Path(converter), Path(folder)))} |", flush=True)
    if only:
        return
    print("\n| tokenizer.ggml.pre | 6 ordinary texts | 300 random ones |\n|---|---|---|")
    with TemporaryDirectory() as folder:
        for name, ordinary, random in compared(Path(folder)):
            print(f"| {name} | {ordinary or 'right'} | {random or 'right'} |", flush=True)

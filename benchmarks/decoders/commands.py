"""The command `decoders`: every type of decoder through the library's ways, as a page of the documentation."""

import json
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from benchmarks.lab import lab
from ctx_compress_rag.cli.shared import command

_PAGE = Path(__file__).parents[2] / "docs" / "decoders.md"


@command("llama qwen3 --page /tmp/decoders.md", lab)
def decoders(
    types: Annotated[list[str] | None, typer.Argument(metavar="TYPE...", help="transformers' names.  [all]")] = None,
    page: Annotated[str, typer.Option(metavar="FILE", help="The page to write.")] = str(_PAGE),
    processes: Annotated[int, typer.Option(metavar="N", min=1, help="Types at a time.")] = 2,
    seconds: Annotated[float, typer.Option(metavar="N", min=1, help="The most for a type.")] = 240,
) -> None:
    """Try tiny decoders of transformers' types, and write which of the library's ways they can go.

    Outcomes are also kept beside the page, in .json, for each version of transformers, and types that are there are
    not tried again. The page's table is of the newest version, and counts what is right with the others.
    """
    import torch
    import transformers

    import benchmarks.decoders.trial  # noqa: F401, once, before processes are forked
    from benchmarks.decoders.build import WRAPPERS, decoder_types
    from benchmarks.decoders.page import decoder_page

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    file = Path(page).with_suffix(".json")
    kept: dict[str, dict[str, dict[str, str]]] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    found = kept.setdefault(transformers.__version__, {})
    left = [name for name in types or decoder_types() + WRAPPERS if name not in found]
    for name, said in _in_processes(left, processes, seconds):
        found[name] = said
        print(name, *(f"{way}: {each}" for way, each in said.items() if each != "yes"), sep=" | ", flush=True)
        file.write_text(json.dumps(kept, indent=1), encoding="utf-8")
    Path(page).write_text(decoder_page(kept), encoding="utf-8")


def _in_processes(names: Sequence[str], most: int, seconds: float) -> Iterator[tuple[str, dict[str, str]]]:
    """Try each type in a process of its own, which has imported all, and ends after so many seconds."""
    from benchmarks.decoders.trial import WAYS

    fork = multiprocessing.get_context("fork")
    left, running = list(reversed(names)), dict[Any, tuple[str, Any, float]]()
    while left or running:
        while left and len(running) < most:
            name = left.pop()
            ours, theirs = fork.Pipe(duplex=False)
            process = fork.Process(target=_try, args=(name, theirs))
            process.start()
            theirs.close()
            running[ours] = name, process, time.monotonic() + seconds
        done = wait(list(running), timeout=1)
        for pipe in [pipe for pipe, (_, _, end) in running.items() if pipe in done or time.monotonic() > end]:
            name, process, _ = running.pop(pipe)
            try:
                said = dict(pipe.recv()) if pipe in done else dict.fromkeys(WAYS, f"error: not done in {seconds:.0f} s")
            except EOFError:
                said = dict.fromkeys(WAYS, "error: its process ended")
            process.kill()
            process.join()
            yield name, said


def _try(name: str, pipe: Any) -> None:
    from benchmarks.decoders.trial import try_decoder

    with TemporaryDirectory() as folder:
        pipe.send(try_decoder(name, Path(folder)))

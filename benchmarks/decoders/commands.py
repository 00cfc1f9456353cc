"""The command `decoders`: every type of decoder through the library's ways, as a page of the documentation."""

import json
import multiprocessing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from benchmarks.lab import lab
from ctx_compress_rag.cli.command import command

_PAGE = Path(__file__).parents[2] / "docs" / "decoders.md"


@command("llama qwen3 --page /tmp/decoders.md", lab)
def decoders(
    types: Annotated[list[str] | None, typer.Argument(metavar="TYPE...", help="transformers' names.  [all]")] = None,
    page: Annotated[str, typer.Option(metavar="FILE", help="The page to write.")] = str(_PAGE),
    seconds: Annotated[float, typer.Option(metavar="N", min=1, help="The most for a type.")] = 240,
) -> None:
    """Try tiny decoders of transformers' types, and write which of the library's ways they can go.

    Outcomes are also kept beside the page, in .json, and types that are there are not tried again.
    """
    import torch
    import transformers

    import benchmarks.decoders.trial  # noqa: F401, once, before processes are forked
    from benchmarks.decoders.build import WRAPPERS, decoder_types
    from benchmarks.decoders.page import decoder_page

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    file = Path(page).with_suffix(".json")
    found: dict[str, dict[str, str]] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for name in types or decoder_types() + WRAPPERS:
        if name not in found:
            found[name] = _in_process(name, seconds)
            print(
                name, *(f"{way}: {said}" for way, said in found[name].items() if said != "yes"), sep=" | ", flush=True
            )
            file.write_text(json.dumps(found, indent=1), encoding="utf-8")
    Path(page).write_text(decoder_page(found, transformers.__version__), encoding="utf-8")


def _in_process(name: str, seconds: float) -> dict[str, str]:
    """Try a type in a process of its own, which has imported all, and ends after so many seconds."""
    from benchmarks.decoders.trial import WAYS

    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    process = fork.Process(target=_try, args=(name, theirs))
    process.start()
    theirs.close()
    try:
        return dict(ours.recv()) if ours.poll(seconds) else dict.fromkeys(WAYS, f"error: not done in {seconds:.0f} s")
    except EOFError:
        return dict.fromkeys(WAYS, "error: its process ended")
    finally:
        process.kill()
        process.join()


def _try(name: str, pipe: Any) -> None:
    from benchmarks.decoders.trial import try_decoder

    with TemporaryDirectory() as folder:
        pipe.send(try_decoder(name, Path(folder)))

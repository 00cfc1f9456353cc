"""The commands `train`, `import` and `export`, which make a bundle, and write its decoder for vLLM or llama.cpp."""

import time
from typing import Annotated, Literal

from typer import Argument, Option

from ctx_compress_rag.cli import shared


@shared.command("mean_pooling/teacher mean_pooling/compressor --minutes 60")
def train(
    recipes: Annotated[
        list[str],
        Argument(
            metavar="RECIPE...",
            show_default=False,
            help="YAML files, folders of them, or shipped ones: a recipe (comprexit/answer) or a folder (smollm2).",
        ),
    ],
    minutes: Annotated[
        float | None,
        Option(metavar="N", min=0, help="Save what is trained, and stop, after this time.  [default: no limit]"),
    ] = None,
    no_resume: Annotated[bool, Option("--no-resume", help="Start again; removes earlier checkpoints.")] = False,
) -> None:
    """Train a bundle from recipes.

    Runs the recipes in order. An interrupted run resumes at its last checkpoint. A finished recipe is not run again.
    """
    from ctx_compress_rag.errors import TimeUpError
    from ctx_compress_rag.training.engine.loop import training_processes
    from ctx_compress_rag.training.run import (
        check_recipe_inputs,
        is_recipe_finished,
        load_recipe,
        recipe_names,
        run_recipe,
    )

    names = [recipe for name in recipes for recipe in recipe_names(name)]
    loaded = [load_recipe(recipe) for recipe in names]  # report an error in any before the first runs
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    check_recipe_inputs(loaded)
    try:
        for name, recipe in zip(names, loaded, strict=True):
            before = not no_resume and is_recipe_finished(recipe)
            folder = run_recipe(name, resume=not no_resume, deadline=deadline)
            if training_processes().is_main_process:
                print(f"{name}: {'finished before, in' if before else 'written to'} {folder}")
    except TimeUpError as stop:
        if training_processes().is_main_process:
            print(f"{stop}, without --no-resume" if no_resume else stop)


@shared.command("latent-context/0.6b-4b-LCLM-4x ./lclm")
def import_(
    name: Annotated[str | None, Argument(metavar="NAME", help="A published checkpoint's hub id or folder.")] = None,
    folder: Annotated[
        str | None, Argument(metavar="DIR", help="Where the bundle goes.  [default: nowhere; only print facts]")
    ] = None,
    subfolder: Annotated[
        str | None, Option(metavar="DIR", help="The checkpoint's place in the repository, if it has several.")
    ] = None,
    revision: Annotated[str | None, Option(metavar="REV", help="A hub revision.  [default: the newest]")] = None,
    decoder: Annotated[
        str | None, Option(metavar="MODEL", help="The decoder it was trained for.  [default: the one that it names]")
    ] = None,
    encoder: Annotated[str | None, Option(metavar="MODEL", help="Its encoder, likewise.")] = None,
    copy: Annotated[
        bool, Option("--copy", help="Put decoder and encoder into the bundle, for machines without network.")
    ] = False,
    list_: Annotated[bool, Option("--list", help="List the checkpoints that are known, and their licenses.")] = False,
) -> None:
    """Make a bundle of a published compressor.

    Reads LCLM, PISCO, CLaRa, xRAG and ICAE. First prints licenses, downloads and memory. A second run fetches the rest.
    """
    from ctx_compress_rag.published.importing import FORMATS, PublishedImport

    if list_ or name is None:
        for each in FORMATS:
            for arguments, license in each.known:
                print(f"{each.name:<8} {license:<14} {arguments}")
        return
    found = PublishedImport.of(name, subfolder=subfolder, revision=revision, decoder=decoder, encoder=encoder)
    spaces = {"every": "before every text", "first": "before a prompt's first text only", "none": "never"}
    sizes = (f"{found.parameters * bits / 8e9:.1f} GB in {bits}" for bits in (32, 16, 8, 4))
    rows = {
        "format": found.format.name,
        "license": found.licenses["checkpoint"],
        "commit": found.checkpoint.revision or "none: a folder",
        **{part: f"{files} ({found.licenses[part]})" for part, files in found.parts.items()},
        "tokenizer": f"adds a space {spaces[found.decoder.spaces]}",
        "import": f"reads {found.read_now / 1e9:.1f} GB, in about {0.5 + found.read_now / 1e9:.1f} GB of memory",
        "first use": f"reads {found.read_in_use / 1e9:.1f} GB, the decoder and the encoder",
        "memory": f"{', '.join(sizes)} bits; without a GPU, it is 32 unless you give --dtype bfloat16",
        "check": found.format.caution,
    }
    for key, value in rows.items():
        if value:
            print(f"{key:<10} {value}", flush=True)
    if folder is not None:
        found.write(folder, copy=copy)
        print(f"\nthe bundle is in {folder}: `ctx-compress index FILES --bundle {folder}`, then `ctx-compress ask`")


@shared.command("runs/mine/bundle ./for-vllm")
def export(
    bundle: Annotated[str, Argument(metavar="BUNDLE", help="A bundle's folder, hub id or shipped name.")],
    folder: Annotated[str, Argument(metavar="DIR", help="Where to write.")],
    engine: Annotated[Literal["vllm", "llama.cpp"], Option(help="What reads it.")] = "vllm",
    weights: Annotated[Literal["F32", "BF16", "Q8_0", "Q4_0"], Option(help="Type of llama.cpp's weights.")] = "BF16",
    convert: Annotated[
        str | None, Option(metavar="FILE", help="llama.cpp's convert_hf_to_gguf.py, or a folder with it.")
    ] = None,
) -> None:
    """Write a bundle's decoder for vLLM or llama.cpp.

    For vLLM, also writes the LoRA adapters, and prints the command that serves decoder and adapters. For llama.cpp,
    writes GGUF files with the LoRA merged; if the decoder is no such file, give --convert, the place of llama.cpp's
    converter.
    """
    import shlex
    from pathlib import Path

    from ctx_compress_rag.bundle.bundle import Bundle

    opened = Bundle.from_pretrained(bundle)
    if engine == "llama.cpp":
        from ctx_compress_rag.decoding.engines.gguf_weights import export_for_llama_cpp

        export_for_llama_cpp(opened, Path(folder), weights, Path(convert) if convert else None)
        return
    from ctx_compress_rag.decoding import export as exporting

    print(shlex.join(exporting.export_for_vllm(opened, folder)))

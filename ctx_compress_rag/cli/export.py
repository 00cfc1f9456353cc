"""The command `ctx-compress export`, which writes a bundle's decoder for vLLM or llama.cpp."""

from typing import Annotated, Literal

from typer import Argument, Option

from ctx_compress_rag.cli.command import command


@command("runs/mine/bundle ./for-vllm")
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

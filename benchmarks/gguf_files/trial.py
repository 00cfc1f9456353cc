"""One tiny model through llama.cpp's converter, back into transformers, and through llama.cpp."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gguf_files.shapes import tiny_model
from ctx_compress_rag.decoding.engines.gguf_conversion import convert_checkpoint
from ctx_compress_rag.decoding.engines.gguf_weights import UNLIKE, longest
from ctx_compress_rag.decoding.engines.llama_cpp_proof import distance, scores_of, spread
from ctx_compress_rag.errors import BundleError, ConfigError
from ctx_compress_rag.models.gguf_tensors import read_gguf

_VOCABULARY = 1000
_SIZE = 256
_LENGTHS = (12, 40)  # the second is longer than the windows


def tried(name: str, converter: Path, folder: Path) -> tuple[str, str]:
    """Return what became of a model's GGUF file in transformers and in llama.cpp: "right", a difference or an error.

    What transformers and llama.cpp compute alike, but otherwise than the model, llama.cpp's converter left out.
    """
    model, file = tiny_model(name, _VOCABULARY), folder / "tiny.gguf"
    model.save_pretrained(folder / "model")
    (folder / "model" / "metadata.json").write_text('{"general.description": "tiny"}')
    words = {str(number): number for number in range(_VOCABULARY)}  # some conversions count them
    (folder / "model" / "tokenizer.json").write_text(json.dumps({"model": {"vocab": words}, "added_tokens": []}))
    try:
        convert_checkpoint(converter, folder / "model", file)
    except ConfigError as error:
        said = str(error).partition("it said: ")[2].partition(")")[0]
        return "-", f"refused: not converted ({said})"
    size = longest(model.config, _SIZE) or _SIZE
    lengths, found = sorted({min(length, size - 1) for length in _LENGTHS}), None
    try:
        found = scores_of(file, "tiny", model.config.hidden_size, _VOCABULARY, size, lengths)
        in_llama_cpp = _verdict(found, _logits(model, lengths)) + ("" if size == _SIZE else f", to {size} positions")
    except ConfigError as error:
        in_llama_cpp = f"refused: {'ends the process' if 'ends' in str(error) else 'vectors'}"
    except BundleError as error:
        in_llama_cpp = f"refused: unreadable ({str(error).rpartition(': ')[2]})"
    try:
        read = read_gguf(file)[1]().eval()
    except ValueError as error:
        return f"refused: {str(error).partition(':')[0].partition(' is not')[0]}", in_llama_cpp
    in_transformers = _verdict(_logits(read), _logits(model)).replace("refused", "WRONG")
    if found is not None and in_transformers != "right" == _verdict(_logits(read, lengths), found):
        in_transformers = "as the file, not as the model"
    return in_transformers, in_llama_cpp


@torch.no_grad()
def _logits(model: Any, lengths: Sequence[int] = _LENGTHS) -> list[Any]:
    texts = [torch.tensor([spread(_VOCABULARY, length)]) for length in lengths]
    return [model(ids).logits[0, -_LENGTHS[0] :].numpy() for ids in texts]


def _verdict(found: list[Any], expected: list[Any]) -> str:
    off = max(distance(one, other) for one, other in zip(found, expected, strict=True))
    return "right" if off <= UNLIKE else f"refused: {off:.2g} off"

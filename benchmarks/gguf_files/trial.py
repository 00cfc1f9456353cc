"""One tiny model through llama.cpp's converter, back into transformers, and through llama.cpp."""

import json
from pathlib import Path

import torch

from benchmarks.gguf_files.shapes import tiny_model
from ctx_compress_rag.decoding.engines.gguf_conversion import convert_checkpoint
from ctx_compress_rag.decoding.engines.llama_cpp_proof import distance, scores_of, spread
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.models.gguf_tensors import read_gguf

_VOCABULARY = 1000
_LENGTH = 40  # longer than the windows
_LIKE = 0.02  # llama.cpp's memory is in half precision


def tried(name: str, converter: Path, folder: Path) -> tuple[str, str]:
    """Return what became of a model's GGUF file in transformers and in llama.cpp: "right", a difference or an error."""
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
    ids = spread(_VOCABULARY, _LENGTH)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0, -12:].numpy()
        try:
            read = read_gguf(file)[1]().eval()(torch.tensor([ids])).logits[0, -12:].numpy()
        except ValueError as error:
            in_transformers = f"refused: {str(error).partition(':')[0].partition(' is not')[0]}"
        else:
            in_transformers = _verdict(distance(read, expected))
    try:
        found = scores_of(file, "tiny", model.config.hidden_size, _VOCABULARY, 256, ids)
    except ConfigError as error:
        return in_transformers, f"refused: {'ends the process' if 'ends' in str(error) else 'vectors'}"
    return in_transformers, "refused: unreadable" if found is None else _verdict(distance(found, expected))


def _verdict(off: float) -> str:
    return "right" if off <= _LIKE else f"refused: {off:.2g} off"

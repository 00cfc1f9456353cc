"""Convert a transformers checkpoint to GGUF with llama.cpp's own converter, without the vocabulary.

This library tokenizes, and the converter refuses vocabularies that it does not know. It brings its own `gguf` package,
so it runs in a process of its own.
"""

import json
import runpy
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from ctx_compress_rag.decoding.engines.llama_cpp_proof import REMEDY
from ctx_compress_rag.errors import ConfigError

CONVERTER = "convert_hf_to_gguf.py"


def convert_checkpoint(converter: Path, folder: Path, file: Path) -> None:
    """Write a checkpoint to a float32 GGUF file by llama.cpp's script, or one in a folder; or raise ConfigError."""
    places = [converter, *(converter / under / CONVERTER for under in ("", "vendor/llama.cpp"))]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise ConfigError(
            f"{converter} has no {CONVERTER}: it is in llama.cpp's repository, and in the source package of your "
            "version of llama-cpp-python (pip download --no-deps --no-binary :all: llama-cpp-python)"
        )
    command = [sys.executable, "-m", __name__, str(found), str(folder), str(file)]
    child = subprocess.run(command, capture_output=True, text=True)
    if child.returncode or not file.is_file():
        lines = [line for line in child.stderr.splitlines() if line.strip(" ~^")] or ["nothing"]
        said = " ".join(line.strip() for line in lines[-1 if ":" in lines[-1] else -2 :])  # a bare AssertionError
        raise ConfigError(f"llama.cpp's converter cannot convert {folder} (it said: {said}): {REMEDY}")


def _convert(script: Path, folder: str, file: str) -> None:
    sys.path[:0] = [str(script.parent / "gguf-py"), str(script.parent)]
    base: Any = import_module("conversion.base")  # of llama.cpp

    prepare = base.TextModel.prepare_metadata

    def without_vocabulary(model: Any, vocab_only: bool) -> None:
        def set_vocab() -> None:
            writer = model.gguf_writer
            writer.add_tokenizer_model("none")
            if not any(key.endswith(".vocab_size") for part in writer.kv_data for key in part):
                writer.add_vocab_size(model.hparams["vocab_size"])

        model.set_vocab = set_vocab
        prepare(model, vocab_only=vocab_only)

    base.TextModel.prepare_metadata = without_vocabulary
    base.ModelBase.no_mtp = True  # transformers leaves out the layers that guess further tokens
    about = Path(folder, "config.json")  # Granite's layers, as they were called before transformers 5
    config = json.loads(about.read_bytes())
    if config["model_type"] == "granitemoehybrid":
        config["layer_types"] = [kind.removeprefix("full_") for kind in config["layer_types"]]
        about.write_text(json.dumps(config), encoding="utf-8")
    sys.argv = [str(script), folder, "--outtype", "f32", "--outfile", file]
    if (metadata := Path(folder, "metadata.json")).is_file():
        sys.argv += ["--metadata", str(metadata)]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    _convert(Path(sys.argv[1]), *sys.argv[2:])

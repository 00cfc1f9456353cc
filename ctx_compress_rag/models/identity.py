"""What identifies a decoder: config, tokenizer, chat template and, if it is in a folder, its weights.

They are read from files and not from the objects in memory, because another version of transformers would fill in other
defaults, and a store would then refuse its own bundle.
"""

import hashlib
import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ctx_compress_rag.errors import BundleError
from ctx_compress_rag.models.weights import own_tensors

_SUFFIXES = {".json", ".jinja", ".txt", ".model"}
_OF_WEIGHTS = ".index.json"
_OF_ANSWERS = "generation_config.json"  # end tokens, penalties: they change no slot
_SAMPLED = 1024  # values of each weight
# Keys that record who wrote a file or how it was loaded, and change no answer.
_PASSING = {
    "transformers_version", "_name_or_path", "name_or_path", "architectures", "dtype", "torch_dtype", "use_cache",
    "tokenizer_class", "backend", "is_local", "local_files_only",
    "padding", "padding_side", "truncation", "truncation_side",
}  # fmt: skip


def decoder_files_digest(folder: Path) -> str:
    """Return the SHA-256 of configs, tokenizer and chat template in a decoder's folder: 64 hex digits."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix not in _SUFFIXES or path.name.endswith(_OF_WEIGHTS) or path.name == _OF_ANSWERS:
            continue
        content = path.read_bytes()
        if path.suffix == ".json":
            content = _canonical(path, content)
        digest.update(f"{path.name} {len(content)} ".encode())
        digest.update(content)
    return digest.hexdigest()


def model_folder_digest(folder: Path) -> str:
    """Return the SHA-256 of `decoder_files_digest` and of the weight files in a decoder's folder: 64 hex digits."""
    weights = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    files = [f"{path.name} {file_sha256(path)}" for path in weights]
    return hashlib.sha256(" ".join([decoder_files_digest(folder), *files]).encode()).hexdigest()


def files_digest(files: Iterable[Path]) -> str:
    """Return the SHA-256 of names and contents of files, in their order: 64 hex digits."""
    return hashlib.sha256(" ".join(f"{file.name} {file_sha256(file)}" for file in files).encode()).hexdigest()


def decoder_digest_in_memory(model: Any, tokenizer: Any) -> str:
    """Return what `decoder_files_digest` would return for the folder that this decoder is saved into."""
    with TemporaryDirectory() as folder:
        write_decoder(model, tokenizer, Path(folder))
        return decoder_files_digest(Path(folder))


def decoder_weights_digest(model: Any, adapter: str) -> str:
    """Return the SHA-256 of a sample of each weight, with those of `adapter` if there is one: 64 hex digits."""
    digest = hashlib.sha256()
    adapters = {name: weight for name, weight in model.named_parameters() if f".{adapter}." in name and "lora_" in name}
    for name, weight in (own_tensors(model) | adapters).items():
        # In bfloat16: the dtype that the model is loaded in must not matter.
        part = weight.detach().flatten()[:_SAMPLED].bfloat16().float().cpu()
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(part.numpy().tobytes())
    return digest.hexdigest()


def write_decoder(model: Any, tokenizer: Any, folder: Path) -> None:
    model.config.save_pretrained(folder)
    model.generation_config.to_json_file(folder / _OF_ANSWERS)  # `save_pretrained` refuses what some publishers give
    tokenizer.save_pretrained(folder)


def _canonical(path: Path, content: bytes) -> bytes:
    try:
        settings = json.loads(content)
    except ValueError as error:
        raise BundleError(f"{path} is damaged ({error}): fetch or make the bundle again") from error
    if isinstance(settings, dict):
        settings = {key: value for key, value in settings.items() if key not in _PASSING}
    return json.dumps(settings, sort_keys=True).encode()


def file_sha256(file: Path) -> str:
    """Return a file's SHA-256 in 64 hex digits, cached until the file's size or modification time changes."""
    status = file.stat()
    return _sha256(file.resolve(), status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=256)  # large decoders come in dozens of files
def _sha256(file: Path, size: int, changed: int) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()

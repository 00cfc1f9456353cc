"""The files in a bundle's folder, how the folder is found and its files are read, and the fingerprint of a bundle."""

import hashlib
import json
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from ctx_compress_rag.bundle import SHIPPED
from ctx_compress_rag.bundle.config import BundleConfig
from ctx_compress_rag.errors import BundleError, ConfigError
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.models.gguf import GgufDecoder
from ctx_compress_rag.models.identity import decoder_digest_in_memory, decoder_files_digest, model_folder_digest
from ctx_compress_rag.models.layers import PEFT_PREFIX
from ctx_compress_rag.models.loading import INT8_FILE
from ctx_compress_rag.models.weights import weights_from_int8
from ctx_compress_rag.strict import faults_raised_as

CONFIG_FILE = "config.json"
REPORT_FILE = "training_report.json"
DECODER_FOLDER = "decoder"
TEACHER = "teacher"
WEIGHTS_FILE = "model.safetensors"
INT8_ADAPTER_FILE = "adapter_model.int8.safetensors"

# The names that peft gives to an adapter's files.
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"

_READ = (".json", ".jinja", ".txt", ".model", ".safetensors")
_LARGEST = 2**26  # bytes of a file that is read whole
_LARGEST_TOKENIZER = 2**28


def find_bundle(name_or_path: str | Path, revision: str | None) -> Path:
    """Return the folder of a bundle that is local, shipped, or on the hub (`owner/name`), which this call downloads.

    `revision` None means the newest. Raises BundleError if there is no such bundle or the hub fails, ConfigError if
    the name is blank or a local or shipped bundle is given a revision.
    """
    shown = str(name_or_path) if isinstance(name_or_path, Path) else name_or_path
    none = f"no bundle {shown!r}: give a folder, one of {sorted(SHIPPED)}, or a hub id owner/name"
    if not isinstance(name_or_path, str | Path) or not str(name_or_path).strip() or name_or_path == Path():
        raise ConfigError(none)
    folder = SHIPPED.get(str(name_or_path), Path(name_or_path))
    if folder.is_dir():
        if revision is not None:
            what = "comes with this package" if shown in SHIPPED else "is a folder"
            raise ConfigError(f"revision={revision!r}: the bundle {shown!r} {what} and has none: leave revision out")
        return folder
    if str(name_or_path).count("/") != 1 or str(name_or_path).startswith((".", "/", "~")):
        raise BundleError(none)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    name = str(name_or_path)

    def fetched(*patterns: str) -> Path:
        return Path(snapshot_download(name, revision=revision, allow_patterns=[*patterns]))

    try:
        config = fetched(CONFIG_FILE) / CONFIG_FILE
        # First, for a repository of something else may hold gigabytes.
        if not config.exists() or not _is_bundle(config.read_bytes()):
            raise BundleError(_not_a_bundle(name))
        return fetched("*.json", "*.safetensors", "*.jinja")
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise BundleError(f"cannot fetch the bundle {name!r} from the hub: {error}") from error


def _is_bundle(config: bytes) -> bool:
    """Whether a config.json is a bundle's or too damaged to tell, and not that of another kind of checkpoint."""
    try:
        found = json.loads(config)
    except (ValueError, RecursionError):
        return True
    return not isinstance(found, dict) or "model_type" not in found


def _not_a_bundle(name: str | Path) -> str:
    return (
        f"{str(name)!r} is not a bundle: it has no {CONFIG_FILE} of one. A published compressor (LCLM, PISCO, CLaRa, "
        f"xRAG, ICAE) is converted with `ctx-compress import {name} DIR`"
    )


def check_bundle_files(folder: Path) -> None:
    """Raise BundleError if reading the files, maybe a stranger's, could take for ever or fill the memory."""
    for path in sorted([*folder.glob("*"), *folder.glob("*/*")]):
        if path.suffix in _READ:
            _check_file(path)


def _check_file(path: Path) -> None:
    try:
        status = path.stat()
    except OSError as error:
        raise BundleError(f"{path} cannot be read ({error.strerror}): fetch or make the bundle again") from None
    if not stat.S_ISREG(status.st_mode):
        raise BundleError(f"{path} is not a regular file: fetch or make the bundle again")
    largest = _LARGEST_TOKENIZER if path.name.startswith("tokenizer.") else _LARGEST
    if status.st_size > largest and path.suffix != ".safetensors":  # those are read tensor by tensor
        raise BundleError(f"{path} has {status.st_size} bytes, more than {largest}: fetch or make the bundle again")


def weight_file_stamps(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return the size (bytes) and modification time (nanoseconds) of each weight file of a bundle."""
    files = {path: path.stat() for path in folder.glob("*/*.safetensors")}
    return {path: (status.st_size, status.st_mtime_ns) for path, status in files.items()}


def check_bundle_weights_unchanged(folder: Path, before: Mapping[Path, tuple[int, int]]) -> None:
    """Raise BundleError if weight files differ from `before` (`weight_file_stamps`) and may not fit the fingerprint."""
    if weight_file_stamps(folder) != before:
        raise BundleError(f"the weights in {folder} changed after the bundle was opened: open it again")


def check_bundle_folder_free(folder: Path) -> None:
    """Raise ConfigError if the folder is a file, or has a config.json or README.md that is not a bundle's."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file: give a folder")
    if any((folder / name).exists() for name in (CONFIG_FILE, "README.md")):
        try:
            read_bundle_config(folder / CONFIG_FILE)
        except (BundleError, ConfigError):
            raise ConfigError(f"{folder} has files that are not a bundle's: give a new folder") from None


def read_bundle_config(path: Path, changes: Mapping[str, Any] | None = None) -> BundleConfig:
    """Return the settings in a config.json, with `changes` in place of their fields; None changes nothing.

    Raises BundleError if the file is missing or not a bundle's, ConfigError for unknown or impossible values.
    """
    if not path.is_symlink() and not path.exists():
        raise BundleError(_not_a_bundle(path.parent))
    _check_file(path)
    content = path.read_bytes()
    if not _is_bundle(content):
        raise BundleError(_not_a_bundle(path.parent))
    with faults_raised_as(ConfigError, f"{path}: "):
        return BundleConfig(**{**dict(BundleConfig.model_validate_json(content)), **(changes or {})})


def read_bundle_report(path: Path) -> dict[str, Any]:
    """Return a bundle's training report, {} if there is no file; raise BundleError if the file is damaged."""
    try:
        report = json.loads(path.read_bytes()) if path.exists() else {}
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path} is damaged ({error}): fetch or make the bundle again") from error
    if not isinstance(report, dict):
        raise BundleError(f"{path} holds a {type(report).__name__}, not a JSON object: fetch or make the bundle again")
    return report


def read_bundle_tensors(path: Path, *, counts: bool = False) -> dict[str, Tensor]:
    """Return a file's tensors by name, unpacked from 8 bits. Raise BundleError if the file is missing or damaged.

    `counts` admits whole numbers, which some decoders keep beside their weights.
    """
    with _damage_named(path):
        tensors = weights_from_int8(load_file(path))
    for name, value in tensors.items():
        if not (counts or value.is_floating_point()) or not value.isfinite().all():
            fault = f"{name} holds a NaN, an infinity or whole numbers"
            raise BundleError(f"{path} is damaged ({fault}): fetch or make the bundle again")
    return tensors


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise BundleError(f"the bundle is incomplete: {path} is missing") from None
    except (SafetensorError, OSError, KeyError, RuntimeError) as error:  # the latter two if scales do not fit
        raise BundleError(f"{path} is damaged ({error}): fetch or make the bundle again") from error


def read_decoder_tensors(folder: Path) -> Mapping[str, Tensor]:
    """Return the tensors, by name, of the decoder in a bundle's folder `decoder`. Errors: see `read_bundle_tensors`."""
    if (folder / INT8_FILE).exists():
        return read_bundle_tensors(folder / INT8_FILE, counts=True)
    shards = sorted(folder.glob("*.safetensors"))
    return _Shards(shards) if len(shards) > 1 else read_bundle_tensors(folder / WEIGHTS_FILE, counts=True)


class _Shards(Mapping[str, Tensor]):
    """The tensors of several files. Each is read when asked for, because all together may not fit into memory."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths: dict[str, Path] = {}
        for path in paths:
            with _damage_named(path), safe_open(path, "pt") as file:
                self._paths |= dict.fromkeys(file.keys(), path)

    def __getitem__(self, name: str) -> Tensor:
        with _damage_named(path := self._paths[name]), safe_open(path, "pt") as file:
            found: Tensor = file.get_tensor(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


def read_adapter_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors, by name, of an adapter's folder, unpacked from 8 bits. Errors: see `read_bundle_tensors`."""
    int8 = folder / INT8_ADAPTER_FILE
    return read_bundle_tensors(int8 if int8.exists() else folder / ADAPTER_FILE)


def adapter_layers(tensors: Iterable[str]) -> list[str]:
    """Return the full names of the layers that an adapter's tensors, by their names in its file, belong to."""
    return list(dict.fromkeys(name.removeprefix(PEFT_PREFIX).split(".lora_")[0] for name in tensors))


_ASKING = {"template", "answer_tokens", "extractive", "text_share", "separator", "answer_prefix", "chat_template"}
_CHANGES_NO_SLOT = {"name", "reads", "decoder_digest", "source", "subfolder", "reader_share", *_ASKING}


def decoder_digest(config: BundleConfig, backbone: Backbone, shipped: Path | None = None) -> str:
    """Return 64 hex digits that identify the decoder's files; "" for one on the hub (commit) or in GGUF (own SHA-256).

    They identify a tokenizer beside a GGUF file. `shipped` is the folder of a decoder that is part of the bundle; None
    reads the decoder in memory instead.
    """
    if config.decoder is None:
        if shipped is None:
            return decoder_digest_in_memory(backbone.model, backbone.tokenizer)
        return decoder_files_digest(shipped)
    if isinstance(config.decoder, GgufDecoder) and config.decoder.tokenizer:
        return hashlib.sha256(backbone.tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
    in_folder = isinstance(config.decoder, str) and Path(config.decoder).is_dir()
    return model_folder_digest(Path(str(config.decoder), config.subfolder or "")) if in_folder else ""


def bundle_fingerprint(
    config: BundleConfig, commit: str, decoder: str, states: Mapping[str, Mapping[str, Tensor]]
) -> str:
    """Return the SHA-256 (hex) of the settings that affect slots, the decoder's commit and digest, and all tensors.

    Weights are hashed in half precision, as stored, so that the device's precision does not change the fingerprint.
    """
    settings = config.model_dump(mode="json", exclude=_CHANGES_NO_SLOT)
    if config.subfolder:
        settings |= {"subfolder": config.subfolder}
    if isinstance(config.decoder, GgufDecoder):
        # Only the file's content counts, not where it is.
        settings |= {"decoder": config.decoder.sha256, "revision": None}
    digest = hashlib.sha256(json.dumps([settings, commit, decoder], sort_keys=True).encode())
    for part in sorted(states):
        for name in sorted(states[part]):
            value = states[part][name]  # one by one: a large decoder's are read from files
            digest.update(f"{part} {name}".encode())
            digest.update(value.detach().to("cpu", torch.float16).contiguous().numpy().tobytes())
    return digest.hexdigest()


def state_digest(state: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 (hex) of tensors by name, in bfloat16, so that the dtype of a loaded decoder has no effect."""
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode())
        digest.update(state[name].detach().cpu().bfloat16().contiguous().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()

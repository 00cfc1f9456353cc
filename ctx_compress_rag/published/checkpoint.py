"""A published checkpoint's files: a folder, or a repository on the hub at one commit."""

from __future__ import annotations

import errno
import json
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ctx_compress_rag.errors import BundleError, ConfigError

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_OF_TRANSFORMERS = (".json", ".jinja", ".txt", ".model", ".safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """Files by name; those on the hub are downloaded into its cache when they are read.

    Whatever cannot be found, fetched or read raises a BundleError that names it and the remedy.

    Attributes:
        name: the hub id or folder.
        revision: the commit on the hub; None for a folder.
        subfolder: where the files are in it: "", or a path that ends with a slash.
        sizes: bytes of each file there.
        license: as its card says; None if it says nothing.
    """

    name: str
    revision: str | None
    subfolder: str
    sizes: Mapping[str, int]
    license: str | None

    @classmethod
    def open(cls, name: str, revision: str | None = None, subfolder: str | None = None) -> Checkpoint:
        """Look at a folder, or at a repository's commit; raises ConfigError if the other arguments do not fit it."""
        root = Path(name)
        if not root.is_dir():
            whole = _on_hub(name, revision)
        elif revision is not None:
            raise ConfigError(f"revision={revision!r}: {name} is a folder and has none: leave it out")
        else:
            files = [path for path in root.rglob("*") if path.is_file()]
            card = root / "README.md"
            found = re.search(r"^license: *(\S+)", card.read_text("utf-8"), re.MULTILINE) if card.exists() else None
            sizes = {path.relative_to(root).as_posix(): path.stat().st_size for path in files}
            whole = cls(str(root.resolve()), None, "", sizes, found and found[1])
        return whole.within(subfolder) if subfolder else whole

    def within(self, subfolder: str) -> Checkpoint:
        """The files of a subfolder; raises ConfigError if it has none."""
        start = f"{subfolder.strip('/')}/"
        sizes = {name.removeprefix(start): size for name, size in self.sizes.items() if name.startswith(start)}
        if not sizes:
            raise ConfigError(f"{self.name} has no folder {subfolder!r}: give one of {self.folders}")
        return replace(self, subfolder=f"{self.subfolder}{start}", sizes=sizes)

    @property
    def folders(self) -> list[str]:
        """Names of its folders."""
        return sorted({name.split("/")[0] for name in self.sizes if "/" in name})

    @property
    def of_transformers(self) -> list[str]:
        """Names of the files that transformers reads."""
        return [name for name in self.sizes if "/" not in name and name.endswith(_OF_TRANSFORMERS)]

    def bytes_of(self, names: Iterable[str]) -> int:
        """Bytes of these files together."""
        return sum(self.sizes.get(name, 0) for name in names)

    def path(self, name: str) -> Path:
        """A file's path here, after downloading it."""
        if name not in self.sizes:
            raise BundleError(f"{self} has no {name}: the checkpoint is incomplete, or not of the format it seems")
        if self.revision is None:
            return Path(self.name, self.subfolder, name)
        from huggingface_hub import hf_hub_download

        with _reaching(self.name):
            return Path(hf_hub_download(self.name, self.subfolder + name, revision=self.revision))

    def json(self, name: str) -> dict[str, Any]:
        """A JSON file's object; empty if there is no such file."""
        if name not in self.sizes:
            return {}
        try:
            found = json.loads(self.path(name).read_bytes())
        except ValueError as error:
            raise BundleError(f"{self}: {name} is damaged ({error}): fetch it again") from error
        if not isinstance(found, dict):
            raise BundleError(f"{self}: {name} holds a {type(found).__name__}, not an object: fetch it again")
        return found

    def tensors(self, name: str) -> dict[str, Any]:
        """A file's tensors by name. Of a pickle torch reads nothing but tensors, so that no code runs."""
        path = self.path(name)
        try:
            if path.suffix != ".safetensors":
                found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
                return dict(found)
            with safe_open(path, "pt") as file:
                return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
        except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, ValueError, TypeError) as error:
            said = str(error).partition("\n")[0]
            raise BundleError(f"{path} is damaged or holds more than tensors ({said}): fetch it again") from error

    def shard(self, key: str) -> str:
        """Name of the file of a transformers folder that should have a tensor."""
        for name in _WEIGHTS:
            if shards := self.json(f"{name}.index.json").get("weight_map"):
                return str(shards.get(key, name))
            if name in self.sizes:
                return name
        raise BundleError(f"{self} has no weights of transformers: give one that has")

    def tensor(self, key: str) -> Tensor | None:
        """A tensor of a transformers folder, from the one file that should have it; None if it has not."""
        name = self.shard(key)
        if not name.endswith(".safetensors"):
            return self.tensors(name).get(key)
        try:
            with safe_open(self.path(name), "pt") as file:
                found: Tensor | None = file.get_tensor(key) if key in file.keys() else None  # noqa: SIM118
                return found
        except SafetensorError as error:
            raise BundleError(f"{self}: {name} is damaged ({error}): fetch it again") from error

    def reference(self, key: str) -> dict[str, Any]:
        """How a config names this transformers folder, under `key`."""
        named = {key: self.name, "revision": self.revision, "subfolder": self.subfolder.strip("/") or None}
        return {name: value for name, value in named.items() if value is not None}

    def __str__(self) -> str:
        return f"{self.name}/{self.subfolder}".rstrip("/")


def _on_hub(name: str, revision: str | None) -> Checkpoint:
    from huggingface_hub import HfApi

    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise BundleError(f"there is no folder {name!r}, and a hub id is owner/name: give one of them")
    with _reaching(name):
        found = HfApi().model_info(name, revision=revision, files_metadata=True)
    sizes = {each.rfilename: each.size or 0 for each in found.siblings or ()}
    card = found.card_data
    return Checkpoint(name, str(found.sha), "", sizes, None if card is None else card.get("license"))


@contextmanager
def _reaching(name: str) -> Iterator[None]:
    """Wrap what asks the hub about `name`: its errors become one sentence with the remedy."""
    from httpx import HTTPError
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        remedy = f"accept its terms at https://huggingface.co/{name}, then run `hf auth login`"
        raise BundleError(f"{name} is gated: {remedy}") from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
        raise BundleError(f"there is no {name!r} here or on the hub ({_short(error)}): check its name") from error
    except (OSError, HTTPError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise BundleError(f"no space left for {name} in the hub's cache: free some, or set HF_HOME") from error
        raise BundleError(f"cannot fetch {name} from the hub ({_short(error)}): run the command again") from error


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200]

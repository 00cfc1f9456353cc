"""The files of a published checkpoint, in a folder or in a repository on the hub at one commit."""

import json
import pickle
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ctx_compress_rag.errors import BundleError, ConfigError

T = TypeVar("T")
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_OF_TRANSFORMERS = (".json", ".jinja", ".txt", ".model")


@dataclass(frozen=True)
class PublishedCheckpoint:
    """The files of a checkpoint, by name. Files on the hub are downloaded into the hub's cache when they are read.

    A file that cannot be found, fetched or read raises a BundleError that names the file and the remedy.
    """

    name: str  # the hub id or folder
    revision: str | None  # the commit on the hub; None for a folder
    subfolder: str  # the folder of the files in there: "", or a path that ends with a slash
    sizes: Mapping[str, int]  # bytes of each file there
    license: str  # as the checkpoint's model card says, or "none given"

    @classmethod
    def open(cls, name: str, revision: str | None = None, subfolder: str | None = None) -> "PublishedCheckpoint":
        """List a folder's or (online) repository's files; raise ConfigError for a folder's revision or no subfolder."""
        root = Path(name)
        if not root.is_dir():
            whole = _on_hub(name, revision)
        elif revision is not None:
            raise ConfigError(f"revision={revision!r}: {name} is a folder and has none: leave it out")
        else:
            files = [path for path in root.rglob("*") if path.is_file()]
            sizes = {path.relative_to(root).as_posix(): path.stat().st_size for path in files}
            whole = cls(str(root.resolve()), None, "", sizes, _license(_card(root / "README.md")))
        return whole.in_subfolder(subfolder) if subfolder else whole

    def in_subfolder(self, subfolder: str) -> "PublishedCheckpoint":
        """Return the checkpoint in a subfolder. Raise ConfigError if there is no file."""
        start = f"{subfolder.strip('/')}/"
        sizes = {name.removeprefix(start): size for name, size in self.sizes.items() if name.startswith(start)}
        if not sizes:
            raise ConfigError(f"{self.name} has no folder {subfolder!r}: give one of {self.folders}")
        return replace(self, subfolder=f"{self.subfolder}{start}", sizes=sizes)

    @property
    def folders(self) -> list[str]:
        return sorted({name.split("/")[0] for name in self.sizes if "/" in name})

    @property
    def of_transformers(self) -> list[str]:
        """Names of the files that transformers reads. Raises BundleError if weights are missing or pickled."""
        weights = set(self._weight_map(_WEIGHTS[0]).values()) or {_WEIGHTS[0]}
        if missing := sorted(weights - self.sizes.keys()):
            raise BundleError(
                f"{self} lacks {len(missing)} of {len(weights)} files of weights in safetensors, such as {missing[0]}: "
                "fetch it again, or give one that has them"
            )
        return [*(name for name in self.sizes if "/" not in name and name.endswith(_OF_TRANSFORMERS)), *sorted(weights)]

    def bytes_of(self, names: Iterable[str]) -> int:
        return sum(self.sizes.get(name, 0) for name in names)

    def path(self, name: str) -> Path:
        if name not in self.sizes:
            raise BundleError(f"{self} has no {name}: the checkpoint is incomplete, or not of the format it seems")
        if self.revision is None:
            return Path(self.name, self.subfolder, name)
        from huggingface_hub import hf_hub_download

        with _reaching(self.name):
            return Path(hf_hub_download(self.name, self.subfolder + name, revision=self.revision))

    def json(self, name: str) -> dict[str, Any]:
        """Return the object in a JSON file, empty if there is no such file."""
        if name not in self.sizes:
            return {}
        try:
            found = json.loads(self.path(name).read_bytes())
        except (ValueError, RecursionError) as error:
            raise BundleError(f"{self}: {name} is damaged ({error}): fetch it again") from error
        if not isinstance(found, dict):
            raise BundleError(f"{self}: {name} holds a {type(found).__name__}, not an object: fetch it again")
        return found

    def settings(self, name: str, *counts: str, **values: Any) -> dict[str, Any]:
        """Return a JSON file's settings. Raise BundleError if `values` differ or `counts` are not whole and above 0."""
        settings = self.json(name)
        for key, value in values.items():
            if (found := settings.get(key)) != value:
                raise BundleError(f"{self}: {key} is {found!r} in {name}, and only {value!r} can be imported")
        for key in counts:
            if type(found := settings.get(key)) is not int or found < 1:
                raise BundleError(f"{self}: {key} is {found!r} in {name}, not a whole number above 0: fetch it again")
        return settings

    def check_tensors(self, found: Iterable[str], wanted: Iterable[str], file: str = "") -> None:
        """Raise BundleError, which names the first, if tensors are missing or unknown (in a file)."""
        where, has, needed = f"{self}: {file}" if file else str(self), set(found), set(wanted)
        if missing := sorted(needed - has):
            raise BundleError(f"{where} lacks {len(missing)} tensors, such as {missing[0]}: fetch the checkpoint again")
        if odd := sorted(has - needed):
            raise BundleError(f"{where} has {len(odd)} unknown tensors, such as {odd[0]}: it is of another version")

    def tensors(self, name: str, keys: Collection[str] | None = None) -> dict[str, Tensor]:
        """Return a file's tensors by name, of safetensors only `keys` (None: all). No code in a pickled file is run."""
        return self._only(Tensor, self._content(name, keys), name)

    def groups(self, name: str) -> dict[str, dict[str, Tensor]]:
        """Return the tensors of a file that holds groups of tensors, by group and name. No code in it is run."""
        groups = self._only(dict, self._content(name), name)
        return {group: self._only(Tensor, content, f"{group} of {name}") for group, content in groups.items()}

    def _only(self, kind: type[T], content: Any, where: str) -> dict[str, T]:
        values = content.items() if isinstance(content, dict) else [("it", content)]
        if odd := [(key, value) for key, value in values if not isinstance(value, kind)]:
            found = f"{odd[0][0]} is a {type(odd[0][1]).__name__}, not a {kind.__name__}"
            raise BundleError(f"{self}: in {where}, {found}: it is damaged, or of another version")
        return dict(content)

    def _content(self, name: str, keys: Collection[str] | None = None) -> Any:
        path = self.path(name)
        try:
            if path.suffix != ".safetensors":
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            with safe_open(path, "pt") as file:
                wanted = [key for key in file.keys() if keys is None or key in keys]  # noqa: SIM118 - not a dict
                return {key: file.get_tensor(key) for key in wanted}
        except pickle.UnpicklingError as error:
            raise BundleError(
                f"{path} is damaged, or holds code, which is not run: fetch it again, or ask its makers for safetensors"
            ) from error
        except (SafetensorError, RuntimeError, EOFError, ValueError, TypeError) as error:
            raise BundleError(f"{path} is damaged ({short_error(error)}): fetch it again") from error

    def _weight_map(self, weights: str) -> dict[str, str]:
        """Return the file of each tensor, empty if all tensors are in the file that `weights` names."""
        found = self.json(f"{weights}.index.json").get("weight_map", {})
        return self._only(str, found, f"the weight_map of {weights}.index.json")

    def shard(self, key: str) -> str:
        """Return the name of the file, in a transformers folder, that should have the tensor `key`."""
        for name in _WEIGHTS:
            if shards := self._weight_map(name):
                return shards.get(key, name)
            if name in self.sizes:
                return name
        raise BundleError(f"{self} has no weights of transformers: give one that has")

    def tensor(self, key: str) -> Tensor | None:
        """Return a tensor of a transformers folder, or None if the file that should have the tensor lacks it."""
        return self.tensors(self.shard(key), [key]).get(key)

    def model_without_weights(self, auto: Any) -> Any:
        """Return this transformers folder's model, of a class such as `AutoModel`, on the meta device."""
        from transformers import AutoConfig

        try:
            config = AutoConfig.from_pretrained(self.path("config.json").parent, trust_remote_code=False)
            with torch.device("meta"):
                return auto.from_config(config, trust_remote_code=False)
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            kind = self.json("config.json").get("model_type")
            raise BundleError(
                f"this version of transformers has no model for {self}, of model_type {kind!r}, and code from the hub "
                "is not run: give another, or a newer transformers"
            ) from error

    def reference(self, key: str) -> dict[str, Any]:
        """Return the settings with which a config names this transformers folder, its hub id or path under `key`."""
        return {key: self.name, "revision": self.revision, "subfolder": self.subfolder.strip("/") or None}

    def __str__(self) -> str:
        return f"{self.name}/{self.subfolder}".rstrip("/")


def _on_hub(name: str, revision: str | None) -> PublishedCheckpoint:
    from huggingface_hub import HfApi

    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise BundleError(f"there is no folder {name!r}, and a hub id is owner/name: give one of them")
    with _reaching(name):
        found = HfApi().model_info(name, revision=revision, files_metadata=True)
    sizes = {each.rfilename: each.size or 0 for each in found.siblings or ()}
    return PublishedCheckpoint(name, str(found.sha), "", sizes, _license(found.card_data))


def _card(path: Path) -> Any:
    """Return the settings at the top of a folder's model card, or None if no card can be read."""
    from huggingface_hub import ModelCard

    try:
        return ModelCard(path.read_text("utf-8"), ignore_metadata_errors=True).data
    except Exception:  # a parser's, too
        return None


def _license(card: Any) -> str:
    found = None if card is None else card.get("license")
    return ", ".join(map(str, found)) if isinstance(found, list) else str(found or "none given")


@contextmanager
def _reaching(name: str) -> Iterator[None]:
    """Turn the hub's errors about `name` in the block into a BundleError with the remedy."""
    from httpx import HTTPError
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        remedy = f"accept its terms at https://huggingface.co/{name}, then run `hf auth login`"
        raise BundleError(f"{name} is gated: {remedy}") from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
        raise BundleError(f"there is no {name!r} here or on the hub ({short_error(error)}): check its name") from error
    except (OSError, HTTPError) as error:
        raise BundleError(f"cannot fetch {name} from the hub ({short_error(error)}): run the command again") from error


def short_error(error: Exception) -> str:
    return " ".join(str(error).split())[:200]

"""A bundle that only answers, in files that need neither torch nor transformers."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from ctx_compress_rag.errors import BundleError, RatioError, StoreWriteError
from ctx_compress_rag.methods.base.config import WrapConfig
from ctx_compress_rag.methods.base.rendering import PassageRenderer
from ctx_compress_rag.models.question_minilm import gelu
from ctx_compress_rag.process_bound import ProcessBound
from ctx_compress_rag.prompt import Side
from ctx_compress_rag.soft_context import SoftContext
from ctx_compress_rag.text.fast_tokenizer import FastTokenizer

if TYPE_CHECKING:  # they import torch
    from ctx_compress_rag.bundle.bundle import Bundle
    from ctx_compress_rag.bundle.plain_decoder import PlainDecoder

AnyBundle: TypeAlias = "Bundle | ExportedBundle"
AnyDecoder: TypeAlias = "PlainDecoder | ExportedBundle"
EXPORTED_FILE = "answering.json"
_READER_FILE = "reader.safetensors"
_FORMAT = 1


class _Config(BaseModel):
    """A bundle's settings as its `BundleConfig` wrote them; checking them again would import all methods."""

    model_config = ConfigDict(extra="allow", frozen=True)


class ExportedBundle(ProcessBound):
    """A bundle that `ctx-compress export --engine llama.cpp` wrote: it answers with llama.cpp, and compresses nothing.

    It stands for a `Bundle` in stores, decoders, postprocessors and LLM classes whose engine is "llama.cpp", and needs
    neither torch nor transformers. Passages that are not stored stay text.

    ```python
    store = SoftContextStore("./chroma", ExportedBundle("./for-llama-cpp"))
    decoder = Decoder(store.bundle, store, engine="llama.cpp")
    ```

    Args:
        folder: the folder that `ctx-compress export` wrote.

    Raises BundleError if the folder holds no exported bundle.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            said = json.loads((self.folder / EXPORTED_FILE).read_bytes())
            if said["format"] != _FORMAT:
                raise ValueError(f"its format is {said['format']}")
            self._weights = load_file(self.folder / _READER_FILE)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            how = "run ctx-compress export --engine llama.cpp"
            raise BundleError(f"{str(folder)!r} holds no exported bundle ({error}): {how}") from error
        self.config: Any = cast(Any, _Config(**said["config"]))
        self.tokenizer: Any = FastTokenizer(**said["tokenizer"])
        self.generation_config = SimpleNamespace(**said["generation_config"])
        self.compressor = PassageRenderer()
        self.compressor.nestable = said["nestable"]
        self.fingerprint: str = said["fingerprint"]
        self.decoder_name: str | None = said["decoder_name"]
        self.window: int | None = said["window"]
        self.digests: dict[Side, str] = said["digests"]  # of the GGUF file of each side
        self.dim, self.vocabulary = said["embeddings"]
        self.sides: tuple[Side, ...] = tuple(said["sides"])
        self.separator: str = self.config.separator
        self.answer_prefix: str = self.config.answer_prefix
        self._wrap = WrapConfig(**(said["wrap"] or {}))

    def __repr__(self) -> str:
        return f"ExportedBundle({str(self.folder)!r}, {self.config.name!r})"

    def positions(self, slots: int) -> int:
        """Return how many positions of a prompt a passage of so many slots takes."""
        return self._wrap.positions(slots)

    def check_ratio(self, ratio: int) -> None:
        """Raise RatioError for a ratio other than the base ratio, because nothing is compressed here."""
        if ratio != self.config.base_ratio:
            raise RatioError(f"ratio={ratio}: an exported bundle compresses nothing: leave the ratio out")

    def compress(self, texts: Sequence[str], ratio: int | None = None) -> NoReturn:
        """Raise StoreWriteError, because an exported bundle has no compressor."""
        raise StoreWriteError("an exported bundle has no compressor: add passages with the bundle itself")

    def embed(self, soft: SoftContext) -> NDArray[np.float32]:
        """Return a soft context as the decoder's input embeddings, (`positions(slots)`, dim)."""
        vectors, weights = soft.slots, self._weights
        if "weight" in weights:
            vectors = vectors @ weights["weight"].T
        elif "inner.weight" in weights:
            if "norm.weight" in weights:
                vectors = vectors / np.sqrt((vectors**2).mean(-1, keepdims=True) + 1e-6) * weights["norm.weight"]
            inner = gelu(vectors @ weights["inner.weight"].T + weights["inner.bias"])
            vectors = inner @ weights["outer.weight"].T + weights["outer.bias"]
        if "before" not in weights:
            return vectors.astype(np.float32)
        size = self._wrap.every or max(1, len(vectors))
        runs = np.split(vectors, range(size, len(vectors), size))
        return np.concatenate([each for run in runs for each in (weights["before"], run, weights["after"])])


def write_exported_bundle(bundle: "Bundle", folder: Path, digests: Mapping[Side, str], window: int | None) -> None:
    """Write the files of an ExportedBundle beside the GGUF files, whose digests, by side, are given."""
    reader = bundle.reader
    parts = [part for part in (reader.projection, reader.wrap) if part is not None]
    state = {name: value for part in parts for name, value in part.state_dict().items()}
    save_file({name: value.float().cpu().numpy() for name, value in state.items()}, folder / _READER_FILE)
    about = {
        "format": _FORMAT,
        "fingerprint": bundle.fingerprint,
        "config": bundle.config.model_dump(mode="json"),
        "decoder_name": bundle.decoder_name,
        "tokenizer": FastTokenizer.parts_of(bundle.tokenizer),
        "generation_config": bundle.generation_config.to_dict(),
        "nestable": bundle.compressor.nestable,
        "window": window,
        "sides": bundle.sides,
        "digests": digests,
        "embeddings": [bundle.backbone.dim, bundle.backbone.config.get_text_config().vocab_size],
        "wrap": None if reader.wrap is None else reader.wrap.config.model_dump(),
    }
    (folder / EXPORTED_FILE).write_text(json.dumps(about), encoding="utf-8")

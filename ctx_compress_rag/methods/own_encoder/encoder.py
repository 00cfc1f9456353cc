"""A frozen transformers encoder, loaded on first use."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from ctx_compress_rag.errors import BundleError
from ctx_compress_rag.methods.own_encoder.config import OwnEncoderConfig
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.models.identity import folder_digest


class OwnEncoder:
    """Loads an encoder and its tokenizer as the decoder was loaded: device, dtype and quantization.

    It is not an nn.Module, so that its weights are not saved with a bundle. Reading stored slots does not load it.

    Attributes:
        folder: where the bundle lies, if it ships the encoder.
    """

    def __init__(self, config: OwnEncoderConfig, backbone: Backbone) -> None:
        self.config = config
        self.folder: Path | None = None
        self._backbone = backbone
        self._loaded: tuple[Any, Any] | None = None
        self._lock = threading.Lock()

    def __call__(self) -> tuple[Any, Any]:
        """The model and its tokenizer.

        Raises:
            BundleError: there is no such encoder, or its files have changed since the bundle was made.
        """
        with self._lock:
            if self._loaded is None:
                self._loaded = self._load()
            return self._loaded

    @property
    def place(self) -> Path | None:
        """The encoder's folder here; None if it is on the hub.

        Raises:
            BundleError: the bundle should ship it, but was not loaded from a folder.
        """
        config = self.config
        if config.encoder is None:
            if self.folder is None:
                raise BundleError("the bundle ships its encoder in encoder/: load it with Bundle.from_pretrained")
            return self.folder / "encoder"
        folder = Path(config.encoder, config.subfolder or "")
        return folder if folder.is_dir() else None

    def _load(self) -> tuple[Any, Any]:
        from transformers import AutoModel, AutoTokenizer

        config, decoder, place = self.config, self._backbone.model, self.place
        if place is not None and config.digest is not None and folder_digest(place) != config.digest:
            raise BundleError(f"{place} is not the encoder that the bundle was made with: import the bundle again")
        where: dict[str, Any] = {"trust_remote_code": False}
        if place is None:
            where |= {"revision": config.revision, "subfolder": config.subfolder or ""}
        options: dict[str, Any] = {"device_map": {"": self._backbone.device}} if self._backbone.quantized else {}
        if self._backbone.quantized:
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
            model = model.to(self._backbone.device)
        return model.eval().requires_grad_(False), tokenizer

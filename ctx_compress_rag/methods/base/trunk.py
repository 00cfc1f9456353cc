"""Compressors that encode with the decoder's own trunk."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.methods.base.compressor import Compressor
from ctx_compress_rag.methods.base.config import TuneConfig, lora_config
from ctx_compress_rag.methods.base.part import linear_layers, train_copy
from ctx_compress_rag.models.backbone import Backbone, decoder_layers


class TrunkCompressor(Compressor):
    """A compressor whose encoder is the decoder without its head: with LoRA, as a separate copy, or frozen.

    In a class that is a `TokenCompressor`, too, it comes first.

    Args:
        backbone: the decoder.
        tune: how the encoder is adapted (Simple Context Compression, section 5.1: LoRA separate from the decoder's).
        layers: how many of the decoder's first layers the encoder has; None means all layers.

    Raises:
        ConfigError: the decoder does not have so many layers.
    """

    def __init__(self, backbone: Backbone, tune: TuneConfig, layers: int | None = None) -> None:
        super().__init__(backbone)
        if layers is not None and layers > (has := backbone.config.get_text_config().num_hidden_layers):
            raise ConfigError(f"layers={layers}: the decoder has only {has} layers")
        self.tune = tune
        self.dim = backbone.dim
        self._kept = layers
        self.encoder = self._of(backbone.copy_model()) if tune.mode == "full" else None
        if tune.mode == "lora":
            backbone.add_adapter(self.side, self._lora)

    def _of(self, model: Any) -> nn.Module:
        """A causal LM's trunk, with the layers that the encoder has."""
        trunk: nn.Module = model.base_model
        return trunk if self._kept is None else _with_layers(trunk, _layers(trunk, model.config)[: self._kept])

    def _lora(self) -> Any:
        model = self.backbone.model
        if self._kept is None:
            return lora_config(self.tune)
        return _lora_of_layers(self.tune, _layers(model.base_model, model.config)[: self._kept])

    def trained_parameters(self) -> list[nn.Parameter]:
        if self.encoder is not None:
            return train_copy(self.encoder)
        return self.backbone.train_adapter(self.side) if self.tune.mode == "lora" else []

    @contextmanager
    def trunk(self) -> Iterator[Any]:
        """Lock the encoder, a transformers model without a head, for this thread within the context."""
        with self.backbone.use(self.side if self.tune.mode == "lora" else None):
            yield self._of(self.backbone.model) if self.encoder is None else self.encoder


def _layers(trunk: nn.Module, config: Any) -> nn.ModuleList:
    return decoder_layers(trunk, config.get_text_config().num_hidden_layers)


def _with_layers(trunk: nn.Module, layers: nn.ModuleList) -> nn.Module:
    """A view of a trunk that runs these layers and then its final norm; the trunk itself stays whole."""
    view = copy.copy(trunk)
    view._modules = {
        name: layers if isinstance(child, nn.ModuleList) and child[0] is layers[0] else child
        for name, child in trunk._modules.items()
    }
    return view


def _lora_of_layers(tune: TuneConfig, layers: nn.ModuleList) -> Any:
    """The peft configuration for `tune` in only these layers, the first of a decoder."""
    config = lora_config(tune)
    if config.target_modules == "all-linear":  # peft cannot combine it with a choice of layers
        config.target_modules = {name.rpartition(".")[2] for name, _ in linear_layers(layers)}
    config.layers_to_transform = list(range(len(layers)))
    return config

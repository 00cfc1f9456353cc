"""Settings of mean pooling."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from ctx_compress_rag.methods.base.config import MethodConfig, TuneConfig


class MeanPoolingConfig(MethodConfig):
    """Mean pooling (Simple Context Compression, section 4.1).

    `embedding_skip` adds each token's embedding to its hidden state, scaled to the embeddings' size,
    before pooling. It is not in the paper (the default is off), but with it small decoders learn to read
    slots sooner.

    These settings are not in the paper either; they help to train a pretrained decoder in a few hours:

    Attributes:
        layers: how many of the decoder's first layers, before its final norm, the encoder has; None means all. Fewer
            layers encode and train faster. 0 is the paper's ablation without an encoder (table 3), which pools token
            embeddings.
        hidden_map: with `embedding_skip`, pass hidden states through a linear map that starts at zero, so that an
            untrained slot is the mean of its tokens' embeddings, which the decoder can nearly read. Unmapped hidden
            states destroy this ability in a few steps.
        positions: add to each embedding that the encoder reads a learned vector for its position modulo this number,
            initially zero. A mean loses the order of its tokens; this hints at each token's place in its slot.
    """

    name: Literal["mean_pooling"] = "mean_pooling"
    encoder: TuneConfig = TuneConfig()
    decoder: TuneConfig = TuneConfig()
    linear: bool = True
    embedding_skip: bool = False
    layers: int | None = Field(default=None, ge=0)
    hidden_map: bool = False
    positions: int | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _fits_together(self) -> MeanPoolingConfig:
        if self.hidden_map and not self.embedding_skip:
            raise ValueError(
                "hidden_map: true starts at zero and needs embedding_skip: true, or all slots would be zero"
            )
        if self.layers == 0 and (self.encoder.mode != "frozen" or self.embedding_skip or self.positions is not None):
            raise ValueError(
                "layers: 0 pools token embeddings as they are: give encoder: {mode: frozen}, and leave out "
                "embedding_skip, hidden_map and positions"
            )
        return self

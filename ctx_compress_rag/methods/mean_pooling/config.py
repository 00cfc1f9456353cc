"""Settings of mean pooling."""

from __future__ import annotations

from typing import Literal

from ctx_compress_rag.methods.base.config import MethodConfig, TuneConfig


class MeanPoolingConfig(MethodConfig):
    """Mean pooling (paper 001, section 4.1).

    `embedding_skip` adds each token's embedding to its hidden state, scaled to the embeddings' size,
    before pooling. It is not in the paper (the default is off); small decoders learn to read slots
    sooner with it.
    """

    name: Literal["mean_pooling"] = "mean_pooling"
    encoder: TuneConfig = TuneConfig()
    decoder: TuneConfig = TuneConfig()
    linear: bool = True
    embedding_skip: bool = False

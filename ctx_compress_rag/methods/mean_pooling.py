"""Mean pooling (Simple Context Compression, section 4.1)."""

import logging
from collections.abc import Sequence
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from ctx_compress_rag.methods.base.compressor import SlotBatch, TokenCompressor, TrunkCompressor, mean_pool_slots
from ctx_compress_rag.methods.base.config import MethodConfig, TuneConfig
from ctx_compress_rag.methods.base.reader import LinearMap, Reader
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.strict import Size

logger = logging.getLogger(__name__)


class MeanPoolingConfig(MethodConfig):
    """The settings of mean pooling (Simple Context Compression, section 4.1).

    `embedding_skip`, `layers`, `hidden_map` and `positions` are not in the paper and off by default. With
    `embedding_skip` small decoders learn to read slots sooner; the others help to train a pretrained decoder in hours.

    Attributes:
        encoder, decoder: how each is trained.
        linear: whether the reader maps slots; False is the paper's ablation, which reads them as they are.
        embedding_skip: scale hidden states to the size of embeddings, and add each token's embedding, before pooling.
        layers: how many of the decoder's first layers, before its final norm, the encoder has; None means all. Fewer
            layers encode and train faster. 0 is the paper's ablation that pools token embeddings (table 3).
        hidden_map: with `embedding_skip`, pass hidden states through a linear map that starts at zero. An untrained
            slot is then the mean of its tokens' embeddings, which the decoder can nearly read. Unmapped hidden states
            destroy this ability in a few steps.
        positions: add to each embedding that the encoder reads a learned vector for its position modulo this number,
            initially zero; None adds none. A mean loses the order of its tokens, at which these vectors hint.
    """

    paper = "Simple Context Compression: Mean-Pooling and Multi-Ratio Training"

    name: Literal["mean_pooling"] = "mean_pooling"
    encoder: TuneConfig = TuneConfig()
    decoder: TuneConfig = TuneConfig()
    linear: bool = True
    embedding_skip: bool = False
    layers: int | None = Field(default=None, ge=0)
    hidden_map: bool = False
    positions: Size | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
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

    def compressor(self, backbone: Backbone) -> "MeanPoolingCompressor":
        return MeanPoolingCompressor(backbone, self)

    def reader(self, backbone: Backbone, compressor: Any) -> Reader:
        return Reader(backbone, LinearMap(compressor.dim, backbone.dim) if self.linear else None, self.decoder)


class MeanPoolingCompressor(TrunkCompressor, TokenCompressor):
    """A compressor that averages hidden states of the decoder's own trunk over r tokens, with full attention (eq. 3-4).

    The paper's linear map comes after pooling and belongs to the reader, so stored slots stay nestable: a slot pooled
    over 4r tokens is the weighted mean of four neighboring slots pooled over r.
    """

    nestable = True

    def __init__(self, backbone: Backbone, config: MeanPoolingConfig) -> None:
        super().__init__(backbone, config.encoder, config.layers or None)
        self.encodes = config.layers != 0
        self.embedding_skip = config.embedding_skip
        self.hidden_map: nn.Linear | None = None
        self.positions: nn.Parameter | None = None
        self.ahead: bool | None = None  # whether full attention has an effect, once known
        if config.hidden_map:
            self.hidden_map = nn.Linear(self.dim, self.dim, bias=False, device=backbone.device).requires_grad_(False)
            nn.init.zeros_(self.hidden_map.weight)
        if config.positions is not None:
            zeros = torch.zeros(config.positions, self.dim, device=backbone.device)
            self.positions = nn.Parameter(zeros, requires_grad=False)

    def token_vectors(self, input_ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        """Return the vectors to pool, (batch, length, dim), for rows that hold several passages.

        `mask` is additive, (batch, 1, length, length). `positions` count within each passage, (batch or 1, length).
        """
        with self.trunk() as trunk:
            embeddings: Tensor = self.backbone.inputs.embed(input_ids)
            if not self.encodes:
                return embeddings
            inputs = embeddings
            if self.positions is not None:
                inputs = inputs + self.positions[positions % len(self.positions)].to(inputs.dtype)
            given = self.backbone.inputs.of(inputs, input_ids)
            seen = mask if self._sees_ahead(trunk) else None  # padding is on the right, where no token before it looks
            hidden: Tensor = trunk(
                **given, attention_mask=seen, position_ids=positions, use_cache=False
            ).last_hidden_state
        if not self.embedding_skip:
            return hidden
        # Hidden states are many times larger than embeddings, which would hardly count in the sum.
        hidden = F.rms_norm(hidden.float(), hidden.shape[-1:])
        if self.hidden_map is not None:
            hidden = self.hidden_map(hidden)
        summed: Tensor = embeddings + self.backbone.embedding_rms() * hidden
        return summed

    def looks_ahead(self) -> bool | None:
        with self.trunk() as trunk:
            return self._sees_ahead(trunk) if self.encodes else None

    def _sees_ahead(self, trunk: Any) -> bool:
        """Whether a token's vector depends on the next token under full attention; if not, say so in the log, once."""
        if self.ahead is None:
            self.ahead = bool(self.depends(trunk, torch.ones(2, 2, dtype=torch.bool), 0))
            if not self.ahead:
                logger.warning(
                    "layers of %s are causal whatever the mask: each vector is of its token and those before",
                    type(trunk).__name__,
                )
        return self.ahead

    def encode(self, input_ids: Tensor, attention_mask: Tensor, ratios: Sequence[int]) -> dict[int, SlotBatch]:
        """Encode once and pool at every ratio (section 4.2: ratios share the encoder's work)."""
        ids, mask, first = self.behind_bos(input_ids, attention_mask)
        positions = torch.arange(ids.shape[1], device=ids.device).expand(len(ids), -1)  # Qwen4-exp broadcasts none
        full = full_attention_mask(mask, self.backbone.embeddings.weight.dtype)
        vectors = self.token_vectors(ids, full, positions)[:, first:]
        return {ratio: SlotBatch(*mean_pool_slots(vectors, attention_mask, ratio)) for ratio in ratios}

    def saved_parameters(self) -> dict[str, nn.Parameter]:
        """Return the weights that a bundle stores, with transformers' names for those of the encoder."""
        return {name.removeprefix("encoder."): p for name, p in super().saved_parameters().items()}


def full_attention_mask(attention_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an additive mask, (batch, 1, length, length), with which every token attends to every real token.

    transformers uses a 4-D mask unchanged, in place of the architecture's causal and sliding-window masks.
    """
    hidden = (1.0 - attention_mask.to(dtype)) * torch.finfo(dtype).min
    return hidden[:, None, None, :].expand(-1, 1, attention_mask.shape[1], -1)

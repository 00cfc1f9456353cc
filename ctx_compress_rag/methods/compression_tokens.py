"""Compression tokens (Simple Context Compression, sections 3 and 5.1)."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.methods.base.compressor import SlotBatch, TokenCompressor, TrunkCompressor
from ctx_compress_rag.methods.base.config import MethodConfig, TuneConfig
from ctx_compress_rag.methods.base.reader import LinearMap, Reader
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.models.inputs import NO_TOKEN


class CompressionTokensConfig(MethodConfig):
    """The settings of compression tokens, one learned token for all slots (Simple Context Compression, section 5.1).

    `attention` among compression tokens is "causal", as in the decoder, or "bidirectional". The text is read causally.
    `encoder` and `decoder` say how each is trained.
    """

    paper = "Simple Context Compression: Mean-Pooling and Multi-Ratio Training"

    name: Literal["compression_tokens"] = "compression_tokens"
    attention: Literal["causal", "bidirectional"] = "bidirectional"
    encoder: TuneConfig = TuneConfig()
    decoder: TuneConfig = TuneConfig()

    def compressor(self, backbone: Backbone) -> "CompressionTokensCompressor":
        return CompressionTokensCompressor(backbone, self)

    def reader(self, backbone: Backbone, compressor: Any) -> Reader:
        return Reader(backbone, LinearMap(compressor.dim, backbone.dim), self.decoder)


class CompressionTokensCompressor(TrunkCompressor, TokenCompressor):
    """A compressor that appends one learned token ceil(L/r) times to a text; their final hidden states are the slots.

    The decoder reads the text once for all ratios, and the text never sees compression tokens. The compression tokens
    of a ratio see the whole text, and of each other the earlier ones ("causal") or all ("bidirectional"). With causal
    attention the slots of a coarser ratio are therefore the first slots of a finer ratio, which the paper calls
    Matryoshka-style. But no slot is the mean of others, so the method is not nestable.

    The paper does not say how the token is initialized. Here it is random, of the size of a token embedding. It is
    trained even if the encoder is frozen.
    """

    def __init__(self, backbone: Backbone, config: CompressionTokensConfig) -> None:
        super().__init__(backbone, config.encoder)
        self.bidirectional = config.attention == "bidirectional"
        self.obeys: bool | None = None  # whether the trunk sees nothing that a mask hides, once known
        token = torch.randn(backbone.dim) * backbone.embedding_rms()
        self.token = nn.Parameter(token.to(backbone.device), requires_grad=False)

    def encode(self, input_ids: Tensor, attention_mask: Tensor, ratios: Sequence[int]) -> dict[int, SlotBatch]:
        """Encode the text and the compression tokens of every ratio in one pass (section 5.1, shared computation)."""
        counts = {ratio: token_counts(attention_mask, ratio) for ratio in ratios}
        # With causal attention, the finest ratio's tokens include every other ratio's.
        encoded = list(counts) if self.bidirectional else [min(counts)]
        states = dict(zip(encoded, self.hidden_states(input_ids, attention_mask, encoded), strict=True))
        finest = states[min(counts)]
        return {
            ratio: SlotBatch(states.get(ratio, finest)[:, : count.shape[1]] * (count > 0).unsqueeze(-1), count)
            for ratio, count in counts.items()
        }

    def hidden_states(self, input_ids: Tensor, attention_mask: Tensor, ratios: Sequence[int]) -> list[Tensor]:
        """Return the final states of each ratio's compression tokens, (batch, ceil(length / ratio), dim) each."""
        tokens_of = [token_counts(attention_mask, ratio) > 0 for ratio in ratios]
        input_ids, attention_mask, _ = self.behind_bos(input_ids, attention_mask)
        batch, length = input_ids.shape
        device = input_ids.device
        real = [attention_mask.bool(), *tokens_of]
        sizes = [part.shape[1] for part in real]
        # Each ratio's positions continue from the text's last real token, whatever the padding.
        ends = attention_mask.sum(1, keepdim=True)
        positions = [torch.arange(length, device=device).expand(batch, -1)]
        positions += [ends + torch.arange(size, device=device) for size in sizes[1:]]
        with self.trunk() as trunk:
            if self.obeys is None:
                self.obeys = self.depends(trunk, torch.eye(2, dtype=torch.bool), 1) is False
            if not self.obeys:
                raise ConfigError(
                    f"compression_tokens: layers of {type(trunk).__name__} read on past what a mask hides, such as "
                    "padding and another ratio's tokens: use mean_pooling"
                )
            text = self.backbone.inputs.embed(input_ids)
            tokens = self.token.to(text.dtype).expand(batch, sum(sizes[1:]), -1)
            ids = F.pad(input_ids, (0, tokens.shape[1]), value=NO_TOKEN)
            hidden: Tensor = trunk(
                **self.backbone.inputs.of(torch.cat([text, tokens], dim=1), ids),
                attention_mask=compression_mask(real, self.bidirectional, text.dtype),
                position_ids=torch.cat(positions, dim=1),
                use_cache=False,
            ).last_hidden_state
        return list(hidden.split(sizes, dim=1)[1:])


def token_counts(attention_mask: Tensor, ratio: int) -> Tensor:
    """Return the source tokens per compression token, which are `ratio`, or fewer for the last token of a passage.

    Each compression token sees the whole text, so only the sum of the counts, the passage's length, has a meaning.

    Shape: (batch, length) -> (batch, ceil(length / ratio)), 0 where a shorter passage has no such token
    """
    starts = torch.arange(0, attention_mask.shape[1], ratio, device=attention_mask.device)
    return (attention_mask.sum(1, keepdim=True) - starts).clamp(0, ratio)


def compression_mask(real: Sequence[Tensor], bidirectional: bool, dtype: torch.dtype) -> Tensor:
    """Return an additive mask, causal over the text. Compression tokens see the text and other tokens of their ratio.

    transformers uses a 4-D mask unchanged, in place of the architecture's own, so that sliding windows hide no part of
    the text. `real` holds bool masks, False at padding: the text's (batch, length), then each ratio's (batch, tokens).

    Shape: -> (batch, 1, total, total), where total counts the text and all compression tokens
    """
    device = real[0].device
    part = torch.cat([torch.full((each.shape[1],), i, device=device) for i, each in enumerate(real)])
    query, key = part.unsqueeze(1), part.unsqueeze(0)
    same = query == key
    seen = (same | (key == 0)).tril()
    if bidirectional:
        seen = seen | (same & (query > 0))
    hidden = ~(seen & torch.cat(list(real), dim=1).unsqueeze(1))
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill(hidden, torch.finfo(dtype).min)[:, None]

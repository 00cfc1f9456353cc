"""The predictor, which maps demonstrations to an update in one pass (In-Context Optimization, section 5.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from ctx_compress_rag.adaptation.adapt import opened
from ctx_compress_rag.adaptation.adapter import Adapter, Shapes
from ctx_compress_rag.adaptation.updates import norms
from ctx_compress_rag.bundle.plain_decoder import PlainDecoder
from ctx_compress_rag.decoding.splice import splice
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.models.backbone import decoder_layers
from ctx_compress_rag.prompt import Prompt


class UpdatePredictor(nn.Module):
    """g_phi: a two-layer MLP encoder, and a head for each layer and projection that returns U and V.

    The paper gives no activation (GELU here) and no scales. The states of end tokens are much alike, so contexts differ
    little compared with the mean. The encoder therefore reads states minus their mean, divided by their spread. Updates
    are small compared with weights. If heads had to learn their scale from torch's initial one, AdamW's steps of 5e-4
    would be coarse, so each head's output has a gain. `calibrate` measures mean, spread and gains once.
    """

    center: Tensor
    spread: Tensor
    gain: Tensor

    def __init__(self, dim: int, shapes: Shapes, rank: int, hidden: int = 256, code: int = 64) -> None:
        super().__init__()
        self.shapes = dict(shapes)
        self.rank = rank
        self.encoder = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, code))
        self.heads = nn.ModuleList(nn.Linear(code, rank * (d_in + d_out)) for d_in, d_out in self.shapes.values())
        self.register_buffer("center", torch.zeros(dim))
        self.register_buffer("spread", torch.ones(dim))
        self.register_buffer("gain", torch.ones(len(self.shapes)))

    def forward(self, pooled: Tensor) -> Adapter:
        """Map pooled hidden states (contexts, dim) to U V^T, a row for each context; `b` is U and `a` is V^T."""
        code = self.encoder((pooled.to(self.gain.dtype) - self.center) / self.spread)
        a, b = {}, {}
        for (name, (d_in, d_out)), head, gain in zip(self.shapes.items(), self.heads, self.gain, strict=True):
            u, v = head(code).split([self.rank * d_out, self.rank * d_in], dim=-1)
            a[name] = v.unflatten(-1, (self.rank, d_in))
            b[name] = gain * u.unflatten(-1, (d_out, self.rank))
        return Adapter(a, b)

    @torch.no_grad()
    def calibrate(self, pooled: Tensor, wanted: Mapping[str, Tensor]) -> None:
        """Measure mean, spread and gains on some contexts, so that first updates have about the norms of their targets.

        The norms are equal in the geometric mean. `wanted` holds the targets' norms by projection, (contexts,).
        """
        self.center.copy_(pooled.mean(dim=0))
        spread = pooled.std(dim=0, correction=0)
        self.spread.copy_(torch.where(spread > 0, spread, 1.0))
        self.gain.fill_(1.0)
        own = norms(self(pooled))
        self.gain.copy_(torch.stack([(wanted[n].log() - own[n].log()).mean().exp() for n in self.shapes]))


@torch.no_grad()
def pooled_states(
    decoder: PlainDecoder, contexts: Sequence[Sequence[Prompt]], base: Adapter, layer: int | None = None
) -> Tensor:
    """Return hidden states at the end tokens of demonstrations, averaged over each context: (contexts, dim).

    The frozen decoder reads the demonstrations with the base adapter. As in all prompts here, passages come first, then
    question and answer; the paper has the question first (appendix G). States are taken after `layer`, and later layers
    are not run. None takes the last layer, after the final norm. The paper does not name the layer.
    """
    rows = [row for context in contexts for row in context]
    batch = splice(decoder.backbone.embeddings, rows)
    with opened(decoder.text_decoder(), base) as model:
        states = _hidden_states(model, batch.model_inputs(), layer)
    last = states[:, -1].float()  # padding is on the left
    return torch.stack([part.mean(dim=0) for part in last.split([len(context) for context in contexts])])


class _Reached(Exception):
    pass


def _hidden_states(model: Any, inputs: dict[str, Tensor], layer: int | None) -> Tensor:
    """Return the states of every position: (rows, length, dim)."""
    if layer is None:
        states: Tensor = model.base_model(**inputs, use_cache=False).last_hidden_state
        return states
    count = int(model.config.get_text_config().num_hidden_layers)
    if layer > count:
        raise ConfigError(f"layer is {layer}, and the decoder has {count} layers: give 1 to {count}, or leave it out")
    made: list[Tensor] = []

    def stop(module: Any, inputs: Any, output: Any) -> None:
        made.append(output[0] if isinstance(output, tuple) else output)
        raise _Reached

    last = decoder_layers(model.base_model, count)[layer - 1]
    with suppress(_Reached), last.register_forward_hook(stop):
        model.base_model(**inputs, use_cache=False)
    return made[0]

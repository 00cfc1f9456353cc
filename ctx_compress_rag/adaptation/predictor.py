"""The predictor: demonstrations -> an update of the Q/K/V projections, in one forward pass (paper 003, section 5.2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ctx_compress_rag.adaptation.adapter import Adapter, Shapes, applied
from ctx_compress_rag.adaptation.decoder import AdaptiveDecoder, Row
from ctx_compress_rag.adaptation.updates import norms


class UpdatePredictor(nn.Module):
    """g_phi: a two-layer MLP encoder, and a head for each layer and projection that emits U and V.

    The paper gives no activation (GELU here) and no initial scale. Updates are small beside weights: heads
    that had to learn their scale from torch's initial one would make AdamW's steps of 5e-4 coarse, so each
    head's output has a fixed gain that `calibrate` measures once, and its weights stay of ordinary size.

    Args:
        dim: width of the decoder's hidden states.
        shapes: the projections and their widths.
        rank: of U V^T, the base adapter's.
        hidden: width of the encoder's first layer.
        code: width of its output.
    """

    gain: Tensor

    def __init__(self, dim: int, shapes: Shapes, rank: int, hidden: int = 256, code: int = 64) -> None:
        super().__init__()
        self.shapes = dict(shapes)
        self.rank = rank
        self.encoder = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, code))
        self.heads = nn.ModuleList(nn.Linear(code, rank * (d_in + d_out)) for d_in, d_out in self.shapes.values())
        self.register_buffer("gain", torch.ones(len(self.shapes)))

    def forward(self, pooled: Tensor) -> Adapter:
        """Pooled hidden states (contexts, dim) -> U V^T, a row for each context: `b` is U and `a` is V^T."""
        code = self.encoder(pooled.to(self.gain.dtype))
        a, b = {}, {}
        for (name, (d_in, d_out)), head, gain in zip(self.shapes.items(), self.heads, self.gain, strict=True):
            u, v = head(code).split([self.rank * d_out, self.rank * d_in], dim=-1)
            a[name] = v.unflatten(-1, (self.rank, d_in))
            b[name] = gain * u.unflatten(-1, (d_out, self.rank))
        return Adapter(a, b)

    @torch.no_grad()
    def calibrate(self, pooled: Tensor, target: Adapter) -> None:
        """Set the gains so that updates start at their targets' size: the geometric mean over these contexts.

        Args:
            pooled: (contexts, dim).
            target: the updates gradient descent makes of the same contexts.
        """
        self.gain.fill_(1.0)
        own, wanted = norms(self(pooled)), norms(target)
        self.gain.copy_(torch.stack([(wanted[n].log() - own[n].log()).mean().exp() for n in self.shapes]))


@torch.no_grad()
def pooled_states(decoder: AdaptiveDecoder, contexts: Sequence[Sequence[Row]], base: Adapter) -> Tensor:
    """Final hidden states at the end tokens of demonstrations, averaged over each context: (contexts, dim).

    The demonstrations (question, passages, answer) are read by the frozen decoder with the base adapter.
    """
    rows = [row for context in contexts for row in context]
    batch = decoder.splice([row.pieces for row in rows])
    with decoder.model_for(batch, any(row.soft for row in rows)) as model, applied(model, base):
        states: Tensor = model.base_model(**batch.model_inputs(), use_cache=False).last_hidden_state
    last = states[:, -1].float()  # padding is on the left
    return torch.stack([part.mean(dim=0) for part in last.split([len(context) for context in contexts])])

"""The stages `fitted_next_token` and `fitted_reconstruction`, whose reader starts as a least-squares map.

Not in the papers, which do not say how their maps are initialized. A frozen decoder can only read vectors that look
like its embeddings, and a small one hardly gets there from a random map.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.data.examples import Example
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.methods.base.projections import TwoLayerMap
from ctx_compress_rag.text.tokenizing import text_ids
from ctx_compress_rag.training.examples import passage_examples
from ctx_compress_rag.training.recipe import register_stage
from ctx_compress_rag.training.stages.answer import NextTokenRecipe, ReconstructionRecipe
from ctx_compress_rag.training.stages.compression import CompressionRecipe, Objective, make_compression_job

# GELU(x) is x / 2 + 0.4 x^2 and smaller terms: for inputs of this standard deviation it is nine tenths linear.
_NEARLY_LINEAR = 0.3

# Share of the inputs' mean variance, added to each direction's: a few passages hardly vary in some directions.
_RIDGE = 1e-3


class _Fitted(CompressionRecipe):
    """A recipe for a reader with a map of two layers, which is fitted first.

    Attributes:
        fit_passages: how many of the data's passages it is fitted on, so that it maps a slot of one token to that
            token's embedding, and a longer one to the mean of its tokens' embeddings.
    """

    fit_passages: int = Field(gt=0)

    def objective(self, bundle: Bundle, examples: Sequence[Example]) -> Objective:
        """The loss, what feeds it, and on what."""
        fit_reader(bundle, [text for e in passage_examples(examples)[: self.fit_passages] for text in e.passages])
        return super().objective(bundle, examples)


class FittedNextTokenRecipe(_Fitted, NextTokenRecipe):
    """Stage `next_token`, fitted first."""

    stage: Literal["fitted_next_token"]  # type: ignore[assignment]


class FittedReconstructionRecipe(_Fitted, ReconstructionRecipe):
    """Stage `reconstruction`, fitted first."""

    stage: Literal["fitted_reconstruction"]  # type: ignore[assignment]


def fit_reader(bundle: Bundle, texts: Sequence[str]) -> None:
    """Fit a bundle's reader to map the slots of texts at 1x to the mean embeddings of their tokens.

    Raises:
        ConfigError: its map has not two layers.
    """
    if not isinstance(bundle.reader.projection, TwoLayerMap):
        raise ConfigError("fitted stages are for methods whose reader has a map of two layers: leave out 'fitted_'")
    softs = bundle.compress(texts, ratio=1)
    embed = bundle.backbone.inputs.embed
    targets: list[Tensor] = []
    with torch.no_grad():
        for text, soft in zip(texts, softs, strict=True):
            ids = torch.tensor(text_ids(bundle.tokenizer, text), device=bundle.backbone.device)
            targets += [part.mean(0) for part in embed(ids).float().split(soft.token_counts.tolist())]
    slots = torch.cat([torch.from_numpy(soft.slots) for soft in softs]).to(bundle.backbone.device)
    fit(bundle.reader.projection, slots, torch.stack(targets))


@torch.no_grad()
def fit(projection: TwoLayerMap, slots: Tensor, embeddings: Tensor) -> None:
    """Set the least-squares map from slots to embeddings: first a linear map, then through GELU.

    Shape: (slots, slot_dim), (slots, dim)
    """
    slots = slots.to(projection.inner.weight.dtype)
    if projection.norm is not None:
        slots = projection.norm(slots)
    weight, bias = _least_squares(slots, embeddings)
    line = slots.double() @ weight.T + bias
    center = line.mean(0)
    scale = _NEARLY_LINEAR / line.std().clamp(min=1e-12)
    projection.inner.weight.copy_(scale * weight)
    projection.inner.bias.copy_(scale * (bias - center))
    weight, bias = _least_squares(F.gelu(scale * (line - center)), embeddings)
    projection.outer.weight.copy_(weight)
    projection.outer.bias.copy_(bias)


def _least_squares(inputs: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Weight and bias of the affine map with the least squared error, with slight ridge regularization.

    Shape: (rows, in), (rows, out) -> (out, in), (out,), in float64
    """
    inputs, outputs = inputs.double(), outputs.double()
    mean_in, mean_out = inputs.mean(0), outputs.mean(0)
    centered = inputs - mean_in
    gram = centered.T @ centered
    ridge = _RIDGE * gram.diagonal().mean() + 1e-12
    gram.diagonal().add_(ridge)
    weight = torch.linalg.solve(gram, centered.T @ (outputs - mean_out)).T
    return weight, mean_out - weight @ mean_in


for _recipe in (FittedNextTokenRecipe, FittedReconstructionRecipe):
    register_stage(_recipe, make_compression_job)

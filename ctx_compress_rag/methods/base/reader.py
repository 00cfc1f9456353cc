"""The reader of a method: a map of slots to the decoder's embeddings, and a decoder, adapted to slots or frozen.

Learned vectors may stand around the mapped slots.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ctx_compress_rag.methods.base.config import TuneConfig, WrapConfig, lora_config
from ctx_compress_rag.methods.base.part import MethodPart, train_decoder_copy
from ctx_compress_rag.models.backbone import Backbone

# E[GELU(x)^2] for standard normal x.
_GELU_POWER = 0.42522

# GELU(x) is x / 2 + 0.4 x^2 and smaller terms: for inputs of this standard deviation it is nine tenths linear.
_NEARLY_LINEAR = 0.3

# Share of the inputs' mean variance, added to each direction's: a few passages hardly vary in some directions.
_RIDGE = 1e-3


class LinearMap(nn.Linear):
    """The map z W^T of each slot z (Simple Context Compression, section 5.1; W_align of Read As Human, eq. 5)."""

    def __init__(self, slot_dim: int, dim: int) -> None:
        super().__init__(slot_dim, dim, bias=False)

    def initialize(self, slot_rms: float, embedding_rms: float) -> None:
        """Set the weight to a multiple of the identity that gives slots the root mean square of token embeddings.

        Slots and embeddings can differ in size 100 times, and a decoder learns to ignore inputs of an unusual size.
        """
        with torch.no_grad():
            nn.init.eye_(self.weight)
            self.weight.mul_(embedding_rms / max(slot_rms, 1e-6))

    def forward(self, slots: Tensor) -> Tensor:
        """Map slots to input embeddings, in this module's precision: (slots, slot_dim) -> (slots, dim)."""
        return super().forward(slots.to(self.weight.dtype))


class TwoLayerMap(nn.Module):
    """The map W_2 GELU(W_1 z + b_1) + b_2 of each slot z.

    It is the MLP of ComprExIT, eq. 13, and W_psi of ArcAligner, eq. 1. ArcAligner says only "lightweight projector", so
    we use xRAG's map. One linear map is not enough, because the vectors of a sentence encoder are no rotation of the
    decoder's embeddings, and the encoder is frozen, so that nothing before the map can learn the rest. The papers give
    neither the activation nor the inner width, which is here the width of the decoder.

    `normed` first normalizes each slot to a root mean square of 1 (the adapter of Latent Context Language Models).
    """

    def __init__(self, slot_dim: int, dim: int, normed: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(slot_dim, dim)
        self.outer = nn.Linear(dim, dim)
        self.norm = nn.RMSNorm(slot_dim, eps=1e-6) if normed else None

    def initialize(self, slot_rms: float, embedding_rms: float) -> None:
        """Draw weights that keep slots distinct and give them the root mean square of embeddings. Biases are zero."""
        with torch.no_grad():
            for layer in (self.inner, self.outer):
                layer.bias.zero_()
            # The inner layer's outputs then have unit variance, which suits GELU.
            size = max(slot_rms, 1e-6) if self.norm is None else 1.0
            self.inner.weight.normal_(std=1 / (size * self.inner.in_features**0.5))
            self.outer.weight.normal_(std=embedding_rms / (_GELU_POWER * self.outer.in_features) ** 0.5)

    @torch.no_grad()
    def fit(self, slots: Tensor, embeddings: Tensor) -> None:
        """Start as the least-squares map from slots (n, slot_dim) to embeddings (n, dim): a linear one, through GELU.

        Not in the papers, which do not say how their maps start. A frozen decoder can only read vectors that look like
        its embeddings, and a small one hardly gets there from a random map.
        """
        slots = self._normed(slots)
        weight, bias = _least_squares(slots, embeddings)
        line = slots.double() @ weight.T + bias
        center = line.mean(0)
        scale = _NEARLY_LINEAR / line.std().clamp(min=1e-12)
        self.inner.weight.copy_(scale * weight)
        self.inner.bias.copy_(scale * (bias - center))
        weight, bias = _least_squares(F.gelu(scale * (line - center)), embeddings)
        self.outer.weight.copy_(weight)
        self.outer.bias.copy_(bias)

    def forward(self, slots: Tensor) -> Tensor:
        """Map slots to input embeddings, in this module's precision: (slots, slot_dim) -> (slots, dim)."""
        mapped: Tensor = self.outer(F.gelu(self.inner(self._normed(slots))))
        return mapped

    def _normed(self, slots: Tensor) -> Tensor:
        slots = slots.to(self.inner.weight.dtype)
        return slots if self.norm is None else self.norm(slots)


def _least_squares(inputs: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight and bias, in float64, of the affine map with the least squared error, slightly regularized.

    Shape: (n, in), (n, out) -> (out, in), (out,)
    """
    inputs, outputs = inputs.double(), outputs.double()
    mean_in, mean_out = inputs.mean(0), outputs.mean(0)
    centered = inputs - mean_in
    gram = centered.T @ centered
    gram.diagonal().add_(_RIDGE * gram.diagonal().mean() + 1e-12)
    weight = torch.linalg.solve(gram, centered.T @ (outputs - mean_out)).T
    return weight, mean_out - weight @ mean_in


class SlotWrap(nn.Module):
    """Learned vectors around the slots of a passage, the same for every passage.

    Vectors, unlike tokens of the prompt, surround a passage wherever it stands, and need no new tokens.
    """

    def __init__(self, config: WrapConfig, dim: int) -> None:
        super().__init__()
        self.config = config
        self.before = nn.Parameter(torch.zeros(config.before, dim))
        self.after = nn.Parameter(torch.zeros(config.after, dim))

    def forward(self, embedded: Tensor) -> Tensor:
        """Put the vectors around a passage's input embeddings: (slots, dim) -> (positions(slots), dim)."""
        runs = embedded.split(self.config.every or max(1, len(embedded)))
        return torch.cat([part for run in runs for part in (self.before, run, self.after)])


class Reader(MethodPart):
    """A reader: it maps stored slots for the decoder, which reads them with LoRA, as a trained copy, or frozen.

    Without a `projection`, slots are embeddings already (Simple Context Compression's ablation).
    """

    part = "reader"

    def __init__(
        self,
        backbone: Backbone,
        projection: LinearMap | TwoLayerMap | None,
        tune: TuneConfig,
        wrap: WrapConfig | None = None,
    ) -> None:
        super().__init__(backbone)
        self.tune = tune
        self.projection = projection
        self.wrap = SlotWrap(wrap, backbone.dim) if wrap else None
        self.own: nn.Module | None = None
        if tune.mode == "lora":
            backbone.add_adapter(self.part, lambda: lora_config(tune))
        elif tune.mode == "full":
            self.own = backbone.copy_model()
        self.to(backbone.device)
        self.requires_grad_(False)

    @property
    def mergeable(self) -> bool:
        """Whether all that the reader changes of the decoder is a LoRA, which other weights may take in."""
        return type(self) is Reader and self.tune.mode == "lora"

    def initialize(self, slot_rms: float) -> None:
        """Initialize the map so that slots of this root mean square get the root mean square of token embeddings."""
        if self.projection is not None:
            self.projection.initialize(slot_rms, self.backbone.embedding_rms())

    def trained_parameters(self) -> list[nn.Parameter]:
        parts = [part for part in (self.wrap, self.projection) if part is not None]
        trained = [parameter for part in parts for parameter in part.requires_grad_(True).parameters()]
        if self.own is not None:
            return trained + train_decoder_copy(self.own)
        return trained + (self.backbone.train_adapter(self.part) if self.tune.mode == "lora" else [])

    def forward(self, slots: Tensor, token_counts: Tensor) -> Tensor:
        """Return a passage's slots as input embeddings: (slots, dim), (slots,) -> (positions(slots), decoder dim)."""
        mapped: Tensor = slots if self.projection is None else self.projection(slots)
        return mapped if self.wrap is None else self.wrap(mapped)

    def positions(self, slots: int) -> int:
        """Return the number of input embeddings that `forward` makes of this number of slots of one passage."""
        return slots if self.wrap is None else self.wrap.config.positions(slots)

    @contextmanager
    def decoder(self, slot_mask: Tensor) -> Iterator[Any]:
        """Yield the model that reads slots, locked for this thread within the context.

        `slot_mask` is bool (batch, length), True at the slots of the prompts to be read. Only subclasses use it.
        """
        with self.backbone.use(self.part if self.tune.mode == "lora" else None) as model:
            yield model if self.own is None else self.own

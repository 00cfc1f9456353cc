"""The reader of a method: a map of slots to the decoder's embeddings, and a decoder, adapted to slots or frozen."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ctx_compress_rag.methods.base.config import TuneConfig, WrapConfig, lora_config
from ctx_compress_rag.methods.base.part import MethodPart, train_decoder_copy
from ctx_compress_rag.methods.base.projections import LinearMap, SlotWrap, TwoLayerMap
from ctx_compress_rag.models.backbone import Backbone


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

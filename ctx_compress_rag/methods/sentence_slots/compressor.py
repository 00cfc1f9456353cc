"""One vector from a frozen sentence encoder per sentence or passage (ArcAligner, sections 3.1-3.2; xRAG)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ctx_compress_rag.errors import BundleError
from ctx_compress_rag.methods.base.compressor import Compressor, SlotBatch, Tokenized
from ctx_compress_rag.methods.sentence_slots.config import SentenceUnits
from ctx_compress_rag.methods.sentence_slots.sentence_encoder import SentenceEncoder
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.soft_context import SoftContext
from ctx_compress_rag.text.sentences import Unit, split

_DIGEST = "encoder_digest"


class SentenceSlotsCompressor(Compressor):
    """The compressed context embeddings E of section 3.1; the reader projects them (eq. 1).

    `config.unit` says what a slot stands for:

    - "sentence": a sentence. The ratio is then nominal: it changes nothing.
    - "passage": the whole passage, as in xRAG. The ratio is nominal too.
    - "tokens": sentences merged or cut to at most `ratio` decoder tokens, for any ratio. The paper halves sentences or
      joins three (section 4.10).

    A store's window is the most tokens that a unit of any kind may have: a longer passage or sentence
    becomes several. The encoder cuts off text beyond its own longest input, so choose a window that fits.

    The vector of merged sentences is not the mean of their vectors: a coarser ratio needs the text again.
    """

    def __init__(self, backbone: Backbone, config: SentenceUnits) -> None:
        super().__init__(backbone)
        self.config = config
        self.dim = config.encoder_dim
        self.encoder = SentenceEncoder(config.encoder, config.encoder_revision, config.encoder_dim, backbone.device)

    def units(self, text: str, ratio: int, window: int | None = None) -> list[Unit]:
        """The pieces of a passage that become one slot each, in order.

        Args:
            text: the passage.
            ratio: most tokens of a unit if `unit` is "tokens"; otherwise without effect.
            window: most tokens of any unit; None sets no limit.
        """
        unit = self.config.unit
        limit = ratio if unit == "tokens" else window
        return split(text, self.backbone.tokenizer, limit, merge=unit != "sentence", language=self.config.language)

    def forward(self, passages: Sequence[Tokenized], ratios: Sequence[int], window: int) -> Mapping[int, SlotBatch]:
        """Compress a training batch at each ratio. Nothing here is trained, so slots carry no gradients."""
        return {
            ratio: SlotBatch.of(self._encoded(passages, ratio, window, 32), self.backbone.device) for ratio in ratios
        }

    def compress(self, passages: Sequence[Tokenized], ratio: int, window: int, batch_tokens: int) -> list[SoftContext]:
        """Compress passages for a store: unprojected sentence vectors (units, encoder_dim)."""
        longest = min(self.encoder.model.max_seq_length or window, window)
        return self._encoded(passages, ratio, window, max(1, batch_tokens // longest))

    def _encoded(self, passages: Sequence[Tokenized], ratio: int, window: int, batch_size: int) -> list[SoftContext]:
        done = [self.units(passage.text, ratio, window) for passage in passages]
        vectors = self.encoder.encode([unit.text for units in done for unit in units], batch_size)
        return [
            SoftContext(slots, torch.tensor([unit.tokens for unit in units]))
            for slots, units in zip(vectors.split([len(units) for units in done]), done, strict=True)
        ]

    def saved_state(self) -> dict[str, Tensor]:
        """The SHA-256 of the encoder's weights, one byte per entry, to identify the encoder without storing it.

        As floats, because a bundle stores everything in half precision, which is exact for bytes.
        """
        return {_DIGEST: torch.tensor(list(self.encoder.digest), dtype=torch.float32)}

    def load_saved_state(self, state: dict[str, Tensor]) -> None:
        """From now on, accept only the encoder that `saved_state` identifies.

        Raises:
            BundleError: the state belongs to another method.
        """
        if state.keys() != {_DIGEST} or state[_DIGEST].shape != (32,):
            raise BundleError(
                f"the compressor's weights do not fit its config: expected {_DIGEST}, got {sorted(state)}"
            )
        self.encoder.expect(bytes(state[_DIGEST].to(torch.uint8).tolist()))

"""Every method in each of its forms, as tiny settings; a test refuses a method that is not here."""

from collections.abc import Sequence
from typing import Any

import torch

from ctx_compress_rag import Bundle, SoftContext
from ctx_compress_rag.methods.base.compressor import TokenCompressor, TokenizedPassage
from helpers.sentences import DIM

FULL, FROZEN = {"mode": "full"}, {"mode": "frozen"}
SENTENCES = {"encoder": "a tiny one", "encoder_dim": DIM}
SMALL_LORA = {"rank": 4, "alpha": 8, "dropout": 0.0}
COMPREXIT = {"gate_dim": 8, "slot_dim": 12, "transport_dim": 8, "segment_tokens": 16}

IMPORTED = {"memory_tokens", "own_encoder"}
"""Methods without a recipe here: published compressors use them, in tests/published/."""

# The smallest configs of each method, one for each of its forms; the first answers a question, too.
MATRIX: dict[str, dict[str, dict[str, Any]]] = {
    "mean_pooling": {
        "lora": {},
        "full": {"encoder": FULL, "decoder": FULL, "embedding_skip": True},
        "plain": {"encoder": FROZEN, "decoder": {"mode": "lora"}, "linear": False},
        "first layer": {"layers": 1, "positions": 4, "embedding_skip": True, "hidden_map": True},
        "first layer, full": {"layers": 1, "positions": 4, "encoder": FULL, "decoder": FROZEN},
    },
    "compression_tokens": {
        "bidirectional": {"attention": "bidirectional"},
        "causal": {"attention": "causal", "encoder": FULL, "decoder": FROZEN},
        "frozen": {"encoder": FROZEN},
    },
    "comprexit": {
        "transport": COMPREXIT,
        "window attention": COMPREXIT | {"allocation": "window_attention"},
        "last layer": COMPREXIT | {"layers": "last"},
    },
    "sentence_slots": {
        "tokens": SENTENCES | {"unit": "tokens"},
        "sentence": SENTENCES | {"unit": "sentence", "decoder": {"mode": "lora"}},
        "passage": SENTENCES | {"unit": "passage"},
    },
    "arcaligner": {
        "gates": SENTENCES | {"unit": "tokens", "lora": SMALL_LORA, "loops": 2},
        "no recursion": SENTENCES | {"unit": "tokens", "lora": SMALL_LORA, "loops": 0},
        "no lora": SENTENCES | {"unit": "sentence", "lora": None, "loops": 0},
    },
    "ram": {
        "both": {"segment_tokens": 4, "encoder": FULL, "decoder": {"mode": "lora"}},
        "no skimming": {"segment_tokens": 4, "encoder": {"mode": "lora"}, "decoder": FROZEN, "skimming": "none"},
        "no close reading": {"segment_tokens": 4, "encoder": FROZEN, "decoder": FULL, "close_reading": False},
    },
}
PASSAGES = [
    "The harbour of Velmora was built by Oda Brink in 1612, and its lighthouse still burns whale oil.",
    "Tarin Holt keeps bees. The honey is sold under the name of Old Gold, at the door of the town hall.",
    "Oda Brink was a mason.",
    "The river Issel freezes every January, and the people of Velmora then hold a market on the ice. " * 4,
]


def trained(bundle: Bundle) -> list[torch.nn.Parameter]:
    return bundle.compressor.trained_parameters() + bundle.reader.trained_parameters()


def compress_ids(
    compressor: TokenCompressor, passages: Sequence[list[int]], ratio: int, window: int = 64, batch_tokens: int = 8192
) -> list[SoftContext]:
    """Compress passages given as token ids."""
    return compressor.compress([TokenizedPassage("", ids) for ids in passages], ratio, window, batch_tokens)

"""Compression tokens (Simple Context Compression, section 5.1) against plain computations of their attention."""

import math
from typing import Any

import pytest
import torch

from ctx_compress_rag.methods.base.config import TuneConfig
from ctx_compress_rag.methods.compression_tokens import CompressionTokensCompressor, CompressionTokensConfig
from ctx_compress_rag.models.backbone import Backbone
from helpers import architectures
from helpers.methods import compress_ids

ATTENTION = ["causal", "bidirectional"]
FROZEN = TuneConfig(mode="frozen")


def sees(length: int, slots: int, bidirectional: bool) -> list[list[bool]]:
    """Section 5.1 in words: who (row) sees whom (column) among the text and then the compression tokens."""
    table = []
    for query in range(length + slots):
        row = []
        for key in range(length + slots):
            if query < length or key < length or not bidirectional:
                row.append(key <= query)  # causal over the text, and everywhere in the conventional mask
            else:
                row.append(True)  # compression tokens among themselves
        table.append(row)
    return table


@pytest.fixture(scope="module", params=architectures.NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def backbone(name: str) -> Backbone:
    return Backbone(architectures.model(name), architectures.tokenizer(name))


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize(("length", "ratio"), [(3 * architectures.SLIDING_WINDOW + 1, 4), (8, 3), (3, 5), (1, 1)])
def test_the_token_sees_what_the_paper_says_in_every_architecture(
    name: str, backbone: Backbone, attention: Any, length: int, ratio: int
) -> None:
    """Against transformers' own model on one unpadded row, its mask written out; longer than sliding windows.

    The learned token follows the text ceil(L/r) times.
    """
    compressor = CompressionTokensCompressor(backbone, CompressionTokensConfig(attention=attention, encoder=FROZEN))
    [ids] = architectures.random_ids(name, [length])
    slots, read = math.ceil(length / ratio), torch.tensor([*architectures.bos(name), *ids])
    table = sees(len(read), slots, compressor.bidirectional)
    mask = torch.tensor([[0.0 if seen else torch.finfo(torch.float32).min for seen in row] for row in table])
    x = torch.cat([backbone.model.get_input_embeddings()(read), *[compressor.token[None]] * slots])
    with torch.no_grad():
        expected = backbone.model.base_model(inputs_embeds=x[None], attention_mask=mask[None, None], use_cache=False)
    [soft] = compress_ids(compressor, [ids.tolist()], ratio)
    torch.testing.assert_close(soft.slots, expected.last_hidden_state[0, len(read) :], atol=2e-4, rtol=1e-4)
    # Each slot stands for r tokens, the last for what is left.
    assert soft.token_counts.tolist() == [min(ratio, length - start) for start in range(0, length, ratio)]


def test_the_token_starts_at_the_size_of_token_embeddings(backbone: Backbone) -> None:
    """As the embedding layer gives them: Gemma's scales what it looks up."""
    embed = backbone.model.get_input_embeddings()
    size = embed(torch.arange(embed.num_embeddings)).pow(2).mean().sqrt()
    config = CompressionTokensConfig(encoder=FROZEN)
    tokens = torch.stack([CompressionTokensCompressor(backbone, config).token for _ in range(8)])
    assert tokens.pow(2).mean().sqrt() == pytest.approx(float(size), rel=0.15)
    assert len({tuple(token.tolist()) for token in tokens}) == 8 and not tokens.requires_grad

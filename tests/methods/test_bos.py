"""Mean pooling reads a passage behind a BOS where the decoder's tokenizer puts one (Llama, Gemma).

Tests of the other methods that read tokens have the BOS in their plain computations, in every architecture.
"""

from __future__ import annotations

import copy

import pytest
import torch

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.bundle.config import BundleConfig
from ctx_compress_rag.methods.mean_pooling.config import MeanPoolingConfig
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.text.chat import chat_text
from helpers import architectures

TEXTS = ["Kormoor lies on the river Halen, where the salt works are.", "Pell trades."]
RATIO = 4


@torch.no_grad()
def plain_slots(bundle: Bundle, ids: list[int]) -> torch.Tensor:
    """The slots of a passage by transformers' own trunk, fed BOS and the passage alone, without padding."""
    trunk, embed, bos = bundle.backbone.model.model, bundle.backbone.embeddings, bundle.tokenizer.bos_token_id
    text = embed(torch.tensor([[bos, *ids]]))
    everything = torch.zeros(1, 1, len(ids) + 1, len(ids) + 1)
    hidden = trunk(inputs_embeds=text, attention_mask=everything).last_hidden_state[0, 1:]
    return torch.stack([part.mean(0) for part in hidden.split(RATIO)])


@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
def test_passages_are_read_behind_bos(name: str) -> None:
    tokenizer, model = architectures.tokenizer(name), architectures.model(name).eval()
    ids = tokenizer("", verbose=False)["input_ids"]
    assert ids == [tokenizer.bos_token_id]
    config = BundleConfig(name=name, method=MeanPoolingConfig(), base_ratio=RATIO, ratios=[RATIO], max_tokens=64)
    bundle = Bundle.build(config, Backbone(model, tokenizer))
    for text, soft in zip(TEXTS, bundle.compress(TEXTS), strict=True):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert soft.n_tokens == len(ids)
        torch.testing.assert_close(soft.slots, plain_slots(bundle, ids), atol=1e-4, rtol=1e-4)


def test_prompts_of_base_models_begin_as_the_tokenizer_begins_a_text() -> None:
    for name, begins in (("Llama", True), ("Phi3", False)):
        tokenizer = copy.deepcopy(architectures.tokenizer(name))
        tokenizer.chat_template = None
        text = chat_text(tokenizer, [{"role": "user", "content": "Who?"}])
        assert text.startswith(tokenizer.bos_token) is begins
        assert (
            tokenizer(text, add_special_tokens=False)["input_ids"][0]
            == tokenizer(text.removeprefix(tokenizer.bos_token))["input_ids"][0]
        )

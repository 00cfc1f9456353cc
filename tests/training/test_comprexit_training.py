"""ComprExIT's training (section 3.3): its loss, its two phases and their recipes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.data.examples import Example, Turn
from ctx_compress_rag.methods.base.compressor import Tokenized
from ctx_compress_rag.training.recipe import load_recipe
from ctx_compress_rag.training.stages.answer import LikelihoodLoss
from ctx_compress_rag.training.stages.next_token import NextTokenCollator
from helpers.comprexit import TEXTS, comprexit_bundle


@pytest.fixture(scope="module")
def make(tiny_tokenizer: Any) -> Callable[..., Bundle]:
    return partial(comprexit_bundle, tiny_tokenizer)


def test_next_token_loss_is_plain_cross_entropy(make: Callable[..., Bundle]) -> None:
    """Slots in place of the beginning, then token by token through transformers alone."""
    bundle = make(seed=5)
    objective = LikelihoodLoss(bundle)
    examples = [Example((text,), (Turn("", ("",)),)) for text in TEXTS[:2]]
    with torch.no_grad():
        loss = float(objective(**NextTokenCollator(bundle.tokenizer, 16, 6)(examples))["loss"])
    total, count = 0.0, 0
    for text in TEXTS[:2]:
        ids = bundle.tokenizer(text, add_special_tokens=False)["input_ids"][:22]
        cut = len(ids) * 16 // 22
        [soft] = bundle.compressor.compress([Tokenized("", ids[:cut])], 4, 64, 8192)
        row = bundle.embed(soft)
        for token in ids[cut:]:
            with torch.no_grad():
                logits = bundle.backbone.model(inputs_embeds=row[None]).logits[0, -1].double()
            total -= float(logits.log_softmax(-1)[token])
            count += 1
            row = torch.cat([row, bundle.backbone.embeddings(torch.tensor([token]))])
    assert loss == pytest.approx(total / count, rel=1e-4)


@pytest.mark.parametrize(("name", "stage"), [("next_token", "next_token"), ("answer", "answer")])
def test_shipped_recipes_hold_the_papers_values(name: str, stage: str) -> None:
    """Table 7."""
    recipe: Any = load_recipe(f"comprexit/{name}")
    assert recipe.stage == stage and recipe.ratios == [4]
    assert (recipe.optim.learning_rate, recipe.optim.warmup_ratio, recipe.optim.clip_norm) == (1e-4, 0.05, 20.0)
    assert (recipe.optim.batch_size, recipe.optim.micro_batch_size) == (2048, 16)
    assert recipe.data.max_context_tokens == recipe.window == 512
    if name == "next_token":
        assert recipe.data.max_answer_tokens == 128
        method = recipe.method
        assert (method.segment_tokens, method.iterations) == (128, 30)
        assert method.gate_dim == method.transport_dim == method.slot_dim == 256
        assert recipe.optim.steps * 2048 * (512 + 128) == pytest.approx(1e9, rel=1e-3)
    else:
        assert recipe.bundle == load_recipe("comprexit/next_token").output / "bundle"

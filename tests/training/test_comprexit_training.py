"""ComprExIT's training (section 3.3): what it reaches, its loss, its two phases and their recipes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.world.world import world_examples
from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.data.examples import Example, Turn, write_jsonl
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.methods.base.compressor import Tokenized
from ctx_compress_rag.training.recipe import load_recipe
from ctx_compress_rag.training.run import run_recipe
from ctx_compress_rag.training.stages.answer import LikelihoodLoss
from ctx_compress_rag.training.stages.next_token import NextTokenCollator
from helpers.comprexit import SMALL, TEXTS, comprexit_bundle
from helpers.training import write_recipe


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


def fitting_recipe(folder: Path, bundle: Bundle, /, **change: Any) -> Path:
    """One step for ComprExIT, so small that it is none, after fitting its reader on the recipe's data."""
    bundle.save_pretrained(folder)
    write_jsonl(folder / "world.jsonl", world_examples("train", 3, 24, max_turns=1, passages=(1,)))
    settings = {
        "method": {"name": "comprexit", **SMALL},
        "fit_passages": 24,
        "ratios": [4],
        "data": {"files": [str(folder / "world.jsonl")], "max_context_tokens": 48},
    }
    optim = {"steps": 1, "batch_size": 2, "learning_rate": 1e-9, "final_learning_rate": 0.0}
    return write_recipe(folder / "decoder", "answer", folder / "out", optim, **settings | change)


def test_a_fitted_reader_starts_at_the_tokens_own_embeddings(make: Callable[..., Bundle], tmp_path: Path) -> None:
    """Of a token's slot an untrained reader makes what is nearest to its embedding, as numpy's least squares has it."""
    bundle = make()
    examples = world_examples("train", 3, 24, max_turns=1, passages=(1,))
    texts = list(dict.fromkeys(example.passages[0] for example in examples))
    ids = [bundle.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    embeddings = bundle.backbone.embeddings(torch.tensor([token for row in ids for token in row])).double().numpy()
    errors, best = {}, 0.0
    for passages in (0, 24):
        recipe = fitting_recipe(tmp_path, bundle, fit_passages=passages, output=str(tmp_path / str(passages)))
        made = Bundle.from_pretrained(run_recipe(recipe) / "bundle")
        softs = made.compress(texts, 1)
        read = torch.cat([made.embed(soft) for soft in softs]).double().numpy()
        errors[passages] = ((read - embeddings) ** 2).mean() / embeddings.var()
        affine = np.column_stack([torch.cat([soft.slots for soft in softs]).double().numpy(), np.ones(len(read))])
        nearest = affine @ np.linalg.lstsq(affine, embeddings, rcond=None)[0]
        best = ((nearest - embeddings) ** 2).mean() / embeddings.var()
    assert best < 0.95
    assert errors[24] == pytest.approx(best, abs=0.05)
    assert errors[0] > best + 0.5


def test_a_reader_is_fitted_on_texts_that_spell_control_tokens(tmp_path: Path, make: Callable[..., Bundle]) -> None:
    bundle = make()
    write_jsonl(tmp_path / "data.jsonl", [Example((f"One {bundle.tokenizer.eos_token} two.",), (Turn("?", ("two",)),))])
    data = {"files": [str(tmp_path / "data.jsonl")], "max_context_tokens": 48}
    run_recipe(fitting_recipe(tmp_path, bundle, data=data))


@pytest.mark.parametrize(
    ("change", "named"),
    [({"method": {"name": "mean_pooling"}}, "map of two layers"), ({"decoder": None, "bundle": "x"}, "untrained")],
)
def test_other_readers_are_not_fitted(make: Callable[..., Bundle], tmp_path: Path, change: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        run_recipe(fitting_recipe(tmp_path, make(), **change))


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

"""Readers that start as a least-squares map, against numpy's."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.compare.fitted import FittedNextTokenRecipe
from benchmarks.world.world import world_examples
from ctx_compress_rag.data.examples import Example, Turn
from helpers.comprexit import comprexit_bundle
from helpers.training import settings_of


def test_a_fitted_reader_gives_nearly_the_tokens_own_embeddings(tiny_tokenizer: Any, tmp_path: Path) -> None:
    """Of a token's slot, as near as an affine map comes; also where a text spells a control token."""
    bundle = comprexit_bundle(tiny_tokenizer)
    examples = world_examples("train", 3, 24, max_turns=1, passages=(1,))
    texts = list(dict.fromkeys(example.passages[0] for example in examples))
    ids = [bundle.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    embeddings = bundle.backbone.embeddings(torch.tensor([token for row in ids for token in row])).double().numpy()
    softs = bundle.compress(texts, 1)
    slots = torch.cat([soft.slots for soft in softs]).double().numpy()

    def error(made: np.ndarray) -> float:
        return float(((made - embeddings) ** 2).mean() / embeddings.var())

    def read() -> np.ndarray:
        return torch.cat([bundle.embed(soft) for soft in softs]).double().numpy()

    affine = np.column_stack([slots, np.ones(len(slots))])
    best = error(affine @ np.linalg.lstsq(affine, embeddings, rcond=None)[0])
    assert best < 0.97 and error(read()) > best + 0.5
    settings = settings_of(tmp_path, "comprexit", tmp_path, stage="fitted_next_token", fit_passages=25)
    spelled = Example((f"One {tiny_tokenizer.eos_token} two.",), (Turn("?", ("two",)),))
    FittedNextTokenRecipe.model_validate(settings).objective(bundle, [*examples, spelled])
    assert error(read()) == pytest.approx(best, abs=0.05)

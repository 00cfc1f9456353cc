"""Contexts solved once: what is kept is what gradient descent makes, and predictors learn from it as from new ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ctx_compress_rag.adaptation import Adapter, AdaptiveDecoder, PredictedUpdate
from ctx_compress_rag.adaptation import solved as solved_module
from ctx_compress_rag.adaptation.baselines import PredictorConfig
from ctx_compress_rag.adaptation.episodes import Episodes
from ctx_compress_rag.adaptation.objectives.update_predictor import MatchingObjective, SolvedMatchingObjective
from ctx_compress_rag.adaptation.predictor import pooled_states
from ctx_compress_rag.adaptation.solved import load_solved, solve
from ctx_compress_rag.adaptation.stages import passes
from ctx_compress_rag.adaptation.updates import sgd
from ctx_compress_rag.errors import ConfigError
from helpers.adaptation import FamilyTasks, random_adapter

EPISODES: Any = Episodes(FamilyTasks("train"), 20, 2, seed=4)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def decoder(make_tiny_bundle: Any) -> AdaptiveDecoder:
    return AdaptiveDecoder(make_tiny_bundle(seed=8))


@pytest.fixture(scope="module")
def base(decoder: AdaptiveDecoder) -> Adapter:
    return random_adapter(decoder.bundle.backbone.model, 2, seed=1)


@pytest.fixture(scope="module")
def folder(decoder: AdaptiveDecoder, base: Adapter, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("solved")
    solve(decoder, base, EPISODES, [1, 3], 0.1, made, {"seed": 4})
    return made


@pytest.mark.parametrize("steps", [1, 3])
def test_what_is_kept_is_what_gradient_descent_makes(
    decoder: AdaptiveDecoder, base: Adapter, folder: Path, steps: int
) -> None:
    """Across the seam between two files, to bfloat16's rounding."""
    kept = load_solved(folder, base, 18, steps)
    assert len(kept) == 18
    numbers = torch.tensor([17, 3, 15])
    pooled, change = kept.rows(numbers)
    contexts = [decoder.rows(EPISODES[int(i)].support) for i in numbers]
    torch.testing.assert_close(pooled, pooled_states(decoder, contexts, base), atol=1e-5, rtol=1e-5)
    expected = sgd(decoder, contexts, base, steps, 0.1).change()
    for name in base.a:
        made, wanted = (x.scale * x.b[name] @ x.a[name] for x in (change, expected))
        assert (made - wanted).norm() < 0.01 * wanted.norm()


def test_the_loss_is_that_of_contexts_solved_now(decoder: AdaptiveDecoder, base: Adapter, folder: Path) -> None:
    config = PredictorConfig(inner_steps=3, inner_learning_rate=0.1, demonstrations=2, hidden=8, code=4)
    torch.manual_seed(0)
    update = PredictedUpdate.build(base, decoder, config)
    numbers = torch.tensor([2, 16])
    contexts = [decoder.rows(EPISODES[int(i)].support) for i in numbers]
    now = MatchingObjective(decoder, update, 0.1)(contexts, [])["loss"]
    kept = SolvedMatchingObjective(update, load_solved(folder, base, 20, 3), 0.1)(numbers)["loss"]
    assert float(kept.detach()) == pytest.approx(float(now.detach()), rel=1e-3)
    kept.backward()
    assert all(p.grad is not None for p in update.predictor.parameters())


def test_solving_goes_on_where_it_was_cut_off(
    decoder: AdaptiveDecoder, base: Adapter, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = sorted(folder.glob("*.safetensors"))
    before, whole = first.stat().st_mtime_ns, second.read_bytes()
    second.unlink()
    solve(decoder, base, EPISODES, [1, 3], 0.1, folder, {"seed": 4})
    assert first.stat().st_mtime_ns == before and second.read_bytes() == whole
    monkeypatch.setattr(solved_module, "sgd_path", lambda *_: pytest.fail("solved again"))
    solve(decoder, base, EPISODES, [1, 3], 0.1, folder, {"seed": 4})


def test_contexts_solved_otherwise_are_refused(decoder: AdaptiveDecoder, base: Adapter, folder: Path) -> None:
    other = random_adapter(decoder.bundle.backbone.model, 2, seed=2)
    for changed in (
        {"base": other},
        {"steps": [1, 2]},
        {"learning_rate": 0.2},
        {"episodes": EPISODES[:8]},
        {"about": {"seed": 5}},
    ):
        given = {"base": base, "episodes": EPISODES, "steps": [1, 3], "learning_rate": 0.1, "about": {"seed": 4}}
        with pytest.raises(ConfigError, match="other settings: remove this folder"):
            solve(decoder, folder=folder, **(given | changed))  # type: ignore[arg-type]


def test_every_context_is_met_equally_often() -> None:
    numbers = passes(5, 13, seed=0)
    assert [sorted(numbers[i : i + 5]) for i in (0, 5)] == [list(range(5))] * 2
    assert numbers[:5] != numbers[5:10] and len(set(numbers[10:])) == 3
    assert passes(5, 13, seed=0) == numbers != passes(5, 13, seed=1)

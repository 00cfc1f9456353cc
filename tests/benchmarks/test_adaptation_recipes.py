"""The recipes of a comparison of adaptations: which belong together, and which systems they train."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file

from benchmarks.adaptation.run import verdict
from benchmarks.adaptation.systems import Recipes
from ctx_compress_rag.adaptation import AdaptiveDecoder
from ctx_compress_rag.adaptation.config import UpdatePredictorRecipe
from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.training.run import run_recipe
from helpers.adaptation import small_recipes, system_score


@pytest.fixture(scope="module")
def decoder(bundle_folder: Path) -> AdaptiveDecoder:
    return AdaptiveDecoder(Bundle.from_pretrained(bundle_folder, device="cpu"))


@pytest.fixture(scope="module")
def trained(bundle_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which every stage has been run."""
    folder = tmp_path_factory.mktemp("trained")
    for file in small_recipes(folder, bundle_folder).values():
        run_recipe(file)
    return folder


def test_shipped_recipes_belong_together() -> None:
    for where in ("rag_gd", "rag_gd/demo"):
        recipes = Recipes.find(where)
        assert len(recipes.files) == 6
        assert sorted(recipes.files) == list(recipes.files)  # `ctx-compress train` takes the base first
        assert len({recipe.output for recipe in (recipes.base, *recipes.others)}) == 6
        kinds = sorted((r.stage, getattr(r, "loss", ""), getattr(r, "inner_steps", 0)) for r in recipes.others)  # type: ignore[attr-defined]
        assert all(r.data.passages == (5 if where == "rag_gd" else None) for r in (recipes.base, *recipes.others))
        matching = [("update_predictor", "matching", k) for k in (1, 5, 10)]
        assert kinds == [("prompt_tuning", "", 0), *matching, ("update_predictor", "task", 5)]


def test_recipes_for_smollm2_belong_together() -> None:
    recipes = Recipes.find("rag_gd/smollm2")
    [predictor] = recipes.others
    assert sorted(recipes.files) == list(recipes.files)
    assert isinstance(predictor, UpdatePredictorRecipe)
    assert predictor.solved is not None and predictor.solved.steps == [predictor.inner_steps] == [1]


def test_recipes_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    files = small_recipes(tmp_path, Path("demo"))
    recipe = yaml.safe_load(files["k1"].read_text())
    for change, named in (({"base": "elsewhere"}, "base is elsewhere"), ({"ratio": 8}, "ratio is 8")):
        files["k1"].write_text(yaml.safe_dump(recipe | change))
        with pytest.raises(ConfigError, match=named):
            Recipes.find(tmp_path / "recipes")
    files["base"].unlink()
    with pytest.raises(ConfigError, match="0 retrieval_adapter"):
        Recipes.find(tmp_path / "recipes")


def test_predictors_are_not_reused_after_their_base_was_trained_again(
    tmp_path: Path, bundle_folder: Path, decoder: AdaptiveDecoder
) -> None:
    for name, file in small_recipes(tmp_path, bundle_folder, steps=1).items():
        if name not in ("base", "k1"):
            file.unlink()
    recipes = Recipes.find(tmp_path / "recipes")
    recipes.train_missing(decoder)
    recipes.train_missing(decoder)  # nothing is missing
    weights = tmp_path / "out" / "base" / "adapter_model.safetensors"
    save_file({name: value + 1 for name, value in load_file(weights).items()}, weights)
    with pytest.raises(ConfigError, match=r"out/k1 was made before .*out/base changed: remove it"):
        recipes.train_missing(decoder)


def test_recipes_of_one_kind_have_rows_of_their_own(trained: Path, tmp_path: Path, decoder: AdaptiveDecoder) -> None:
    for name in ("base", "prefix", "k1", "k2", "task"):
        text = (trained / "recipes" / f"{name}.yaml").read_text()
        for copy in (name, f"{name}_again") if name in ("prefix", "k2", "task") else (name,):
            (tmp_path / f"{copy}.yaml").write_text(text)
    names = [system.name for system in Recipes.find(tmp_path).systems(decoder)]
    assert names[5:] == [
        "prompt tuning (prefix)", "prompt tuning (prefix_again)", "HyperTuning (task)", "HyperTuning (task_again)",
        "TT-SGD, K=1", "TT-SGD, K=2 (k2)", "TT-SGD, K=2 (k2_again)",
        "RAG-GD, K=1", "RAG-GD, K=2 (k2)", "RAG-GD, K=2 (k2_again)",
    ]  # fmt: skip
    scores = [system_score(name, 0.5, 0.1, 1.0) for name in names]
    assert [line.split(": ")[0] for line in verdict(scores).splitlines()] == [f"- {name}" for name in names[-3:]]

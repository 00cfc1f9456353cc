"""What an interrupted training continues from, and that it ends as one that was not interrupted."""

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.data.examples import write_jsonl
from ctx_compress_rag.errors import ConfigError, DataError
from ctx_compress_rag.training.recipe import load_recipe
from ctx_compress_rag.training.run import check_recipe_inputs, is_recipe_finished, run_recipe
from helpers.forked import COMMAND, Forked
from helpers.models import save_tiny_llama
from helpers.training import UNLIKE, killed, losses, report, write_recipe


def _recipe(decoder: Path, folder: Path, data: str = "three.jsonl", seed: int = 0, **optim: Any) -> Path:
    write_jsonl(decoder / "three.jsonl", UNLIKE[:3])  # no multiple of a batch
    optim = {"steps": 6, "micro_batch_size": 2, "save_every": 2, "learning_rate": 1e-2, **optim}
    data = {"files": [str(decoder / data)], "max_turns": 2}
    return write_recipe(decoder, "adapter", folder, optim, data=data, seed=seed)


def _assert_the_same(one: Path, other: Path) -> None:
    assert losses(one) == pytest.approx(losses(other), rel=1e-5)
    a, b = (load_file(folder / "adapter_model.safetensors") for folder in (one, other))
    for name, weight in a.items():
        assert torch.allclose(b[name], weight, atol=2e-5), name


@pytest.fixture(scope="module")
def whole(decoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_recipe(_recipe(decoder, tmp_path_factory.mktemp("whole") / "whole"))


def test_missing_input_of_a_later_recipe_is_refused_before_the_first_runs(decoder: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    recipes = [_recipe(decoder, first), _recipe(decoder, second, data="nowhere.jsonl")]
    with pytest.raises(ConfigError, match=r"nowhere.jsonl'.*second'"):
        check_recipe_inputs([load_recipe(recipe) for recipe in recipes])
    settings = yaml.safe_load(recipes[1].read_text())
    settings["data"]["files"] = [str(first / "answers.jsonl")]  # within what the first writes
    recipes[1].write_text(yaml.safe_dump(settings))
    check_recipe_inputs([load_recipe(recipe) for recipe in recipes])
    with pytest.raises(ConfigError, match="answers.jsonl"):
        check_recipe_inputs([load_recipe(recipe) for recipe in reversed(recipes)])


# Reductions, ratios and episodes are drawn again at each step.
DRAWN: dict[str, dict[str, Any]] = {
    "distillation": {"curriculum": [{"step": 0, "ratios": [4, 8], "sample": 1}], "reconstruction_weight": 0.5},
    "ram": {},
    "packed": {},
    "update_predictor": {"inner_steps": 2},
}


@pytest.mark.parametrize("stage", DRAWN)
def test_interrupted_training_ends_like_an_uninterrupted_one(decoder: Path, tmp_path: Path, stage: str) -> None:
    """From recipe to bundle: the same losses and, where slots are made, the same slots."""
    optim = {"steps": 4, "save_every": 2, "batch_size": 1 if stage == "packed" else 2, "learning_rate": 1e-2}
    whole, cut = (write_recipe(decoder, stage, tmp_path / name, optim, **DRAWN[stage]) for name in ("whole", "cut"))
    run_recipe(whole)
    with killed(after=3):
        run_recipe(cut)
    run_recipe(cut)
    told = report(tmp_path / "cut")
    assert (told["resumed"], told["steps"]) == (True, 4) and told["tokens"] > 0
    curve = losses(tmp_path / "whole")
    assert len(curve) == 4 and losses(tmp_path / "cut") == pytest.approx(curve, rel=1e-4)
    if stage != "update_predictor":
        one, two = (Bundle.from_pretrained(tmp_path / name / "bundle") for name in ("whole", "cut"))
        assert one.report["steps"] == 4 and one.config.ratios == ([2, 4, 8] if stage == "ram" else [4, 8])
        a, b = (each.compress(["Orla Reedwen was born in Kormoor."])[0].slots for each in (one, two))
        assert torch.allclose(a, b, atol=1e-3)


def test_checkpoints_of_another_recipe_are_refused(decoder: Path, whole: Path, tmp_path: Path) -> None:
    """It is told what differs; the training that is there ends as it would have."""
    folder = tmp_path / "cut"
    changes: dict[str, dict[str, Any]] = {
        "optim.learning_rate 0.01 there, 0.1 in the recipe": {"learning_rate": 0.1},
        "data.files": {"data": "data.jsonl"},
        "seed 0 there, 5": {"seed": 5},
        "checkpoint-{} is beyond the recipe's 1 steps": {"steps": 1},
    }
    with killed(after=3):
        run_recipe(_recipe(decoder, folder))
    for done in (2, 6):
        for named, change in changes.items():
            with pytest.raises(ConfigError, match=named.format(done)):
                run_recipe(_recipe(decoder, folder, **change))
        run_recipe(_recipe(decoder, folder))
        _assert_the_same(whole, folder)


@pytest.mark.parametrize("finished", [False, True])
def test_checkpoints_of_edited_files_are_refused(decoder: Path, tmp_path: Path, finished: bool) -> None:
    recipe = _recipe(decoder, tmp_path / "cut")
    settings = yaml.safe_load(recipe.read_text())
    data = tmp_path / "mine.jsonl"
    write_jsonl(data, UNLIKE[:3])
    settings["data"]["files"] = [str(data)]
    recipe.write_text(yaml.safe_dump(settings))
    with nullcontext() if finished else killed(after=3):
        run_recipe(recipe)
    assert is_recipe_finished(load_recipe(recipe)) is finished
    write_jsonl(data, UNLIKE)
    assert not is_recipe_finished(load_recipe(recipe))
    with pytest.raises(ConfigError, match="mine.jsonl"):
        run_recipe(recipe)
    write_jsonl(data, UNLIKE[:3])
    run_recipe(recipe)
    assert is_recipe_finished(load_recipe(recipe))
    data.unlink()  # what is finished needs no data
    assert run_recipe(recipe) == tmp_path / "cut"


@pytest.mark.parametrize("read", ["teacher", "decoder", "bundle"])
def test_checkpoints_of_a_retrained_input_are_refused(
    decoder: Path, tiny_tokenizer: Any, tmp_path: Path, read: str
) -> None:
    """A bundle must not be of a teacher, a decoder or an earlier bundle that is no longer there."""
    folder = tmp_path / "start" / ("bundle" if read == "bundle" else "")

    def make(steps: int) -> None:
        if read == "decoder":
            save_tiny_llama(tiny_tokenizer, folder, num_hidden_layers=steps)
        else:
            stage = "adapter" if read == "teacher" else "answer"
            run_recipe(write_recipe(decoder, stage, tmp_path / "start", {"steps": steps}))

    make(2)
    changes = {"decoder": None, "method": None} if read == "bundle" else {}
    recipe = write_recipe(
        decoder, "distillation", tmp_path / "then", {"steps": 4, "save_every": 2}, **changes, **{read: str(folder)}
    )
    with killed(after=3):
        run_recipe(recipe)
    make(3)
    assert not is_recipe_finished(load_recipe(recipe))
    with pytest.raises(ConfigError, match=f"{folder}.*--no-resume"):
        run_recipe(recipe)
    run_recipe(recipe, resume=False)
    assert is_recipe_finished(load_recipe(recipe))


@pytest.mark.parametrize("begun", [False, True])
def test_error_in_a_recipe_keeps_its_checkpoints(decoder: Path, tmp_path: Path, begun: bool) -> None:
    """Not even where the training was to begin anew."""
    if begun:
        with killed(after=3):
            run_recipe(_recipe(decoder, tmp_path / "cut"))
    (decoder / "empty.jsonl").touch()
    with pytest.raises(DataError, match="empty.jsonl"):
        run_recipe(_recipe(decoder, tmp_path / "cut", data="empty.jsonl"), resume=not begun)
    run_recipe(_recipe(decoder, tmp_path / "cut"))
    assert report(tmp_path / "cut")["resumed"] is begun


def test_computation_of_steps_may_change_on_resuming(decoder: Path, whole: Path, tmp_path: Path) -> None:
    """And a training may be moved, and prolonged; its report then has the new number of steps.

    Of its checkpoints, one that a kill left incomplete is ignored.
    """
    folder = tmp_path / "cut"
    with killed(after=5):
        run_recipe(_recipe(decoder, folder))
    folder = folder.rename(tmp_path / "moved")
    (folder / "checkpoints" / "checkpoint-4" / "progress.json").unlink()  # it is written last
    run_recipe(_recipe(decoder, folder, micro_batch_size=1, save_every=4, checkpoint_layers=True))
    assert report(folder)["resumed"] is True
    _assert_the_same(whole, folder)
    run_recipe(_recipe(decoder, folder, steps=8))
    assert (report(folder)["steps"], len(losses(folder))) == (8, 8)


def test_no_resume_ignores_earlier_checkpoints(decoder: Path, whole: Path, tmp_path: Path) -> None:
    """Interrupted, too, it does not continue from the other's checkpoints, though those are of later steps."""
    folder = run_recipe(_recipe(decoder, tmp_path / "cut", seed=5))
    anew = _recipe(decoder, folder)
    with killed(after=3):
        run_recipe(anew, resume=False)
    assert not is_recipe_finished(load_recipe(anew))
    run_recipe(anew)
    assert report(folder)["resumed"] is True
    _assert_the_same(whole, folder)


def test_unwritten_result_is_saved_later_without_further_steps(decoder: Path, tmp_path: Path) -> None:
    whole = run_recipe(_recipe(decoder, tmp_path / "whole", batch_size=2, steps=5))
    in_the_way = tmp_path / "cut" / "adapter_model.safetensors"
    in_the_way.mkdir(parents=True)
    recipe = _recipe(decoder, tmp_path / "cut", batch_size=2, steps=5)
    with pytest.raises(OSError):
        run_recipe(recipe)
    in_the_way.rmdir()
    run_recipe(recipe)
    assert report(tmp_path / "cut")["steps"] == 5
    _assert_the_same(whole, tmp_path / "cut")


def test_second_training_into_a_folder_is_refused(decoder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    recipe = _recipe(decoder, folder, steps=100_000, save_every=1)
    with Forked(COMMAND, "train", recipe):
        deadline = time.monotonic() + 120
        while not list(folder.glob("checkpoints/checkpoint-*/progress.json")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        with pytest.raises(ConfigError, match="out"):
            run_recipe(recipe, resume=False)
        assert list(folder.glob("checkpoints/checkpoint-*/progress.json"))
    run_recipe(_recipe(decoder, folder, steps=1), resume=False)
    assert report(folder)["steps"] == 1

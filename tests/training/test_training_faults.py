"""Trainings that diverge, whose disk is full, or whose data are edited while they run."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ctx_compress_rag.data.examples import write_jsonl
from ctx_compress_rag.errors import TrainingError
from ctx_compress_rag.training.recipe import load_recipe
from ctx_compress_rag.training.run import is_recipe_finished, run_recipe
from helpers.training import UNLIKE, write_recipe


@pytest.mark.parametrize(
    ("rate", "said"), [(1e30, "the loss of step 2 is nan"), (1e39, "weights are NaN or infinite after step 1")]
)
def test_a_training_that_diverges_stops_and_saves_nothing(
    decoder: Path, tmp_path: Path, rate: float, said: str
) -> None:
    optim = {"steps": 4, "save_every": 1, "learning_rate": rate, "clip_norm": 1e30}
    with pytest.raises(TrainingError, match=f"{said}.*optim.learning_rate"):
        run_recipe(write_recipe(decoder, "answer", tmp_path / "out", optim))
    assert not (tmp_path / "out" / "bundle").exists() and not (tmp_path / "out" / "training_report.json").exists()
    whole = [file.parent.name for file in tmp_path.rglob("progress.json")]
    assert whole == (["checkpoint-1"] if rate == 1e30 else [])


@contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """No file grows beyond `limit` bytes: to whoever writes it the disk is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("limit", [20_000, 100_000])  # for weights, for optimizer states, which take twice as much
def test_a_full_disk_is_named_and_training_resumes(decoder: Path, tmp_path: Path, limit: int) -> None:
    recipe = write_recipe(decoder, "adapter", tmp_path / "out", {"steps": 2, "save_every": 1})
    with full_disk(limit), pytest.raises(OSError, match="checkpoint-1.*disk"):
        run_recipe(recipe)
    run_recipe(recipe)
    assert is_recipe_finished(load_recipe(recipe))


def test_report_has_the_hash_of_the_data_as_read(decoder: Path, tmp_path: Path) -> None:
    data = tmp_path / "mine.jsonl"
    write_jsonl(data, UNLIKE[:3])
    recipe = write_recipe(decoder, "adapter", tmp_path / "out", {"steps": 2}, data={"files": [str(data)]})
    hook = register_optimizer_step_pre_hook(lambda *_: (write_jsonl(data, UNLIKE), None)[1])
    run_recipe(recipe)
    hook.remove()
    assert not is_recipe_finished(load_recipe(recipe))
    write_jsonl(data, UNLIKE[:3])
    assert is_recipe_finished(load_recipe(recipe))

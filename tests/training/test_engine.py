"""Optimizers, rates, averages; compiled layers; micro-batches and processes; trainings interrupted or gone wrong."""

import json
import math
import shutil
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from torch.optim import AdamW, Muon
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import LlamaConfig, LlamaForCausalLM

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.data.examples import write_jsonl
from ctx_compress_rag.errors import BundleError, ConfigError, DataError, TrainingError
from ctx_compress_rag.training.config import OptimConfig
from ctx_compress_rag.training.engine import layers as compiled
from ctx_compress_rag.training.engine.layers import compile_decoder_layers
from ctx_compress_rag.training.engine.optimizers import make_optimizers, set_learning_rate
from ctx_compress_rag.training.run import check_recipe_inputs, is_recipe_finished, load_recipe, parse_recipe, run_recipe
from ctx_compress_rag.training.stages.answer import AnswerRecipe
from helpers.forked import COMMAND, Forked, run_by
from helpers.marks import slowly
from helpers.models import save_tiny_llama
from helpers.store import full_disk
from helpers.training import UNLIKE, killed, losses, report, saved_weights, settings_of, write_recipe

SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize("tied", [False, True])
def test_muon_trains_the_matrices_without_embeddings_and_head(tied: bool) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=tied))
    model.model.layers[0].mlp.up_proj.requires_grad_(False)
    adamw, muon = make_optimizers(model, OptimConfig(muon_learning_rate=0.01))
    assert isinstance(adamw, AdamW) and isinstance(muon, Muon)
    matrices = {p for n, p in model.named_parameters() if n.endswith("proj.weight") and p.requires_grad}
    assert set(muon.param_groups[0]["params"]) == matrices
    rest = {p for n, p in model.named_parameters() if not n.endswith("proj.weight")}
    assert {p for group in adamw.param_groups for p in group["params"]} == rest


def test_matrices_decay_and_vectors_do_not() -> None:
    layer = nn.Linear(3, 3)
    [adamw] = make_optimizers(layer, OptimConfig(weight_decay=0.1))
    decays = {p: group["weight_decay"] for group in adamw.param_groups for p in group["params"]}
    assert decays == {layer.weight: 0.1, layer.bias: 0.0}


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("final", [0.0, 0.02])
def test_the_rate_rises_on_a_line_and_falls_by_the_schedule(schedule: str, final: float) -> None:
    optim = OptimConfig(
        steps=10,
        learning_rate=0.1,
        final_learning_rate=final,
        muon_learning_rate=0.5,
        schedule=schedule,  # type: ignore[arg-type]
        warmup_ratio=0.2,
    )
    optimizers = make_optimizers(nn.Linear(2, 2), optim)
    for step in range(10):
        progress = (step - 2) / 8
        left = 1 - progress if schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
        wanted = 0.1 * step / 2 if step < 2 else final + (0.1 - final) * left
        assert set_learning_rate(optimizers, optim, step) == pytest.approx(wanted)
        rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
        assert rates == pytest.approx([wanted, 5 * wanted])


def test_the_average_is_saved_also_after_an_interruption(decoder: Path, tmp_path: Path) -> None:
    """The moving average of the weights after each step, by its plain formula."""
    # The same steps are made whatever their number is.
    alike = {"learning_rate": 1e-2, "final_learning_rate": 1e-2, "batch_size": 2, "save_every": 2}

    def recipe(output: str, steps: int, **optim: float) -> Path:
        settings = {**alike, "steps": steps, "muon_learning_rate": 1e-2, **optim}
        return write_recipe(decoder, "adapter", tmp_path / output, settings)

    after = [load_file(run_recipe(recipe(str(n), n)) / "adapter_model.safetensors") for n in range(1, 5)]
    cut = recipe("cut", 4, average=0.6)
    with killed(after=3):
        run_recipe(cut)
    averaged = load_file(run_recipe(cut) / "adapter_model.safetensors")
    for name in averaged:
        mean = (after[0][name] + after[1][name]) / 2
        for weights in after[2:]:
            mean = 0.6 * mean + 0.4 * weights[name]
        moved = (after[-1][name] - mean).abs().max()
        assert (averaged[name] - mean).abs().max() < 0.02 * moved, name


@pytest.mark.slow  # it imports the compiler, which takes twice as long as all the rest of it
def test_layers_with_lora_share_their_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    # Layers are traced as always, and not made machine code, which takes minutes.
    traced: list[Any] = []
    compile_with = torch.nn.Module.compile

    def trace(graph: Any, inputs: Any) -> Any:
        traced.append(graph)
        return graph.forward

    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda layer, dynamic: compile_with(layer, backend=trace, dynamic=dynamic)
    )
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.0))
    compile_decoder_layers(model.get_base_model(), dynamic=True)
    torch._dynamo.reset()
    for length in (6, 9):
        vectors = torch.randn(2, length, 16, requires_grad=True)
        model(inputs_embeds=vectors, use_cache=False).logits.sum().backward()
    assert len(traced) == 1


@pytest.mark.parametrize("copied", [False, True])
def test_frozen_weights_are_rounded_unless_the_bundle_saves_them(
    decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copied: bool
) -> None:
    monkeypatch.setattr(compiled, "bfloat16_pays", lambda: True)
    recipe = parse_recipe(settings_of(decoder, "answer", tmp_path, {"bf16": True}, copy_decoder=copied), "test")
    assert isinstance(recipe, AnswerRecipe)
    job = recipe.make_job()
    bundle = job.model.bundle
    assert (bundle.config.decoder is None) == copied
    before = load_file(decoder / "model.safetensors")
    for name, value in bundle.backbone.own_state().items():
        wanted = before[name].float() if copied else before[name].bfloat16()
        assert torch.equal(value, wanted)
    trained = [p for p in job.model.parameters() if p.requires_grad]
    assert trained and all(p.dtype == torch.float32 for p in trained)


def _step(folder: Path) -> list[float]:
    [row] = json.loads((folder / "loss.json").read_text())
    return [row["loss"], row["grad_norm"]]


RARE = ("answer", "retrieval_adapter", "prompt_tuning", "hypertuning")  # what they are made of is in the others


@pytest.mark.parametrize("stage", slowly(("adapter", "repetition", "update_predictor", *RARE), RARE))
def test_micro_batches_change_nothing(decoder: Path, tmp_path: Path, stage: str) -> None:
    optims = [{"steps": 1, "micro_batch_size": micro} for micro in (4, 1)]
    whole, parts = (_step(run_recipe(write_recipe(decoder, stage, tmp_path / str(i), optims[i]))) for i in (0, 1))
    assert parts == pytest.approx(whole, rel=1e-3)


def test_processes_change_nothing(decoder: Path, tmp_path: Path) -> None:
    """Two, told who they are as `accelerate launch` tells it; one of them may have no passage to repeat."""
    alone = _step(run_recipe(write_recipe(decoder, "repetition", tmp_path / "alone", {"steps": 1})))
    shared = write_recipe(decoder, "repetition", tmp_path / "shared", {"steps": 1, "micro_batch_size": 1})
    run_by(2, ("train", shared))
    assert _step(tmp_path / "shared") == pytest.approx(alone, rel=1e-3)


@pytest.mark.slow
def test_two_processes_resume_and_so_does_one(decoder: Path, tmp_path: Path) -> None:
    """Killed after two of four steps, or out of time in one of them: all end with the weights of one process."""
    steps = {"steps": 4, "save_every": 1}
    run_recipe(write_recipe(decoder, "adapter", tmp_path / "whole", steps))
    names = ("shared", "late", "alone")
    shared, late, alone = (
        write_recipe(decoder, "adapter", tmp_path / name, {"micro_batch_size": 1, **steps}) for name in names
    )
    run_by(2, ("kill", alone, 2), ("hurry", late), ("kill", shared, 2), ("train", shared))
    for recipe in (alone, late):
        run_recipe(recipe)
    for name in names:
        _assert_same_weights(tmp_path / "whole", tmp_path / name)
        assert report(tmp_path / name)["resumed"] is True


@pytest.mark.slow
def test_ten_steps_of_two_processes_make_the_weights_of_one(decoder: Path, tmp_path: Path) -> None:
    """By `accelerate launch`, as several GPUs train, with gradient checkpointing."""
    run_recipe(write_recipe(decoder, "answer", tmp_path / "alone", {"steps": 10}))
    apart = {"steps": 10, "micro_batch_size": 1, "checkpoint_layers": True}
    recipe = write_recipe(decoder, "answer", tmp_path / "shared", apart)
    command = ["accelerate.commands.launch", "--cpu", "--num_processes", "2", "-m", "ctx_compress_rag.cli"]
    done = subprocess.run(
        [sys.executable, "-m", *command, "train", str(recipe)], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    _assert_same_weights(tmp_path / "alone", tmp_path / "shared")


def _assert_same_weights(one: Path, other: Path) -> None:
    a, b = saved_weights(one), saved_weights(other)
    assert a.keys() == b.keys() != set()
    for name, weight in a.items():
        assert (b[name] - weight).abs().max() < 2e-4, name


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


@pytest.mark.parametrize("stage", slowly(DRAWN, ("ram", "packed")))
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
        assert np.allclose(a, b, atol=1e-3)


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


@pytest.mark.parametrize("read", slowly(("decoder", "bundle", "teacher"), ("teacher",)))
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


def test_unwritten_result_is_saved_later_without_further_steps(decoder: Path, whole: Path, tmp_path: Path) -> None:
    in_the_way = tmp_path / "cut" / "adapter_model.safetensors"
    in_the_way.mkdir(parents=True)
    recipe = _recipe(decoder, tmp_path / "cut")
    with pytest.raises(OSError):
        run_recipe(recipe)
    in_the_way.rmdir()
    run_recipe(recipe)
    assert report(tmp_path / "cut")["steps"] == 6
    _assert_the_same(whole, tmp_path / "cut")


def test_a_damaged_checkpoint_is_named(decoder: Path, whole: Path, tmp_path: Path) -> None:
    recipe, last = _recipe(decoder, tmp_path / "cut"), tmp_path / "cut" / "checkpoints" / "checkpoint-4"
    with killed(after=5):
        run_recipe(recipe)
    for file in (files := sorted(last.iterdir())):
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])
        with pytest.raises(ConfigError, match=r"checkpoint-4 is damaged: delete it"):
            run_recipe(recipe)
        file.write_bytes(content)
    assert len(files) == 4
    shutil.rmtree(last)
    run_recipe(recipe)
    _assert_the_same(whole, tmp_path / "cut")


def test_a_damaged_report_is_named(decoder: Path, tmp_path: Path) -> None:
    recipe = load_recipe(_recipe(decoder, tmp_path / "run"))
    recipe.output.mkdir()
    (recipe.output / "training_report.json").write_text("{")
    with pytest.raises(BundleError, match=r"training_report\.json is damaged"):
        is_recipe_finished(recipe)


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

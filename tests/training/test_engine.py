"""Optimizers, rates and averages; compiled layers; micro-batches and processes; trainings that go wrong."""

import json
import math
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.optim import AdamW, Muon
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import LlamaConfig, LlamaForCausalLM

from ctx_compress_rag.data.examples import write_jsonl
from ctx_compress_rag.errors import TrainingError
from ctx_compress_rag.training.config import OptimConfig
from ctx_compress_rag.training.engine import speedups as compiled
from ctx_compress_rag.training.engine.optimizers import make_optimizers, set_learning_rate
from ctx_compress_rag.training.engine.speedups import compile_decoder_layers
from ctx_compress_rag.training.recipe import load_recipe, parse_recipe
from ctx_compress_rag.training.run import is_recipe_finished, run_recipe
from ctx_compress_rag.training.stages.answer import AnswerRecipe
from ctx_compress_rag.training.stages.compression import make_compression_job
from helpers.processes import run_by
from helpers.training import UNLIKE, killed, report, saved_weights, settings_of, write_recipe

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


@pytest.mark.parametrize("muon", [None, 1e-2])
def test_the_average_is_saved_also_after_an_interruption(decoder: Path, tmp_path: Path, muon: float | None) -> None:
    """The moving average of the weights after each step, by its plain formula."""
    # The same steps are made whatever their number is.
    alike = {"learning_rate": 1e-2, "final_learning_rate": 1e-2, "batch_size": 2, "save_every": 2}

    def recipe(output: str, steps: int, **optim: float) -> Path:
        settings = {**alike, "steps": steps, "muon_learning_rate": muon, **optim}
        return write_recipe(decoder, "adapter", tmp_path / output, settings)

    after = [load_file(run_recipe(recipe(str(n), n)) / "adapter_model.safetensors") for n in range(1, 6)]
    cut = recipe("cut", 5, average=0.6)
    with killed(after=3):
        run_recipe(cut)
    averaged = load_file(run_recipe(cut) / "adapter_model.safetensors")
    for name in averaged:
        mean = (after[0][name] + after[1][name]) / 2
        for weights in after[2:]:
            mean = 0.6 * mean + 0.4 * weights[name]
        moved = (after[-1][name] - mean).abs().max()
        assert (averaged[name] - mean).abs().max() < 0.02 * moved, name


@pytest.mark.parametrize("dynamic", [False, True])
def test_layers_with_lora_share_their_compiled_code(monkeypatch: pytest.MonkeyPatch, dynamic: bool) -> None:
    # Layers are traced as always, and not made machine code, which takes minutes.
    traced, compile_with = CompileCounter(), torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda layer, dynamic: compile_with(layer, backend=traced, dynamic=dynamic)
    )
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2
    )
    model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.0))
    compile_decoder_layers(model.get_base_model(), dynamic)
    torch._dynamo.reset()
    for length in (6, 9) if dynamic else (6, 6):
        vectors = torch.randn(2, length, 16, requires_grad=True)
        model(inputs_embeds=vectors, use_cache=False).logits.sum().backward()
    assert traced.frame_count == 1


@pytest.mark.parametrize("copied", [False, True])
def test_frozen_weights_are_rounded_unless_the_bundle_saves_them(
    decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copied: bool
) -> None:
    monkeypatch.setattr(compiled, "bfloat16_pays", lambda: True)
    recipe = parse_recipe(settings_of(decoder, "answer", tmp_path, {"bf16": True}, copy_decoder=copied), "test")
    assert isinstance(recipe, AnswerRecipe)
    job = make_compression_job(recipe)
    bundle = job.model.bundle
    assert (bundle.config.decoder is None) == copied
    before = load_file(decoder / "model.safetensors")
    for name, value in bundle.backbone.own_state().items():
        wanted = before[name].float() if copied else before[name].bfloat16()
        assert torch.equal(value, wanted)
    trained = [p for p in job.model.parameters() if p.requires_grad]
    assert trained and all(p.dtype == torch.float32 for p in trained)


LEARNERS = ("retrieval_adapter", "prompt_tuning", "update_predictor", "hypertuning")


def _step(folder: Path) -> list[float]:
    [row] = json.loads((folder / "loss.json").read_text())
    return [row["loss"], row["grad_norm"]]


@pytest.mark.parametrize("stage", ["adapter", "answer", "repetition", *LEARNERS])
def test_micro_batches_change_nothing(decoder: Path, tmp_path: Path, stage: str) -> None:
    optims = [{"steps": 1, "micro_batch_size": micro} for micro in (4, 1)]
    whole, parts = (_step(run_recipe(write_recipe(decoder, stage, tmp_path / str(i), optims[i]))) for i in (0, 1))
    assert parts == pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize("stage", ["answer", "repetition"])
def test_processes_change_nothing(decoder: Path, tmp_path: Path, stage: str) -> None:
    """Two, told who they are as `accelerate launch` tells it; one of them may have no passage to repeat."""
    alone = _step(run_recipe(write_recipe(decoder, stage, tmp_path / "alone", {"steps": 1})))
    shared = write_recipe(decoder, stage, tmp_path / "shared", {"steps": 1, "micro_batch_size": 1})
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

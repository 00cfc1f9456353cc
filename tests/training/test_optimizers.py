"""Which optimizer trains what, the learning rate of each step, and the average of the weights."""

import math
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import nn
from torch.optim import AdamW, Muon
from transformers import LlamaConfig, LlamaForCausalLM

from ctx_compress_rag.training.config import OptimConfig
from ctx_compress_rag.training.engine.optimizers import make_optimizers, set_learning_rate
from ctx_compress_rag.training.run import run_recipe
from helpers.training import killed, write_recipe

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

"""Which optimizer trains what, and the learning rate of each step."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Muon
from transformers import LlamaConfig, LlamaForCausalLM

from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.training.config import OptimConfig
from ctx_compress_rag.training.engine.optimizers import make_optimizers, set_learning_rate
from ctx_compress_rag.training.recipe import parse_recipe

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


def test_linear_schedule_with_constant_rate_is_refused() -> None:
    optim = {"learning_rate": 1e-5, "final_learning_rate": 1e-5, "schedule": "linear"}
    with pytest.raises(ConfigError, match="final_learning_rate"):
        parse_recipe({"stage": "teacher", "output": "x", "decoder": "x", "data": {"files": ["x"]}, "optim": optim}, "")


def test_frozen_weights_stay_bit_by_bit() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    frozen = {name: p.requires_grad_(False).clone() for name, p in model[0].named_parameters()}
    optimizers = make_optimizers(model, OptimConfig(muon_learning_rate=0.01, weight_decay=0.1))
    model(torch.ones(2, 4)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    assert all(torch.equal(p, frozen[name]) for name, p in model[0].named_parameters())

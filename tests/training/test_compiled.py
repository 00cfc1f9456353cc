"""Compiled decoder layers: one piece of code for all of them."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch._dynamo.testing import CompileCounter
from transformers import LlamaConfig, LlamaForCausalLM

from ctx_compress_rag.training.compiled import compile_layers


def test_layers_with_lora_share_their_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = CompileCounter()
    compile_with = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda layer, dynamic: compile_with(layer, backend=counter, dynamic=dynamic)
    )
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2
    )
    model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.0))
    compile_layers(model.get_base_model())
    torch._dynamo.reset()
    for _ in range(2):
        vectors = torch.randn(2, 6, 16, requires_grad=True)
        model(inputs_embeds=vectors, use_cache=False).logits.sum().backward()
    assert counter.frame_count == 1

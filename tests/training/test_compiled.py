"""Compiled decoder layers: one piece of code for all of them."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch._dynamo.testing import CompileCounter
from transformers import LlamaConfig, LlamaForCausalLM

from ctx_compress_rag.training.engine import speedups as compiled
from ctx_compress_rag.training.engine.speedups import compile_decoder_layers
from ctx_compress_rag.training.recipe import parse_recipe
from ctx_compress_rag.training.stages.answer import AnswerRecipe
from ctx_compress_rag.training.stages.compression import make_compression_job
from helpers.training import settings_of


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

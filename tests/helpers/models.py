"""Tiny decoders of random weights for a tokenizer, and configs of their bundles."""

from pathlib import Path
from typing import Any

import torch

from ctx_compress_rag.bundle.config import BundleConfig


def tiny_config(**changes: Any) -> BundleConfig:
    """A tiny bundle's; keywords are BundleConfig's, in place of these."""
    sizes = {"base_ratio": 4, "ratios": [4, 8, 16], "window": 64}
    return BundleConfig(**{"name": "tiny", "method": {"name": "mean_pooling"}, **sizes, **changes})


def tiny_llama(tokenizer: Any, **shape: Any) -> Any:
    """A Llama that two cores run in no time; keywords are LlamaConfig's, in place of these."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return LlamaForCausalLM(LlamaConfig(**settings | shape)).eval()


def save_tiny_llama(tokenizer: Any, folder: Path, **shape: Any) -> Any:
    """A tiny Llama, saved with its tokenizer as a recipe's `decoder`."""
    torch.manual_seed(0)
    model = tiny_llama(tokenizer, **shape)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def read_both_ways(bundle: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """The decoder's logits for token ids as it reads text, and as it reads soft contexts."""
    found = []
    for decoder in (bundle.text_decoder(), bundle.soft_decoder(torch.zeros(1, 1, dtype=torch.bool))):
        with torch.no_grad(), decoder as model:
            found.append(model(input_ids=ids).logits)
    return found


def draw_lora(model: Any, std: float = 1.0, adapter: str = "") -> None:
    """Draw the LoRA factors that start at zero, so that adapters (or the one of this name) change what is computed."""
    for name, parameter in model.named_parameters():
        if f"lora_B.{adapter}" in name:
            torch.nn.init.normal_(parameter, std=std)


def widen(*modules: Any, seed: int = 0, std: float = 0.5) -> None:
    """Draw every matrix anew, LoRA's too, so wide that each input and each adapter matters."""
    torch.manual_seed(seed)
    for module in modules:
        for name, parameter in module.named_parameters():
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=0.3 if "lora_" in name else std)

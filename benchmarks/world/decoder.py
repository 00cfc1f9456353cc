"""The world's decoder before training: a tokenizer of its own and random weights, 4 M of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.world.tokenizer import train_tokenizer
from benchmarks.world.world import tokenizer_texts
from ctx_compress_rag.text.templates import TEMPLATES
from ctx_compress_rag.training.stages.teacher import save_decoder

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
}
VOCABULARY = 2048


def new_decoder(folder: Path, seed: int = 0) -> None:
    """Save an untrained decoder as a transformers folder."""
    tokenizer = train_tokenizer([*tokenizer_texts(), *TEMPLATES * 200], VOCABULARY, max_length=1024)
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**CONFIG, vocab_size=len(tokenizer), **special)
    save_decoder(AutoModelForCausalLM.from_config(config), tokenizer, folder)

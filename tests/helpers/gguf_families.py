"""Tiny decoders of several families as GGUF files in float32, as llama.cpp's own converter names things."""

from pathlib import Path
from typing import Any

import gguf
import torch
import transformers

from helpers.architectures import SLIDING_WINDOW, family, tokenizer

FAMILIES = ["Llama", "Qwen2", "Qwen3", "Gemma2", "Gemma3"]
_LAYERS = {"Gemma3": 6}  # llama.cpp knows only this family's own pattern: five sliding layers, then a full one


def tiny_model(name: str) -> Any:
    """A causal LM of the family with wide random weights."""
    style, layers = family(name), _LAYERS.get(name, 2)
    shape = dict(style.shape)
    if name == "Gemma3":
        shape["layer_types"] = ["sliding_attention"] * 5 + ["full_attention"]
    config = getattr(transformers, f"{'Gemma3Text' if name == 'Gemma3' else name}Config")(
        vocab_size=len(tokenizer(name)),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=True,
        **shape,
    )
    torch.manual_seed(4)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval().requires_grad_(False)


def write_family(model: Any, name: str, file: Path, description: str) -> None:
    """Write a model of `tiny_model` without its tokenizer."""
    config, arch = model.config, name.lower()
    writer = gguf.GGUFWriter(file, arch)
    writer.add_description(description)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if arch.startswith("gemma"):
        writer.add_sliding_window(SLIDING_WINDOW)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    arches = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(arches[arch], config.num_hidden_layers)
    rotated = {"q_proj": 4, "k_proj": 2} if arch == "llama" else {}
    for own, parameter in model.named_parameters():
        values = parameter.numpy()
        if heads := rotated.get(own.split(".")[-2], 0):
            values = values.reshape(heads, 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
        if arch.startswith("gemma") and own.endswith("norm.weight"):
            values = values + 1  # Gemma multiplies by 1 + weight
        base, _, suffix = own.rpartition(".")
        writer.add_tensor(f"{names.get_name(base)}.{suffix}", values.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

"""GGUF files of tiny decoders, written with llama.cpp's own package, which names tensors as its converter does."""

import json
from pathlib import Path
from typing import Any

import gguf
import torch

from helpers.architectures import SLIDING_WINDOW


def write_gguf(model: Any, file: Path, tokenizer: Any = None, description: str = "", int8: bool = False) -> None:
    """Write a causal LM with tied embeddings, in float32, or matrices in 8 bits (Q8_0), to which the model's change."""
    config = model.config
    arch = config.model_type.removesuffix("_text")
    writer = gguf.GGUFWriter(str(file), arch)
    writer.add_description(description)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if gemma := arch.startswith("gemma"):
        writer.add_sliding_window(SLIDING_WINDOW)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_vocab_size(config.vocab_size)
    if tokenizer is None:
        writer.add_tokenizer_model("none")
    else:
        _add_tokenizer(writer, tokenizer)
    arches = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(arches[arch], config.num_hidden_layers)
    # llama.cpp pairs neighboring dimensions for rotary positions, transformers the two halves of a head.
    rotated = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads} if arch == "llama" else {}
    q8 = gguf.GGMLQuantizationType.Q8_0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values, packed = parameter.numpy().copy(), int8 and parameter.ndim > 1
            if gemma and name.endswith("norm.weight"):
                values += 1  # Gemma multiplies by 1 + weight
            if packed:
                values = gguf.quants.quantize(values, q8)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(values, q8)))
            if heads := rotated.get(name.split(".")[-2], 0):
                values = values.reshape(heads, 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
            base, _, suffix = name.rpartition(".")
            writer.add_tensor(f"{names.get_name(base)}.{suffix}", values, raw_dtype=q8 if packed else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: Any, tokenizer: Any) -> None:
    bpe = json.loads(tokenizer.backend_tokenizer.to_str())
    special = {token["id"] for token in bpe["added_tokens"]}
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    kinds = gguf.TokenType
    writer.add_token_types([kinds.CONTROL if i in special else kinds.NORMAL for i in range(len(tokens))])
    writer.add_token_merges([" ".join(pair) for pair in bpe["model"]["merges"]])
    writer.add_bos_token_id(tokenizer.eos_token_id)  # transformers 5.0 wants one
    writer.add_add_bos_token(False)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)

"""GGUF files of tiny decoders, written with llama.cpp's own package."""

import json
from pathlib import Path
from typing import Any

import gguf
import torch


def write_gguf(model: Any, tokenizer: Any, file: Path) -> Any:
    """Write a Llama with tied embeddings, its matrices in 8 bits (Q8_0).

    Returns: the same model, its weights changed to what the file's mean.
    """
    config, writer = model.config, gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, tokenizer)
    rotated = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            heads = rotated.get(name.split(".")[-2], 0)
            _add_tensor(writer, names.get_name(name, [".weight"]), parameter, heads)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _add_tensor(writer: Any, name: str, parameter: torch.Tensor, heads: int) -> None:
    if parameter.ndim == 1:
        writer.add_tensor(name, parameter.numpy())
        return
    q8 = gguf.GGMLQuantizationType.Q8_0
    packed = gguf.quants.quantize(parameter.numpy(), q8)
    parameter.copy_(torch.from_numpy(gguf.quants.dequantize(packed, q8)))
    if heads:  # llama.cpp pairs neighboring dimensions for rotary positions, transformers the two halves of a head
        packed = packed.reshape(heads, 2, -1, packed.shape[-1]).swapaxes(1, 2).reshape(packed.shape)
    writer.add_tensor(name, packed, raw_dtype=q8)


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

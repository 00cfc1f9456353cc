"""GGUF files of tiny decoders, written with llama.cpp's own package, with the keys that its converter writes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import torch

ARCHES = {"mistral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3"}
PAIRED = ("llama", "smollm3", "granite")  # llama.cpp rotates neighboring dimensions, transformers the halves of a head
# Keys of a file, and what transformers' configs call them.
KEYS = {
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "block_count": ("num_hidden_layers",),
    "feed_forward_length": ("intermediate_size",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps", "layer_norm_epsilon"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "norm_epsilon"),
    "attention.sliding_window": ("sliding_window",),
    "attention.scale": ("attention_multiplier",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "logit_scale": ("logits_scaling", "logit_scale"),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "use_parallel_residual": ("use_parallel_residual",),
    "expert_count": ("num_experts",),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "shortconv.l_cache": ("conv_L_cache",),
    "vocab_size": ("vocab_size",),
}
MAMBA = {
    "attention.layer_norm_rms_epsilon": ("layer_norm_epsilon",),
    "context_length": ("hidden_size",),  # any
    "embedding_length": ("hidden_size",),
    "block_count": ("num_hidden_layers",),
    "ssm.conv_kernel": ("conv_kernel",),
    "ssm.inner_size": ("intermediate_size",),
    "ssm.state_size": ("state_size",),
    "ssm.time_step_rank": ("time_step_rank",),
}
SCALING = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}


def write_gguf(
    model: Any,
    file: Path,
    tokenizer: Any = None,
    description: str = "",
    int8: bool = False,
    keys: Mapping[str, Any] | None = None,
    vocabulary: str = "none",
) -> None:
    """Write a causal LM, in float32, or matrices in 8 bits (Q8_0), to which the model's change.

    `keys` are written in place of what the config says; those whose value is None are left out.
    """
    config = model.config
    arch = ARCHES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(str(file), arch)
    writer.add_description(description)
    tensors: dict[str, Any] = {}
    for key, value in (_settings(config, model, tensors) | dict(keys or {})).items():
        if value is not None:
            kind = gguf.GGUFValueType.UINT32 if type(value) is int else gguf.GGUFValueType.get_type(value)
            inner = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
            writer.add_key_value(key if key.startswith("tokenizer.") else f"{arch}.{key}", value, kind, inner)
    if tokenizer is None:
        writer.add_tokenizer_model(vocabulary)
    else:
        _add_tokenizer(writer, tokenizer)
    arches = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}
    names: Any = gguf.get_tensor_name_map(arches[arch], config.num_hidden_layers)
    rotated = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads} if arch in PAIRED else {}
    q8 = gguf.GGMLQuantizationType.Q8_0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values, packed = parameter.numpy().copy(), int8 and parameter.ndim > 1
            if arch.startswith("gemma") and name.endswith("norm.weight"):
                values += 1  # Gemma multiplies by 1 + weight
            if packed:
                values = gguf.quants.quantize(values, q8)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(values, q8)))
            if heads := rotated.get(name.split(".")[-2], 0):
                values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
            base, _, suffix = name.rpartition(".")
            if name.endswith("gate_up_proj"):
                for part, half in zip(("gate", "up"), torch.from_numpy(values).chunk(2, dim=1), strict=True):
                    tensors[f"{names.get_name(f'{base}.{part}_proj')}.weight"] = half.numpy().copy(), None
            elif suffix in ("weight", "bias"):
                short = values.squeeze() if "conv" in name or "shared_expert_gate" in name else values
                tensors[f"{names.get_name(base)}.{suffix}"] = short, q8 if packed else None
            elif suffix == "A_log":
                tensors[names.get_name(name)] = -torch.from_numpy(values).exp().numpy(), None
            else:
                tensors[names.get_name(name) + ("" if suffix == "D" else ".weight")] = values, None
    for name, (values, kind) in tensors.items():
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _settings(config: Any, model: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """Return a file's settings, and add the tensors that state rotary frequencies."""
    mamba = config.model_type == "mamba"
    found = {key: [getattr(config, name, None) for name in names] for key, names in (MAMBA if mamba else KEYS).items()}
    said = {key: next((value for value in values if value is not None), None) for key, values in found.items()}
    if mamba:
        return said | {"ssm.dt_b_c_rms": False, "feed_forward_length": 0, "attention.head_count": 0}
    if config.model_type == "lfm2":
        said["attention.head_count_kv"] = [
            config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types
        ]
    rope = config.rope_parameters
    rope, sliding = rope.get("full_attention", rope), rope.get("sliding_attention", {})
    said |= {"rope.freq_base": rope["rope_theta"], "rope.freq_base_swa": sliding.get("rope_theta")}
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    said["rope.dimension_count"] = int(head * rope.get("partial_rotary_factor", 1))
    kind = rope["rope_type"]
    if kind == "llama3":  # what the frequencies are divided by
        plain = rope["rope_theta"] ** -(torch.arange(0, head, 2) / head)
        tensors["rope_freqs.weight"] = (plain / model.model.rotary_emb.inv_freq).float().numpy(), None
    elif kind != "default":
        said["rope.scaling.type"] = kind
        said |= {f"rope.scaling.{key}": rope.get(name) for key, name in SCALING.items()}
    if kind == "longrope":
        said["rope.scaling.attn_factor"] = model.model.rotary_emb.attention_scaling
    for length in ("long", "short") if kind == "longrope" else ():
        tensors[f"rope_factors_{length}.weight"] = torch.tensor(rope[f"{length}_factor"]).numpy(), None
    return said


def _add_tokenizer(writer: Any, tokenizer: Any) -> None:
    bpe = json.loads(tokenizer.backend_tokenizer.to_str())
    special = {token["id"] for token in bpe["added_tokens"]}
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    kinds = gguf.TokenType
    writer.add_token_types([kinds.CONTROL if i in special else kinds.NORMAL for i in range(len(tokens))])
    writer.add_token_merges([" ".join(pair) for pair in bpe["model"]["merges"]])
    writer.add_bos_token_id(tokenizer.eos_token_id)  # transformers 5.0 wants one
    writer.add_add_bos_token(False)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)

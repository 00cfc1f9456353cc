"""GGUF files of tiny decoders, written with llama.cpp's own package, with the keys that its converter writes."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

ARCHES = {
    "mistral": "llama", "mixtral": "llama", "ministral3": "mistral3", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe",
    "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "gemma3_text": "gemma3", "olmo3": "olmo2",
    "phi": "phi2", "cohere": "command-r", "hunyuan_v1_dense": "hunyuan-dense", "glm4_moe": "glm4moe",
    "gpt_oss": "gpt-oss", "lfm2_moe": "lfm2moe", "granitemoehybrid": "granitehybrid", "falcon_h1": "falcon-h1",
}  # fmt: skip
# llama.cpp rotates neighboring dimensions, transformers the halves of a head
PAIRED = ("llama", "mistral3", "smollm3", "arcee", "granite", "granitemoe", "granitehybrid")
RAISED = ("gemma", "gemma2", "gemma3", "nemotron", "qwen35", "qwen35moe")  # norms' weights are stored plus one
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
    "attention.layer_norm_epsilon": ("layer_norm_eps", "norm_epsilon", "norm_eps"),
    "attention.sliding_window": ("sliding_window",),
    "attention.scale": ("attention_multiplier",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "logit_scale": ("logits_scaling", "logit_scale"),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "use_parallel_residual": ("use_parallel_residual",),
    "expert_count": ("num_experts", "num_local_experts", "n_routed_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "shortconv.l_cache": ("conv_L_cache",),
    "leading_dense_block_count": ("first_k_dense_replace", "num_dense_layers"),
    "ssm.conv_kernel": ("mamba_d_conv", "linear_conv_kernel_dim"),
    "ssm.state_size": ("mamba_d_state", "linear_key_head_dim"),
    "ssm.group_count": ("mamba_n_groups", "linear_num_key_heads"),
    "ssm.time_step_rank": ("mamba_n_heads", "linear_num_value_heads"),
    "vocab_size": ("vocab_size",),
}
# What only one architecture's files say.
OWN = {
    "glm4_moe": {
        "expert_shared_count": "n_shared_experts",
        "expert_weights_scale": "routed_scaling_factor",
        "expert_weights_norm": "norm_topk_prob",
        "expert_group_count": "n_group",
        "expert_group_used_count": "topk_group",
    },
    "granitemoehybrid": {"expert_shared_feed_forward_length": "shared_intermediate_size"},
    "gpt_oss": {"expert_feed_forward_length": "intermediate_size"},
}
MAMBA = {
    "attention.layer_norm_rms_epsilon": ("layer_norm_epsilon",),
    "context_length": ("hidden_size",),  # any
    "embedding_length": ("hidden_size",),
    "block_count": ("num_hidden_layers",),
    "ssm.conv_kernel": ("conv_kernel",),
    "ssm.inner_size": ("intermediate_size",),
    "ssm.state_size": ("state_size",),
    "ssm.time_step_rank": ("num_heads", "time_step_rank"),
    "ssm.group_count": ("n_groups",),
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
        for name, parameter in [*model.named_parameters(), *_biases(model)]:
            values, packed = parameter.numpy().copy(), int8 and parameter.ndim > 1
            if arch in RAISED and name.endswith("norm.weight") and "linear_attn" not in name:
                values += 1
            if packed:
                values = gguf.quants.quantize(values, q8)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(values, q8)))
            if heads := rotated.get(name.split(".")[-2], 0):
                values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
            if "linear_attn" in name:
                values = _dealt(values, name, config)
            for found, part in _named(name, values, names, config):
                tensors[found] = part, q8 if packed else None
    for name, (values, kind) in tensors.items():
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _biases(model: Any) -> list[tuple[str, Any]]:
    """Corrections of experts' scores, which are no parameters."""
    return [(name, each) for name, each in model.named_buffers() if name.endswith(("correction_bias", "expert_bias"))]


def _named(name: str, values: Any, names: Any, config: Any) -> list[tuple[str, Any]]:
    """Return what the file has of a tensor of transformers."""
    base, _, suffix = name.rpartition(".")
    layer = "blk." + "".join(re.findall(r"\.layers\.(\d+)\.", name))
    if ".experts.gate_up_proj" in name or ".experts.down_proj" in name:
        kind = "bias" if name.endswith("bias") else "weight"
        parts = ["down"] if "down" in name else ["gate", "up"]
        if config.model_type == "gpt_oss":
            values = values if kind == "bias" else values.swapaxes(1, 2)
            halves = [values] if "down" in name else [values[:, ::2], values[:, 1::2]]
        else:
            halves = np.split(values, len(parts), 1)
        return [(f"{layer}.ffn_{part}_exps.{kind}", half.copy()) for part, half in zip(parts, halves, strict=True)]
    if "shared_mlp" in name:
        parts, end = ["down"] if "output" in name else ["gate", "up"], "_shexp" if config.num_local_experts else ""
        halves = np.split(values, len(parts))
        return [(f"{layer}.ffn_{part}{end}.weight", half.copy()) for part, half in zip(parts, halves, strict=True)]
    if name.endswith(("correction_bias", "expert_bias")):
        return [(f"{layer}.exp_probs_b.bias", values)]
    if suffix == "dt_bias":
        return [(f"{layer}.ssm_dt.bias", values)]
    if suffix == "A_log":
        return [(names.get_name(name), -np.exp(values))]
    if name.endswith("router.weight"):
        return [(f"{layer}.ffn_gate_inp.weight", values)]
    found = names.get_name(base) if suffix in ("weight", "bias") else None
    if found:
        return [(f"{found}.{suffix}", values.squeeze() if "conv" in name or "shared_expert_gate" in name else values)]
    return [(names.get_name(name) + ("" if suffix in ("D", "weight") else ".weight"), values)]


def _dealt(values: Any, name: str, config: Any) -> Any:
    """Return Qwen 3.5's tensor with the first value head of each key head first, then all second ones."""
    if name.endswith("linear_attn.norm.weight"):
        return values
    keys, count = config.linear_num_key_heads, config.linear_num_value_heads
    order = torch.arange(count).reshape(keys, -1).T.flatten()  # of heads
    if ".in_proj_qkv." in name or ".conv1d." in name:
        start = 2 * keys * config.linear_key_head_dim
        return np.concatenate([values[:start], _heads(values[start:], order)])
    return _heads(values.T, order).T.copy() if "out_proj" in name else _heads(values, order)


def _heads(values: Any, order: torch.Tensor) -> Any:
    return values.reshape(len(order), -1, *values.shape[1:])[order.numpy()].reshape(values.shape)


def _settings(config: Any, model: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """Return a file's settings, and add the tensors that state rotary frequencies."""
    mamba, kind = config.model_type in ("mamba", "mamba2"), config.model_type
    found = {key: [getattr(config, name, None) for name in names] for key, names in (MAMBA if mamba else KEYS).items()}
    said = {key: next((value for value in values if value is not None), None) for key, values in found.items()}
    said |= {key: getattr(config, name) for key, name in OWN.get(kind, {}).items()}
    if mamba:
        own = {"ssm.dt_b_c_rms": False} if kind == "mamba" else {"ssm.inner_size": config.expand * config.hidden_size}
        return said | {"feed_forward_length": 0, "attention.head_count": 0, **own}
    if kind in ("lfm2", "lfm2_moe", "granitemoehybrid"):
        said["attention.head_count_kv"] = [
            config.num_key_value_heads if each == "full_attention" else 0 for each in config.layer_types
        ]
    if kind in ("lfm2", "lfm2_moe"):
        del said["attention.layer_norm_epsilon"]
    if kind in ("lfm2_moe", "glm4_moe"):
        said["expert_gating_func"] = 2
    if kind == "granitemoehybrid":
        said |= {"ssm.inner_size": config.mamba_expand * config.hidden_size, "rope.scaling.finetuned": False}
    if kind == "falcon_h1":
        del said["embedding_scale"]  # it is in the weights
        said["ssm.inner_size"] = config.mamba_d_ssm
    if kind.startswith("qwen3_5"):
        said["ssm.inner_size"] = config.linear_value_head_dim * config.linear_num_value_heads
        said |= {"full_attention_interval": 4, "rope.dimension_sections": [11, 11, 10, 0]}
    if kind in ("olmo3", "exaone4") and config.sliding_window:
        said["attention.sliding_window_pattern"] = [each == "sliding_attention" for each in config.layer_types]
    if kind == "ministral3":
        said["attention.temperature_scale"] = config.rope_parameters["llama_4_scaling_beta"]
        said["rope.scaling.yarn_log_multiplier"] = config.rope_parameters["mscale_all_dim"]
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

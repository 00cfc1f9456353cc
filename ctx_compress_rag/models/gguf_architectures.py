"""What transformers calls llama.cpp's architectures, and their settings in GGUF files.

Keys and their defaults are llama.cpp's (`gguf/constants.py` of the package gguf, and llama.cpp's own reading of them).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Architecture:
    """How transformers computes one of llama.cpp's architectures.

    Attributes:
        model_type: transformers' name.
        keys: the architecture's settings in a file, and their names in transformers' config; all must be there.
        optional: settings that may be absent; then the config's default is llama.cpp's, too.
        fixed: config values that every file of the architecture means.
        meant: settings whose value in the file says what holds anyway; None is any value.
        biases: config names, and the tensor of the first layer that is there if they are true.
        full_every: attention slides in all layers but every n-th; 0 for one kind of layers.
        windowed: the type if the file states a window, for one kind of layers.
        recurrent: the type of the layers without heads of keys.
        paired: neighboring rows of queries and keys are rotated together, where transformers pairs a head's halves.
        raised: weights of norms are stored plus one.
    """

    model_type: str
    keys: Mapping[str, str]
    optional: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    meant: Mapping[str, Any] = field(default_factory=dict)
    biases: Mapping[str, str] = field(default_factory=dict)
    full_every: int = 0
    windowed: str = ""
    recurrent: str = ""
    paired: bool = False
    raised: bool = False


_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
}
_MLP = {"feed_forward_length": "intermediate_size"}
_RMS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_PLAIN = _SIZES | _MLP | _RMS
_BIAS = {"attention_bias": "attn_q.bias"}
_BIASES = _BIAS | {"mlp_bias": "ffn_up.bias"}
_LOCAL = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_SHARED = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
_LOGITS = {"logit_scale": "logits_scaling"}
_CAPPED = {"final_logit_softcapping": "final_logit_softcapping"}
_SCALED = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
}
_SIGMOID = {"expert_gating_func": 2}
_DELTA = {  # Qwen's layers of linear attention
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
_CONV = {"attention.layer_norm_rms_epsilon": "norm_eps", "shortconv.l_cache": "conv_L_cache"}
_MAMBA = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
    "ssm.conv_kernel": "conv_kernel",
    "ssm.state_size": "state_size",
}
_MAMBA_BIASES = {"use_bias": "ssm_in.bias", "use_conv_bias": "ssm_conv1d.bias"}
_MROPE = {"rope.dimension_sections": None}  # for text, all sections are at the same place
_MAMBA_2 = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
}
ELSEWHERE = "give the model's transformers folder or hub id"


def _normed(epsilon: str) -> dict[str, str]:
    """Return the settings of an architecture whose norms have means, by transformers' name of their epsilon."""
    return _SIZES | _MLP | {"attention.layer_norm_epsilon": epsilon}


ARCHITECTURES = {
    "llama": Architecture("llama", _PLAIN, _LOCAL, biases=_BIASES, windowed="mistral", paired=True),
    "mistral3": Architecture("ministral3", _PLAIN, fixed={"sliding_window": None}, paired=True),
    "smollm3": Architecture("smollm3", _PLAIN, fixed={"no_rope_layer_interval": 4}, biases=_BIASES, paired=True),
    "arcee": Architecture("arcee", _PLAIN, biases=_BIASES, paired=True),
    "granite": Architecture("granite", _PLAIN | _LOGITS, _SCALED, biases=_BIASES, paired=True),
    "granitemoe": Architecture("granitemoe", _PLAIN | _LOCAL | _LOGITS, _SCALED, biases=_BIAS, paired=True),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        _PLAIN | _MAMBA_2 | _LOGITS,
        _SCALED | _LOCAL | {"expert_shared_feed_forward_length": "shared_intermediate_size"},
        fixed={"num_local_experts": 0, "num_experts_per_tok": 0},
        biases={"mamba_conv_bias": "ssm_conv1d.bias"},
        recurrent="mamba",
        paired=True,
    ),
    "falcon-h1": Architecture(
        "falcon_h1",
        _PLAIN | _MAMBA_2 | {"ssm.inner_size": "mamba_d_ssm"},
        fixed={"mamba_norm_before_gate": False},
        biases=_BIASES | {"mamba_rms_norm": "ssm_norm.weight", "mamba_conv_bias": "ssm_conv1d.bias"},
    ),
    "qwen2": Architecture("qwen2", _PLAIN),
    "qwen3": Architecture("qwen3", _PLAIN, biases=_BIAS),
    "qwen2moe": Architecture(
        "qwen2_moe", _PLAIN | _EXPERTS | _SHARED, fixed={"norm_topk_prob": False}, biases={"qkv_bias": "attn_q.bias"}
    ),
    "qwen3moe": Architecture("qwen3_moe", _PLAIN | _EXPERTS, fixed={"norm_topk_prob": True}, biases=_BIAS),
    "qwen35": Architecture("qwen3_5_text", _PLAIN | _DELTA, meant=_MROPE, raised=True),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text", _SIZES | _RMS | _DELTA | _EXPERTS | _SHARED, _MLP, meant=_MROPE, raised=True
    ),
    "gemma": Architecture("gemma", _PLAIN, biases=_BIAS, raised=True),
    "gemma2": Architecture(
        "gemma2",
        _PLAIN,
        _CAPPED | {"attn_logit_softcapping": "attn_logit_softcapping"},
        biases=_BIAS,
        full_every=2,
        raised=True,
    ),
    "gemma3": Architecture("gemma3_text", _PLAIN, _CAPPED, biases=_BIAS, full_every=6, raised=True),
    "olmo2": Architecture("olmo2", _PLAIN, biases=_BIAS, full_every=4),
    "olmoe": Architecture("olmoe", _PLAIN | {key: _EXPERTS[key] for key in _LOCAL}, fixed={"norm_topk_prob": False}),
    "phi2": Architecture("phi", _normed("layer_norm_eps")),
    "phi3": Architecture("phi3", _PLAIN, fixed={"sliding_window": None}, windowed="phi3"),
    "stablelm": Architecture(
        "stablelm",
        _normed("layer_norm_eps") | {"use_parallel_residual": "use_parallel_residual"},
        biases={"use_qkv_bias": "attn_q.bias", "qk_layernorm": "attn_q_norm.weight"},
    ),
    "starcoder2": Architecture(
        "starcoder2",
        _normed("norm_epsilon"),
        fixed={"sliding_window": None},
        biases={"use_bias": "attn_q.bias"},
        windowed="starcoder2",
    ),
    "nemotron": Architecture(
        "nemotron",
        _normed("norm_eps"),
        meant={"attention.layer_norm_rms_epsilon": None},  # written, but never read
        biases=_BIASES,
        raised=True,
    ),
    "command-r": Architecture(
        "cohere",
        _normed("layer_norm_eps") | {"logit_scale": "logit_scale"},
        biases=_BIAS | {"use_qk_norm": "attn_q_norm.weight"},
    ),
    "cohere2": Architecture(
        "cohere2", _normed("layer_norm_eps") | {"logit_scale": "logit_scale"}, biases=_BIAS, full_every=4
    ),
    "exaone4": Architecture("exaone4", _PLAIN, full_every=4),
    "seed_oss": Architecture("seed_oss", _PLAIN, biases=_BIASES | {"attention_out_bias": "attn_output.bias"}),
    "ernie4_5": Architecture("ernie4_5", _PLAIN, biases={"use_bias": "attn_q.bias"}),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", _PLAIN, biases=_BIAS),
    "glm4": Architecture("glm4", _PLAIN, biases=_BIAS),
    "glm4moe": Architecture(
        "glm4_moe",
        _PLAIN
        | _EXPERTS
        | {
            "expert_count": "n_routed_experts",
            "expert_shared_count": "n_shared_experts",
            "leading_dense_block_count": "first_k_dense_replace",
            "expert_weights_scale": "routed_scaling_factor",
            "expert_weights_norm": "norm_topk_prob",
        },
        {"expert_group_count": "n_group", "expert_group_used_count": "topk_group"},
        meant=_SIGMOID,
        biases=_BIAS | {"use_qk_norm": "attn_q_norm.weight"},
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        _PLAIN | _LOCAL | {"attention.sliding_window": "sliding_window"},
        {"expert_feed_forward_length": "intermediate_size"},
        biases=_BIAS,
        full_every=2,
    ),
    "lfm2": Architecture(
        "lfm2",
        _SIZES | _MLP | _CONV,
        fixed={"block_auto_adjust_ff_dim": False},
        biases={"conv_bias": "shortconv.in_proj.bias"},
        recurrent="conv",
    ),
    "lfm2moe": Architecture(
        "lfm2_moe",
        _SIZES | _MLP | _EXPERTS | _CONV | {"leading_dense_block_count": "num_dense_layers"},
        meant=_SIGMOID,
        biases={"conv_bias": "shortconv.in_proj.bias"},
        recurrent="conv",
    ),
    "mamba": Architecture(
        "mamba",
        _MAMBA | {"ssm.inner_size": "intermediate_size", "ssm.time_step_rank": "time_step_rank"},
        meant={"ssm.dt_b_c_rms": False},
        biases=_MAMBA_BIASES,
    ),
    "mamba2": Architecture(
        "mamba2", _MAMBA | {"ssm.time_step_rank": "num_heads", "ssm.group_count": "n_groups"}, biases=_MAMBA_BIASES
    ),
}


def architecture_of(metadata: Mapping[str, Any]) -> Architecture:
    """Return what is known of a file's architecture; raise ValueError if nothing."""
    name = metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise ValueError(
            f"general.architecture = {name!r} is not one of those that are read from GGUF files "
            f"({', '.join(sorted(ARCHITECTURES))}): {ELSEWHERE}"
        )
    return ARCHITECTURES[name]

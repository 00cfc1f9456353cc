"""Make transformers' config of a GGUF file: of what the file says nothing is lost, or the file is refused.

Keys and their defaults are llama.cpp's (`gguf/constants.py` of the package gguf, and llama.cpp's own reading of them).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Values = Mapping[str, np.ndarray[Any, Any]]  # small tensors by name, float32

_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
}
_MLP = {"feed_forward_length": "intermediate_size"}
_RMS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_BIAS = {"attention_bias": "attn_q.bias"}
_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True)
class Architecture:
    """How transformers computes one of llama.cpp's architectures.

    Attributes:
        model_type: transformers' name.
        keys: the architecture's settings in a file, and their names in transformers' config; all must be there.
        optional: settings that may be absent; then the config's default is llama.cpp's, too.
        fixed: config values that every file of the architecture means.
        biases: config names, and the tensor of the first layer that is there if they are true.
        full_every: attention slides in all layers but every n-th; 0 for one kind of layers.
        paired: neighboring rows of queries and keys are rotated together, where transformers pairs a head's halves.
        raised: weights of norms are stored plus one.
    """

    model_type: str
    keys: Mapping[str, str]
    optional: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    biases: Mapping[str, str] = field(default_factory=dict)
    full_every: int = 0
    paired: bool = False
    raised: bool = False


_CAPPED = {"final_logit_softcapping": "final_logit_softcapping"}
ARCHITECTURES = {
    "llama": Architecture("llama", _SIZES | _MLP | _RMS, biases=_BIAS | {"mlp_bias": "ffn_up.bias"}, paired=True),
    "smollm3": Architecture(
        "smollm3",
        _SIZES | _MLP | _RMS,
        fixed={"no_rope_layer_interval": 4},
        biases=_BIAS | {"mlp_bias": "ffn_up.bias"},
        paired=True,
    ),
    "granite": Architecture(
        "granite",
        _SIZES | _MLP | _RMS | {"logit_scale": "logits_scaling"},
        {
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
        },
        biases=_BIAS | {"mlp_bias": "ffn_up.bias"},
        paired=True,
    ),
    "qwen2": Architecture("qwen2", _SIZES | _MLP | _RMS),
    "qwen3": Architecture("qwen3", _SIZES | _MLP | _RMS, biases=_BIAS),
    "qwen2moe": Architecture(
        "qwen2_moe",
        _SIZES | _MLP | _RMS | _EXPERTS | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        fixed={"norm_topk_prob": False},
        biases={"qkv_bias": "attn_q.bias"},
    ),
    "qwen3moe": Architecture(
        "qwen3_moe", _SIZES | _MLP | _RMS | _EXPERTS, fixed={"norm_topk_prob": True}, biases=_BIAS
    ),
    "gemma": Architecture("gemma", _SIZES | _MLP | _RMS, biases=_BIAS, raised=True),
    "gemma2": Architecture(
        "gemma2",
        _SIZES | _MLP | _RMS,
        _CAPPED | {"attn_logit_softcapping": "attn_logit_softcapping"},
        biases=_BIAS,
        full_every=2,
        raised=True,
    ),
    "gemma3": Architecture("gemma3_text", _SIZES | _MLP | _RMS, _CAPPED, biases=_BIAS, full_every=6, raised=True),
    "olmo2": Architecture("olmo2", _SIZES | _MLP | _RMS, biases=_BIAS),
    "phi3": Architecture("phi3", _SIZES | _MLP | _RMS, fixed={"sliding_window": None}),
    "stablelm": Architecture(
        "stablelm",
        _SIZES
        | _MLP
        | {"attention.layer_norm_epsilon": "layer_norm_eps", "use_parallel_residual": "use_parallel_residual"},
        biases={"use_qkv_bias": "attn_q.bias", "qk_layernorm": "attn_q_norm.weight"},
    ),
    "starcoder2": Architecture(
        "starcoder2",
        _SIZES | _MLP | {"attention.layer_norm_epsilon": "norm_epsilon"},
        fixed={"sliding_window": None},
        biases={"use_bias": "attn_q.bias"},
    ),
    "cohere2": Architecture(
        "cohere2",
        _SIZES | _MLP | {"attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"},
        biases=_BIAS,
        full_every=4,
    ),
    "lfm2": Architecture(
        "lfm2",
        _SIZES | _MLP | {"attention.layer_norm_rms_epsilon": "norm_eps", "shortconv.l_cache": "conv_L_cache"},
        fixed={"block_auto_adjust_ff_dim": False},
        biases={"conv_bias": "shortconv.in_proj.bias"},
    ),
    "mamba": Architecture(
        "mamba",
        {
            "embedding_length": "hidden_size",
            "block_count": "num_hidden_layers",
            "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
            "ssm.conv_kernel": "conv_kernel",
            "ssm.inner_size": "intermediate_size",
            "ssm.state_size": "state_size",
            "ssm.time_step_rank": "time_step_rank",
        },
        biases={"use_bias": "ssm_in.bias", "use_conv_bias": "ssm_conv1d.bias"},
    ),
}


def architecture_of(metadata: Mapping[str, Any]) -> Architecture:
    """Return what is known of a file's architecture; raise ValueError if nothing."""
    name = metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise ValueError(
            f"general.architecture = {name!r} is not one of those that are read from GGUF files "
            f"({', '.join(sorted(ARCHITECTURES))}): give the model's transformers folder or hub id"
        )
    return ARCHITECTURES[name]


def gguf_config(metadata: Mapping[str, Any], names: Mapping[str, tuple[int, ...]], factors: Values) -> Any:
    """Return the config of the model that a GGUF file holds.

    Args:
        metadata: all of the file's keys.
        names: the file's tensors, and their shapes as PyTorch has them.
        factors: the tensors that are named in `FACTORS`, if the file has them.

    Raises:
        ValueError: the file says something that transformers cannot compute, or that is unknown here.
    """
    from transformers import AutoConfig

    known, prefix = architecture_of(metadata), f"{metadata['general.architecture']}."
    left = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    if missing := known.keys.keys() - left:
        raise ValueError(f"{prefix}{min(missing)} is missing: llama.cpp needs it, too, so get another file")
    said = dict(known.fixed)
    for key, name in {**known.keys, **known.optional}.items():
        if key in left:
            said[name] = left.pop(key)
    said |= {name: f"blk.0.{tensor}" in names for name, tensor in known.biases.items()}
    rows = names["token_embd.weight"][0]
    left.pop("vocab_size", None)  # there are as many tokens as rows
    said |= {"vocab_size": rows, "tie_word_embeddings": "output.weight" not in names} | _ends(metadata, rows)
    model_type = known.model_type
    if model_type == "mamba":
        _drop(left, {"context_length": None, "feed_forward_length": 0, "attention.head_count": 0})
        _drop(left, {"ssm.dt_b_c_rms": False})
    else:
        _set_heads(said, left)
        said["rope_parameters"] = _rope(said, left, factors)
        model_type = _set_window(said, left, known) or model_type
        _set_family(said, left, model_type)
    _drop(left, {"attention.causal": True, "rope.scaling.finetuned": None})
    if left:
        key = min(left)
        raise ValueError(
            f"{prefix}{key} = {left[key]!r} is not known for this architecture, and could change every answer: give "
            "the model's transformers folder or hub id"
        )
    return AutoConfig.for_model(model_type, **said)


def _drop(left: dict[str, Any], harmless: Mapping[str, Any]) -> None:
    """Drop keys whose value says what holds anyway; None is any value."""
    for key, value in harmless.items():
        if key in left and (value is None or left[key] == value):
            del left[key]


def _ends(metadata: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Return the numbers of special tokens; llama.cpp also ends at the end of a turn or message."""
    numbers = {
        name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom", "padding")
    }
    ends = list(dict.fromkeys(numbers[name] for name in ("eos", "eot", "eom") if numbers[name] is not None))
    # Phi 3's padding is beyond a cut vocabulary.
    padding = numbers["padding"] if numbers["padding"] is None or numbers["padding"] < rows else None
    eos = None if not ends else ends[0] if len(ends) == 1 else ends
    return {"bos_token_id": numbers["bos"], "eos_token_id": eos, "pad_token_id": padding}


def _set_heads(said: dict[str, Any], left: dict[str, Any]) -> None:
    heads = left.pop("attention.head_count", None)
    if not isinstance(heads, int):
        raise ValueError(f"attention.head_count = {heads!r}: one number of heads for all layers is needed")
    counts = left.pop("attention.head_count_kv", heads)
    if isinstance(counts, list) and len(set(counts) - {0}) == 1:
        if 0 in counts:  # LFM2's layers without attention
            said["layer_types"] = ["full_attention" if count else "conv" for count in counts]
        counts = max(counts)
    if not isinstance(counts, int):
        raise ValueError(f"attention.head_count_kv = {counts!r}: layers of different sizes are not read")
    size = left.pop("attention.key_length", said["hidden_size"] // heads)
    _drop(left, {"attention.value_length": size})
    said |= {"num_attention_heads": heads, "num_key_value_heads": counts, "head_dim": size}


def _rope(said: Mapping[str, Any], left: dict[str, Any], factors: Values) -> dict[str, Any]:
    """Return transformers' `rope_parameters`."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": left.pop("rope.freq_base", 10_000.0)}
    if (width := left.pop("rope.dimension_count", said["head_dim"])) != said["head_dim"]:
        rope["partial_rotary_factor"] = width / said["head_dim"]
    kind = left.pop("rope.scaling.type", "linear")
    factor = left.pop("rope.scaling.factor", None) or left.pop("rope.scale_linear", None) or 1.0
    original = left.pop("rope.scaling.original_context_length", said["max_position_embeddings"])
    lists = [values.tolist() for name in FACTORS if (values := factors.get(name)) is not None]
    if lists:
        # Llama 3's are stored as what divides each frequency; longrope says that, with one list for all lengths.
        rope |= {"rope_type": "longrope", "long_factor": lists[0], "short_factor": lists[-1], "factor": 1.0}
        rope |= {"attention_factor": left.pop("rope.scaling.attn_factor", 1.0)}
        rope |= {"original_max_position_embeddings": original}
        if kind not in ("longrope", "linear", "none") or factor != 1:
            raise ValueError(f"rope.scaling.type = {kind!r} with a factor for each frequency, too, is not read")
    elif kind == "yarn":
        rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if (value := left.pop(f"rope.scaling.{key}", None)) is not None:
                rope[name] = value
        _drop(left, {"rope.scaling.yarn_ext_factor": 1.0, "rope.scaling.yarn_attn_factor": 1.0})
    elif kind == "linear" and factor != 1:
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind not in ("linear", "none"):
        raise ValueError(f"rope.scaling.type = {kind!r} is not read: give the model's transformers folder or hub id")
    _drop(left, {"rope.scaling.attn_factor": 1.0})
    return rope


def _set_window(said: dict[str, Any], left: dict[str, Any], known: Architecture) -> str | None:
    """Set the window of sliding attention and which layers slide; return another model type, where it takes one."""
    if not known.full_every:
        window = left.get("attention.sliding_window", 0)
        if not window or known.model_type in ("llama", "phi3", "starcoder2"):
            left.pop("attention.sliding_window", None)
            if window:
                said["sliding_window"] = window
                return "mistral" if known.model_type == "llama" else None
        return None
    window = left.pop("attention.sliding_window", 4096 if known.model_type == "gemma2" else 0)
    pattern, count = left.pop("attention.sliding_window_pattern", known.full_every), said["num_hidden_layers"]
    slides = pattern if isinstance(pattern, list) else [(at + 1) % pattern != 0 for at in range(count)]
    said["layer_types"] = ["sliding_attention" if window and each else "full_attention" for each in slides]
    said["sliding_window"] = window or said["max_position_embeddings"]
    return None


def _set_family(said: dict[str, Any], left: dict[str, Any], model_type: str) -> None:
    """Set what llama.cpp knows of a family, without a key in the file."""
    theta = left.pop("rope.freq_base_swa", 10_000.0) if model_type == "gemma3_text" else None
    if theta is not None:
        sliding = {"rope_type": "default", "rope_theta": theta}
        said["rope_parameters"] = {"full_attention": said["rope_parameters"], "sliding_attention": sliding}
        said.setdefault("final_logit_softcapping", None)
    if model_type in ("gemma2", "gemma3_text"):
        # The 27B ones, which llama.cpp tells by their layers, too, divide by another number than the head's size.
        large = said["num_hidden_layers"] == {"gemma2": 46, "gemma3_text": 62}[model_type]
        said["query_pre_attn_scalar"] = (
            said["hidden_size"] // said["num_attention_heads"] if large else said["head_dim"]
        )
    if model_type == "granite":
        said.setdefault("attention_multiplier", said["head_dim"] ** -0.5)
        if left.get("rope.scaling.finetuned", True) is False:
            raise ValueError("rope.scaling.finetuned = False: Granite without positions is not read")
    if model_type == "phi3":
        parameters = said["rope_parameters"]
        said["original_max_position_embeddings"] = parameters.get(
            "original_max_position_embeddings", said["max_position_embeddings"]
        )

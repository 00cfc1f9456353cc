"""Make transformers' config of a GGUF file: of what the file says nothing is lost, or the file is refused.

Keys and their defaults are llama.cpp's (`gguf/constants.py` of the package gguf, and llama.cpp's own reading of them).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


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


Values = Mapping[str, np.ndarray[Any, Any]]  # small tensors by name, float32
FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def gguf_config(metadata: Mapping[str, Any], names: Mapping[str, tuple[int, ...]], factors: Values) -> Any:
    """Return the config of the model in a GGUF file with these keys, shapes of tensors by name, and `FACTORS`.

    Raises ValueError for what transformers cannot compute, or what is unknown here.
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
    if metadata.get("split.count", 0) > 1 or "token_embd.weight" not in names:
        raise ValueError("the file is a piece of a model, or none: join the pieces with llama-gguf-split --merge")
    rows = names["token_embd.weight"][0]
    left.pop("vocab_size", None)  # there are as many tokens as rows
    said |= {"vocab_size": rows, "tie_word_embeddings": "output.weight" not in names} | _ends(metadata, rows)
    if said["num_hidden_layers"] > len(names):  # a damaged number would fill the memory
        raise ValueError(
            f"{prefix}block_count = {said['num_hidden_layers']} is more than it has tensors: fetch it again"
        )
    said["num_hidden_layers"] -= left.pop("nextn_predict_layers", 0)  # layers that guess further tokens
    model_type = known.model_type
    if model_type in ("mamba", "mamba2"):
        _drop(left, {"context_length": None, "feed_forward_length": 0, "attention.head_count": 0})
    else:
        _set_heads(said, left, known)
        said["rope_parameters"] = _rope(said, left, factors)
        model_type = _set_window(said, left, known) or model_type
    model_type = _set_family(said, left, model_type)
    _drop(left, {"attention.causal": True, "rope.scaling.finetuned": None, **known.meant})
    if left:
        key = min(left)
        raise ValueError(
            f"{prefix}{key} = {left[key]!r} is unknown for this architecture, and could change answers: {ELSEWHERE}"
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


def _set_heads(said: dict[str, Any], left: dict[str, Any], known: Architecture) -> None:
    heads = left.pop("attention.head_count", None)
    if not isinstance(heads, int):
        raise ValueError(f"attention.head_count = {heads!r}: one number of heads for all layers is needed")
    counts = left.pop("attention.head_count_kv", heads)
    if isinstance(counts, list) and len(set(counts) - {0}) == 1 and (known.recurrent or 0 not in counts):
        if known.recurrent:
            said["layer_types"] = ["full_attention" if count else known.recurrent for count in counts]
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
        raise ValueError(f"rope.scaling.type = {kind!r} is not read: {ELSEWHERE}")
    _drop(left, {"rope.scaling.attn_factor": 1.0})
    return rope


def _set_window(said: dict[str, Any], left: dict[str, Any], known: Architecture) -> str | None:
    """Set the window of sliding attention and which layers slide; return another model type, where it takes one."""
    if known.windowed:
        said["sliding_window"] = left.pop("attention.sliding_window", 0) or None
        return known.windowed if said["sliding_window"] else None
    if not known.full_every:
        _drop(left, {"attention.sliding_window": 0})
        return None
    default = 4096 if known.model_type == "gemma2" else 0
    window = said.get("sliding_window") or left.pop("attention.sliding_window", default)
    pattern, count = left.pop("attention.sliding_window_pattern", known.full_every), said["num_hidden_layers"]
    slides = pattern if isinstance(pattern, list) else [(at + 1) % pattern != 0 for at in range(count)]
    if window or known.model_type != "olmo2":
        said["layer_types"] = ["sliding_attention" if window and each else "full_attention" for each in slides]
        # EXAONE 4's layers without a window take positions into account only if no layer has one.
        said["sliding_window"] = window or (None if known.model_type == "exaone4" else said["max_position_embeddings"])
    return "olmo3" if window and known.model_type == "olmo2" else None


def _set_family(said: dict[str, Any], left: dict[str, Any], model_type: str) -> str:
    """Set what llama.cpp knows of a family, without a key in the file; return the model type."""
    rope, heads = said.get("rope_parameters", {}), said.get("num_attention_heads", 0)
    if model_type in ("gemma3_text", "olmo3"):
        theta = left.pop("rope.freq_base_swa", 10_000.0 if model_type == "gemma3_text" else rope["rope_theta"])
        sliding = {"rope_type": "default", "rope_theta": theta}
        said["rope_parameters"] = {"full_attention": rope, "sliding_attention": sliding}
    if model_type == "gemma3_text":
        said.setdefault("final_logit_softcapping", None)
    if model_type in ("gemma2", "gemma3_text"):
        # The 27B ones, which llama.cpp tells by their layers, too, divide by another number than the head's size.
        large = said["num_hidden_layers"] == {"gemma2": 46, "gemma3_text": 62}[model_type]
        said["query_pre_attn_scalar"] = said["hidden_size"] // heads if large else said["head_dim"]
    if model_type.startswith("granite"):
        said.setdefault("attention_multiplier", said["head_dim"] ** -0.5)
        if left.get("rope.scaling.finetuned", True) is False and model_type != "granitemoehybrid":
            raise ValueError("rope.scaling.finetuned = False: Granite without positions is not read")
    if model_type == "granitemoehybrid":
        said["position_embedding_type"] = "rope" if left.get("rope.scaling.finetuned", True) else "nope"
        said.setdefault("shared_intermediate_size", said["intermediate_size"])
        inner = left.pop("ssm.inner_size")
        said |= {"mamba_expand": inner // said["hidden_size"], "mamba_d_head": inner // said["mamba_n_heads"]}
    if model_type == "falcon_h1":
        said["mamba_d_head"] = said["mamba_d_ssm"] // said["mamba_n_heads"]
    if model_type == "mamba2":
        inner = left.pop("ssm.inner_size")
        said |= {"expand": inner // said["hidden_size"], "head_dim": inner // said["num_heads"]}
    if model_type == "phi3":
        said["original_max_position_embeddings"] = rope.get(
            "original_max_position_embeddings", said["max_position_embeddings"]
        )
    if model_type == "gpt_oss":
        rope["truncate"] = False
    if model_type == "ministral3":
        # Attention grows with the place in a text, and with the factor of scaling.
        scale = left.pop("rope.scaling.yarn_log_multiplier", 0.0)
        rope |= {"llama_4_scaling_beta": left.pop("attention.temperature_scale", 0.0)}
        rope |= {"mscale": scale, "mscale_all_dim": scale}
    if model_type.startswith("qwen3_5"):
        said["linear_value_head_dim"] = left.pop("ssm.inner_size") // said["linear_num_value_heads"]
        every, count = left.pop("full_attention_interval", 4), said["num_hidden_layers"]
        recurrent = left.pop("attention.recurrent_layers", [(at + 1) % every != 0 for at in range(count)])[:count]
        said["layer_types"] = ["linear_attention" if each else "full_attention" for each in recurrent]
    return "mixtral" if model_type == "llama" and said.get("num_local_experts") else model_type

"""Make transformers' config of a GGUF file: of what the file says nothing is lost, or the file is refused."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ctx_compress_rag.models.gguf_architectures import ELSEWHERE, Architecture, architecture_of

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

"""The tensors of a GGUF file as a transformers model: all of the file's are used, and all of the model's are there."""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ctx_compress_rag.models.gguf_metadata import ELSEWHERE, FACTORS, Architecture, architecture_of, gguf_config
from ctx_compress_rag.models.weights import own_tensors

# Ends of transformers' names, which the package gguf does not translate: a layer's tensors in a file, joined in order.
_NAMES = {
    ".experts.gate_up_proj": ["ffn_gate_exps.weight", "ffn_up_exps.weight"],
    ".experts.gate_up_proj_bias": ["ffn_gate_exps.bias", "ffn_up_exps.bias"],
    ".experts.down_proj": ["ffn_down_exps.weight"],
    ".experts.down_proj_bias": ["ffn_down_exps.bias"],
    "router.weight": ["ffn_gate_inp.weight"],
    "e_score_correction_bias": ["exp_probs_b.bias"],
    "expert_bias": ["exp_probs_b.bias"],
    "shared_mlp.input_linear.weight": ["ffn_gate.weight", "ffn_up.weight"],
    "shared_mlp.output_linear.weight": ["ffn_down.weight"],
    ".sinks": ["attn_sinks.weight"],
    ".dt_bias": ["ssm_dt.bias"],
}
_LINEAR = ("attn_qkv.weight", "attn_gate.weight")
_VOCABULARY = (".tokens", ".merges", ".scores", ".token_type")  # long lists, which are slow to read
_MOST_VALUES = 2**23  # read one by one; a vocabulary of 260,000 tokens takes two million


def read_gguf(file: Path) -> tuple[dict[str, Any], Callable[[], Any]]:
    """Return a file's settings, without its vocabulary, and a function that loads its causal LM in float32.

    Raises ValueError if the file says, has or misses something that transformers' model would not have.
    """
    metadata, tensors = _contents(_reader(file))
    known = architecture_of(metadata)
    shapes = {name: tuple(tensor.shape[::-1].tolist()) for name, tensor in tensors.items()}
    factors = {name: tensors[name].data for name in FACTORS if name in tensors}
    config = gguf_config(metadata, shapes, factors)
    guessing = metadata.get(f"{metadata['general.architecture']}.nextn_predict_layers", 0)
    for layer in range(config.num_hidden_layers, config.num_hidden_layers + guessing):
        tensors = {name: each for name, each in tensors.items() if not name.startswith(f"blk.{layer}.")}
    return metadata, partial(_load, tensors, metadata["general.architecture"], known, config)


def _reader(file: Path) -> Any:
    """Return a `gguf.GGUFReader`; raise ValueError if the file is shorter than it says, or has too long lists."""
    import gguf

    class Reader(gguf.GGUFReader):
        read = 0

        # Its own reads nothing beyond the end, and goes on: a list whose length is damaged would fill the memory.
        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            self.read += 1
            if offset + np.dtype(dtype).itemsize * int(count) > len(self.data) or self.read > _MOST_VALUES:
                raise ValueError(
                    f"the file is cut, or damaged before byte {min(offset, len(self.data))}: fetch it again"
                )
            return super()._get(offset, dtype, count, override_order)

    return Reader(file)


def _contents(reader: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a `gguf.GGUFReader`'s settings, without its vocabulary, and its tensors by name."""
    metadata = {key: each.contents() for key, each in reader.fields.items() if not key.endswith(_VOCABULARY)}
    return metadata, {tensor.name: tensor for tensor in reader.tensors}


def _load(tensors: Mapping[str, Any], architecture: str, known: Architecture, config: Any) -> Any:
    import transformers

    with torch.device("meta"):
        blank: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    wanted = own_tensors(blank)
    sources = dict(_sources(wanted, tensors, architecture, config.num_hidden_layers))
    used = {source for each in sources.values() for source in each}
    if odd := used.symmetric_difference(tensors.keys() - set(FACTORS)):
        said = "misses" if min(odd) in used else "has"
        raise ValueError(
            f"the file {said} the tensor {min(odd)!r}, unlike transformers' {config.model_type}: {ELSEWHERE}"
        )
    state = {}
    for name, blank_tensor in wanted.items():
        parts = [_unpacked(tensors[source], source, known, config) for source in sources[name]]
        value = _joined(parts, sources[name][0], config)
        if value.numel() != blank_tensor.numel() or value.squeeze().shape != blank_tensor.squeeze().shape:
            raise ValueError(
                f"the tensor {sources[name][0]!r} has the shape {tuple(value.shape)}, but the file's settings make it "
                f"{tuple(blank_tensor.shape)}: {ELSEWHERE}"
            )
        state[name] = value.reshape(blank_tensor.shape)
    return type(blank).from_pretrained(None, config=config, state_dict=state, dtype=torch.float32)


def _sources(
    wanted: Mapping[str, Tensor], tensors: Mapping[str, Any], architecture: str, layers: int
) -> Iterator[tuple[str, list[str]]]:
    """Yield transformers' names and those of the file's tensors."""
    import gguf

    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[architecture], layers)
    for name in wanted:
        layer = re.search(r"\.layers\.(\d+)\.", name)
        if layer and (own := next((own for end, own in _NAMES.items() if name.endswith(end)), None)):
            own = [f"blk.{layer[1]}.{each}" for each in own]
            shared = [each.replace(".weight", "_shexp.weight") for each in own]  # beside experts
            yield name, shared if "shared_mlp" in name and shared[0] in tensors else own
            continue
        base, _, suffix = name.rpartition(".")
        if suffix in ("weight", "bias") and (found := names.get_name(base)):
            yield name, [f"{found}.{suffix}"]
        else:
            yield name, [names.get_name(name) or name]


def _joined(parts: list[Tensor], name: str, config: Any) -> Tensor:
    """Join what transformers has in one tensor."""
    if config.model_type != "gpt_oss" or "_exps" not in name:
        return torch.cat(parts, parts[0].ndim - 2) if len(parts) > 1 else parts[0]
    value = torch.stack(parts, 2).flatten(1, 2)  # rows of gates and others in turn
    return value.transpose(1, 2) if name.endswith("weight") else value


def _unpacked(tensor: Any, name: str, known: Architecture, config: Any) -> Tensor:
    import gguf

    try:
        packed = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        raise ValueError(f"the tensor {name!r} of type {tensor.tensor_type.name} cannot be unpacked") from None
    values = _ordered(np.array(packed, dtype=np.float32).reshape(tensor.shape[::-1]), name, known, config)
    if known.raised and name.endswith("norm.weight") and not name.endswith("ssm_norm.weight"):
        values -= 1
    if name.endswith(".ssm_a"):
        values = np.log(-values)
    return torch.from_numpy(np.ascontiguousarray(values))


def file_changes(reader: Any, added: Mapping[str, Tensor], config: Any) -> dict[str, Any]:
    """Return what is added to a model's tensors as what is added to those of its file, a `gguf.GGUFReader`, by name.

    The same functions that order a tensor for transformers here order the numbers of its places.
    """
    metadata, tensors = _contents(reader)
    known, architecture = architecture_of(metadata), metadata["general.architecture"]
    changes: dict[str, Any] = {}
    for name, sources in _sources(added, tensors, architecture, config.num_hidden_layers):
        ends = np.cumsum([int(tensors[source].shape.prod()) for source in sources])
        parts = []
        for source, places in zip(sources, np.split(np.arange(ends[-1]), ends[:-1]), strict=True):
            places = _ordered(places.reshape(tensors[source].shape[::-1]), source, known, config)
            parts.append(torch.from_numpy(np.ascontiguousarray(places)))
        change = np.empty(ends[-1], np.float32)
        change[_joined(parts, sources[0], config).flatten().numpy()] = added[name].float().flatten().cpu().numpy()
        for source, part in zip(sources, np.split(change, ends[:-1]), strict=True):
            changes[source] = part.reshape(tensors[source].shape[::-1])
    return changes


def changed(values: Any, name: str, change: Any) -> Any:
    """Return a file's tensor with one of `file_changes`; transformers has the logarithm of Mamba's A."""
    return values * np.exp(change) if name.endswith(".ssm_a") else values + change


def _ordered(values: Any, name: str, known: Architecture, config: Any) -> Any:
    """Return a file's tensor in transformers' order."""
    if known.paired and name.split(".")[-2] in ("attn_q", "attn_k"):
        heads = config.num_attention_heads if "attn_q" in name else config.num_key_value_heads
        values = values.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    if known.model_type.startswith("qwen3_5") and (".ssm_" in name or name.endswith(_LINEAR)):
        values = _grouped(values, name, config)
    return values


def _grouped(values: Any, name: str, config: Any) -> Any:
    """Return a tensor of linear attention with the heads of values beside their heads of keys, as llama.cpp has not."""
    if name.endswith("ssm_norm.weight"):
        return values
    keys, axis = config.linear_num_key_heads, int("ssm_out" in name)
    others = 2 * keys * config.linear_key_head_dim if "attn_qkv" in name or "conv1d" in name else 0
    first, dealt = np.split(values, [others], axis)
    heads = dealt.reshape(
        *dealt.shape[:axis], -1, keys, dealt.shape[axis] // config.linear_num_value_heads, *dealt.shape[axis + 1 :]
    )
    return np.concatenate([first, heads.swapaxes(axis, axis + 1).reshape(dealt.shape)], axis)

"""The tensors of a GGUF file as a transformers model: all of the file's are used, and all of the model's are there."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ctx_compress_rag.models.gguf_metadata import FACTORS, Architecture, architecture_of, gguf_config
from ctx_compress_rag.models.state import own_tensors

_FUSED = "mlp.experts.gate_up_proj"  # of transformers; two tensors in a file
_VOCABULARY = (".tokens", ".merges", ".scores", ".token_type")  # long lists, which are slow to read


def read_gguf(file: Path) -> tuple[dict[str, Any], Callable[[], Any]]:
    """Return a file's settings, without its vocabulary, and a function that loads its causal LM in float32.

    Raises:
        ValueError: the file says, has or misses something that transformers' model would not have.
    """
    import gguf

    reader = gguf.GGUFReader(file)
    metadata = {key: each.contents() for key, each in reader.fields.items() if not key.endswith(_VOCABULARY)}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    known = architecture_of(metadata)
    shapes = {name: tuple(tensor.shape[::-1].tolist()) for name, tensor in tensors.items()}
    factors = {name: tensors[name].data for name in FACTORS if name in tensors}
    config = gguf_config(metadata, shapes, factors)
    return metadata, partial(_load, tensors, metadata["general.architecture"], known, config)


def _load(tensors: Mapping[str, Any], architecture: str, known: Architecture, config: Any) -> Any:
    import transformers

    with torch.device("meta"):
        blank: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    wanted = own_tensors(blank)
    sources = dict(_sources(wanted, architecture, config.num_hidden_layers))
    used = {source for each in sources.values() for source in each}
    if odd := used.symmetric_difference(tensors.keys() - set(FACTORS)):
        said = "misses" if min(odd) in used else "has"
        raise ValueError(
            f"the file {said} the tensor {min(odd)!r}, unlike transformers' {config.model_type}: give the model's "
            "transformers folder or hub id"
        )
    state = {}
    for name, blank_tensor in wanted.items():
        parts = [_unpacked(tensors[source], source, known, config) for source in sources[name]]
        value = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        if value.numel() != blank_tensor.numel() or value.squeeze().shape != blank_tensor.squeeze().shape:
            raise ValueError(
                f"the tensor {sources[name][0]!r} has the shape {tuple(value.shape)}, but the file's settings make it "
                f"{tuple(blank_tensor.shape)}: give the model's transformers folder or hub id"
            )
        state[name] = value.reshape(blank_tensor.shape)
    return type(blank).from_pretrained(None, config=config, state_dict=state, dtype=torch.float32)


def _sources(wanted: Mapping[str, Tensor], architecture: str, layers: int) -> Iterator[tuple[str, list[str]]]:
    """Yield transformers' names and those of the file's tensors, as the package gguf translates them."""
    import gguf

    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[architecture], layers)
    for name in wanted:
        if name.endswith(_FUSED):
            yield name, [f"{names.get_name(name.replace('gate_up', part))}.weight" for part in ("gate", "up")]
            continue
        base, _, suffix = name.rpartition(".")
        if suffix in ("weight", "bias") and (found := names.get_name(base)):
            yield name, [f"{found}.{suffix}"]
        else:
            found = names.get_name(name) or name
            yield name, [f"{found}.weight" if found.endswith("_exps") else found]


def _unpacked(tensor: Any, name: str, known: Architecture, config: Any) -> Tensor:
    import gguf

    try:
        packed = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        raise ValueError(
            f"the tensor {name!r} is of type {tensor.tensor_type.name}, which cannot be unpacked"
        ) from None
    values = np.array(packed, dtype=np.float32).reshape(tensor.shape[::-1])
    if known.paired and name.split(".")[-2] in ("attn_q", "attn_k"):
        heads = config.num_attention_heads if "attn_q" in name else config.num_key_value_heads
        values = values.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    if known.raised and name.endswith("norm.weight"):
        values -= 1
    if name.endswith(".ssm_a"):
        values = np.log(-values)
    return torch.from_numpy(np.ascontiguousarray(values))

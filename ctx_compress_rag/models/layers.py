"""A decoder's layers: which of them take LoRA, and what adapters add to their weights."""

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.models.weights import name_without_peft

PEFT_PREFIX = "base_model.model."  # the prefix that peft puts before the parameter names of a model that it adapts
_ROUTERS = {"gate", "router"}


def decoder_trunk(model: Any) -> Any:
    """Return the decoder of a causal LM without its head, and of a multimodal one the part that reads text."""
    base = model.base_model if model.base_model is not model else model.model  # Llama 4's is the causal LM itself
    return base.get_decoder() if hasattr(base, "get_decoder") else base


def logits_at(model: Any, wanted: Tensor, **inputs: Any) -> Tensor:
    """Run a causal LM, and return its logits (places, vocabulary), float32, where `wanted` (batch, length) is True.

    Only the states there reach what the model makes logits of them with: a head, scales, caps, as it does itself.
    """

    def keep(trunk: nn.Module, args: Any, out: Any) -> None:
        states = out.last_hidden_state
        out.last_hidden_state = states[wanted.to(states.device)].unsqueeze(0)

    hook = decoder_trunk(model).register_forward_hook(keep)
    try:
        logits: Tensor = model(**inputs, use_cache=False).logits[0].float()
    finally:
        hook.remove()
    return logits


def decoder_layers(model: Any) -> nn.ModuleList:
    """Return the list of a causal LM's layers, whatever the architecture calls it. Raise ConfigError if it has none."""
    trunk, count = decoder_trunk(model), model.config.get_text_config().num_hidden_layers
    for child in trunk.children():
        if isinstance(child, nn.ModuleList) and len(child) == count:
            return child
    raise ConfigError(f"{type(trunk).__name__} has no list of its {count} layers: choose another decoder")


def layer_states(model: Any, **inputs: Any) -> list[Tensor]:
    """Return what comes out of each of a causal LM's layers, (batch, length, dim), of the last after the final norm.

    transformers' own `hidden_states` are of Mamba's layers others. Raises as `one_stream` and `decoder_layers`.
    """
    made: list[Tensor] = []

    def keep(layer: nn.Module, args: Any, out: Any) -> None:
        made.append(one_stream(layer, out))

    with ExitStack() as hooks:
        for layer in decoder_layers(model):
            hooks.callback(layer.register_forward_hook(keep).remove)
        last = decoder_trunk(model)(**inputs, use_cache=False).last_hidden_state
    return [*made[:-1], last]


def one_stream(module: nn.Module, made: Any) -> Tensor:
    """Return the states in what a decoder's layer returned, with some in a tuple; ConfigError but for three dimensions.

    They are (batch, length, dim); Gemma 3n passes four such tensors from layer to layer.
    """
    states: Tensor = made[0] if isinstance(made, tuple) else made
    if states.ndim != 3:
        raise ConfigError(
            f"{type(module).__name__} returns states of shape {tuple(states.shape)}, which a method that changes or "
            "mixes layers cannot read: choose another method, such as mean_pooling, or another decoder"
        )
    return states


def linear_layers(module: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers, with names, of a decoder layer that a change at some positions of a prompt can be in.

    Left out: LoRA, routers, what DeepSeek's attention runs again on its whole cache, what kernels read past hooks.
    """
    left_out, modules = _ROUTERS | {"kv_b_proj"}, dict(module.named_modules())
    for name, layer in modules.items():
        if isinstance(layer, nn.Linear) and "lora_" not in name and left_out.isdisjoint(name.split(".")):
            own = name.removesuffix(".base_layer")
            if not _read_by_kernels(own, modules):
                yield own, layer


def _read_by_kernels(name: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether kernels of a state-space layer may read this layer's weight without a call of the layer."""
    parent, _, own = name.rpartition(".")
    return own == "out_proj" and hasattr(modules[parent], "A_log")


def fused_experts(model: nn.Module) -> list[str]:
    """Return the names of the weights that hold a matrix for each expert."""
    weights = ((name, p) for name, p in model.named_parameters() if "conv" not in name)
    return [name_without_peft(name) for name, parameter in weights if parameter.ndim == 3]


def is_wanted(name: str, wanted: str | Collection[str]) -> bool:
    """Whether a full name is one of `wanted` or ends with one; one str, such as "all-linear", names nothing."""
    return not isinstance(wanted, str) and any(name == each or name.endswith(f".{each}") for each in wanted)


@dataclass(frozen=True)
class LoraPlaces:
    """What of a decoder takes LoRA, by full names, and why what else was wanted takes none."""

    layers: list[str]
    experts: list[str]  # fused weights
    left_out: dict[str, str]


def lora_places(model: Any, wanted: str | Collection[str], kept: int | None = None) -> LoraPlaces:
    """Choose the linear layers that take LoRA, in the decoder's first `kept` layers; None means the whole model.

    `wanted` is "all-linear", or names or ends of names. Routers and fused experts take LoRA only by name: for experts
    peft computes the changed weights of all of them in every pass. Raises ConfigError if nothing is left.
    """
    from transformers.pytorch_utils import Conv1D

    kinds, head = (nn.Linear, Conv1D), model.get_output_embeddings()
    modules = {name.removesuffix(".base_layer"): module for name, module in model.named_modules()}
    names = [name for name, module in modules.items() if isinstance(module, kinds) and "lora_" not in name]
    names = [
        name for name in names if modules[name] is not head and (wanted == "all-linear" or is_wanted(name, wanted))
    ]
    experts = [name for name in fused_experts(model) if is_wanted(name, wanted)]
    if kept is not None:
        layers = decoder_layers(model)
        place = next(name for name, module in modules.items() if module is layers)
        inside = tuple(f"{place}.{number}." for number in range(kept))
        names, experts = ([name for name in own if name.startswith(inside)] for own in (names, experts))
    reached = _layers_with_gradient(model, kinds)
    left_out = {}
    for name in names:
        if wanted == "all-linear" and not _ROUTERS.isdisjoint(name.split(".")):
            left_out[name] = "it chooses experts"
        elif _read_by_kernels(name, modules):
            left_out[name] = "kernels of state-space layers read its weight past an adapter"
        elif name not in reached and ".experts." not in name:  # a few tokens do not reach all experts
            left_out[name] = "an adapter would not change the logits"
    places = LoraPlaces([name for name in names if name not in left_out], experts, left_out)
    if not places.layers and not experts:
        why = "; ".join(sorted(set(left_out.values()))) or "there is no such layer"
        raise ConfigError(f"target_modules={wanted!r}: {type(model).__name__} can adapt none of these ({why})")
    return places


@contextmanager
def embeddings_with_gradient(model: Any) -> Iterator[list[Tensor]]:
    """Have a causal LM's embeddings require gradients in the block, in which they are collected, pass after pass."""
    vectors: list[Tensor] = []

    def detached(module: Any, args: Any, out: Tensor) -> Tensor:
        vectors.append(out.detach().requires_grad_())
        return vectors[-1].clone()  # CTRL scales it in place

    hook = model.get_input_embeddings().register_forward_hook(detached)
    with torch.inference_mode(False), torch.enable_grad(), hook:
        yield vectors


def _layers_with_gradient(model: Any, kinds: tuple[type[nn.Module], ...]) -> set[str]:
    """Return the names of the layers of these classes whose output changes the logits of a few tokens."""
    reached: set[str] = set()

    def note(name: str, module: Any, args: Any, out: Any) -> None:
        if isinstance(out, Tensor) and out.requires_grad:
            out.register_hook(lambda gradient: reached.add(name) if gradient.any() else None)

    with ExitStack() as hooks, embeddings_with_gradient(model):
        for name, module in model.named_modules():
            if isinstance(module, kinds):
                own = partial(note, name.removesuffix(".base_layer"))
                hooks.callback(module.register_forward_hook(own).remove)
        weight = model.get_input_embeddings().weight
        ids = torch.arange(8, device=weight.device).unsqueeze(0) % len(weight)
        model(input_ids=ids, use_cache=False).logits.float().pow(2).sum().backward()
    return reached


def tuner_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the layers that peft has wrapped, with their names."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [(name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]


def adapted_share(model: Any, adapter: str) -> float:
    """Return the share of the weights of a causal LM's trunk, without embeddings, that an adapter changes."""
    trunk, embed = decoder_trunk(model), model.get_input_embeddings().weight
    adapted = [layer for _, layer in tuner_layers(trunk) if adapter in layer.scaling]
    changed = sum(getattr(layer.get_base_layer(), adapted_weight(layer)).numel() for layer in adapted)
    own = [weight for name, weight in trunk.named_parameters() if "lora_" not in name and weight is not embed]
    return float(changed / sum(weight.numel() for weight in own))


def lora_delta(layer: Any, shares: Mapping[str, float]) -> Tensor | None:
    """Return what shares of adapters add to a layer's weight, float32; None without any, ConfigError for a DoRA."""
    deltas = []
    for adapter in filter(layer.scaling.__contains__, shares):
        check_no_dora(layer, adapter)
        deltas.append(shares[adapter] * layer.get_delta_weight(adapter).float())
    return sum(deltas[1:], deltas[0]) if deltas else None


def adapted_weight(layer: Any) -> str:
    """Return the name that a peft layer's weight has in its base layer; of fused experts it is a parameter's."""
    return getattr(layer, "parameter_name", "weight")


def check_no_dora(layer: Any, adapter: str) -> None:
    """Raise ConfigError if an adapter of a peft layer is a DoRA, whose change of the weight is no sum with it."""
    if layer.use_dora.get(adapter):
        raise ConfigError(f"the adapter {adapter!r} is a DoRA, which is not merged here: use the engine 'transformers'")


def check_own_weights(model: nn.Module) -> None:
    """Raise ConfigError if layers with adapters of their own share a weight, as Zamba 2's do: no file can hold both."""
    seen: dict[int, str] = {}
    for name, layer in tuner_layers(model):
        weight = id(getattr(layer.get_base_layer(), adapted_weight(layer)))
        if (other := seen.setdefault(weight, name)) != name and adapted_weight(layer) == "weight":
            raise ConfigError(
                f"{other} and {name} share a weight, but not their adapters: use the engine 'transformers'"
            )


def added_to_weights(model: nn.Module, shares: Mapping[str, float]) -> dict[str, Tensor]:
    """Return what these shares of adapters add to each weight that they change, by transformers' names, in float32."""
    check_own_weights(model)
    added: dict[str, Tensor] = {}
    for name, layer in tuner_layers(model):
        if (delta := lora_delta(layer, shares)) is not None:
            place = name.replace(".base_layer", "")
            added[f"{place}.{adapted_weight(layer)}"] = delta
    return added


@torch.no_grad()
def merged_copy(model: Any, shares: Mapping[str, float]) -> Any:
    """Return a copy of a causal LM without adapters, with these shares merged; it shares all weights not changed."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, shared)
    for name, layer in reversed(tuner_layers(twin)):  # of two around the same experts, the inner one first
        base, weight = layer.get_base_layer(), adapted_weight(layer)
        if (delta := lora_delta(layer, shares)) is not None:
            own = getattr(base, weight)
            setattr(base, weight, nn.Parameter(own + delta.to(own.dtype), requires_grad=False))
        parent, _, last = name.rpartition(".")
        setattr(twin.get_submodule(parent), last, base)
    return twin

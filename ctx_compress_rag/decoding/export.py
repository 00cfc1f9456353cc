"""Write a bundle's decoder and adapters as files for a vLLM server."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.bundle.files import ADAPTER_FILE, DECODER_FOLDER, WEIGHTS_FILE
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.methods.base.config import TuneConfig, lora_config
from ctx_compress_rag.methods.base.reader import Reader
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.models.identity import write_decoder
from ctx_compress_rag.models.inputs import reads_tables_by_layer
from ctx_compress_rag.models.layers import PEFT_PREFIX, adapted_weight, check_no_dora, check_own_weights, tuner_layers
from ctx_compress_rag.prompt import Side

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values of vLLM's --max-lora-rank


def plain_reader(bundle: Bundle, engine: str) -> Reader:
    """Return `bundle.reader`; raise ConfigError if it changes the decoder's layers, or if they look up token ids."""
    if reads_tables_by_layer(config := bundle.backbone.config.get_text_config()):
        raise ConfigError(
            f"bundle {bundle.config.name!r}: layers of its decoder ({config.model_type}) look up token ids, which "
            f"{engine} cannot do beside slots: use the engine 'transformers'"
        )
    if type(bundle.reader) is not Reader:
        raise ConfigError(
            f"bundle {bundle.config.name!r}: {bundle.config.method.name} changes the decoder's layers as it reads, "
            f"which {engine} cannot do: use the engine 'transformers'"
        )
    return bundle.reader


def vllm_models(bundle: Bundle) -> dict[Side, str]:
    """Return each side's model on a vLLM server, the bundle's name if unadapted; ConfigError if none can run it."""
    reader, name = plain_reader(bundle, "a server"), bundle.config.name
    if reader.tune.mode == "full":
        raise ConfigError(
            f"bundle {name!r}: its reader is a decoder of its own, besides the one that reads text, and a server "
            "has only one: train the reader with LoRA, or use the engine 'transformers'"
        )
    return {side: "-".join([name, *bundle.adapter_shares(side)]) for side in bundle.sides}


def export_for_vllm(bundle: Bundle, folder: str | Path) -> list[str]:
    """Write decoder and adapters for vLLM, each into a subfolder; return the words of the command that serves them."""
    models, backbone, folder = vllm_models(bundle), bundle.backbone, Path(folder)
    if not backbone.inputs.vectors_suffice:  # vLLM's Falcon-H1 scales vectors, transformers' does not
        raise ConfigError(
            f"bundle {bundle.config.name!r}: its decoder scales embeddings of tokens, but not slots, and vLLM scales "
            "both: use the engine 'transformers'"
        )
    if any(adapted_weight(layer) != "weight" for _, layer in tuner_layers(backbone.model)):
        raise ConfigError(
            f"bundle {bundle.config.name!r}: its adapters change fused experts, for which vLLM has none: leave experts "
            "out of target_modules, or use the engine 'transformers'"
        )
    check_own_weights(backbone.model)
    decoder = folder / DECODER_FOLDER
    decoder.mkdir(parents=True, exist_ok=True)
    write_decoder(backbone.model, bundle.tokenizer, decoder)
    save_file(backbone.own_state(), decoder / WEIGHTS_FILE, metadata={"format": "pt"})
    command = ["vllm", "serve", str(decoder), "--served-model-name", bundle.config.name]
    command += ["--enable-prompt-embeds", "--dtype", vllm_dtype_name(backbone.model.dtype)]
    if backbone.window is not None:
        command += ["--max-model-len", str(backbone.window)]
    # In JSON, a small decoder that may write blank lines writes nothing else; only a backend that is chosen with the
    # server forbids them.
    command += ["--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}']
    adapters = {}
    targets: set[str] = set()
    rank = 0
    for side, model in models.items():
        if shares := bundle.adapter_shares(side):
            adapters[model] = place = folder / "-".join(shares)
            place.mkdir(exist_ok=True)
            state = _joined(backbone, shares)
            save_file(state, place / ADAPTER_FILE)
            own_rank = max(len(value) for key, value in state.items() if ".lora_A." in key)
            own_targets = {key.split(".lora_")[0].rpartition(".")[2] for key in state}
            tune = TuneConfig(rank=own_rank, alpha=own_rank, target_modules=sorted(own_targets))
            lora_config(tune).save_pretrained(str(place))
            rank, targets = max(rank, own_rank), targets | own_targets
    if adapters:
        # With vLLM's default targets, prompt embeddings and LoRA together crash its engine.
        command += ["--enable-lora", "--max-lora-rank", str(min(each for each in _RANKS if each >= rank))]
        # One place more than adapters: on a CPU, vLLM takes the number -1 of a prompt without adapter for the last
        # place, and in a mixed batch would read that prompt with the adapter in this place.
        command += ["--max-loras", str(len(adapters) + 1), "--lora-target-modules", *sorted(targets)]
        command += ["--lora-modules", *(f"{model}={place}" for model, place in adapters.items())]
    return command


def _joined(backbone: Backbone, shares: Mapping[str, float]) -> dict[str, Tensor]:
    """Return one LoRA that adds these shares of adapters to the weights; its alpha is its rank, the sum of theirs."""
    parts: dict[str, list[Tensor]] = {}
    for adapter, share in shares.items():
        for key, matrix in backbone.adapter_state(adapter).items():
            layer = backbone.model.get_submodule(key.removeprefix(PEFT_PREFIX).split(".lora_")[0])
            check_no_dora(layer, adapter)
            scale = share * layer.scaling[adapter] if ".lora_B." in key else 1.0
            parts.setdefault(key, []).append(scale * matrix)
    return {key: torch.cat(part, 1 if ".lora_B." in key else 0) for key, part in parts.items()}


def vllm_dtype_name(dtype: torch.dtype) -> str:
    """Return vLLM's name of a dtype, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")

"""Write a bundle's decoder and adapters as files for a vLLM server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.bundle.files import ADAPTER_FILE, DECODER_FOLDER, TEACHER, WEIGHTS_FILE
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.methods.base.reader import Reader
from ctx_compress_rag.models.identity import write_decoder

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values of vLLM's --max-lora-rank


@dataclass(frozen=True)
class VllmModelNames:
    """Names of a bundle's models on a vLLM server; the bundle's own name stands for the decoder without adapters."""

    text: str  # reads prompts without slots
    soft: str  # reads prompts with slots
    adapters: Mapping[str, str]  # from a name on the server to the adapter's name in the backbone


def plain_reader(bundle: Bundle, engine: str) -> Reader:
    """Return `bundle.reader`; raise ConfigError if it changes the decoder's layers, which `engine` cannot do."""
    if type(bundle.reader) is not Reader:
        raise ConfigError(
            f"bundle {bundle.config.name!r}: {bundle.config.method.name} changes the decoder's layers as it reads, "
            f"which {engine} cannot do: use the engine 'transformers'"
        )
    return bundle.reader


def vllm_model_names(bundle: Bundle) -> VllmModelNames:
    """Return a bundle's model names on a vLLM server, for text and for slots; raise ConfigError if none can run it."""
    reader, name = plain_reader(bundle, "a server"), bundle.config.name
    if reader.tune.mode == "full":
        raise ConfigError(
            f"bundle {name!r}: its reader is a decoder of its own, besides the one that reads text, and a server "
            "has only one: train the reader with LoRA, or use the engine 'transformers'"
        )
    adapters = {}
    text = soft = name
    if reader.tune.mode == "lora":
        soft = f"{name}-{reader.side}"
        adapters[soft] = reader.side
    if TEACHER in bundle.backbone.adapters:
        text = f"{name}-{TEACHER}"
        adapters[text] = TEACHER
    return VllmModelNames(text, soft, adapters)


def export_for_vllm(bundle: Bundle, folder: str | Path) -> list[str]:
    """Write decoder and adapters for vLLM, each into a subfolder; return the words of the command that serves them."""
    names, backbone, folder = vllm_model_names(bundle), bundle.backbone, Path(folder)
    decoder = folder / DECODER_FOLDER
    decoder.mkdir(parents=True, exist_ok=True)
    write_decoder(backbone.model, bundle.tokenizer, decoder)
    backbone.model.generation_config.save_pretrained(decoder)
    save_file(backbone.own_state(), decoder / WEIGHTS_FILE, metadata={"format": "pt"})
    command = ["vllm", "serve", str(decoder), "--served-model-name", bundle.config.name]
    command += ["--enable-prompt-embeds", "--dtype", vllm_dtype_name(backbone.model.dtype)]
    if backbone.window is not None:
        command += ["--max-model-len", str(backbone.window)]
    # In JSON, a small decoder that may write blank lines writes nothing else; only a backend that is chosen with the
    # server forbids them.
    command += ["--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}']
    if names.adapters:
        targets: set[str] = set()
        rank = 0
        for adapter in names.adapters.values():
            (folder / adapter).mkdir(exist_ok=True)
            state = backbone.adapter_state(adapter)
            save_file(state, folder / adapter / ADAPTER_FILE)
            backbone.save_adapter_config(adapter, folder / adapter)
            targets |= {key.split(".lora_")[0].rpartition(".")[2] for key in state}
            rank = max(rank, *(len(value) for key, value in state.items() if ".lora_A." in key))
        # With vLLM's default targets, prompt embeddings and LoRA together crash its engine.
        command += ["--enable-lora", "--max-lora-rank", str(min(each for each in _RANKS if each >= rank))]
        # One place more than adapters: on a CPU, vLLM takes the number -1 of a prompt without adapter for the last
        # place, and in a mixed batch would read that prompt with the adapter in this place.
        command += ["--max-loras", str(len(names.adapters) + 1), "--lora-target-modules", *sorted(targets)]
        command += ["--lora-modules", *(f"{name}={folder / each}" for name, each in names.adapters.items())]
    return command


def vllm_dtype_name(dtype: torch.dtype) -> str:
    """Return vLLM's name of a dtype, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")

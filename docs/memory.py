"""The table of docs/larger_decoders.md, memory of each of eight GPUs: python docs/memory.py prints it.

Counts the weights of a decoder of Llama-3.1-8B's shape, which are never made.
"""

from __future__ import annotations

import sys

import torch
from peft import LoraConfig, inject_adapter_in_model
from transformers import LlamaConfig, LlamaForCausalLM

GPUS = 8
FROZEN, VALUE, TRAINED = 2, 4, 16  # bytes of a number: in bfloat16, in float32, with its gradient and two Adam states
SHAPE = LlamaConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    tie_word_embeddings=False,
)


def numbers() -> tuple[int, int, int, int]:
    """Numbers in all layers, in the embeddings, in the head with the last norm, and in a LoRA adapter of rank 16."""
    with torch.device("meta"):
        model = LlamaForCausalLM(SHAPE)
        own = {name: p.numel() for name, p in model.named_parameters()}
        inject_adapter_in_model(LoraConfig(r=16, target_modules="all-linear"), model)
    layers = sum(count for name, count in own.items() if ".layers." in name)
    embeddings = own["model.embed_tokens.weight"]
    adapter = sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)
    return layers, embeddings, sum(own.values()) - layers - embeddings, adapter


def row(name: str, frozen: tuple[int, int], trained: tuple[int, int], layer: float, bundle: bool) -> str:
    """Of numbers inside and outside of layers: memory whole, and what each GPU has of it.

    Args:
        name: what is trained.
        frozen: numbers inside of layers and outside.
        trained: the same.
        layer: bytes of a layer that is gathered, and of its gradient.
        bundle: whether a bundle is trained.
    """
    whole = sum(frozen) * FROZEN + sum(trained) * TRAINED
    cells = [
        whole,
        whole - frozen[0] * FROZEN * (1 - 1 / GPUS) if bundle else None,
        frozen[0] * FROZEN / GPUS + frozen[1] * FROZEN + sum(trained) * TRAINED / GPUS,
        trained[1] * 2 * VALUE + layer,
        sum(frozen) * FROZEN + sum(trained) * VALUE,
    ]
    return f"| {name} | " + " | ".join("" if cell is None else f"{cell / 1e9:.1f} GB" for cell in cells) + " |"


def table() -> str:
    """The table, as Markdown."""
    layers, embeddings, head, adapter = numbers()
    each = layers / SHAPE.num_hidden_layers
    # The layer in use and the next one; of one that is trained whole, the gradient, too.
    frozen_layer, trained_layer = 2 * each * FROZEN, 3 * each * VALUE
    outside = embeddings + head
    both = (2 * layers, head + SHAPE.hidden_size)  # the encoder has a last norm, too
    lines = [
        "| training | whole | `shard: frozen` | `shard: all` | and within a step | while it is loaded |",
        "|---|---|---|---|---|---|",
        row("teacher, LoRA", (layers, outside), (adapter, 0), frozen_layer, False),
        row("teacher, `mode: full`", (0, 0), (layers, outside), trained_layer, False),
        row("mean pooling, LoRA", (layers, outside), (2 * adapter, 0), frozen_layer, True),
        row("mean pooling or RAM, `mode: full`", (layers, outside), both, trained_layer, True),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table())

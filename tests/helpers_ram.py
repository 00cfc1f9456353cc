"""Tiny RAM bundles, and the paper's equations written out for them, token by token, in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ctx_compress_rag.backbone import Backbone
from ctx_compress_rag.bundle import Bundle
from ctx_compress_rag.config import BundleConfig, RamConfig

FROZEN = {"mode": "frozen"}


def ram_bundle(tokenizer: Any, seed: int = 0, segment_tokens: int = 4, **method: Any) -> Bundle:
    """A RAM bundle with random weights, large enough that what each input says shows; keywords are RamConfig's."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(shape).eval()
    with torch.no_grad():
        for name, weight in model.model.layers.named_parameters():
            if "norm" not in name:
                weight.mul_(8)
    config = BundleConfig(
        name="tiny",
        method=RamConfig(segment_tokens=segment_tokens, **method),
        base_ratio=segment_tokens,
        ratios=[2, 4, 8],
        max_tokens=16 * segment_tokens,
    )
    bundle = Bundle.build(config, Backbone(model, tokenizer))
    bundle.reader.initialise(1.0)
    return bundle


def plain_ids(bundle: Bundle, text: str) -> list[int]:
    ids: list[int] = bundle.tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def plain_segments(bundle: Bundle, text: str) -> list[list[int]]:
    """A passage's token ids in equal chunks."""
    size, ids = bundle.config.base_ratio, plain_ids(bundle, text)
    return [ids[i : i + size] for i in range(0, len(ids), size)]


def plain_states(encoder: Any, ids: Sequence[int]) -> Tensor:
    """Last hidden states of a text read alone, by transformers itself: (tokens, dim), float64."""
    with torch.no_grad():
        hidden: Tensor = encoder(input_ids=torch.tensor([list(ids)]), use_cache=False).last_hidden_state[0]
    return hidden.double()


def plain_cosine(a: Tensor, b: Tensor) -> float:
    return float(sum(a * b)) / math.sqrt(float(sum(a * a)) * float(sum(b * b)))


def plain_mean(states: Tensor) -> Tensor:
    """Eq. 1."""
    total = torch.zeros(states.shape[1], dtype=torch.float64)
    for state in states:
        total = total + state
    return total / len(states)


def plain_skim(states: Tensor, question: Tensor) -> Tensor:
    """Eq. 4."""
    weights = [math.exp(plain_cosine(state, question)) for state in states]
    total = torch.zeros(states.shape[1], dtype=torch.float64)
    for weight, state in zip(weights, states, strict=True):
        total = total + weight / sum(weights) * state
    return total


def plain_choice(question: Tensor, means: Sequence[Tensor], tokens: int, ratio: int, size: int) -> list[bool]:
    """Eq. 2 and 3: the segments of the k largest probabilities."""
    exponentials = [math.exp(plain_cosine(question, mean) / 0.1) for mean in means]
    probabilities = [e / sum(exponentials) for e in exponentials]
    k = math.floor(tokens / (ratio * size))
    best = sorted(range(len(means)), key=lambda i: -probabilities[i])[:k]
    return [i in best for i in range(len(means))]

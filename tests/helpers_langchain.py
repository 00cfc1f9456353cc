"""A tiny bundle with something to say: what it answers depends on all of its prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def talkative_bundle(make_tiny_bundle: Callable[..., Any]) -> Any:
    """A tiny bundle whose random decoder answers in text that never ends by itself.

    At its initial weights a decoder with tied embeddings repeats the prompt's last token, which is a special
    one. Larger layers outweigh the residual stream; special tokens without an embedding are never the likeliest.
    """
    bundle = make_tiny_bundle(seed=1)
    with torch.no_grad():
        for name, weight in bundle.backbone.model.model.layers.named_parameters():
            if "norm" not in name and "lora" not in name:
                weight.mul_(15)
        bundle.backbone.embeddings.weight[bundle.tokenizer.all_special_ids] = 0
    return bundle

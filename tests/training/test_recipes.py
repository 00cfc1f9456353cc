"""Shipped recipes hold the papers' values."""

from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from ctx_compress_rag.training.recipe import load_recipe

Values = dict[str, Any]


def optim(steps: int, batch_size: int, learning_rate: float, **more: Any) -> Values:
    own = {"steps": steps, "batch_size": batch_size, "learning_rate": learning_rate, **more}
    return {f"optim.{key}": value for key, value in own.items()}


LINEAR = {"final_learning_rate": 0, "schedule": "linear", "weight_decay": 0}
# Simple Context Compression, table 6.
POOLING: Values = {
    **optim(48_000, 32, 2e-4, final_learning_rate=2e-5, warmup_ratio=0.05, betas=(0.9, 0.95), weight_decay=0),
    **{f"method.{side}.{key}": 16 for side in ("encoder", "decoder") for key in ("rank", "alpha")},
    "method.encoder.mode": "lora", "method.decoder.mode": "lora",
    "optim.clip_norm": 1, "ratios": [4, 8, 16, 32, 64, 128], "curriculum": [], "reconstruction_weight": 0,
    "data.max_context_tokens": 1024, "data.max_answer_tokens": 256,
}  # fmt: skip
# ComprExIT, table 7 and appendix A.4: an epoch of a billion tokens; table 4: of 516,819 questions.
COMPREXIT: Values = {"ratios": [4], "window": 512, "data.max_context_tokens": 512}
TABLE_7 = LINEAR | {"warmup_ratio": 0.05, "clip_norm": 20, "micro_batch_size": 16}
SIZES = dict.fromkeys(("method.gate_dim", "method.slot_dim", "method.transport_dim"), 256)
SIZES |= {"method.segment_tokens": 128, "method.iterations": 30, "data.max_answer_tokens": 128}
# ArcAligner, tables 5 and 6: the batch is that of all GPUs, and steps are one epoch.
LORA = {"method.lora.rank": 128, "method.lora.alpha": 32, "method.lora.dropout": 0.05}
RECONSTRUCTION = optim(200_000 // 256, 8 * 8 * 4, 2e-4, warmup_ratio=0.03, **LINEAR)
ANSWER = optim(90_447 // 64, 8 * 2 * 4, 2e-5, warmup_ratio=0.03, **LINEAR)
# Read As Human, section 4.1: one pass over the examples of five datasets; summaries of MultiNews keep their end.
RAM: Values = {
    **optim(5 * 20_000 // 32, 32, 1e-5, **LINEAR),
    "ratios": [2, 4, 8, 16, 32], "temperature": 0.1, "contrastive": True, "base_ratio": 50, "method.segment_tokens": 50,
    "method.encoder.mode": "full", "method.decoder.mode": "full",
    "data.max_context_tokens": 20_000, "data.max_answer_tokens": 2048,
}  # fmt: skip
PAPERS: dict[str, Values] = {
    "mean_pooling/compressor": POOLING,
    "compression_tokens/causal": POOLING | {"method.attention": "causal"},
    "compression_tokens/bidirectional": POOLING | {"method.attention": "bidirectional"},
    "comprexit/next_token": COMPREXIT | SIZES | optim(round(1e9 / 2048 / (512 + 128)), 2048, 1e-4, **TABLE_7),
    "comprexit/answer": COMPREXIT | optim(516_819 // 2048, 2048, 1e-4, **TABLE_7),
    "arcaligner/1_reconstruction": RECONSTRUCTION | LORA | {"method.loops": 0},
    "arcaligner/2_answer": ANSWER | {"method": None, "bundle": Path("runs/arcaligner/1_reconstruction/bundle")},
    "arcaligner/3_gates": ANSWER | LORA | {"method.loops": 3, "bundle": Path("runs/arcaligner/2_answer/bundle")},
    "ram/ram": RAM,
}


@pytest.mark.parametrize("name", PAPERS)
def test_shipped_recipes_hold_the_papers_values(name: str) -> None:
    recipe = load_recipe(name)
    assert {key: attrgetter(key)(recipe) for key in PAPERS[name]} == PAPERS[name]

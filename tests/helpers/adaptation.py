"""Demonstrations, and adapters with random factors, for tiny decoders."""

from pathlib import Path
from typing import Any

import torch

from ctx_compress_rag.adaptation.adapt import Demonstration
from ctx_compress_rag.adaptation.adapter import Adapter, qkv_projections
from ctx_compress_rag.adaptation.predicted import PredictedUpdate, PredictorConfig

DEMONSTRATIONS = [
    Demonstration(
        "Which pet does Orla Reedwen keep?",
        ("Orla Reedwen keeps a goat as a pet.", "Kormoor lies on the river Halen."),
        "a goat",
    ),
    Demonstration("Which river flows through Kormoor?", ("Kormoor lies on the river Halen.",), "the river Halen"),
    Demonstration(
        "What does Ivo Stormley like to eat?",
        ("Ivo Stormley likes to eat plum cake best of all. He keeps a crow.", "Ada Halson is a poet."),
        "plum cake",
    ),
]
QUESTIONS = [
    Demonstration("Which pet does Ivo Stormley keep?", ("Ivo Stormley keeps a crow as a pet.",), "a crow"),
    Demonstration("Where was Ada Halson born?", ("Ada Halson was born in Kormoor.", "Kormoor is old."), "Kormoor"),
    Demonstration("Who is the mayor of Kormoor?", ("The mayor of Kormoor is Vera Holmby.",), "Vera Holmby"),
]
PREDICTOR = PredictorConfig(inner_steps=2, inner_learning_rate=0.01, demonstrations=3, hidden=16, code=8)


def random_adapter(model: Any, rank: int, seed: int, size: float = 0.3, scale: float = 2.0) -> Adapter:
    """An adapter with normal factors for a decoder's Q/K/V projections."""
    return drawn(qkv_projections(model), rank, torch.Generator().manual_seed(seed), size, scale)


def drawn(shapes: Any, rank: int, generator: torch.Generator, size: float, scale: float, rows: int = 0) -> Adapter:
    """An adapter with normal factors for matrices of these widths."""
    lead = (rows,) if rows else ()
    a = {n: size * torch.randn(*lead, rank, d_in, generator=generator) for n, (d_in, _) in shapes.items()}
    b = {n: size * torch.randn(*lead, d_out, rank, generator=generator) for n, (_, d_out) in shapes.items()}
    return Adapter(a, b, scale)


def save_predictor(bundle: Any, folder: Path) -> Path:
    """A predictor of random weights, whose updates are large enough to change answers."""
    torch.manual_seed(3)
    made = PredictedUpdate.build(random_adapter(bundle.backbone.model, 4, seed=8), bundle, PREDICTOR)
    with torch.no_grad():
        for parameter in made.predictor.parameters():
            parameter.normal_(std=0.5)
    made.save_pretrained(folder)
    return folder


def plain_copy(model: Any) -> Any:
    """A transformers model of the same class with the same weights of its own, and no adapters."""
    copy = type(model)(model.config)
    state = {n.replace(".base_layer", ""): p.detach() for n, p in model.named_parameters() if "lora_" not in n}
    copy.load_state_dict(state, strict=False)
    copy.tie_weights()
    return copy.eval().requires_grad_(False)


def merged_copy(model: Any, adapter: Adapter) -> Any:
    """A plain copy whose weights hold the adapter's product, added in float64."""
    copy = plain_copy(model)
    for name in adapter.a:
        weight = copy.get_submodule(name).weight
        change = adapter.scale * adapter.b[name].double() @ adapter.a[name].double()
        weight.copy_(weight.double() + change)
    return copy

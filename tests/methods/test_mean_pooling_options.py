"""Mean pooling with the decoder's first layers, position vectors and a map that starts at zero."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PeftModel
from pydantic import ValidationError
from torch import Tensor
from transformers import AutoModelForCausalLM

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.methods.base.config import TuneConfig
from ctx_compress_rag.methods.mean_pooling.compressor import MeanPoolingCompressor
from ctx_compress_rag.methods.mean_pooling.config import MeanPoolingConfig
from ctx_compress_rag.models.backbone import Backbone
from helpers.architectures import NAMES, model, random_ids, tokenizer
from helpers.plain_llama import llama_layer, rms_norm

TEXTS = ["Orla Drumwell was born in Pellmouth, where she kept bees and wrote three books.", "Pellmouth is a town."]
OPTIONS: dict[str, Any] = {"layers": 1, "positions": 3, "embedding_skip": True, "hidden_map": True}
RANK, ALPHA = 4, 6
MODES = {
    "lora": TuneConfig(rank=RANK, alpha=ALPHA),
    "full": TuneConfig(mode="full"),
    "frozen": TuneConfig(mode="frozen"),
}


def widen(bundle: Bundle) -> Bundle:
    """Draw every weight anew, so that each one matters."""
    torch.manual_seed(8)
    with torch.no_grad():
        for module in (bundle.backbone.model, bundle.compressor, bundle.reader):
            for parameter in module.parameters():
                parameter.normal_(std=0.4)
    return bundle


@pytest.fixture(scope="module", params=MODES)
def bundle(request: pytest.FixtureRequest, make_tiny_bundle: Callable[..., Any]) -> Bundle:
    return widen(make_tiny_bundle(encoder=MODES[request.param], **OPTIONS))


# The equations, written anew


def plain_slots(bundle: Bundle, ids: list[int], ratio: int) -> Tensor:
    """What the options say, one step after the other, in float64, from nothing but named weights."""
    decoder = {name: value.double() for name, value in bundle.backbone.own_state().items()}
    embeddings = decoder["model.embed_tokens.weight"]
    own = {name: value.double() for name, value in bundle.compressor.saved_state().items()}
    layer = {
        name.removeprefix("model.layers.0."): value
        for name, value in decoder.items()
        if name.startswith("model.layers.0.")
    }
    norm = decoder["model.norm.weight"]
    if bundle.config.method.encoder.mode == "full":  # type: ignore[union-attr]
        layer = {n.removeprefix("layers.0."): value for n, value in own.items() if n.startswith("layers.0.")}
        norm = own["norm.weight"]
    if bundle.config.method.encoder.mode == "lora":  # type: ignore[union-attr]
        adapter = {n: value.double() for n, value in bundle.backbone.adapter_state("compressor").items()}
        for name in [name for name in layer if "proj" in name]:
            a, b = (
                adapter[f"base_model.model.model.layers.0.{name.removesuffix('.weight')}.lora_{side}.weight"]
                for side in "AB"
            )
            layer[name] = layer[name] + ALPHA / RANK * b @ a
    config = bundle.backbone.model.config
    embedded = embeddings[ids]
    x = llama_layer(
        embedded + own["positions"][[i % 3 for i in range(len(ids))]],
        config,
        lambda x, name: x @ layer[f"{name}.weight"].T,
        lambda x, name: rms_norm(x, layer[f"{name}.weight"], config.rms_norm_eps),
        torch.ones(len(ids), len(ids)).bool(),  # every token sees every token
    )
    h = rms_norm(x, norm, config.rms_norm_eps)
    h = h / h.pow(2).mean(-1, keepdim=True).sqrt()
    tokens = embedded + embeddings.pow(2).mean().sqrt() * h @ own["hidden_map.weight"].T
    return torch.stack([tokens[i : i + ratio].mean(0) for i in range(0, len(ids), ratio)])


@settings(max_examples=25, deadline=None)
@given(ids=st.lists(st.integers(5, 590), min_size=1, max_size=40), ratio=st.sampled_from([4, 8, 16]))
def test_slots_are_what_a_plain_computation_gives(bundle: Bundle, ids: list[int], ratio: int) -> None:
    [soft] = bundle.compressor.compress_ids([ids], ratio, 64, 8192)
    torch.testing.assert_close(soft.slots.double(), plain_slots(bundle, ids, ratio), atol=1e-3, rtol=1e-3)
    [base] = bundle.compressor.compress_ids([ids], 4, 64, 8192)
    torch.testing.assert_close(bundle.at_ratio(base, ratio).slots, soft.slots, atol=1e-4, rtol=1e-4)


def test_an_untrained_slot_is_the_mean_of_its_embeddings(make_tiny_bundle: Callable[..., Any]) -> None:
    made = make_tiny_bundle(**OPTIONS)
    ids = made.tokenizer(TEXTS[0], add_special_tokens=False)["input_ids"]
    [soft] = made.compress(TEXTS[:1])
    embedded = made.backbone.embeddings(torch.tensor(ids))
    means = torch.stack([embedded[i : i + 4].mean(0) for i in range(0, len(ids), 4)])
    torch.testing.assert_close(soft.slots, means)


@pytest.mark.parametrize("name", NAMES)
def test_in_every_architecture_the_first_layers_alone_are_run(name: str) -> None:
    """As many layers as there are give what the whole trunk gives; with fewer, the last one's weights count nothing."""

    def compressor(layers: int | None) -> MeanPoolingCompressor:
        frozen = TuneConfig(mode="frozen")
        return MeanPoolingCompressor(
            Backbone(model(name), tokenizer(name)), MeanPoolingConfig(encoder=frozen, decoder=frozen, layers=layers)
        )

    [ids] = random_ids(name, [12])
    batch = ids.unsqueeze(0), torch.ones(1, 12).long()
    with torch.no_grad():
        count = compressor(None).backbone.model.config.get_text_config().num_hidden_layers
        whole = compressor(None).hidden_states(*batch)
        assert torch.equal(compressor(count).hidden_states(*batch), whole)
        cut = compressor(count - 1)
        before = cut.hidden_states(*batch)
        assert (before - whole).abs().max() > 1e-3
        last = [p for n, p in cut.backbone.model.named_parameters() if f"layers.{count - 1}." in n]
        assert last
        for parameter in last:
            parameter.fill_(float("nan"))
        assert torch.equal(cut.hidden_states(*batch), before)
        assert cut.backbone.model(input_ids=batch[0]).logits.isnan().all(), "the decoder itself keeps all of its layers"


# What is trained and saved


def test_lora_lies_in_the_first_layers_alone_and_is_a_peft_adapter(
    make_tiny_bundle: Callable[..., Any], tmp_path: Path
) -> None:
    made = widen(make_tiny_bundle(encoder=MODES["lora"], **OPTIONS))
    assert {name.split(".layers.")[1][0] for name in made.backbone.adapter_state("compressor")} == {"0"}
    assert {name.split(".layers.")[1][0] for name in made.backbone.adapter_state("reader")} == {"0", "1"}
    made.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "decoder", dtype=torch.float32).eval()
    tuned = PeftModel.from_pretrained(plain, tmp_path / "compressor").eval()
    prompt = torch.arange(20, 50).unsqueeze(0)
    with torch.no_grad(), made.backbone.use("compressor") as ours:
        torch.testing.assert_close(tuned(input_ids=prompt).logits, ours(input_ids=prompt).logits, atol=1e-3, rtol=1e-3)


# The config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_map": True}, "needs embedding_skip: true"),
        ({"layers": 0}, "layers"),
        ({"positions": 0}, "positions"),
        ({"layers": 1, "encoder": {"target_modules": ".*q_proj"}}, "a list of names or all-linear, not '.*q_proj'"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        MeanPoolingConfig(**settings)


def test_more_layers_than_there_are_are_refused(make_tiny_bundle: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="layers=3: the decoder has only 2 layers"):
        make_tiny_bundle(layers=3)

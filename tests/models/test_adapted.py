"""A linear layer with adapters beside it, in float64."""

from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch.nn import functional as F

from ctx_compress_rag.models.adapted import AdaptedLinear
from ctx_compress_rag.models.backbone import Backbone
from helpers.models import tiny_llama


def adapted(tokenizer: Any, **options: Any) -> tuple[Backbone, Any]:
    """A decoder with the adapters a (plain, of alpha 3) and b (with `options`), and one of its layers."""
    backbone = Backbone(tiny_llama(tokenizer), tokenizer)
    for name, settings in (("a", {}), ("b", options)):
        own = LoraConfig(r=4, lora_alpha=3, target_modules=["q_proj"], init_lora_weights=False, **settings)
        backbone.add_adapter(name, lambda own=own: own)
    return backbone, backbone.model.model.layers[0].self_attn.q_proj


def test_active_adapters_add_their_share_of_two_products(tiny_tokenizer: Any) -> None:
    backbone, layer = adapted(tiny_tokenizer)
    x = torch.randn(2, 5, layer.in_features)
    with torch.no_grad():
        delta = {n: layer.lora_B[n].weight.double() @ layer.lora_A[n].weight.double() for n in "ab"}
        plain = F.linear(x, layer.base_layer.weight)
        for shares in ({}, {"a": 1.0}, {"a": 0.25, "b": 0.75}, {"b": 1.0}):
            with backbone.use(shares):
                weight = layer.base_layer.weight.double() + sum(0.75 * s * delta[n] for n, s in shares.items())
                torch.testing.assert_close(layer(x).double(), F.linear(x.double(), weight), rtol=1e-5, atol=1e-6)
                with backbone.use("a"):  # and then those of before
                    pass
                torch.testing.assert_close(layer(x).double(), F.linear(x.double(), weight), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(layer(x), plain, rtol=0, atol=0)
    assert isinstance(layer, AdaptedLinear) and not any(p.requires_grad for p in backbone.model.parameters())


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_dropout": 0.5}])
def test_what_is_not_plain_lora_stays_peft_s(options: dict[str, Any], tiny_tokenizer: Any) -> None:
    backbone, layer = adapted(tiny_tokenizer, **options)
    x = torch.randn(3, layer.in_features)
    assert not isinstance(layer, AdaptedLinear)
    weight = layer.base_layer.weight + 0.25 * layer.get_delta_weight("a") + 0.75 * layer.get_delta_weight("b")
    with torch.no_grad(), backbone.use({"a": 0.25, "b": 0.75}):
        if "use_dora" not in options:
            torch.testing.assert_close(layer(x), F.linear(x, weight), rtol=1e-4, atol=1e-5)
    with torch.no_grad(), backbone.use("b"):
        expected = F.linear(x, layer.base_layer.weight + layer.get_delta_weight("b"))
        if "use_dora" in options:
            weight = layer.base_layer.weight + layer.get_delta_weight("b")
            size = layer.lora_magnitude_vector["b"].weight / weight.norm(dim=1)
            expected = F.linear(x, size.unsqueeze(1) * weight)
        torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)


def test_a_trained_adapter_stays_trainable_whatever_is_active(tiny_tokenizer: Any) -> None:
    backbone, _ = adapted(tiny_tokenizer, lora_dropout=0.5)
    trained = backbone.train_adapter("b")
    with backbone.use("a"):
        free = {id(p) for p in backbone.model.parameters() if p.requires_grad}
    assert free == {id(p) for p in trained} == {id(p) for p in backbone.model.parameters() if p.requires_grad}

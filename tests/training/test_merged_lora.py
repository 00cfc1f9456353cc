"""LoRA layers as one product: what peft computes, forward and backward."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from ctx_compress_rag.training.engine.merged_lora import merge_lora


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 5)
        self.second = nn.Linear(5, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return out


def _adapted(**settings: object) -> nn.Module:
    torch.manual_seed(3)
    config = LoraConfig(r=3, lora_alpha=5, target_modules=["first", "second"], init_lora_weights=False, **settings)
    model: nn.Module = get_peft_model(_Net(), config).double()
    model.add_adapter("other", config)  # type: ignore[operator]
    return model.double()


def _outcome(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_(True)
    out = model(x)
    out.square().sum().backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    gradients = [p.grad for p in trained if p.grad is not None]
    model.zero_grad()
    return [out.detach(), x.grad, *gradients]  # type: ignore[list-item]


@pytest.mark.parametrize("settings", [{}, {"lora_bias": True}, {"use_dora": True}, {"use_rslora": True}])
@pytest.mark.parametrize("adapter", ["default", "other"])
def test_output_and_gradients_are_those_of_peft(settings: dict[str, object], adapter: str) -> None:
    model = _adapted(**settings)
    model.set_adapter(adapter)  # type: ignore[operator]
    x = torch.randn(2, 4, 7, dtype=torch.double)
    wanted = _outcome(model, x)
    merge_lora(model)
    for got, want in zip(_outcome(model, x), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    with model.disable_adapter():  # type: ignore[operator]
        torch.testing.assert_close(model(x), model.base_model.model(x))  # type: ignore[operator, union-attr]


def test_dropout_is_still_dropped() -> None:
    model = _adapted(lora_dropout=0.5)
    merge_lora(model)
    x = torch.randn(3, 7, dtype=torch.double)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


def test_autocast_multiplies_in_its_own_precision() -> None:
    model = _adapted().float()
    x = torch.randn(64, 7)
    wanted = model(x)
    merge_lora(model)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), wanted, rtol=0.05, atol=0.05 * float(wanted.abs().max()))

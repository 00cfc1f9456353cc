"""Muon for the weight matrices and AdamW for the rest, as one optimiser."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from ctx_compress_rag.training.engine.parameters import trained


class MuonAdamW(Optimizer):
    """Trains the matrices of linear layers by Muon (Jordan et al. 2024) and everything else by AdamW.

    Embeddings and the output head are AdamW's, as Muon's authors advise.

    Args:
        model: its parameters that require gradients are trained.
        muon_learning_rate: for the matrices; updates are scaled to the size of AdamW's, so that rates are comparable.
        learning_rate, betas: for AdamW.
        weight_decay: for both.
    """

    def __init__(
        self,
        model: nn.Module,
        muon_learning_rate: float,
        learning_rate: float,
        betas: tuple[float, float],
        weight_decay: float,
    ) -> None:
        parameters = trained(model)
        linear = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
        linear -= {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}  # a tied head
        matrices = [p for name, p in parameters.items() if id(p) in linear and not name.endswith("lm_head.weight")]
        taken = {id(p) for p in matrices}
        rest = [p for p in parameters.values() if id(p) not in taken]
        self._parts: list[Optimizer] = []
        if matrices:
            muon = Muon(matrices, lr=muon_learning_rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
            self._parts.append(muon)
        if rest:
            self._parts.append(AdamW(rest, lr=learning_rate, betas=betas, weight_decay=weight_decay, fused=True))
        # The groups are the parts' own objects, so that a rate that a scheduler sets here is also set there.
        # Schedulers express the lowest rate as a share of the rate in the defaults.
        super().__init__([group for part in self._parts for group in part.param_groups], {"lr": learning_rate})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Make a step with both."""
        loss = closure() if closure is not None else None
        for part in self._parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The states of both."""
        return {"parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for part, state in zip(self._parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self._parts for group in part.param_groups]

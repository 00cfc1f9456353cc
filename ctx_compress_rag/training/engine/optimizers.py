"""The trained parameters (those that require gradients): optimizers, average, and each step's learning rate."""

import math

from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.swa_utils import AveragedModel

from ctx_compress_rag.training.config import OptimConfig


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def make_optimizers(model: nn.Module, optim: OptimConfig) -> list[Optimizer]:
    """Return AdamW for the trained parameters; with `muon_learning_rate`, Muon (Jordan et al. 2024) for their matrices.

    As Muon's authors advise, AdamW keeps embeddings and the output head. Muon's updates are scaled to the size of
    AdamW's, so that the two learning rates are comparable.
    """
    matrices = _matrices(model) if optim.muon_learning_rate is not None else {}
    rest = [p for name, p in trained_parameters(model).items() if name not in matrices]
    decay = optim.weight_decay
    # Biases and norms do not decay, as is usual; beside Muon they do.
    groups = [
        {"params": [p for p in rest if p.ndim > 1 or matrices], "weight_decay": decay},
        {"params": [p for p in rest if p.ndim <= 1 and not matrices], "weight_decay": 0.0},
    ]
    made: list[Optimizer] = []
    if rest:
        made.append(AdamW([g for g in groups if g["params"]], lr=optim.learning_rate, betas=optim.betas, fused=True))
    if optim.muon_learning_rate is not None and matrices:
        rate, weights = optim.muon_learning_rate, list(matrices.values())
        made.append(Muon(weights, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"))
    for optimizer in made:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return made


def _matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return trained weights of linear layers by name, without the head, even one that is tied to the embeddings."""
    linear = {m.weight for m in model.modules() if isinstance(m, nn.Linear)}
    linear -= {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    return {
        name: p for name, p in trained_parameters(model).items() if p in linear and not name.endswith("lm_head.weight")
    }


def set_learning_rate(optimizers: list[Optimizer], optim: OptimConfig, step: int) -> float:
    """Set the learning rates of a step, counted from 0: they rise linearly, and fall by `schedule`. Return AdamW's."""
    warmup = round(optim.warmup_ratio * optim.steps)
    progress = (step - warmup) / max(1, optim.steps - warmup)
    left = 1 - progress if optim.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    final = optim.final_learning_rate / optim.learning_rate
    share = step / warmup if step < warmup else final + (1 - final) * left
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * share
    return optim.learning_rate * share


def weight_average(weights: nn.ParameterList, decay: float) -> AveragedModel:
    """Return an exponential moving average of weights (Polyak and Juditsky 1992); a step keeps the share `decay`.

    For the first 1 / (1 - decay) steps it is the mean of all steps' weights, so that the first weights do not linger.
    """

    def mean(average: Tensor, weight: Tensor, count: Tensor | int) -> Tensor:
        return average.lerp(weight, 1 - min(decay, float(count / (count + 1))))

    return AveragedModel(weights, avg_fn=mean)

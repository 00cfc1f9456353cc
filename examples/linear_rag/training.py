"""Training a linear self-attention layer on fresh synthetic tasks (In-Context Optimization, eq. 21)."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from linear_rag.attention import LinearAttention
from linear_rag.comparison import trained
from linear_rag.nonlinear import after
from linear_rag.tasks import Interface

Freedom = Literal["all", "writes y", "lemma"]


def train_layer(
    interface: Interface,
    *,
    depth: int = 1,
    steps: int = 1000,
    batch: int = 512,
    learning_rate: float = 0.01,
    seed: int = 0,
    freedom: Freedom = "writes y",
    watch: Callable[[int, LinearAttention], None] = lambda step, layer: None,
    every: int = 100,
    embedding: nn.Module | None = None,
) -> LinearAttention:
    """Train `depth` layers with shared weights, initially small and random, with Adam and a cosine schedule.

    The paper uses minibatch SGD (section 4.1, appendix C.1); with Adam 1,000 steps are enough. With fewer than about
    six features, the layer stays on a plateau for half of all seeds.

    Args:
        interface: draws a fresh batch of tasks for each step.
        depth: how many times the layer is applied.
        steps: optimizer steps.
        batch: tasks per step.
        learning_rate: initial learning rate.
        seed: seed of the weights and the tasks.
        freedom: which weights are trained; the others stay zero. "all"; "writes y": P writes only to y, as in lemma 1;
            "lemma": W_Q and W_K do not read y either, as in eq. 9. For a single layer, the first two are the same,
            because only the query's y is read.
        watch: called with the step and the layer every `every` steps, first before training.
        every: see `watch`.
        embedding: trained with the layer, which reads embedded inputs (dot-product interface). None reads raw inputs.
    """
    generator = Generator().manual_seed(seed)
    width = interface.sample(1, generator).context.shape[-1]
    is_y = torch.arange(width) == width - 1
    reads = torch.outer(~is_y, ~is_y) if freedom == "lemma" else torch.ones(width, width)
    writes = torch.ones(width, 1) if freedom == "all" else is_y[:, None]
    scale = 0.25 * width**-0.5
    weights = [(scale * torch.randn(width, width, generator=generator)).requires_grad_() for _ in range(4)]

    def layer(query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> LinearAttention:
        return LinearAttention(query * reads, key * reads, value, output * writes)

    parameters = weights if embedding is None else [*weights, *embedding.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        if step % every == 0:
            watch(step, layer(*[w.detach().clone() for w in weights]))
        tasks = interface.sample(batch, generator)
        predictor = trained(layer(*weights), depth)
        if embedding is not None:
            predictor = after(embedding, predictor)
        error = F.mse_loss(predictor(tasks, tasks.x), tasks.target)
        optimizer.zero_grad()
        error.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
    result = layer(*[w.detach().clone() for w in weights])
    watch(steps, result)
    return result

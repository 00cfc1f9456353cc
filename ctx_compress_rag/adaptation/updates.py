"""The update of gradient descent (In-Context Optimization, section 5.1, eq. 8), and the loss that compares updates."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ctx_compress_rag.adaptation.adapt import open_adapted_model
from ctx_compress_rag.adaptation.adapter import Adapter
from ctx_compress_rag.bundle.plain_decoder import PlainDecoder
from ctx_compress_rag.decoding.splice import answer_token_logits, splice_prompts
from ctx_compress_rag.prompt import Prompt


@dataclass(frozen=True, eq=False)
class GradientUpdate:
    """The change of `base`'s factors by gradient descent: `a` (contexts, rank, d_in), `b` (contexts, d_out, rank)."""

    base: Adapter
    a: dict[str, Tensor]
    b: dict[str, Tensor]

    def adapted(self) -> Adapter:
        """Return the base adapter as gradient descent left it, with a row for each context."""
        return Adapter(
            {n: self.base.a[n] + change for n, change in self.a.items()},
            {n: self.base.b[n] + change for n, change in self.b.items()},
            self.base.scale,
        )

    def change(self) -> Adapter:
        """Return the change of each projection's weight after K steps, W^(K) - W0 (RAG-GD, eq. 8), at twice the rank.

        The steps move the factors, and the product moves by
            s (b + db)(a + da) - s b a = s [db, b] @ [a + da; da].
        The right side avoids the difference of two large products.
        """
        after = self.adapted()
        return Adapter(
            {n: torch.cat([after.a[n], change], dim=-2) for n, change in self.a.items()},
            {n: torch.cat([change, self.base.b[n].expand_as(change)], dim=-1) for n, change in self.b.items()},
            self.base.scale,
        )


def answer_losses(decoder: PlainDecoder, contexts: Sequence[Sequence[Prompt]], adapter: Adapter | None) -> Tensor:
    """Return the mean cross-entropy of each context's answer tokens, given questions and passages: (contexts,).

    An `adapter` with rows has a row for each context. None is no adapter.
    """
    rows = [row for context in contexts for row in context]
    owners = torch.tensor([number for number, context in enumerate(contexts) for _ in context])
    batch = splice_prompts(decoder.backbone.inputs, rows)
    own = None if adapter is None else adapter.rows(owners)
    with open_adapted_model(decoder.text_decoder(), own) as model:
        logits, ids = answer_token_logits(model, batch, rows)
    losses = F.cross_entropy(logits, ids, reduction="none")
    tokens = torch.tensor([int(row.answers.sum()) for row in rows])
    of_token = owners.repeat_interleave(tokens).to(losses.device)
    sums = torch.zeros(len(contexts), device=losses.device).index_add(0, of_token, losses)
    return sums / torch.bincount(of_token, minlength=len(contexts))


def sgd_update(
    decoder: PlainDecoder, contexts: Sequence[Sequence[Prompt]], base: Adapter, steps: int, learning_rate: float
) -> GradientUpdate:
    """Return the update of K steps of plain SGD on each context's answer loss, from the base adapter's factors (eq. 8).

    Gradients are taken with respect to the adapter's factors alone (appendix G). Contexts share forward passes but have
    their own factors (rows), so they do not affect each other.
    """
    count = len(contexts)
    a = {n: torch.zeros(count, *t.shape, device=t.device) for n, t in base.a.items()}
    b = {n: torch.zeros(count, *t.shape, device=t.device) for n, t in base.b.items()}
    moved = [*a.values(), *b.values()]
    for _ in range(steps):
        with torch.enable_grad():
            for change in moved:
                change.requires_grad_(True)
            # The sum gives each context's factors the gradient of its own loss only.
            loss = answer_losses(decoder, contexts, GradientUpdate(base, a, b).adapted()).sum()
            gradients = torch.autograd.grad(loss, moved)
        with torch.no_grad():
            for change, gradient in zip(moved, gradients, strict=True):
                change.requires_grad_(False).sub_(gradient, alpha=learning_rate)
    return GradientUpdate(base, a, b)


def update_inner_products(one: Adapter, other: Adapter) -> dict[str, Tensor]:
    """Return the Frobenius inner products of two adapters' rows, by projection's name: (rows,), () without rows.

    <b a, b' a'> = sum((b^T b') * (a a'^T)), so that no d x d matrix is formed.
    """
    scale = one.scale * other.scale
    return {n: scale * ((one.b[n].mT @ other.b[n]) * (one.a[n] @ other.a[n].mT)).sum(dim=(-2, -1)) for n in one.a}


def update_norms(adapter: Adapter) -> dict[str, Tensor]:
    """Return the Frobenius norms of an adapter's rows, as `update_inner_products`; never zero, for divisions."""
    products = update_inner_products(adapter, adapter)
    return {n: product.clamp(min=torch.finfo(product.dtype).tiny).sqrt() for n, product in products.items()}


def matching_loss(predicted: Adapter, target: Adapter, magnitude_weight: float = 0.1) -> Tensor:
    """Return 1 - cosine + lambda |log of the ratio of norms|, summed over layers and projections (eq. 9): (contexts,).

    Compared are the changes of the projections' weights, d_out x d_in, as the paper defines both sides: the prediction
    is U V^T, the target W^(K) - W0. Comparing factors would not work: b R and R^-1 a are the same adapter for every
    invertible R. The target's rank is twice the prediction's; the predictor should find the target's best approximation
    at the adapter's own rank. Both adapters have a row for each context. `magnitude_weight` is lambda.
    """
    products, own, wanted = update_inner_products(predicted, target), update_norms(predicted), update_norms(target)
    terms = [
        1 - products[n] / (own[n] * wanted[n]) + magnitude_weight * (own[n] / wanted[n]).log().abs() for n in products
    ]
    return torch.stack(terms).sum(dim=0)

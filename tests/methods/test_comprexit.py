"""ComprExIT: equations 4 to 13 in plain loops, padding, segments, and its weights."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.methods.base.compressor import pad_token_ids
from ctx_compress_rag.methods.comprexit import ComprexitCompressor, ComprexitConfig, sinkhorn
from ctx_compress_rag.models.backbone import Backbone
from helpers import architectures
from helpers.methods import SMALL, blocks_outputs, comprexit_bundle, encode, some_ids


@pytest.fixture(scope="module")
def make(tiny_tokenizer: Any) -> Callable[..., Bundle]:
    return partial(comprexit_bundle, tiny_tokenizer)


def plain_slots(w: dict[str, Tensor], states: list[Tensor], config: ComprexitConfig, ratio: int) -> list[Tensor]:
    """Equations 4 to 12 as they are printed, one token, layer and slot at a time, segment by segment."""
    n_layers, n_tokens = len(states), len(states[0])
    states = [torch.stack([h / h.pow(2).mean().sqrt() for h in state]) for state in states]  # ours
    anchors = []
    for t in range(n_tokens):
        h = [state[t] for state in states]
        if config.layers == "all":
            prior = torch.tensor([math.exp(x) for x in w["depth.priors"]], dtype=torch.float64)
            prior = prior / prior.sum()  # the constraint of eq. 4
            mixed = sum(prior[i] * h[i] for i in range(n_layers))  # eq. 4
            context = w["depth.context.weight"] @ mixed
            scores = [  # eq. 5
                float(context @ (w[f"depth.layers.{i}.weight"] @ h[i] + w["depth.layer_embeddings"][i]))
                for i in range(n_layers)
            ]
            exp = [math.exp(s / config.temperature) for s in scores]
            alpha = [e / sum(exp) for e in exp]  # eq. 6
            anchors.append(sum(alpha[i] * (w["anchor.weight"] @ h[i]) for i in range(n_layers)))  # eq. 7
        else:
            anchors.append(w["anchor.weight"] @ h[-1])
    slots = []
    for start in range(0, n_tokens, config.segment_tokens):
        a = anchors[start : start + config.segment_tokens]
        fields = [range(i, min(i + ratio, len(a))) for i in range(0, len(a), ratio)]
        n_slots = len(fields)
        receivers = [sum(a[t] for t in field) / len(field) for field in fields]  # eq. 8
        plan = [[0.0] * n_slots for _ in a]
        if config.allocation == "transport":

            def cosine(x: Tensor, y: Tensor) -> float:
                return float(x @ y / (x @ x).sqrt() / (y @ y).sqrt())

            w_u, w_rho = w["allocation.utility.weight"], w["allocation.capacity.weight"][0]
            cost = [[1 - cosine(w_u @ x, w_u @ r) for r in receivers] for x in a]  # eq. 9, and C of eq. 11
            exp = [math.exp(float(w_rho @ x)) for x in a]
            sent = [e / sum(exp) for e in exp]  # eq. 10
            gibbs = [[math.exp(-c / config.epsilon) for c in row] for row in cost]
            v = [1.0] * n_slots
            for _ in range(config.iterations):  # Sinkhorn and Knopp, in the plain domain
                u = [sent[t] / sum(gibbs[t][k] * v[k] for k in range(n_slots)) for t in range(len(a))]
                v = [(1 / n_slots) / sum(gibbs[t][k] * u[t] for t in range(len(a))) for k in range(n_slots)]
            plan = [[u[t] * gibbs[t][k] * v[k] for k in range(n_slots)] for t in range(len(a))]
        else:
            w_q, w_k = w["allocation.query.weight"], w["allocation.key.weight"]
            for k, field in enumerate(fields):
                exp = {t: math.exp(float((w_q @ receivers[k]) @ (w_k @ a[t])) / math.sqrt(len(w_q))) for t in field}
                for t in field:
                    plan[t][k] = exp[t] / sum(exp.values()) / n_slots
        for k in range(n_slots):  # eq. 12, over the receiver's capacity 1 / K
            slots.append(n_slots * sum(plan[t][k] * (w["value.weight"] @ a[t]) for t in range(len(a))))
    return slots


@pytest.mark.parametrize("method", [{}, {"layers": "last"}, {"allocation": "window_attention"}], ids=str)
@pytest.mark.parametrize(("length", "ratio"), [(37, 4), (16, 8), (3, 4), (21, 16)])
def test_slots_follow_the_equations(make: Any, method: dict[str, Any], length: int, ratio: int) -> None:
    bundle = make(seed=length, **method)
    assert not bundle.backbone.adapters and bundle.reader.own is None  # the decoder is frozen
    bundle.backbone.model.double()
    bundle.compressor.double()
    bundle.reader.double()
    ids = some_ids(length)
    weights = dict(bundle.compressor.named_parameters())
    states = blocks_outputs(bundle.backbone.model, ids)
    with torch.no_grad():
        expected = torch.stack(plain_slots(weights, states, bundle.config.method, ratio))  # type: ignore[arg-type]
    [soft] = encode(bundle.compressor, [ids], ratio).rows()
    torch.testing.assert_close(soft.slots, expected, atol=1e-9, rtol=1e-8)
    assert soft.token_counts.tolist() == [min(ratio, length - i) for i in range(0, length, ratio)]

    w = {name.removeprefix("projection."): p for name, p in bundle.reader.named_parameters()}
    embedded = bundle.embed(soft)
    for slot, out in zip(expected, embedded, strict=True):  # eq. 13
        hidden = [float(w["inner.weight"][i] @ slot + w["inner.bias"][i]) for i in range(bundle.backbone.dim)]
        gelu = torch.tensor([0.5 * x * (1 + math.erf(x / math.sqrt(2))) for x in hidden], dtype=torch.float64)
        torch.testing.assert_close(out, w["outer.weight"] @ gelu + w["outer.bias"], atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("name", ["Gemma3", "Mistral"])
def test_layers_are_those_of_transformers(name: str) -> None:
    compressor = ComprexitCompressor(
        Backbone(architectures.model(name), architectures.tokenizer(name)),
        ComprexitConfig(**SMALL),
    )
    [ids] = architectures.random_ids(name, [3 * architectures.SLIDING_WINDOW])
    states = compressor.hidden_states(ids.unsqueeze(0))
    bos = architectures.bos(name)  # it is read first, and goes into no slot
    with torch.no_grad():
        read = compressor.backbone.model(input_ids=torch.tensor([[*bos, *ids.tolist()]]), output_hidden_states=True)
    expected = [output[0, len(bos) :] for output in read.hidden_states[1:]]
    assert len(states) == len(expected) == compressor.backbone.model.config.num_hidden_layers
    for state, output in zip(states, expected, strict=True):
        sized = output / output.pow(2).mean(-1, keepdim=True).sqrt()
        torch.testing.assert_close(state[0], sized, atol=1e-5, rtol=1e-4)


def marginals(generator: torch.Generator, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cosine costs of random vectors near their fields' means, random row masses, equal column masses."""
    anchors = torch.randn(rows, 5, generator=generator, dtype=torch.float64)
    receivers = torch.stack([part.mean(0) for part in anchors.chunk(columns)])
    cost = 1 - F.cosine_similarity(anchors.unsqueeze(1), receivers.unsqueeze(0), dim=-1)
    sent = torch.randn(rows, generator=generator, dtype=torch.float64).softmax(0)
    return cost, sent, torch.full((len(receivers),), 1 / len(receivers), dtype=torch.float64)


@given(seed=st.integers(0, 10**6), rows=st.integers(1, 40), columns=st.integers(1, 8))
@settings(max_examples=12)
def test_the_plan_is_the_entropic_optimum(seed: int, rows: int, columns: int) -> None:
    """Only the optimum has both marginals and is exp(f_t + g_k - C / epsilon); and no other solver is needed."""
    generator = torch.Generator().manual_seed(seed)
    cost, sent, received = marginals(generator, rows, min(rows, columns))
    plan = sinkhorn(cost, sent.log(), received.log(), 0.5, 600)  # at 0.1 some need thousands
    torch.testing.assert_close(plan.sum(1), sent, atol=1e-7, rtol=1e-5)
    torch.testing.assert_close(plan.sum(0), received, atol=1e-12, rtol=1e-12)
    potentials = plan.log() + cost / 0.5
    centered = potentials - potentials.mean(0, keepdim=True) - potentials.mean(1, keepdim=True) + potentials.mean()
    assert centered.abs().max() < 1e-8


def test_the_plan_is_in_full_precision_under_autocast(make: Any) -> None:
    compressor = make().compressor
    ids, mask = pad_token_ids([some_ids(40)], torch.device("cpu"))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        anchors = compressor.anchors(compressor.hidden_states(ids))
        assert anchors.dtype == torch.bfloat16  # so there is something to guard against
        plans: list[Tensor] = []
        with compressor.allocation.register_forward_hook(lambda module, inputs, plan: plans.append(plan)):
            assert compressor.encode(ids, mask, [4])[4].slots.dtype == torch.float32
    plan = plans[0][0]
    assert plan.dtype == torch.float32
    torch.testing.assert_close(plan[:, :4].sum(0), torch.full((4,), 0.25), atol=1e-6, rtol=1e-6)

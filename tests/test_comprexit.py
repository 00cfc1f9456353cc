"""ComprExIT (paper 002): equations 4 to 13 in plain loops, transport against other solvers, and its training."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import helpers_architectures as architectures
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from torch import Tensor
from torch.nn import functional as F

from ctx_compress_rag.backbone import Backbone
from ctx_compress_rag.bundle import Bundle
from ctx_compress_rag.compressors.base import SlotBatch, Tokenized, padded
from ctx_compress_rag.compressors.comprexit import ComprexitCompressor
from ctx_compress_rag.compressors.transport import TransportPlan, WindowAttention, sinkhorn
from ctx_compress_rag.config import BundleConfig, ComprexitConfig
from ctx_compress_rag.errors import BundleError, RatioError
from ctx_compress_rag.readers.mlp import MlpReader
from ctx_compress_rag.training.data import Example, Turn, world_examples, write_jsonl
from ctx_compress_rag.training.objectives.likelihood import LikelihoodLoss
from ctx_compress_rag.training.objectives.next_token import NextTokenCollator
from ctx_compress_rag.training.recipes import load_recipe
from ctx_compress_rag.training.run import run_recipe

SMALL: dict[str, Any] = {
    "gate_dim": 8, "slot_dim": 12, "transport_dim": 6, "temperature": 2.0, "segment_tokens": 16,
}  # fmt: skip
ABLATIONS: list[dict[str, Any]] = [
    {},
    {"layers": "last"},
    {"allocation": "window_attention"},
    {"normalise_states": False},
]
IDS = [f"{next(iter(a.values()), 'full')}" for a in ABLATIONS]
TEXTS = [
    "Orla Drumwell was born in Pellmouth. She kept bees and wrote three books about the northern coast.",
    "Pellmouth is a town.",
    "The Harrow Institute was founded in 1911, and it moved to Stavely after the flood. " * 8,
]


@pytest.fixture(scope="module")
def make(tiny_tokenizer: Any) -> Callable[..., Bundle]:
    """Make a bundle whose every weight is random and matters; keywords are ComprexitConfig's, and `seed`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def build(seed: int = 0, **method: Any) -> Bundle:
        torch.manual_seed(seed)
        shape = LlamaConfig(
            vocab_size=len(tiny_tokenizer),
            hidden_size=20,
            intermediate_size=32,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=10,
            initializer_range=0.3,
            tie_word_embeddings=True,
            eos_token_id=tiny_tokenizer.eos_token_id,
            pad_token_id=tiny_tokenizer.pad_token_id,
        )
        config = BundleConfig(
            name="tiny", method=ComprexitConfig(**{**SMALL, **method}), base_ratio=4, ratios=[4], max_tokens=64
        )
        bundle = Bundle.build(config, Backbone(LlamaForCausalLM(shape).eval(), tiny_tokenizer))
        for parameter in [*bundle.compressor.parameters(), *bundle.reader.parameters()]:
            torch.nn.init.normal_(parameter, std=0.5)
        return bundle

    return build


def encode(compressor: ComprexitCompressor, passages: Sequence[Sequence[int]], ratio: int) -> SlotBatch:
    ids, mask = padded(passages, torch.device("cpu"))
    with torch.no_grad():
        return compressor.encode(ids, mask, [ratio])[ratio]


def some_ids(length: int, start: int = 0) -> list[int]:
    return [(37 * i + 11 * start) % 500 + 20 for i in range(length)]


# The equations


def blocks_outputs(model: Any, ids: Sequence[int]) -> list[Tensor]:
    """The outputs of the decoder's blocks, taken where they come out; the last one after the final norm."""
    outputs: list[Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda _, __, out: outputs.append(out if torch.is_tensor(out) else out[0]))
        for layer in model.base_model.layers
    ]
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]))
        outputs[-1] = model.base_model.norm(outputs[-1])
    for hook in hooks:
        hook.remove()
    return [out[0] for out in outputs]


def plain_slots(w: dict[str, Tensor], states: list[Tensor], config: ComprexitConfig, ratio: int) -> list[Tensor]:
    """Equations 4 to 12 as they are printed, one token, layer and slot at a time, segment by segment."""
    n_layers, n_tokens = len(states), len(states[0])
    if config.normalise_states:
        states = [torch.stack([h / h.pow(2).mean().sqrt() for h in state]) for state in states]
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


@pytest.mark.parametrize("method", ABLATIONS, ids=IDS)
@pytest.mark.parametrize(("length", "ratio"), [(37, 4), (16, 8), (3, 4), (21, 16)])
def test_slots_follow_the_equations(
    make: Callable[..., Bundle], method: dict[str, Any], length: int, ratio: int
) -> None:
    bundle = make(seed=length, **method)
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

    w = dict(bundle.reader.named_parameters())
    embedded = bundle.embed(soft)
    for slot, out in zip(expected, embedded, strict=True):  # eq. 13
        hidden = [float(w["hidden.weight"][i] @ slot + w["hidden.bias"][i]) for i in range(bundle.backbone.dim)]
        gelu = torch.tensor([0.5 * x * (1 + math.erf(x / math.sqrt(2))) for x in hidden], dtype=torch.float64)
        torch.testing.assert_close(out, w["out.weight"] @ gelu + w["out.bias"], atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("name", architectures.NAMES)
def test_layers_are_the_blocks_outputs_in_every_architecture(name: str) -> None:
    compressor = ComprexitCompressor(
        Backbone(architectures.model(name), architectures.tokenizer(name)),
        ComprexitConfig(**SMALL, normalise_states=False),
    )
    [ids] = architectures.random_ids(name, [3 * architectures.SLIDING_WINDOW])
    states = compressor.hidden_states(ids.unsqueeze(0))
    expected = blocks_outputs(compressor.backbone.model, ids.tolist())
    assert len(states) == len(expected) == compressor.backbone.model.config.num_hidden_layers
    for state, output in zip(states, expected, strict=True):
        torch.testing.assert_close(state[0], output, atol=1e-5, rtol=1e-5)


# Transport


def marginals(generator: torch.Generator, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cosine costs of random vectors near their fields' means, random row masses, equal column masses."""
    anchors = torch.randn(rows, 5, generator=generator, dtype=torch.float64)
    receivers = torch.stack([part.mean(0) for part in anchors.chunk(columns)])
    cost = 1 - F.cosine_similarity(anchors.unsqueeze(1), receivers.unsqueeze(0), dim=-1)
    sent = torch.randn(rows, generator=generator, dtype=torch.float64).softmax(0)
    return cost, sent, torch.full((len(receivers),), 1 / len(receivers), dtype=torch.float64)


@given(seed=st.integers(0, 10**6), rows=st.integers(1, 40), columns=st.integers(1, 8))
@settings(deadline=None, max_examples=12)
def test_the_plan_is_the_entropic_optimum(seed: int, rows: int, columns: int) -> None:
    """Only the optimum has both marginals and is exp(f_t + g_k - C / epsilon); and no other solver is needed."""
    generator = torch.Generator().manual_seed(seed)
    cost, sent, received = marginals(generator, rows, min(rows, columns))
    plan = sinkhorn(cost, sent.log(), received.log(), 0.1, 600)
    torch.testing.assert_close(plan.sum(1), sent, atol=1e-7, rtol=1e-5)
    torch.testing.assert_close(plan.sum(0), received, atol=1e-12, rtol=1e-12)
    potentials = plan.log() + cost / 0.1
    centred = potentials - potentials.mean(0, keepdim=True) - potentials.mean(1, keepdim=True) + potentials.mean()
    assert centred.abs().max() < 1e-8


def test_the_plan_nears_the_linear_programmes(make: Callable[..., Bundle]) -> None:
    """Without entropy eq. 11 is a linear programme; entropy costs at most epsilon log(tokens x slots)."""
    cost, sent, received = marginals(torch.Generator().manual_seed(4), 24, 6)
    rows, columns = cost.shape
    equal = torch.cat([torch.eye(rows).repeat_interleave(columns, 1), torch.eye(columns).repeat(1, rows)])
    best = linprog(cost.flatten().numpy(), A_eq=equal.numpy(), b_eq=torch.cat([sent, received]).numpy())
    assert best.status == 0
    gaps = []
    for epsilon in (0.2, 0.05, 0.01):
        plan = sinkhorn(cost, sent.log(), received.log(), epsilon, 3000)
        assert (plan.sum(1) - sent).abs().sum() < 1e-3
        gaps.append(float((plan * cost).sum()) - best.fun)
        assert -1e-3 < gaps[-1] <= epsilon * math.log(rows * columns)
    assert gaps[0] > gaps[1] > gaps[2] and gaps[2] < 5e-3


@pytest.mark.parametrize("iterations", [1, 30])
def test_rows_and_columns_of_no_mass_take_no_part(iterations: int) -> None:
    """From the first iteration on, so that padding changes nothing before convergence either."""
    cost, sent, received = marginals(torch.Generator().manual_seed(2), 9, 3)
    alone = sinkhorn(cost, sent.log(), received.log(), 0.1, iterations)
    log_sent, log_received = (F.pad(mass.log(), (0, 2), value=-math.inf) for mass in (sent, received))
    beside = sinkhorn(F.pad(cost, (0, 2, 0, 2), value=0.3), log_sent, log_received, 0.1, iterations)
    torch.testing.assert_close(beside, F.pad(alone, (0, 2, 0, 2)), atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_marginals_hold_at_the_defaults(seed: int) -> None:
    """30 iterations in float32 on whole segments of 128 tokens and 32 slots, and on a short one beside them."""
    defaults = ComprexitConfig()
    torch.manual_seed(seed)
    allocation = TransportPlan(64, defaults.transport_dim, defaults.epsilon, defaults.iterations)
    torch.nn.init.normal_(allocation.capacity.weight, std=0.2)
    anchors, mask = torch.randn(2, 128, 64), torch.ones(2, 128, dtype=torch.bool)
    mask[1, 9:] = False
    counts = torch.stack([torch.full((32,), 4), torch.tensor([4, 4, 1] + [0] * 29)])
    receivers = torch.stack([anchors[i].unflatten(0, (32, 4)).mean(1) for i in range(2)])
    receivers[1, 2] = anchors[1, 8]
    with torch.no_grad():
        plan = allocation(anchors, mask, receivers, counts)
        logits = allocation.capacity(anchors).squeeze(-1)
    for i, (tokens, slots, row_error) in enumerate([(128, 32, 0.01), (9, 3, 0.06)]):
        held = plan[i, :tokens, :slots]
        assert (plan[i, tokens:] == 0).all() and (plan[i, :, slots:] == 0).all()
        torch.testing.assert_close(held.sum(0), torch.full((slots,), 1 / slots), atol=1e-6, rtol=1e-4)
        assert (held.sum(1) - logits[i, :tokens].softmax(0)).abs().sum() < row_error


def test_window_attention_is_not_coordinated() -> None:
    """Each slot takes from its own field alone, and what one takes does not depend on the others' fields."""
    torch.manual_seed(0)
    attention = WindowAttention(8, 8)
    anchors, mask, counts = torch.randn(1, 12, 8), torch.ones(1, 12, dtype=torch.bool), torch.full((1, 3), 4)
    changed = anchors.clone()
    changed[:, 8:] += 1

    def plan(x: Tensor) -> Tensor:
        with torch.no_grad():
            made: Tensor = attention(x, mask, x.unflatten(1, (3, 4)).mean(2), counts)
        return made[0]

    own = torch.block_diag(*[torch.ones(4, 1)] * 3).bool()
    assert (plan(anchors)[~own] == 0).all() and (plan(anchors)[own] > 0).all()
    torch.testing.assert_close(plan(anchors)[:, :2], plan(changed)[:, :2])
    transport = TransportPlan(8, 8, 0.1, 30)
    with torch.no_grad():
        one, two = (transport(x, mask, x.unflatten(1, (3, 4)).mean(2), counts)[0] for x in (anchors, changed))
    assert (one[:, :2] - two[:, :2]).abs().max() > 1e-3


# Passages


@pytest.mark.parametrize("name", architectures.NAMES)
def test_padding_changes_nothing_in_any_architecture(name: str) -> None:
    torch.manual_seed(0)
    compressor = ComprexitCompressor(
        Backbone(architectures.model(name), architectures.tokenizer(name)), ComprexitConfig(**SMALL)
    )
    passages = architectures.random_ids(name, [41, 3, 16, 17])
    ids = torch.nn.utils.rnn.pad_sequence(passages, batch_first=True, padding_value=1)
    ids = F.pad(ids, (0, 9), value=2)
    mask = torch.tensor([[1] * len(p) + [0] * (50 - len(p)) for p in passages])
    with torch.no_grad():
        batch = compressor.encode(ids, mask, [4, 16])
    for ratio, slots in batch.items():
        assert (slots.slots[slots.token_counts == 0] == 0).all()
        for row, passage in zip(slots.rows(), passages, strict=True):
            [alone] = encode(compressor, [passage.tolist()], ratio).rows()
            assert torch.equal(row.token_counts, alone.token_counts)
            torch.testing.assert_close(row.slots, alone.slots, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("method", ABLATIONS, ids=IDS)
def test_a_batch_compresses_as_each_passage_alone(make: Callable[..., Bundle], method: dict[str, Any]) -> None:
    bundle = make(**method)
    for text, soft in zip(TEXTS, bundle.compress(TEXTS), strict=True):
        [alone] = bundle.compress([text])
        torch.testing.assert_close(soft.slots, alone.slots, atol=1e-4, rtol=1e-4)
        assert torch.equal(soft.token_counts, alone.token_counts)


@given(length=st.integers(1, 60), ratio=st.integers(1, 50))
@settings(deadline=None, max_examples=20)
def test_any_ratio_of_any_passage(make: Callable[..., Bundle], length: int, ratio: int) -> None:
    """ceil(tokens / ratio) slots, whole fields in order, finite, each a weighted mean of the W_g h."""
    compressor = make().compressor
    batch = encode(compressor, [some_ids(length), some_ids(60)], ratio)
    [soft, _] = batch.rows()
    assert soft.token_counts.tolist() == [min(ratio, length - i) for i in range(0, length, ratio)]
    with torch.no_grad():
        values = compressor.value(compressor.anchors(compressor.hidden_states(torch.tensor([some_ids(length)])))[0])
    assert (soft.slots >= values.amin(0) - 1e-4).all() and (soft.slots <= values.amax(0) + 1e-4).all()


def test_segments_and_windows_stand_alone(make: Callable[..., Bundle]) -> None:
    """Text changes its own segment and later ones, which the decoder reads after it; never earlier ones."""
    bundle = make()
    ids = some_ids(64)
    other = [*ids[:20], ids[20] + 1, *ids[21:]]
    one, two = (encode(bundle.compressor, [x], 4).slots[0] for x in (ids, other))
    segment = 16 // 4
    torch.testing.assert_close(one[:segment], two[:segment])
    assert (one[segment : 2 * segment] - two[segment : 2 * segment]).abs().amin(0).max() > 1e-5
    long = some_ids(150)
    [soft] = bundle.compressor.compress([Tokenized("", long)], 4, 64, 8192)
    parts = [encode(bundle.compressor, [long[i : i + 64]], 4).rows()[0].slots for i in range(0, 150, 64)]
    torch.testing.assert_close(soft.slots, torch.cat(parts), atol=1e-5, rtol=1e-4)


def test_coarser_ratios_need_another_encoding(make: Callable[..., Bundle]) -> None:
    bundle = make()
    [soft] = bundle.compress(TEXTS[:1], 4)
    assert torch.equal(bundle.at_ratio(soft, 4).slots, soft.slots)
    with pytest.raises(RatioError, match="comprexit stores one ratio"):
        bundle.at_ratio(soft, 8)
    [coarse] = bundle.compress(TEXTS[:1], 8)
    assert (soft.merge(2).slots - coarse.slots).abs().max() > 1e-3


def test_the_plan_is_in_full_precision_under_autocast(make: Callable[..., Bundle]) -> None:
    compressor = make().compressor
    ids, mask = padded([some_ids(40)], torch.device("cpu"))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        anchors = compressor.anchors(compressor.hidden_states(ids))
        assert anchors.dtype == torch.bfloat16  # so there is something to guard against
        plan = compressor._transport(anchors, mask, 4).plan
        assert compressor.encode(ids, mask, [4])[4].slots.dtype == torch.float32
    assert plan.dtype == torch.float32
    torch.testing.assert_close(plan[0].sum(0), torch.full((4,), 0.25), atol=1e-6, rtol=1e-6)


# Weights


def test_untrained_slots_have_the_size_of_embeddings(make: Callable[..., Bundle]) -> None:
    for seed in range(3):
        bundle = make(seed=seed)
        softs = bundle.compress(TEXTS)
        bundle.reader.initialise(float(torch.cat([soft.slots for soft in softs]).pow(2).mean().sqrt()))
        size = torch.cat([bundle.embed(soft) for soft in softs]).pow(2).mean().sqrt()
        assert size / bundle.backbone.embeddings.weight.pow(2).mean().sqrt() == pytest.approx(1, abs=0.35)


@pytest.mark.parametrize(("width", "layers", "heads"), [(2048, 16, 32), (3072, 28, 24)])
def test_about_one_per_cent_of_parameters_is_added(width: int, layers: int, heads: int, tiny_tokenizer: Any) -> None:
    """The abstract, for Llama-3.2-1B and 3B at the paper's widths."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        vocab_size=128_256,
        hidden_size=width,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        backbone = Backbone(LlamaForCausalLM(shape), tiny_tokenizer)
        compressor = ComprexitCompressor(backbone, ComprexitConfig())
        added = [*compressor.parameters(), *MlpReader(backbone, compressor.dim).parameters()]
    share = sum(p.numel() for p in added) / sum(p.numel() for p in backbone.model.parameters())
    assert share == pytest.approx(0.01, abs=0.002)


@pytest.mark.parametrize("method", ABLATIONS, ids=IDS)
def test_gradients_reach_what_is_trained_and_nothing_else(make: Callable[..., Bundle], method: dict[str, Any]) -> None:
    """One optimiser step moves every weight of both sides; the decoder has none that is trained, and its bits."""
    bundle = make(**method)
    objective = LikelihoodLoss(bundle)
    decoder = {name: value.clone() for name, value in bundle.backbone.own_state().items()}
    trained = {name: p for name, p in objective.named_parameters() if p.requires_grad}
    own = {id(p) for part in (bundle.compressor, bundle.reader) for p in part.parameters()}
    assert {id(p) for p in trained.values()} == own
    assert not any(p.requires_grad for p in bundle.backbone.model.parameters())
    before = {name: p.detach().clone() for name, p in trained.items()}
    examples = [Example((text,), (Turn("", ("",)),)) for text in TEXTS]
    objective(**NextTokenCollator(bundle.tokenizer, 40, 10)(examples))["loss"].backward()
    assert all(p.grad is None for p in bundle.backbone.model.parameters())
    torch.optim.SGD(trained.values(), lr=1.0).step()
    assert [name for name, p in trained.items() if torch.equal(p, before[name])] == []
    assert all(torch.isfinite(p).all() for p in trained.values())
    assert all(torch.equal(value, decoder[name]) for name, value in bundle.backbone.own_state().items())


@pytest.mark.parametrize("method", ABLATIONS, ids=IDS)
def test_saved_bundles_have_the_same_bits(make: Callable[..., Bundle], method: dict[str, Any], tmp_path: Path) -> None:
    bundle = make(**method)
    bundle.save_pretrained(tmp_path / "bundle")
    again = Bundle.from_pretrained(tmp_path / "bundle", device="cpu")
    assert again.config == bundle.config and again.fingerprint == bundle.fingerprint
    for one, two in zip(bundle.compress(TEXTS), again.compress(TEXTS), strict=True):
        assert torch.equal(one.slots, two.slots)
        assert torch.equal(bundle.embed(one), again.embed(two))
    config = json.loads((tmp_path / "bundle" / "config.json").read_text())
    config["method"]["slot_dim"] = 13
    (tmp_path / "bundle" / "config.json").write_text(json.dumps(config))
    with pytest.raises(BundleError, match=r"12\), its config needs .*13\)"):
        Bundle.from_pretrained(tmp_path / "bundle", device="cpu")


@pytest.mark.parametrize("wrong", [{"epsilon": 0}, {"iterations": 0}, {"layers": "first"}, {"segments": 3}])
def test_impossible_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ComprexitConfig(**wrong)


# Next-token training


def test_next_token_loss_is_plain_cross_entropy(make: Callable[..., Bundle]) -> None:
    """Slots in place of the beginning, then token by token through transformers alone."""
    bundle = make(seed=5)
    objective = LikelihoodLoss(bundle)
    examples = [Example((text,), (Turn("", ("",)),)) for text in TEXTS[:2]]
    with torch.no_grad():
        loss = float(objective(**NextTokenCollator(bundle.tokenizer, 16, 6)(examples))["loss"])
    total, count = 0.0, 0
    for text in TEXTS[:2]:
        ids = bundle.tokenizer(text, add_special_tokens=False)["input_ids"][:22]
        cut = len(ids) * 16 // 22
        [soft] = bundle.compressor.compress([Tokenized("", ids[:cut])], 4, 64, 8192)
        row = bundle.embed(soft)
        for token in ids[cut:]:
            with torch.no_grad():
                logits = bundle.backbone.model(inputs_embeds=row[None]).logits[0, -1].double()
            total -= float(logits.log_softmax(-1)[token])
            count += 1
            row = torch.cat([row, bundle.backbone.embeddings(torch.tensor([token]))])
    assert loss == pytest.approx(total / count, rel=1e-4)


def test_both_stages_run_from_recipe_to_bundle(make: Callable[..., Bundle], tmp_path: Path) -> None:
    """Next token, then answers from the first stage's bundle; each stage trains and the decoder stays."""
    bundle = make()
    bundle._save_decoder(tmp_path / "decoder")
    write_jsonl(tmp_path / "data.jsonl", world_examples("train", 3, 8, max_turns=1, passages=(1, 2)))
    data = {"files": [str(tmp_path / "data.jsonl")], "max_context_tokens": 48, "max_answer_tokens": 12}
    common = {"data": data, "ratios": [4], "window": 64, "optim": {"steps": 2, "batch_size": 4, "log_every": 1}}
    recipes = {
        "next": {"stage": "next_token", "decoder": str(tmp_path / "decoder"), "method": {"name": "comprexit", **SMALL}},
        "answer": {"stage": "answer", "bundle": str(tmp_path / "next" / "bundle")},
    }
    made = []
    for name, recipe in recipes.items():
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump({**common, **recipe, "name": name, "output": str(tmp_path / name)}))
        assert run_recipe(path) == tmp_path / name
        losses = [row["loss"] for row in json.loads((tmp_path / name / "loss.json").read_text())]
        assert len(losses) == 2 and all(math.isfinite(loss) and loss > 0 for loss in losses)
        made.append(Bundle.from_pretrained(tmp_path / name / "bundle", device="cpu"))
    first, second = made
    assert second.config.method == first.config.method and second.config.name == "answer"
    changed = [
        name
        for name, p in second.compressor.named_parameters()
        if not torch.equal(p, first.compressor.get_parameter(name))
    ]
    assert changed
    decoder = first.backbone.own_state()
    assert all(torch.equal(value, decoder[name]) for name, value in second.backbone.own_state().items())


@pytest.mark.parametrize(("name", "stage"), [("next_token", "next_token"), ("answer", "answer")])
def test_shipped_recipes_hold_the_papers_values(name: str, stage: str) -> None:
    """Table 7."""
    recipe: Any = load_recipe(f"comprexit/{name}")
    assert recipe.stage == stage and recipe.ratios == [4]
    assert (recipe.optim.learning_rate, recipe.optim.warmup_ratio, recipe.optim.clip_norm) == (1e-4, 0.05, 20.0)
    assert (recipe.optim.batch_size, recipe.optim.micro_batch_size) == (2048, 16)
    assert recipe.data.max_context_tokens == recipe.window == 512
    if name == "next_token":
        assert recipe.data.max_answer_tokens == 128
        method = recipe.method
        assert (method.segment_tokens, method.iterations) == (128, 30)
        assert method.gate_dim == method.transport_dim == method.slot_dim == 256
        assert recipe.optim.steps * 2048 * (512 + 128) == pytest.approx(1e9, rel=1e-3)
    else:
        assert recipe.bundle == load_recipe("comprexit/next_token").output / "bundle"

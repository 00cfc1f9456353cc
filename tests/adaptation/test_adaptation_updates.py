"""What gradient descent does to an adapter, how updates are compared, and the predictor that learns them."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn import functional as F

from ctx_compress_rag import Bundle, Decoder
from ctx_compress_rag.adaptation.adapt import demonstration_prompts
from ctx_compress_rag.adaptation.adapter import Adapter, qkv_projections
from ctx_compress_rag.adaptation.demonstrations import Demonstration
from ctx_compress_rag.adaptation.predicted import PredictedUpdate, UpdatePredictor, pool_demonstrations
from ctx_compress_rag.adaptation.updates import matching_loss, sgd_update, update_inner_products, update_norms
from ctx_compress_rag.errors import BundleError, ConfigError
from ctx_compress_rag.models.backbone import Backbone
from helpers import architectures
from helpers.adaptation import DEMONSTRATIONS, PREDICTOR, QUESTIONS, drawn, merged_copy, plain_copy, random_adapter


@pytest.fixture(scope="module")
def base(bundle: Any) -> Adapter:
    return random_adapter(bundle.backbone.model, 4, seed=21, size=0.1)


def _row_ids(bundle: Any, d: Demonstration) -> tuple[torch.Tensor, int]:
    """The demonstration's tokens by the tokenizer's own chat template, and where the answer begins."""
    tokenizer = bundle.tokenizer
    prompt = tokenizer.apply_chat_template(d.chat(), add_generation_prompt=True)["input_ids"]
    whole = tokenizer.apply_chat_template([*d.chat(), {"role": "assistant", "content": d.answer}])["input_ids"]
    return torch.tensor(whole), len(prompt)


def _plain_sgd(bundle: Any, base: Adapter, demonstrations: Any, steps: int, rate: float) -> dict[str, torch.Tensor]:
    """Eq. 8 with peft and torch's own SGD, one row at a time: the change of each projection's weight, in float64."""
    plain = plain_copy(bundle.backbone.model)
    config = LoraConfig(
        r=base.rank, lora_alpha=int(base.scale * base.rank), target_modules=["q_proj", "k_proj", "v_proj"]
    )
    model = get_peft_model(plain, config).double()
    factors = {}
    for name, module in model.named_modules():
        site = name.removeprefix("base_model.model.")
        if site in base.a:
            module.lora_A.default.weight.data = base.a[site].double().clone()
            module.lora_B.default.weight.data = base.b[site].double().clone()
            factors[site] = (module.lora_A.default.weight, module.lora_B.default.weight)
    optimizer = torch.optim.SGD([p for pair in factors.values() for p in pair], lr=rate)
    for _ in range(steps):
        losses = []
        for demonstration in demonstrations:
            ids, start = _row_ids(bundle, demonstration)
            logits = model(input_ids=ids[None]).logits[0]
            losses += [-logits[i - 1].log_softmax(-1)[ids[i]] for i in range(start, len(ids))]
        optimizer.zero_grad()
        (sum(losses) / len(losses)).backward()
        optimizer.step()
    with torch.no_grad():
        return {
            site: base.scale * (b @ a - base.b[site].double() @ base.a[site].double())
            for site, (a, b) in factors.items()
        }


def test_the_target_is_a_plain_sgd_loops(decoder: Decoder, bundle: Any, base: Adapter) -> None:
    """Contexts of different sizes in one batch, each with the update that it has alone."""
    contexts = [DEMONSTRATIONS, QUESTIONS[:1]]
    update = sgd_update(
        decoder.bundle, [demonstration_prompts(decoder, c) for c in contexts], base, steps=3, learning_rate=0.5
    )
    change, adapted = update.change(), update.adapted()
    for number, context in enumerate(contexts):
        expected = _plain_sgd(bundle, base, context, steps=3, rate=0.5)
        for name, matrix in expected.items():
            row = change.row(number)
            made = row.scale * row.b[name].double() @ row.a[name].double()
            assert (made - matrix).norm() < 1e-3 * matrix.norm(), name
            after = adapted.row(number)
            moved = base.scale * base.b[name].double() @ base.a[name].double() + matrix
            torch.testing.assert_close(
                (after.scale * after.b[name] @ after.a[name]).double(), moved, atol=1e-5, rtol=1e-4
            )
    assert not any(t.requires_grad for t in (*change.a.values(), *change.b.values()))
    assert all(torch.equal(base.b[n], t) for n, t in random_adapter(bundle.backbone.model, 4, 21, 0.1).b.items())


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_the_matching_loss_is_the_papers_on_whole_matrices(data: st.DataObject) -> None:
    """Eq. 9 in float64 with every matrix written out, for random widths, ranks, scales and sizes."""
    sizes = st.integers(1, 12)
    shapes = {f"layer.{i}": (data.draw(sizes), data.draw(sizes)) for i in range(data.draw(st.integers(1, 4)))}
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    ranks, rows = (data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))), data.draw(st.integers(1, 3))
    scale = st.floats(0.1, 4.0)
    one = drawn(shapes, ranks[0], generator, data.draw(scale), data.draw(scale), rows)
    two = drawn(shapes, ranks[1], generator, data.draw(scale), data.draw(scale), rows)
    weight = data.draw(st.floats(0.0, 2.0))
    losses = matching_loss(one, two, weight)
    products = update_inner_products(one, two)
    for row in range(rows):
        total = 0.0
        for name in shapes:
            x, y = (z.scale * z.b[name][row].double() @ z.a[name][row].double() for z in (one, two))
            assert float(products[name][row]) == pytest.approx(float((x * y).sum()), rel=1e-3, abs=1e-3)
            assert float(update_norms(one)[name][row]) == pytest.approx(float(x.norm()), rel=1e-3)
            cosine = (x * y).sum() / (x.norm() * y.norm())
            total += float(1 - cosine + weight * (x.norm() / y.norm()).log().abs())
        assert float(losses[row]) == pytest.approx(total, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("layer", [None, 1])
def test_states_are_the_end_tokens_means(decoder: Decoder, bundle: Any, base: Adapter, layer: int | None) -> None:
    merged = merged_copy(bundle.backbone.model, base)
    pooled = pool_demonstrations(
        decoder.bundle,
        [demonstration_prompts(decoder, DEMONSTRATIONS), demonstration_prompts(decoder, QUESTIONS[:2])],
        base,
        layer,
    )
    for row, context in zip(pooled, (DEMONSTRATIONS, QUESTIONS[:2]), strict=True):
        states = []
        for demonstration in context:
            ids, _ = _row_ids(bundle, demonstration)
            assert ids[-1] == bundle.tokenizer.eos_token_id
            all_layers = merged(ids[None], output_hidden_states=True).hidden_states  # embeddings first
            states.append(all_layers[-1 if layer is None else layer][0, -1])
        torch.testing.assert_close(row, torch.stack(states).mean(0), atol=1e-4, rtol=1e-4)
    with pytest.raises(ConfigError, match="layer is 9, and the decoder has 2 layers"):
        pool_demonstrations(decoder.bundle, [demonstration_prompts(decoder, QUESTIONS)], base, 9)


def test_the_predictor_is_an_mlp_and_heads(bundle: Any) -> None:
    """Against the formula: encoder of two layers, then U and V for each projection, U V^T of the base's shape."""
    torch.manual_seed(0)
    shapes = qkv_projections(bundle.backbone.model)
    predictor = UpdatePredictor(32, shapes, rank=3)
    predictor.gain.uniform_(0.5, 2.0)
    predictor.center.normal_()
    predictor.spread.uniform_(0.5, 2.0)
    pooled = torch.randn(2, 32)
    update = predictor(pooled)
    first, second = predictor.encoder[0], predictor.encoder[2]
    assert (first.weight.shape, second.weight.shape) == ((256, 32), (64, 256))
    read = (pooled - predictor.center) / predictor.spread
    code = F.gelu(read @ first.weight.T + first.bias) @ second.weight.T + second.bias
    for i, (name, (d_in, d_out)) in enumerate(shapes.items()):
        head = predictor.heads[i]
        out = code @ head.weight.T + head.bias
        u = out[:, : 3 * d_out].reshape(2, d_out, 3) * predictor.gain[i]
        v = out[:, 3 * d_out :].reshape(2, 3, d_in)
        torch.testing.assert_close(update.b[name] @ update.a[name], u @ v)
    assert update.scale == 1.0 and update.rank == 3


def test_calibrated_updates_start_at_their_targets_size(decoder: Decoder, base: Adapter) -> None:
    contexts = [demonstration_prompts(decoder, [d]) for d in (*DEMONSTRATIONS, *QUESTIONS)]
    target = sgd_update(decoder.bundle, contexts, base, 1, 1e-3).change()
    pooled = pool_demonstrations(decoder.bundle, contexts, base)
    predictor = PredictedUpdate.build(base, decoder.bundle, PREDICTOR).predictor
    predictor.calibrate(pooled, update_norms(target))
    read = (pooled - predictor.center) / predictor.spread
    torch.testing.assert_close(read.mean(0), torch.zeros(32), atol=1e-4, rtol=0)
    torch.testing.assert_close(read.square().mean(0), torch.ones(32), atol=1e-3, rtol=0)
    for name, size in update_norms(predictor(pooled)).items():
        assert float((size.log() - update_norms(target)[name].log()).mean()) == pytest.approx(0.0, abs=1e-3)


def test_an_update_is_saved_as_a_peft_adapter(decoder: Decoder, bundle: Any, base: Adapter, tmp_path: Any) -> None:
    """The predictor comes back to the same update, and the update loads in peft at twice the base's rank."""
    torch.manual_seed(1)
    made = PredictedUpdate.build(base, decoder.bundle, PREDICTOR)
    made.save_pretrained(tmp_path / "predictor", "someone/decoder")
    loaded = PredictedUpdate.from_pretrained(tmp_path / "predictor", decoder)
    assert loaded.config == PREDICTOR.model_copy(update={"fingerprint": bundle.weights_digest})
    one, two = (x.adapt(decoder, DEMONSTRATIONS) for x in (made, loaded))
    assert one.rank == 8
    assert all(torch.equal(one.b[n], two.b[n]) and torch.equal(one.a[n], two.a[n]) for n in one.a)
    assert not any(t.requires_grad for t in (*one.a.values(), *one.b.values()))
    one.save_pretrained(tmp_path / "peft")
    theirs = PeftModel.from_pretrained(plain_copy(bundle.backbone.model), tmp_path / "peft")
    merged = merged_copy(merged_copy(bundle.backbone.model, base), _update_alone(one, base.rank))
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, merged(ids).logits, atol=1e-4, rtol=1e-4)
    backbone = Backbone(architectures.model("Llama"), bundle.tokenizer)
    other = Decoder(Bundle(bundle.config, backbone, bundle.compressor, bundle.reader))
    with pytest.raises(BundleError, match="another decoder"):
        PredictedUpdate.from_pretrained(tmp_path / "predictor", other)
    (tmp_path / "predictor" / "config.json").write_text('{"inner_steps": -1}')
    with pytest.raises(BundleError, match="inner_steps"):
        PredictedUpdate.from_pretrained(tmp_path / "predictor", decoder)


def _update_alone(both: Adapter, base_rank: int) -> Adapter:
    return Adapter(
        {n: t[base_rank:] for n, t in both.a.items()}, {n: t[:, base_rank:] for n, t in both.b.items()}, both.scale
    )

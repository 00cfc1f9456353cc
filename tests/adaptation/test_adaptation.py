"""Adapters on Q/K/V projections, adapted decoders, gradient descent on adapters, and the predictor that learns it."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from ctx_compress_rag import Bundle, Decoder, SoftContextStore
from ctx_compress_rag.adaptation.adapt import Demonstration, adapted_decoder, demonstration_prompts
from ctx_compress_rag.adaptation.adapter import Adapter, apply_adapter, qkv_projections
from ctx_compress_rag.adaptation.predicted import PredictedUpdate, UpdatePredictor, pool_demonstrations
from ctx_compress_rag.adaptation.updates import matching_loss, sgd_update, update_inner_products, update_norms
from ctx_compress_rag.decoding.sampling import Sampling
from ctx_compress_rag.decoding.splice import splice_prompts
from ctx_compress_rag.errors import BundleError, ConfigError
from ctx_compress_rag.marking.mark import mark_texts
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.text.chat import answer_ids, chat_text
from ctx_compress_rag.text.tokenizing import bos_token_id, text_ids
from helpers import architectures
from helpers.adaptation import DEMONSTRATIONS, PREDICTOR, QUESTIONS, drawn, merged_copy, plain_copy, random_adapter
from helpers.decoding import by_transformers
from helpers.models import draw_lora

SHORT = Sampling(max_tokens=8)


@pytest.fixture(scope="module")
def bundle(make_tiny_bundle: Any) -> Any:
    """With adapters of its own for compressor and reader that do something."""
    made = make_tiny_bundle(seed=6)
    for name, parameter in made.backbone.model.named_parameters():
        if "lora_" not in name and "proj" in name:
            parameter.mul_(10)  # wide, so that what is attended to matters
    draw_lora(made.backbone.model, 0.1)
    return made


@pytest.fixture(scope="module")
def decoder(bundle: Any) -> Decoder:
    return Decoder(bundle)


def _logits(model: Any, ids: torch.Tensor, adapter: Adapter | None = None) -> torch.Tensor:
    with torch.no_grad(), apply_adapter(model, adapter):
        return model(ids).logits


@pytest.mark.parametrize("name", architectures.NAMES)
def test_an_applied_update_equals_merged_weights(name: str) -> None:
    """On every architecture: base adapter and update, concatenated, give what the summed weights give."""
    model = architectures.model(name)
    base, update = random_adapter(model, 3, seed=1), random_adapter(model, 2, seed=2, scale=0.5)
    both = base.plus(update)
    assert both.rank == 5
    [ids] = architectures.random_ids(name, [11])
    expected = merged_copy(merged_copy(model, base), update)(ids[None]).logits
    plain = model(ids[None]).logits
    torch.testing.assert_close(_logits(model, ids[None], both), expected, atol=1e-4, rtol=1e-4)
    assert (expected - plain).abs().max() > 0.1
    assert torch.equal(model(ids[None]).logits, plain)


def test_every_attention_block_is_adapted() -> None:
    """Names and widths as the config has them; Phi-3's fused projection is one."""
    llama, phi = architectures.model("Llama"), architectures.model("Phi3")
    wide = {"q_proj": (64, 64), "k_proj": (64, 32), "v_proj": (64, 32)}
    assert qkv_projections(llama) == {f"model.layers.{i}.self_attn.{n}": s for i in range(2) for n, s in wide.items()}
    assert qkv_projections(phi) == {f"model.layers.{i}.self_attn.qkv_proj": (64, 128) for i in range(2)}


def test_other_attention_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="GPT2LMHeadModel.*none of them"):
        qkv_projections(GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=10)))
    llama = architectures.model("Llama")
    llama.model.layers[1].self_attn.kv_proj = llama.model.layers[1].self_attn.k_proj
    del llama.model.layers[1].self_attn.k_proj
    with pytest.raises(ConfigError, match=r"only \['q_proj', 'v_proj'\] in model.layers.1"):
        qkv_projections(llama)


@pytest.mark.parametrize("name", ["Llama", "Phi3"])
@pytest.mark.parametrize(("scale", "rank"), [(0.3, 2), (0.1, 4), (1.5, 3), (1.5, 4), (None, 8)])
def test_peft_loads_what_is_saved_to_same_outputs(name: str, scale: float | None, rank: int, tmp_path: Path) -> None:
    """Of a sum, too; and with the adapter's scale, though peft's lora_alpha, scale * rank, is a whole number."""
    model = architectures.model(name)
    if scale is None:
        adapter = random_adapter(model, 4, seed=7).plus(random_adapter(model, 4, seed=8, scale=1.0))
    else:
        adapter = random_adapter(model, rank, seed=9, scale=scale)
    adapter.save_pretrained(tmp_path, decoder="someone/decoder")
    [ids] = architectures.random_ids(name, [13])
    expected = merged_copy(model, adapter)(ids[None]).logits
    ours = _logits(model, ids[None], Adapter.from_pretrained(tmp_path, model))
    theirs = PeftModel.from_pretrained(architectures.model(name), tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids[None]).logits, ours, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["base_model_name_or_path"]) == (rank, "someone/decoder")
    if scale is None:
        assert torch.equal(ours, _logits(model, ids[None], adapter)) and config["lora_alpha"] == 8


QKV = ["q_proj", "k_proj", "v_proj"]


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (LoraConfig(target_modules=["q_proj", "v_proj"]), "k_proj.lora_A.weight"),
        (LoraConfig(target_modules=[*QKV, "o_proj"]), "o_proj.lora_A.weight"),
        (LoraConfig(target_modules=QKV, use_rslora=True), "use_rslora"),
        (LoraConfig(target_modules=QKV, rank_pattern={"q_proj": 2}), "rank_pattern"),
        (IA3Config(target_modules=QKV, feedforward_modules=[]), "peft_type 'IA3'"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_by_name(config: Any, named: str, tmp_path: Path) -> None:
    get_peft_model(architectures.model("Llama"), config).save_pretrained(tmp_path)
    with pytest.raises(BundleError, match=named):
        Adapter.from_pretrained(tmp_path, architectures.model("Llama"))
    with pytest.raises(BundleError, match="not a peft adapter"):
        Adapter.from_pretrained(tmp_path / "elsewhere", architectures.model("Llama"))


def _chats(questions: Any = QUESTIONS) -> list[Any]:
    return [question.chat() for question in questions]


def _texts(generations: Any) -> list[str]:
    return [generation.text for generation in generations]


def test_an_adapted_decoder_answers_as_one_with_merged_weights(decoder: Decoder, bundle: Any) -> None:
    adapter = random_adapter(bundle.backbone.model, 4, 11, size=0.5)
    changed, plain = adapted_decoder(decoder, adapter), Decoder(bundle)
    before = _texts(plain.generate(_chats(), SHORT))
    texts = _texts(changed.generate(_chats(), SHORT))
    merged = merged_copy(bundle.backbone.model, adapter)
    for chat, text in zip(_chats(), texts, strict=True):
        assert by_transformers(merged, bundle.tokenizer, chat, 8) == text
    assert texts != before
    pieces = list(changed.stream(_chats()[0], SHORT))
    assert pieces[-1].text == texts[0] == "".join(pieces[:-1])  # type: ignore[union-attr, arg-type]
    assert _texts(decoder.generate(_chats(), SHORT)) == _texts(plain.generate(_chats(), SHORT)) == before


def test_soft_contexts_are_read_with_the_update(bundle: Any, tmp_path: Path) -> None:
    """A prompt with slots goes to the reader's decoder, its adapter and the update on top of each other."""
    with SoftContextStore(tmp_path, bundle, key=b"k" * 32) as store:
        decoder = Decoder(bundle, store)
        marked = _chats([replace(q, passages=tuple(mark_texts(store, q.passages, ratio=8))) for q in QUESTIONS])
        adapter = random_adapter(bundle.backbone.model, 4, seed=17)
        changed = adapted_decoder(decoder, adapter)
        [prompt] = decoder.preparer.prepare(marked[1:2])
        embed = bundle.backbone.embeddings
        embedded = torch.cat([embed(torch.as_tensor(p)) if p.ndim == 1 else p for p in prompt.pieces])
        batch = splice_prompts(bundle.backbone.inputs, [prompt])
        with torch.no_grad(), cast(Bundle, changed.bundle).soft_decoder(batch.slot_mask) as model:
            ours = model(**batch.model_inputs()).logits
        # The reader's LoRA merged by hand, then the update's.
        with bundle.backbone.use("reader") as model:
            lora = {
                n: m.scaling["reader"] * m.lora_B["reader"].weight @ m.lora_A["reader"].weight
                for n, m in model.named_modules()
                if hasattr(m, "lora_A")
            }
        plain = merged_copy(bundle.backbone.model, adapter)
        for name, change in lora.items():
            plain.get_submodule(name).weight += change
        logits = plain(inputs_embeds=embedded[None]).logits
        torch.testing.assert_close(ours, logits, atol=1e-4, rtol=1e-4)

        alone = _texts(changed.generate(marked, SHORT)) + _texts(changed.generate(_chats(), SHORT))
        together = changed.generate([*marked, *_chats()], SHORT)
        assert _texts(together) == alone and [bool(each.slots) for each in together] == [True] * 3 + [False] * 3


def test_shown_answers_stand_as_the_one_that_is_asked_for(tiny_tokenizer: Any) -> None:
    """Without a chat template: after the cue, as `answer_ids` has it."""
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = None
    shown, asked = DEMONSTRATIONS[1], QUESTIONS[0]
    bos = "" if bos_token_id(tokenizer) is None else tokenizer.bos_token
    answered = {"role": "assistant", "content": shown.answer}
    text = chat_text(tokenizer, [*shown.chat(), answered, *asked.chat()])
    assert text == (
        f"{bos}Kormoor lies on the river Halen.\n\nQuestion: Which river flows through Kormoor?\n"
        "Answer: the river Halen\n\n"
        "Ivo Stormley keeps a crow as a pet.\n\nQuestion: Which pet does Ivo Stormley keep?\nAnswer:"
    )
    alone = text_ids(tokenizer, chat_text(tokenizer, shown.chat())) + answer_ids(tokenizer, shown.answer)
    assert text_ids(tokenizer, text)[: len(alone)] == alone


def test_impossible_demonstrations_are_refused_by_name(decoder: Decoder) -> None:
    with pytest.raises(ConfigError, match="answer of demonstration 1 is empty"):
        demonstration_prompts(decoder, [DEMONSTRATIONS[0], replace(DEMONSTRATIONS[0], answer=" ")])
    long = replace(DEMONSTRATIONS[0], answer="a goat " * 600)
    with pytest.raises(ConfigError, match=r"demonstration 1 .* window of 1024"):
        demonstration_prompts(decoder, [DEMONSTRATIONS[0], long])
    with pytest.raises(ConfigError, match=r"passages are the string 'Orla keeps a goat.'"):
        Demonstration("Which pet does Orla keep?", "Orla keeps a goat.", "a goat")  # type: ignore[arg-type]


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

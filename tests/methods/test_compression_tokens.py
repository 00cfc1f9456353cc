"""Compression tokens (Simple Context Compression, section 5.1) against plain computations of their attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from ctx_compress_rag.backbone import Backbone
from ctx_compress_rag.bundle import Bundle
from ctx_compress_rag.config import BundleConfig
from ctx_compress_rag.errors import BundleError, RatioError
from ctx_compress_rag.methods.base.compressor import SlotBatch, padded
from ctx_compress_rag.methods.base.config import TuneConfig
from ctx_compress_rag.methods.compression_tokens.compressor import CompressionTokensCompressor
from ctx_compress_rag.methods.compression_tokens.config import CompressionTokensConfig
from ctx_compress_rag.training.compression_config import DistillationRecipe
from ctx_compress_rag.training.recipes import load_recipe
from ctx_compress_rag.training.run import run_recipe
from helpers import architectures
from helpers.models import tiny_llama

ATTENTION = ["causal", "bidirectional"]
FROZEN = TuneConfig(mode="frozen")
TEXTS = ["Orla Drumwell was born in Pellmouth, where she kept bees for nine years.", "Pellmouth is a town."]


def encode(
    compressor: CompressionTokensCompressor, passages: Sequence[Sequence[int]], ratios: Sequence[int]
) -> dict[int, SlotBatch]:
    ids, mask = padded(passages, torch.device("cpu"))
    with torch.no_grad():
        return compressor.encode(ids, mask, ratios)


def sees(length: int, slots: int, bidirectional: bool) -> list[list[bool]]:
    """Section 5.1 in words: who (row) sees whom (column) among the text and then the compression tokens."""
    table = []
    for query in range(length + slots):
        row = []
        for key in range(length + slots):
            if query < length or key < length or not bidirectional:
                row.append(key <= query)  # causal over the text, and everywhere in the conventional mask
            else:
                row.append(True)  # compression tokens among themselves
        table.append(row)
    return table


def plain_llama(model: Any, x: Tensor, table: list[list[bool]]) -> Tensor:
    """A Llama's trunk written out in float64: input embeddings at positions 0, 1, ... -> final hidden states."""

    def norm(v: Tensor, weight: Tensor) -> Tensor:
        return weight.double() * v / (v.pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps).sqrt()

    def turn(v: Tensor, position: int) -> Tensor:
        half = len(v) // 2
        theta = model.config.rope_parameters["rope_theta"]
        angles = torch.tensor([position * theta ** (-2 * i / len(v)) for i in range(half)], dtype=torch.float64)
        a, b = v[:half], v[half:]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()])

    heads, kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads
    d = model.config.hidden_size // heads
    x = x.double()
    for layer in model.model.layers:
        a, m = layer.self_attn, layer.mlp
        inputs = norm(x, layer.input_layernorm.weight)
        q, k, v = (inputs @ w.weight.double().T for w in (a.q_proj, a.k_proj, a.v_proj))
        out = torch.zeros_like(q)
        for head in range(heads):
            mine, theirs = slice(head * d, (head + 1) * d), slice(*(d * (head * kv_heads // heads + i) for i in (0, 1)))
            for i, row in enumerate(table):
                keys = [j for j, seen in enumerate(row) if seen]
                scores = torch.stack([turn(q[i, mine], i) @ turn(k[j, theirs], j) for j in keys]) / math.sqrt(d)
                out[i, mine] = scores.softmax(0) @ v[keys, theirs]
        x = x + out @ a.o_proj.weight.double().T
        inputs = norm(x, layer.post_attention_layernorm.weight)
        gate, up, down = (w.weight.double().T for w in (m.gate_proj, m.up_proj, m.down_proj))
        x = x + (torch.nn.functional.silu(inputs @ gate) * (inputs @ up)) @ down
    return norm(x, model.model.norm.weight)


@pytest.fixture(scope="session")
def make(tiny_tokenizer: Any) -> Callable[..., Any]:
    """Make a bundle of random, wide weights; keywords are CompressionTokensConfig's, and `seed`."""

    def build(seed: int = 0, **method: Any) -> Bundle:
        torch.manual_seed(seed)
        model = tiny_llama(tiny_tokenizer, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2)
        widen(model)
        config = BundleConfig(
            name="tiny", method=CompressionTokensConfig(**method), base_ratio=4, ratios=[4, 8, 16], max_tokens=64
        )
        bundle = Bundle.build(config, Backbone(model, tiny_tokenizer))
        widen(bundle.backbone.model, "lora_")  # LoRA's B starts at zero, which would leave nothing to see
        bundle.reader.initialise(1.0)
        return bundle

    return build


def widen(model: Any, only: str = "") -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and only in name:
                torch.nn.init.normal_(parameter, std=0.3)


@pytest.fixture(scope="module", params=architectures.NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def backbone(name: str) -> Backbone:
    return Backbone(architectures.model(name), architectures.tokenizer(name))


@pytest.fixture(scope="module", params=ATTENTION)
def compressor(request: pytest.FixtureRequest, backbone: Backbone) -> CompressionTokensCompressor:
    """A frozen decoder of each architecture as the encoder, in both modes."""
    return CompressionTokensCompressor(
        backbone, CompressionTokensConfig(attention=request.param, encoder=FROZEN, decoder=FROZEN)
    )


# Pictures


def test_attention_is_that_of_the_decoder_reading_tokens_after_the_text(make: Callable[..., Any]) -> None:
    """Causal tokens are plain ones to transformers; its own weights, on average, and the slots as they were."""
    bundle = make(attention="causal", encoder=FROZEN, decoder=FROZEN)
    compressor, model = bundle.compressor, bundle.backbone.model
    ids = bundle.tokenizer(TEXTS[0], add_special_tokens=False)["input_ids"]
    before = encode(compressor, [ids], [4])[4].slots
    found = compressor.attention(ids, 4)
    assert torch.equal(encode(compressor, [ids], [4])[4].slots, before)
    slots = -(-len(ids) // 4)
    tokens = compressor.token.detach().expand(1, slots, -1)
    embedded = torch.cat([model.get_input_embeddings()(torch.tensor([ids])), tokens], dim=1)
    alone = type(model)._from_config(model.config, attn_implementation="eager")
    alone.load_state_dict(model.state_dict())
    with torch.no_grad():
        layers = alone.eval()(inputs_embeds=embedded, output_attentions=True).attentions
    expected = sum(layer[0, head, -slots:, : len(ids)] for layer in layers for head in range(layer.shape[1]))
    torch.testing.assert_close(found, (expected / expected.sum(1, keepdim=True)).T, atol=1e-5, rtol=1e-4)


# Attention


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize(("length", "ratio"), [(13, 4), (8, 3), (3, 5), (1, 1)])
def test_slots_are_the_final_states_of_tokens_after_the_text(
    make: Callable[..., Any], attention: str, length: int, ratio: int
) -> None:
    """Against a transformer written out in float64; the learned token follows the text ceil(L/r) times."""
    bundle = make(attention=attention, encoder=FROZEN, decoder=FROZEN)
    model, ids = bundle.backbone.model, torch.arange(30, 30 + length)
    slots = math.ceil(length / ratio)
    x = torch.cat([model.model.embed_tokens(ids), *[bundle.compressor.token[None]] * slots]).detach()
    expected = plain_llama(model, x, sees(length, slots, attention == "bidirectional"))[length:]
    [soft] = encode(bundle.compressor, [ids.tolist()], [ratio])[ratio].rows()
    torch.testing.assert_close(soft.slots.double(), expected, atol=1e-4, rtol=1e-4)


def test_the_token_sees_what_the_paper_says_in_every_architecture(
    name: str, backbone: Backbone, compressor: CompressionTokensCompressor
) -> None:
    """Against transformers' own model on one unpadded row, its mask written out; longer than sliding windows."""
    [ids] = architectures.random_ids(name, [3 * architectures.SLIDING_WINDOW + 1])
    slots, read = math.ceil(len(ids) / 4), torch.tensor([*architectures.bos(name), *ids])
    table = sees(len(read), slots, compressor.bidirectional)
    mask = torch.tensor([[0.0 if seen else torch.finfo(torch.float32).min for seen in row] for row in table])
    x = torch.cat([backbone.model.get_input_embeddings()(read), *[compressor.token[None]] * slots])
    with torch.no_grad():
        expected = backbone.model.base_model(inputs_embeds=x[None], attention_mask=mask[None, None], use_cache=False)
    [soft] = encode(compressor, [ids.tolist()], [4])[4].rows()
    torch.testing.assert_close(soft.slots, expected.last_hidden_state[0, len(read) :], atol=2e-4, rtol=1e-4)


def test_causal_tokens_are_plain_decoding(name: str, backbone: Backbone) -> None:
    """The conventional mode is the decoder as it is, without any mask of ours, given [text; token; ...; token]."""
    compressor = CompressionTokensCompressor(backbone, CompressionTokensConfig(attention="causal", encoder=FROZEN))
    plain = architectures.model(name)
    if hasattr(plain.config, "sliding_window"):
        plain.config.sliding_window = 256  # our mask hides none of the text, so its windows may not either
    for length, ratio in ((5, 4), (26, 3), (30, 16)):
        [ids] = architectures.random_ids(name, [length], seed=length)
        slots, read = math.ceil(length / ratio), torch.tensor([*architectures.bos(name), *ids])
        x = torch.cat([plain.get_input_embeddings()(read), *[compressor.token[None]] * slots])
        with torch.no_grad():
            expected = plain.base_model(inputs_embeds=x[None], use_cache=False).last_hidden_state[0, len(read) :]
        [soft] = encode(compressor, [ids.tolist()], [ratio])[ratio].rows()
        torch.testing.assert_close(soft.slots, expected, atol=2e-4, rtol=1e-4)


def test_every_token_sees_the_whole_text(name: str, compressor: CompressionTokensCompressor) -> None:
    """Its first and last token, further than sliding windows reach."""
    [ids] = architectures.random_ids(name, [3 * architectures.SLIDING_WINDOW])
    whole = encode(compressor, [ids.tolist()], [4])[4].slots[0]
    for changed in (0, -1):
        other = ids.clone()
        other[changed] = ids[changed] - 1
        moved = (encode(compressor, [other.tolist()], [4])[4].slots[0] - whole).abs().amax(-1)
        assert moved.min() > 1e-4


def test_the_text_never_sees_compression_tokens(name: str, compressor: CompressionTokensCompressor) -> None:
    """Its hidden states are those of the text alone, whatever ratios are asked for beside it."""
    trunk = compressor.backbone.model.base_model
    [ids] = architectures.random_ids(name, [21])
    read = torch.tensor([*architectures.bos(name), *ids])
    hidden = torch.ones(len(read), len(read)).triu(1).bool()
    window = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)
    with torch.no_grad():
        alone = trunk(input_ids=read[None], attention_mask=window[None, None], use_cache=False).last_hidden_state[0]
    seen: list[Tensor] = []
    handle = trunk.register_forward_hook(lambda _module, _inputs, output: seen.append(output.last_hidden_state))
    encode(compressor, [ids.tolist()], [4, 8])
    handle.remove()
    torch.testing.assert_close(seen[0][0, : len(read)], alone, atol=2e-4, rtol=1e-4)


# Batches and ratios


def test_padding_changes_nothing(name: str, compressor: CompressionTokensCompressor) -> None:
    passages = [ids.tolist() for ids in architectures.random_ids(name, [25, 1, 14, 3])]
    batch = encode(compressor, passages, [2, 5, 16])
    for ratio, rows in batch.items():
        for passage, soft in zip(passages, rows.rows(), strict=True):
            [alone] = encode(compressor, [passage], [ratio])[ratio].rows()
            torch.testing.assert_close(soft.slots, alone.slots, atol=2e-4, rtol=1e-4)
            assert torch.equal(soft.token_counts, alone.token_counts)
        assert rows.slots[rows.token_counts == 0].eq(0).all()


@pytest.fixture(scope="module", params=ATTENTION)
def bundle(request: pytest.FixtureRequest, make: Callable[..., Any]) -> Any:
    """LoRA on both sides, with weights that matter."""
    return make(attention=request.param)


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3), ratios=st.sets(st.integers(1, 50), min_size=2))
@settings(deadline=None, max_examples=15)
def test_ratios_together_equal_each_alone(bundle: Any, lengths: list[int], ratios: set[int]) -> None:
    """Any ratio, in any company and order: those that share a pass do not see each other."""
    passages = [[(7 * i + n) % 500 + 20 for i in range(n)] for n in lengths]
    chosen = sorted(ratios, key=lambda ratio: (ratio % 3, ratio))[:4]
    together = encode(bundle.compressor, passages, chosen)
    assert list(together) == chosen
    for ratio in chosen:
        alone = encode(bundle.compressor, passages, [ratio])[ratio]
        torch.testing.assert_close(together[ratio].slots, alone.slots, atol=2e-4, rtol=1e-4)
        # Each slot stands for r tokens, the last for what is left: L in all, over ceil(L/r) slots.
        expected = [[min(ratio, length - start) for start in range(0, length, ratio)] for length in lengths]
        assert [row.token_counts.tolist() for row in together[ratio].rows()] == expected
        assert [sum(row) for row in expected] == lengths


def test_coarser_slots_are_a_prefix_only_causally(bundle: Any) -> None:
    """Section 5.1: what the conventional mask forces, and the bidirectional one relaxes."""
    ids = list(range(30, 70))
    fine, coarse = (encode(bundle.compressor, [ids], [ratio])[ratio].slots[0] for ratio in (4, 8))
    apart = (fine[: len(coarse)] - coarse).abs().amax(-1)
    assert (apart.min() > 0.01) if bundle.compressor.bidirectional else (apart.max() < 1e-4)


def test_long_passages_window_by_window(bundle: Any) -> None:
    ids = [(7 * i) % 500 + 20 for i in range(150)]
    [soft] = bundle.compressor.compress_ids([ids], 8, 64, 8192)
    parts = [encode(bundle.compressor, [ids[i : i + 64]], [8])[8].slots[0] for i in (0, 64, 128)]
    torch.testing.assert_close(soft.slots, torch.cat(parts), atol=1e-4, rtol=1e-4)
    assert soft.n_tokens == 150 and soft.n_slots == 8 + 8 + 3


def test_each_ratio_is_an_encoding_of_its_own(bundle: Any) -> None:
    [soft] = bundle.compress(TEXTS[:1])
    with pytest.raises(RatioError, match="compression_tokens stores one ratio: use ratio=4, or index again at 8"):
        bundle.at_ratio(soft, 8)
    [coarse] = bundle.compress(TEXTS[:1], ratio=8)
    assert coarse.n_slots == math.ceil(soft.n_tokens / 8) and coarse.n_tokens == soft.n_tokens


def test_bfloat16_encodes_as_float32_does(make: Callable[..., Any]) -> None:
    """The token stays in float32 for training and joins the text in the decoder's precision."""
    made = make(encoder=FROZEN, decoder=FROZEN)
    ids = [list(range(30, 52)), list(range(60, 67))]
    exact = encode(made.compressor, ids, [4, 8])
    made.backbone.model.bfloat16()
    for ratio, rows in encode(made.compressor, ids, [4, 8]).items():
        assert rows.slots.dtype == torch.bfloat16 and made.compressor.token.dtype == torch.float32
        for a, b in zip(rows.rows(), exact[ratio].rows(), strict=True):
            assert torch.cosine_similarity(a.slots.float(), b.slots, dim=-1).min() > 0.98


# Weights


def test_the_token_starts_at_the_size_of_token_embeddings(backbone: Backbone) -> None:
    """As the embedding layer gives them: Gemma's scales what it looks up."""
    embed = backbone.model.get_input_embeddings()
    size = embed(torch.arange(embed.num_embeddings)).pow(2).mean().sqrt()
    config = CompressionTokensConfig(encoder=FROZEN)
    tokens = torch.stack([CompressionTokensCompressor(backbone, config).token for _ in range(8)])
    assert tokens.pow(2).mean().sqrt() == pytest.approx(float(size), rel=0.15)
    assert len({tuple(token.tolist()) for token in tokens}) == 8 and not tokens.requires_grad


def test_weights_without_the_token_are_refused(make: Callable[..., Any], tmp_path: Path) -> None:
    make().save_pretrained(tmp_path)
    path = tmp_path / "compressor" / "model.safetensors"
    assert load_file(path).keys() == {"token"}
    save_file({"token": torch.zeros(5)}, path)
    with pytest.raises(BundleError, match=r"compressor's token has shape \(5,\), its config needs \(32,\)"):
        Bundle.from_pretrained(tmp_path, device="cpu")
    save_file({}, path)
    with pytest.raises(BundleError, match="1 names differ, for example token"):
        Bundle.from_pretrained(tmp_path, device="cpu")


# Recipes


@pytest.mark.parametrize("attention", ATTENTION)
def test_the_shipped_recipe_has_the_papers_hyperparameters(attention: str) -> None:
    recipe = load_recipe(f"compression_tokens/{attention}")
    assert isinstance(recipe, DistillationRecipe) and isinstance(recipe.method, CompressionTokensConfig)
    assert recipe.method.attention == attention
    for tune in (recipe.method.encoder, recipe.method.decoder):
        assert (tune.mode, tune.rank, tune.alpha) == ("lora", 16, 16)
    assert recipe.ratios == [4, 8, 16, 32, 64, 128] and not recipe.curriculum and not recipe.reconstruction_weight
    table_6 = {
        "betas": (0.9, 0.95), "clip_norm": 1, "learning_rate": 2e-4, "final_learning_rate": 2e-5,
        "warmup_ratio": 0.05, "weight_decay": 0, "steps": 48_000, "batch_size": 32,
    }  # fmt: skip
    assert {key: getattr(recipe.optim, key) for key in table_6} == table_6
    assert (recipe.data.max_context_tokens, recipe.data.max_answer_tokens) == (1024, 256)


def test_a_recipe_trains_the_token(make: Callable[..., Any], tmp_path: Path) -> None:
    decoder = make(encoder=FROZEN, decoder=FROZEN)
    decoder.backbone.model.save_pretrained(tmp_path / "decoder")
    decoder.tokenizer.save_pretrained(tmp_path / "decoder")
    recipe = {
        "stage": "distillation",
        "output": str(tmp_path / "out"),
        "name": "tiny",
        "decoder": str(tmp_path / "decoder"),
        "method": {"name": "compression_tokens", "attention": "bidirectional"},
        "ratios": [4, 8],
        "window": 64,
        "data": {"world": {"seed": 50, "examples": 8, "passages": [1]}, "max_context_tokens": 64},
        "optim": {"steps": 2, "batch_size": 2, "learning_rate": 1e-2},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    run_recipe(tmp_path / "recipe.yaml")
    trained = Bundle.from_pretrained(tmp_path / "out" / "bundle", device="cpu")
    torch.manual_seed(0)
    start = Bundle.build(trained.config, Backbone(decoder.backbone.model, decoder.tokenizer))
    moved = (trained.compressor.token - start.compressor.token).abs()
    assert 1e-4 < moved.max() < 0.1  # two of Adam's steps from where the seed put it
    assert all(soft.slots.isfinite().all() for soft in trained.compress(TEXTS))

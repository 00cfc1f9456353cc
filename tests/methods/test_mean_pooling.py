"""Mean pooling and compression tokens (Simple Context Compression), and the weights that they share."""

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PeftModel
from pydantic import ValidationError
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.decoders.build import tiny_model, tiny_tokenizer
from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.errors import ConfigError, RatioError
from ctx_compress_rag.methods.base.config import TuneConfig
from ctx_compress_rag.methods.compression_tokens import CompressionTokensCompressor, CompressionTokensConfig
from ctx_compress_rag.methods.mean_pooling import MeanPoolingCompressor, MeanPoolingConfig
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.models.weights import load_own_tensors
from helpers import architectures
from helpers.adaptation import plain_copy
from helpers.methods import compress_ids
from helpers.models import widen

TEXTS = [
    "Orla Drumwell was born in Pellmouth. She kept bees and wrote three books about the northern coast.",
    "Pellmouth is a town.",
    "The Harrow Institute was founded in 1911, and it moved to Stavely after the flood. " * 8,
]
PROMPT = torch.arange(20, 60).unsqueeze(0)
FROZEN = TuneConfig(mode="frozen")
OPTIONS: dict[str, Any] = {"layers": 1, "positions": 3, "embedding_skip": True, "hidden_map": True}
RANK, ALPHA = 4, 6
MODES = {"lora": TuneConfig(rank=RANK, alpha=ALPHA), "full": TuneConfig(mode="full"), "frozen": FROZEN}


@pytest.fixture(scope="module")
def bundle(make_tiny_bundle: Any) -> Any:
    """LoRA on both sides, with weights that matter."""
    made = make_tiny_bundle(seed=1)
    widen(made.backbone.model)
    return made


@pytest.fixture(scope="module", params=architectures.NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def frozen_encoder(name: str, layers: int | None = None) -> MeanPoolingCompressor:
    """The decoder of an architecture, or its first layers, as the encoder."""
    backbone = Backbone(architectures.model(name), architectures.tokenizer(name))
    return MeanPoolingCompressor(backbone, MeanPoolingConfig(encoder=FROZEN, decoder=FROZEN, layers=layers))


@pytest.fixture(scope="module")
def encoder(name: str) -> MeanPoolingCompressor:
    return frozen_encoder(name)


def alone(encoder: MeanPoolingCompressor, ids: Tensor) -> Tensor:
    """The vectors of a passage's tokens, which are its slots at 1x: (length, dim)."""
    return compress_ids(encoder, [ids.tolist()], 1)[0].slots


def logits(bundle: Any, adapter: str | None) -> Tensor:
    with torch.no_grad(), bundle.backbone.use(adapter) as model:
        result: Tensor = model(input_ids=PROMPT).logits
    return result


def means(vectors: Tensor, ratio: int = 4) -> Tensor:
    return torch.stack([part.mean(0) for part in vectors.split(ratio)])


def test_the_linear_map_comes_after_pooling(bundle: Any) -> None:
    """Section 5.1: W, d x d, is applied to f_c(T, r) before the decoder gets it."""
    [soft] = bundle.compress(TEXTS[:1])
    w = bundle.reader.projection.weight
    assert w.shape == (bundle.backbone.dim, bundle.backbone.dim)
    expected = torch.tensor([[sum(a * b for a, b in zip(row, slot, strict=True)) for row in w.tolist()]
                             for slot in soft.slots.tolist()])  # fmt: skip
    torch.testing.assert_close(bundle.embed(soft), expected, atol=1e-4, rtol=1e-4)


def plain_slots(bundle: Bundle, ids: list[int], ratio: int) -> Tensor:
    """What the options say, one step after the other, in float64, by transformers' own layer."""
    model = plain_copy(bundle.backbone.model).double()
    own = {name: value.double() for name, value in bundle.compressor.saved_state().items()}
    trunk = model.model
    trunk.layers = trunk.layers[:1]
    mode = bundle.config.method.encoder.mode  # type: ignore[union-attr]
    if mode == "full":
        trunk.load_state_dict(
            {n: value for n, value in own.items() if n.startswith(("layers.", "norm."))}, strict=False
        )
    elif mode == "lora":
        adapter = {n: value.double() for n, value in bundle.backbone.adapter_state("compressor").items()}
        for name, weight in trunk.layers.named_parameters():
            if "proj" in name:
                layer = f"base_model.model.model.layers.{name.removesuffix('.weight')}"
                a, b = (adapter[f"{layer}.lora_{side}.weight"] for side in "AB")
                weight += ALPHA / RANK * b @ a
    embedded = trunk.embed_tokens(torch.tensor(ids))
    x = embedded + own["positions"][[i % 3 for i in range(len(ids))]]
    everything = torch.zeros(1, 1, len(ids), len(ids)).double()
    h = trunk(inputs_embeds=x[None], attention_mask=everything, use_cache=False).last_hidden_state[0]
    h = h / h.pow(2).mean(-1, keepdim=True).sqrt()
    size = trunk.embed_tokens.weight.pow(2).mean().sqrt()
    return means(embedded + size * h @ own["hidden_map.weight"].T, ratio)


def draw(bundle: Bundle) -> Bundle:
    torch.manual_seed(8)
    with torch.no_grad():
        for module in (bundle.backbone.model, bundle.compressor, bundle.reader):
            for parameter in module.parameters():
                parameter.normal_(std=0.4)
    return bundle


@pytest.fixture(scope="module", params=MODES)
def with_options(request: pytest.FixtureRequest, make_tiny_bundle: Any) -> Bundle:
    return draw(make_tiny_bundle(encoder=MODES[request.param], **OPTIONS))


@settings(max_examples=10)
@given(ids=st.lists(st.integers(5, 590), min_size=1, max_size=40), ratio=st.sampled_from([4, 8, 16]))
def test_slots_with_all_options_are_those_of_a_plain_computation(
    with_options: Bundle, ids: list[int], ratio: int
) -> None:
    [soft] = compress_ids(with_options.compressor, [ids], ratio)
    torch.testing.assert_close(soft.slots.double(), plain_slots(with_options, ids, ratio), atol=1e-3, rtol=1e-3)
    assert soft.token_counts.tolist() == [min(ratio, len(ids) - start) for start in range(0, len(ids), ratio)]


def test_an_untrained_slot_is_the_mean_of_its_embeddings(make_tiny_bundle: Any) -> None:
    """With a hidden map, which starts at zero; and without an encoder (table 3), which trains nothing."""
    for method in (OPTIONS, {"encoder": FROZEN, "layers": 0}):
        made = make_tiny_bundle(**method)
        ids = made.tokenizer(TEXTS[0], add_special_tokens=False)["input_ids"]
        [soft] = made.compress(TEXTS[:1])
        np.testing.assert_allclose(soft.slots, means(made.backbone.embeddings(torch.tensor(ids))), atol=1e-6)
    assert made.compressor.trained_parameters() == []


def test_slots_are_the_trunks_under_full_attention(name: str, encoder: MeanPoolingCompressor) -> None:
    """By transformers' own trunk, after the BOS if the tokenizer adds one, which enters no slot."""
    [ids] = architectures.random_ids(name, [3 * architectures.SLIDING_WINDOW])
    bos = architectures.bos(name)
    read = torch.tensor([[*bos, *ids]])
    trunk, embed = encoder.backbone.model.base_model, encoder.backbone.embeddings
    everything = torch.zeros(1, 1, read.shape[1], read.shape[1])
    with torch.no_grad():
        hidden = trunk(inputs_embeds=embed(read), attention_mask=everything).last_hidden_state[0, len(bos) :]
    [soft] = compress_ids(encoder, [ids.tolist()], 4)
    torch.testing.assert_close(soft.slots, means(hidden), atol=1e-4, rtol=1e-4)
    whole = alone(encoder, ids)
    for changed, seen in ((-1, 0), (0, -1)):  # the first token sees the last, further than sliding windows reach
        other = ids.clone()
        other[changed] = ids[changed] - 1
        assert (alone(encoder, other)[seen] - whole[seen]).abs().max() > 1e-3


def test_the_first_layers_alone_are_run(name: str, encoder: MeanPoolingCompressor) -> None:
    """As many layers as there are give what the whole trunk gives; with fewer, the last one's weights count nothing."""
    [ids] = architectures.random_ids(name, [12])
    count = encoder.backbone.model.config.get_text_config().num_hidden_layers
    whole = alone(encoder, ids)
    assert torch.equal(alone(frozen_encoder(name, count), ids), whole)
    cut = frozen_encoder(name, count - 1)
    before = alone(cut, ids)
    assert (before - whole).abs().max() > 1e-3
    last = [p for n, p in cut.backbone.model.named_parameters() if f"layers.{count - 1}." in n]
    with torch.no_grad():
        for parameter in last:
            parameter.fill_(float("nan"))
        assert torch.equal(alone(cut, ids), before)
        assert cut.backbone.model(ids.unsqueeze(0)).logits.isnan().all(), "the decoder itself keeps all of its layers"


def test_batches_stay_within_their_budget(bundle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle.compressor, "batch_tokens", 128)
    shapes = []
    passages = [list(range(20, 20 + n)) for n in (5, 64, 30, 150, 1, 31)]
    with bundle.backbone.model.base_model.register_forward_pre_hook(
        lambda _, args, given: shapes.append(given["inputs_embeds"].shape[:2]), with_kwargs=True
    ):
        softs = compress_ids(bundle.compressor, passages, 4)
    assert [int(soft.token_counts.sum()) for soft in softs] == [5, 64, 30, 150, 1, 31]
    assert all(rows * length <= 128 for rows, length in shapes)
    assert len(shapes) < 8  # 8 windows: some share a batch


@given(lengths=st.lists(st.integers(1, 200), min_size=1, max_size=3), factor=st.sampled_from([2, 4, 8, 16]))
@settings(max_examples=8)
def test_merging_equals_compressing_at_the_coarser_ratio(bundle: Any, lengths: list[int], factor: int) -> None:
    """Nestable, over lengths of up to several windows, none of which a merged slot may span wrongly."""
    passages = [[(7 * i + n) % 500 + 20 for i in range(n)] for n in lengths]
    base = compress_ids(bundle.compressor, passages, 4)
    coarse = compress_ids(bundle.compressor, passages, 4 * factor)
    for fine, expected in zip(base, coarse, strict=True):
        merged = fine.soft_context().merge(factor)
        assert merged.token_counts.tolist() == expected.token_counts.tolist()
        np.testing.assert_allclose(merged.slots, expected.slots, atol=1e-4, rtol=1e-4)


def test_long_passages_are_compressed_window_by_window(bundle: Any) -> None:
    ids = bundle.tokenizer(TEXTS[2], add_special_tokens=False)["input_ids"]
    window = bundle.config.window
    assert len(ids) > 2 * window and len(ids) % window
    [soft] = bundle.compress([TEXTS[2]])
    parts = [compress_ids(bundle.compressor, [ids[i : i + window]], 4)[0] for i in range(0, len(ids), window)]
    np.testing.assert_allclose(soft.slots, torch.cat([part.slots for part in parts]), atol=1e-4, rtol=1e-4)
    assert soft.n_tokens == len(ids)


def test_blank_passages_and_impossible_ratios_are_refused(bundle: Any) -> None:
    assert bundle.compress([]) == []
    for blank in ("", " \n\t"):
        with pytest.raises(ConfigError, match="passage 1 is blank"):
            bundle.compress([TEXTS[0], blank])
    with pytest.raises(RatioError, match="ratio 7 does not divide the encoder's window of 64"):
        bundle.compress(TEXTS, ratio=7)


def test_lora_lies_in_the_first_layers_alone_and_is_a_peft_adapter(make_tiny_bundle: Any, tmp_path: Path) -> None:
    made = draw(make_tiny_bundle(encoder=MODES["lora"], **OPTIONS))
    assert {name.split(".layers.")[1][0] for name in made.backbone.adapter_state("compressor")} == {"0"}
    assert {name.split(".layers.")[1][0] for name in made.backbone.adapter_state("reader")} == {"0", "1"}
    made.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "decoder", dtype=torch.float32).eval()
    tuned = PeftModel.from_pretrained(plain, tmp_path / "compressor").eval()
    with torch.no_grad():
        expected = tuned(input_ids=PROMPT).logits
    torch.testing.assert_close(expected, logits(made, "compressor"), atol=1e-3, rtol=1e-3)


def test_adapters_do_not_leak(bundle: Any, make_tiny_bundle: Any) -> None:
    plain = make_tiny_bundle(encoder=FROZEN, decoder=FROZEN)
    load_own_tensors(plain.backbone.model, bundle.backbone.own_state())
    expected = logits(plain, None)
    assert plain.backbone.adapters == frozenset() and bundle.backbone.adapters == {"compressor", "reader"}
    assert torch.equal(logits(bundle, None), expected)
    compressor, reader = logits(bundle, "compressor"), logits(bundle, "reader")
    for a, b in ((compressor, expected), (reader, expected), (compressor, reader)):
        assert (a - b).abs().max() > 0.1
    with bundle.text_decoder() as model, torch.no_grad():
        bundle.compress(TEXTS[:1])  # the compressor's adapter, and back
        assert torch.equal(model(input_ids=PROMPT).logits, expected)
        with pytest.raises(ZeroDivisionError), bundle.soft_decoder(torch.zeros(1, 1, dtype=torch.bool)) as tuned:
            assert torch.equal(tuned(input_ids=PROMPT).logits, reader)
            raise ZeroDivisionError
        assert torch.equal(model(input_ids=PROMPT).logits, expected)
    with pytest.raises(ConfigError, match=r"no adapter 'teacher': there are \['compressor', 'reader'\]"):
        logits(bundle, "teacher")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_map": True}, "needs embedding_skip: true"),
        ({"layers": 0}, "layers"),
        ({"layers": 1, "encoder": {"target_modules": ".*q_proj"}}, "target_modules"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        MeanPoolingConfig(**settings)


def test_more_layers_than_there_are_are_refused(make_tiny_bundle: Any) -> None:
    with pytest.raises(ConfigError, match="layers=3: the decoder has only 2 layers"):
        make_tiny_bundle(layers=3)


ATTENTION = ["causal", "bidirectional"]


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


@pytest.fixture(scope="module")
def backbone(name: str) -> Backbone:
    return Backbone(architectures.model(name), architectures.tokenizer(name))


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize(("length", "ratio"), [(3 * architectures.SLIDING_WINDOW + 1, 4), (8, 3), (3, 5), (1, 1)])
def test_the_token_sees_what_the_paper_says_in_every_architecture(
    name: str, backbone: Backbone, attention: Any, length: int, ratio: int
) -> None:
    """Against transformers' own model on one unpadded row, its mask written out; longer than sliding windows.

    The learned token follows the text ceil(L/r) times.
    """
    compressor = CompressionTokensCompressor(backbone, CompressionTokensConfig(attention=attention, encoder=FROZEN))
    [ids] = architectures.random_ids(name, [length])
    slots, read = math.ceil(length / ratio), torch.tensor([*architectures.bos(name), *ids])
    table = sees(len(read), slots, compressor.bidirectional)
    mask = torch.tensor([[0.0 if seen else torch.finfo(torch.float32).min for seen in row] for row in table])
    x = torch.cat([backbone.model.get_input_embeddings()(read), *[compressor.token[None]] * slots])
    with torch.no_grad():
        expected = backbone.model.base_model(inputs_embeds=x[None], attention_mask=mask[None, None], use_cache=False)
    [soft] = compress_ids(compressor, [ids.tolist()], ratio)
    torch.testing.assert_close(soft.slots, expected.last_hidden_state[0, len(read) :], atol=2e-4, rtol=1e-4)
    # Each slot stands for r tokens, the last for what is left.
    assert soft.token_counts.tolist() == [min(ratio, length - start) for start in range(0, length, ratio)]


def test_the_token_starts_at_the_size_of_token_embeddings(backbone: Backbone) -> None:
    """As the embedding layer gives them: Gemma's scales what it looks up."""
    embed = backbone.model.get_input_embeddings()
    size = embed(torch.arange(embed.num_embeddings)).pow(2).mean().sqrt()
    config = CompressionTokensConfig(encoder=FROZEN)
    tokens = torch.stack([CompressionTokensCompressor(backbone, config).token for _ in range(8)])
    assert tokens.pow(2).mean().sqrt() == pytest.approx(float(size), rel=0.15)
    assert len({tuple(token.tolist()) for token in tokens}) == 8 and not tokens.requires_grad


@pytest.mark.parametrize(("kind", "ahead", "obeys"), [("llama", True, True), ("mamba", False, False)])
def test_what_a_decoder_does_with_masks_is_found_out(
    kind: str, ahead: bool, obeys: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether full attention shows a first slot the last token; state-space layers are causal, and read padding."""
    backbone = Backbone(tiny_model(kind), tiny_tokenizer())
    ids = torch.tensor([[7, 8, 9, 10, 11], [7, 8, 9, 10, 12]])
    pooled = MeanPoolingCompressor(backbone, MeanPoolingConfig(encoder=FROZEN))
    one, other = pooled.encode(ids, torch.ones_like(ids), [4])[4].slots[:, 0]
    assert (not torch.allclose(one, other)) == ahead == ("causal" not in caplog.text)
    tokens = CompressionTokensCompressor(backbone, CompressionTokensConfig(attention="causal", encoder=FROZEN))
    lengths: list[int] = []
    backbone.model.base_model.register_forward_hook(lambda _, __, out: lengths.append(out[0].shape[1]))
    with nullcontext() if obeys else pytest.raises(ConfigError, match="mean_pooling"):
        tokens.encode(ids, torch.ones_like(ids), [2, 4])
        assert lengths[-1] == 5 + 3  # ratio 4 takes the first of ratio 2

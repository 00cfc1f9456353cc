"""Mean pooling (Simple Context Compression, sections 4.1 and 5.1) and the weights it shares with the decoder."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ctx_compress_rag.errors import ConfigError, RatioError
from ctx_compress_rag.methods.base.config import TuneConfig
from ctx_compress_rag.methods.mean_pooling.compressor import MeanPoolingCompressor
from ctx_compress_rag.methods.mean_pooling.config import MeanPoolingConfig
from ctx_compress_rag.models.backbone import Backbone
from helpers import architectures
from helpers.models import widen

TEXTS = [
    "Orla Drumwell was born in Pellmouth. She kept bees and wrote three books about the northern coast.",
    "Pellmouth is a town.",
    "The Harrow Institute was founded in 1911, and it moved to Stavely after the flood. " * 8,
]
PROMPT = torch.arange(20, 60).unsqueeze(0)
WAIT = 120
FROZEN = TuneConfig(mode="frozen")


@pytest.fixture(scope="module")
def bundle(make_tiny_bundle: Callable[..., Any]) -> Any:
    """LoRA on both sides, with weights that matter."""
    made = make_tiny_bundle(seed=1)
    widen(made.backbone.model)
    return made


@pytest.fixture(scope="module", params=architectures.NAMES)
def encoder(request: pytest.FixtureRequest) -> MeanPoolingCompressor:
    """A frozen decoder of each architecture as the encoder."""
    name = str(request.param)
    backbone = Backbone(architectures.model(name), architectures.tokenizer(name))
    return MeanPoolingCompressor(backbone, MeanPoolingConfig(encoder=FROZEN, decoder=FROZEN))


def logits(bundle: Any, adapter: str | None) -> Tensor:
    with torch.no_grad(), bundle.backbone.use(adapter) as model:
        result: Tensor = model(input_ids=PROMPT).logits
    return result


# The equations


@pytest.mark.parametrize("length", [1, 3, 4, 5, 31, 64])
@pytest.mark.parametrize("ratio", [4, 16])
def test_slots_are_means_of_hidden_states(bundle: Any, length: int, ratio: int) -> None:
    ids = torch.arange(30, 30 + length)
    with torch.no_grad():
        h = bundle.compressor.hidden_states(ids.unsqueeze(0), torch.ones(1, length).long())[0].double().tolist()
    # Eq. 3: S_k = {(k-1) r + 1, ..., min(k r, L)}; eq. 4: z_k = 1/|S_k| sum of h_i over S_k
    blocks = [range((k - 1) * ratio + 1, min(k * ratio, length) + 1) for k in range(1, -(-length // ratio) + 1)]
    z = [[sum(h[i - 1][d] for i in block) / len(block) for d in range(len(h[0]))] for block in blocks]
    [soft] = bundle.compressor.compress_ids([ids.tolist()], ratio, 64, 8192)
    torch.testing.assert_close(soft.slots.double(), torch.tensor(z, dtype=torch.float64), atol=1e-5, rtol=1e-4)
    assert soft.token_counts.tolist() == [len(block) for block in blocks]


def test_the_linear_map_comes_after_pooling(bundle: Any) -> None:
    """Section 5.1: W, d x d, is applied to f_c(T, r) before the decoder gets it."""
    [soft] = bundle.compress(TEXTS[:1])
    w = bundle.reader.projection.weight
    assert w.shape == (bundle.backbone.dim, bundle.backbone.dim)
    expected = torch.tensor([[sum(a * b for a, b in zip(row, slot, strict=True)) for row in w.tolist()]
                             for slot in soft.slots.tolist()])  # fmt: skip
    torch.testing.assert_close(bundle.embed(soft), expected, atol=1e-4, rtol=1e-4)


def test_an_embedding_skip_adds_each_tokens_embedding(make_tiny_bundle: Callable[..., Any]) -> None:
    """Hidden states are first scaled, each to the embeddings' root mean square."""
    plain, skipping = (make_tiny_bundle(encoder=FROZEN, decoder=FROZEN, embedding_skip=skip) for skip in (False, True))
    ids = plain.tokenizer(TEXTS[0], add_special_tokens=False)["input_ids"]
    embedded = plain.backbone.embeddings(torch.tensor(ids)).double()
    with torch.no_grad():
        hidden = plain.compressor.hidden_states(torch.tensor([ids]), torch.ones(1, len(ids)).long())[0].double()
    size = plain.backbone.embeddings.weight.double().pow(2).mean().sqrt()
    summed = embedded + size * hidden / hidden.pow(2).mean(-1, keepdim=True).sqrt()
    means = torch.stack([summed[i : i + 4].mean(0) for i in range(0, len(ids), 4)])
    [soft] = skipping.compress(TEXTS[:1], 4)
    torch.testing.assert_close(soft.slots.double(), means, atol=1e-5, rtol=1e-4)


def test_without_an_encoder_token_embeddings_are_pooled(make_tiny_bundle: Callable[..., Any]) -> None:
    """Table 3: "the initial context representation using only the token embeddings of the decoder model"."""
    bundle = make_tiny_bundle(encoder=FROZEN, layers=0)
    ids = bundle.tokenizer(TEXTS[0], add_special_tokens=False)["input_ids"]
    embedded = bundle.backbone.embeddings(torch.tensor(ids)).double()
    means = torch.stack([embedded[i : i + 4].mean(0) for i in range(0, len(ids), 4)])
    [soft] = bundle.compress(TEXTS[:1], 4)
    torch.testing.assert_close(soft.slots.double(), means, atol=1e-5, rtol=1e-4)
    assert bundle.compressor.trained_parameters() == []
    with pytest.raises(ValueError, match="layers: 0 pools token embeddings as they are"):
        make_tiny_bundle(layers=0)


# Attention


def test_attention_is_full_in_every_architecture(encoder: MeanPoolingCompressor) -> None:
    """The first token sees the last and the other way round, further than sliding windows reach."""
    name = encoder.backbone.model.__class__.__name__.removesuffix("ForCausalLM")
    [ids] = architectures.random_ids(name, [3 * architectures.SLIDING_WINDOW])
    mask = torch.ones(1, len(ids)).long()
    with torch.no_grad():
        whole = encoder.hidden_states(ids.unsqueeze(0), mask)[0]
        for changed, seen in ((-1, 0), (0, -1)):
            other = ids.clone()
            other[changed] = ids[changed] - 1
            assert (encoder.hidden_states(other.unsqueeze(0), mask)[0][seen] - whole[seen]).abs().max() > 1e-3


def test_padding_changes_nothing(encoder: MeanPoolingCompressor) -> None:
    name = encoder.backbone.model.__class__.__name__.removesuffix("ForCausalLM")
    passages = architectures.random_ids(name, [25, 3, 14])
    ids = torch.nn.utils.rnn.pad_sequence(passages, batch_first=True, padding_value=1)
    mask = torch.tensor([[1] * len(p) + [0] * (25 - len(p)) for p in passages])
    with torch.no_grad():
        batch = encoder.hidden_states(ids, mask)
        for row, passage in zip(batch, passages, strict=True):
            alone = encoder.hidden_states(passage.unsqueeze(0), torch.ones(1, len(passage)).long())[0]
            torch.testing.assert_close(row[: len(passage)], alone, atol=2e-4, rtol=1e-4)


# Passages


def test_batches_stay_within_their_budget(bundle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []
    forward = bundle.compressor.hidden_states
    monkeypatch.setattr(
        bundle.compressor, "hidden_states", lambda ids, mask: shapes.append(ids.shape) or forward(ids, mask)
    )
    passages = [list(range(20, 20 + n)) for n in (5, 64, 30, 150, 1, 31)]
    softs = bundle.compressor.compress_ids(passages, 4, 64, 128)
    assert [soft.n_tokens for soft in softs] == [5, 64, 30, 150, 1, 31]
    assert all(rows * length <= 128 for rows, length in shapes)
    assert len(shapes) < 8  # 8 windows: some share a batch


@given(lengths=st.lists(st.integers(1, 200), min_size=1, max_size=3), factor=st.sampled_from([2, 4, 8, 16]))
@settings(deadline=None, max_examples=15)
def test_merging_equals_compressing_at_the_coarser_ratio(bundle: Any, lengths: list[int], factor: int) -> None:
    """Nestable, over lengths of up to several windows, none of which a merged slot may span wrongly."""
    passages = [[(7 * i + n) % 500 + 20 for i in range(n)] for n in lengths]
    base = bundle.compressor.compress_ids(passages, 4, 64, 8192)
    coarse = bundle.compressor.compress_ids(passages, 4 * factor, 64, 8192)
    for fine, expected in zip(base, coarse, strict=True):
        merged = bundle.at_ratio(fine, 4 * factor)
        assert torch.equal(merged.token_counts, expected.token_counts)
        torch.testing.assert_close(merged.slots, expected.slots, atol=1e-4, rtol=1e-4)


def test_long_passages_are_compressed_window_by_window(bundle: Any) -> None:
    ids = bundle.tokenizer(TEXTS[2], add_special_tokens=False)["input_ids"]
    window = bundle.config.max_tokens
    assert len(ids) > 2 * window and len(ids) % window
    [soft] = bundle.compress([TEXTS[2]])
    parts = [
        bundle.compressor.compress_ids([ids[i : i + window]], 4, window, 8192)[0] for i in range(0, len(ids), window)
    ]
    torch.testing.assert_close(soft.slots, torch.cat([part.slots for part in parts]), atol=1e-4, rtol=1e-4)
    assert soft.n_tokens == len(ids)


def test_blank_passages_and_impossible_ratios_are_refused(bundle: Any) -> None:
    assert bundle.compress([]) == []
    for blank in ("", " \n\t"):
        with pytest.raises(ConfigError, match="passage 1 is blank"):
            bundle.compress([TEXTS[0], blank])
    with pytest.raises(RatioError, match="ratio 7 does not divide the encoder's window of 64"):
        bundle.compress(TEXTS, ratio=7)
    [soft] = bundle.compress(TEXTS[:1])
    for ratio in (2, 6, 0, -4):
        with pytest.raises(RatioError, match=f"ratio {ratio} cannot be made from slots stored at 4"):
            bundle.at_ratio(soft, ratio)


# Weights


def test_a_copy_shares_the_embeddings(make_tiny_bundle: Callable[..., Any]) -> None:
    made = make_tiny_bundle(encoder=TuneConfig(mode="full"))
    assert made.compressor.encoder.get_input_embeddings().weight is made.backbone.embeddings.weight


def test_adapters_do_not_leak(bundle: Any, make_tiny_bundle: Callable[..., Any]) -> None:
    """The plain decoder has the same bits with adapters beside it, before and after they are used."""
    plain = make_tiny_bundle(encoder=FROZEN, decoder=FROZEN)
    plain.backbone.load_own_state(bundle.backbone.own_state())
    with torch.no_grad():
        expected = plain.backbone.model(input_ids=PROMPT).logits
    assert plain.backbone.adapters == frozenset() and bundle.backbone.adapters == {"compressor", "reader"}
    assert torch.equal(logits(bundle, None), expected)
    compressor, reader = logits(bundle, "compressor"), logits(bundle, "reader")
    for a, b in ((compressor, expected), (reader, expected), (compressor, reader)):
        assert (a - b).abs().max() > 0.1
    bundle.compress(TEXTS[:1])
    with bundle.text_decoder() as model, torch.no_grad():
        assert torch.equal(model(input_ids=PROMPT).logits, expected)
        bundle.compress(TEXTS[:1])  # the compressor's adapter, and back
        assert torch.equal(model(input_ids=PROMPT).logits, expected)
        with pytest.raises(ZeroDivisionError), bundle.soft_decoder(torch.zeros(1, 1, dtype=torch.bool)) as tuned:
            assert torch.equal(tuned(input_ids=PROMPT).logits, reader)
            raise ZeroDivisionError
        assert torch.equal(model(input_ids=PROMPT).logits, expected)
    with pytest.raises(ConfigError, match=r"no adapter 'teacher': there are \['compressor', 'reader'\]"):
        logits(bundle, "teacher")


def test_threads_compress_and_decode_at_once(bundle: Any) -> None:
    [alone] = bundle.compress(TEXTS[:1])
    reader, plain = logits(bundle, "reader"), logits(bundle, None)

    def work(number: int) -> bool:
        if number % 3 == 0:
            return torch.equal(bundle.compress(TEXTS[:1])[0].slots, alone.slots)
        return torch.equal(logits(bundle, "reader" if number % 3 == 1 else None), reader if number % 3 == 1 else plain)

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(work, range(18), timeout=WAIT))

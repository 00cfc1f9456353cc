"""Sentence slots and xRAG (ArcAligner, sections 3.1-3.2), against sentence-transformers, sentencex and plain sums."""

import re
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer
from sentencex import segment

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.errors import BundleError, ConfigError
from ctx_compress_rag.methods.base.reader import TwoLayerMap
from ctx_compress_rag.methods.sentence_slots import SentenceSlotsConfig, SentenceSlotsEncoder
from ctx_compress_rag.text.sentences import split_sentences, split_units
from helpers.methods import DIM, minilm, save_encoder, unigram
from helpers.models import tiny_config

TEXTS = [
    "Dr. Olu Vane was born in Kessmar in 1903. She loved the sea! Her first job was at the salt works of Pell, "
    "where she weighed, counted and shipped more salt than anyone before her had thought there was.",
    "Kessmar is a harbour town.\n\nIts ferry leaves at dawn.",
    "Pell",
]
FROZEN = {"mode": "frozen"}


METASPACE = unigram(TEXTS)


@pytest.fixture(scope="module")
def make(make_tiny_bundle: Any, encoder: Path) -> Callable[..., Any]:
    """Make a sentence-slot bundle with the tiny encoder."""

    def make(window: int = 256, **method: Any) -> Bundle:
        settings = SentenceSlotsConfig(**{"encoder": str(encoder), "encoder_dim": DIM, **method})
        config = tiny_config(method=settings, base_ratio=8, ratios=[8], window=window)
        made = Bundle.build(config, make_tiny_bundle(encoder=FROZEN, decoder=FROZEN).backbone)
        made.compress(TEXTS)  # loads the encoder
        made.reader.initialize(1.0)
        return made

    return make


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


PIECES = [
    "Orla keeps a goat. ",
    "Mr. J. Ames ",
    "rivers",
    "! ",
    "unbelievablyunbroken",
    " ",
    "\n\n",
    "...",
    "7 ",
    "(Why?) ",
]
WIDE = st.text(
    st.sampled_from("aZ9 .!?\n\u00a0\u0085\u2028\u3002\u65e5\u672c\u00e9\U0001f600\u0301,'\"()"), max_size=30
)
ASCII = st.lists(st.sampled_from(PIECES), min_size=1, max_size=14).map("".join).filter(str.strip)


@given(
    st.one_of(ASCII, WIDE, st.text(max_size=40)), st.sampled_from([1, 2, 3, 8, 21, None]), st.booleans(), st.booleans()
)
@example("\U0001f600\U0001f600 on", 2, False, False)  # a character of more bytes than the limit
@example("salt" + "\n" * 9 + "works", 2, True, False)  # white space of more tokens
def test_every_token_and_character_is_in_one_unit(
    tiny_tokenizer: Any, text: str, limit: int | None, merge: bool, unigram: bool
) -> None:
    """Tokens that bring a unit beyond the limit are white space, or further bytes of a character."""
    tokenizer = METASPACE if unigram else tiny_tokenizer
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    assume(text.strip() and offsets)
    units = split_units(text, tokenizer, limit, merge=merge)
    assert all(unit.text for unit in units)
    assert sum(unit.tokens for unit in units) == len(offsets)
    assert "".join("".join(unit.text for unit in units).split()) == "".join(text.split())
    ends = [0, *(end for _, end in offsets)]
    counted = [text[max(a, before) : b].strip() != "" for (a, b), before in zip(offsets, ends, strict=False)]
    for unit in units:
        own, counted = counted[: unit.tokens], counted[unit.tokens :]
        assert unit.tokens > 0 and sum(own) <= (limit or len(offsets))


@given(ASCII, st.sampled_from([2, 3, 8, 21, None]), st.booleans())
@example("some words \U0001f600 and some more \U0001f600\U0001f600", 6, False)  # several tokens of like offsets
@example("some words \U0001f600 and some more \U0001f600\U0001f600", 9, False)
def test_a_units_tokens_are_those_of_its_text(tiny_tokenizer: Any, text: str, limit: int | None, merge: bool) -> None:
    """The passage's ids, cut by the counts and decoded, are the units' texts."""
    ids = ids_of(tiny_tokenizer, text)
    for unit in split_units(text, tiny_tokenizer, limit, merge=merge):
        assert tiny_tokenizer.decode(ids[: unit.tokens]).strip() == unit.text
        ids = ids[unit.tokens :]


@given(ASCII, st.integers(1, 24))
def test_sentences_are_cut_between_words_and_merged_while_they_fit(tiny_tokenizer: Any, text: str, limit: int) -> None:
    parts = split_units(text, tiny_tokenizer, limit, merge=False)
    left = [unit.text for unit in parts if unit.text]
    for sentence in (s.strip() for s in segment("en", text) if s.strip()):
        at = 0
        while at < len(sentence):
            at = sentence.index(left[0], at) + len(left.pop(0))
            if sentence[at : at + 1].strip():  # not at a space: the word, with the space after it, must be too long
                word = re.escape(sentence[:at].split()[-1] + sentence[at:].split()[0])
                spaced = re.findall(rf"{word}\s*", text)
                assert max(len(ids_of(tiny_tokenizer, f" {piece}")) for piece in spaced) > limit
    assert left == []
    merged = split_units(text, tiny_tokenizer, limit, merge=True)
    assert all(a.tokens + b.tokens > limit for a, b in pairwise(merged))
    assert len(merged) <= len(parts)


@pytest.mark.parametrize(
    "text", [*TEXTS, "One.\u00a0Two. Three\u0085four. See J\u0085. It is so.", "  Led by space. Ended by it.  \n"]
)
def test_sentences_are_the_splitters(tiny_tokenizer: Any, text: str) -> None:
    plain = "".join(" " if c in "\u00a0\u0085" else c for c in text)
    expected = [s.strip() for s in segment("en", plain) if s.strip()]
    assert "".join(split_sentences(text)) == text
    assert [
        unit.text.replace("\u00a0", " ").replace("\u0085", " ")
        for unit in split_units(text, tiny_tokenizer, None, merge=False)
    ] == expected


def test_long_sentences_are_cut_into_like_parts(tiny_tokenizer: Any) -> None:
    """Section 4.10: half a sentence to a slot. Words here are one token each."""
    word = " a"
    assert len(ids_of(tiny_tokenizer, word * 20)) == 20
    assert [u.tokens for u in split_units(word * 20, tiny_tokenizer, 19, merge=True)] == [10, 10]
    assert [u.tokens for u in split_units(word * 20, tiny_tokenizer, 7, merge=False)] == [7, 7, 6]


@pytest.mark.parametrize("unit", ["sentence", "passage", "tokens"])
def test_slots_are_the_encoders_own_vectors(make: Any, encoder: Path, unit: str) -> None:
    made, reference = make(unit=unit), SentenceTransformer(str(encoder), device="cpu")
    for text, soft in zip(TEXTS, made.compress(TEXTS), strict=True):
        whole = [s.strip() for s in segment("en", text) if s.strip()]
        if unit == "passage":
            pieces = [text]
        elif unit == "sentence":
            pieces = whole
        else:
            ids = ids_of(made.tokenizer, text)
            cuts = [sum(soft.token_counts[:i]) for i in range(soft.n_slots + 1)]
            pieces = [made.tokenizer.decode(ids[a:b]).strip() for a, b in pairwise(cuts)]
            assert max(soft.token_counts) <= 8 and soft.n_slots >= len(ids) / 8
        assert soft.slots.shape == (len(pieces), DIM)
        assert soft.n_tokens == len(ids_of(made.tokenizer, text))
        np.testing.assert_allclose(soft.slots, reference.encode(pieces), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("unit", ["sentence", "passage"])
def test_nothing_is_longer_than_the_window(make: Any, unit: str) -> None:
    """What follows the first 64 tokens is not lost."""
    [soft] = make(unit=unit, window=64).compress([TEXTS[0] * 3])
    assert soft.n_slots > 3 and max(soft.token_counts) <= 64
    assert soft.n_tokens == len(ids_of(make().tokenizer, TEXTS[0] * 3))


def test_autocast_leaves_vectors_as_they_are(make: Any) -> None:
    """Which `bf16: true` trains with."""
    with torch.autocast("cpu", torch.bfloat16):
        [cast] = make().compress(TEXTS[:1])
    [soft] = make().compress(TEXTS[:1])
    assert np.array_equal(cast.slots, soft.slots)


def test_each_distinct_sentence_is_encoded_once(make: Any) -> None:
    made = make()
    encoded: list[int] = []
    made.compressor.encoder.model.register_forward_hook(
        lambda _module, _inputs, output: encoded.append(len(output["sentence_embedding"]))
    )
    texts = ["Ada swims. Bo runs. Ada swims.", "Bo runs. Cy sings.", "Ada swims."]
    made.compress(texts)
    assert sum(encoded) == 3
    made.compress([*texts, "Di reads. Cy sings."])
    assert sum(encoded) == 4


@pytest.mark.parametrize(("slot_rms", "embedding_rms"), [(0.051, 0.02), (12.0, 1.0), (1.0, 30.0)])
def test_untrained_slots_have_the_size_of_token_embeddings(slot_rms: float, embedding_rms: float) -> None:
    torch.manual_seed(1)
    projector = TwoLayerMap(384, 256)
    projector.initialize(slot_rms, embedding_rms)
    with torch.no_grad():
        made = projector(torch.randn(500, 384) * slot_rms)
    assert float(made.pow(2).mean().sqrt()) == pytest.approx(embedding_rms, rel=0.1)


def test_a_saved_bundle_reads_slots_without_its_encoder(make: Any, encoder: Path, tmp_path: Path) -> None:
    shutil.copytree(encoder, tmp_path / "encoder")
    made = make(encoder=str(tmp_path / "encoder"))
    soft = made.compress(TEXTS)
    made.save_pretrained(tmp_path / "bundle")
    embedded = [made.embed(s) for s in soft]
    assert sum(file.stat().st_size for file in (tmp_path / "bundle" / "compressor").iterdir()) < 1000
    (tmp_path / "encoder").rename(tmp_path / "away")
    loaded = Bundle.from_pretrained(tmp_path / "bundle")
    assert loaded.fingerprint == made.fingerprint
    assert all(torch.equal(loaded.embed(s), e) for s, e in zip(soft, embedded, strict=True))
    with pytest.raises(BundleError, match="cannot load the sentence encoder"):
        loaded.compress(TEXTS)
    (tmp_path / "away").rename(tmp_path / "encoder")
    assert all(np.array_equal(a.slots, b.slots) for a, b in zip(loaded.compress(TEXTS), soft, strict=True))


def test_another_encoder_is_refused(make: Any, encoder: Path, tiny_tokenizer: Any, tmp_path: Path) -> None:
    shutil.copytree(encoder, tmp_path / "encoder")
    made = make(encoder=str(tmp_path / "encoder"))
    made.save_pretrained(tmp_path / "bundle")
    shutil.rmtree(tmp_path / "encoder")
    save_encoder(tmp_path / "encoder", tiny_tokenizer, seed=1)
    with pytest.raises(BundleError, match=r"made with another sentence encoder than .*encoder"):
        Bundle.from_pretrained(tmp_path / "bundle").compress(TEXTS)


def test_impossible_encoders_are_refused(make: Any) -> None:
    with pytest.raises(ConfigError, match=f"set encoder_dim: {DIM}"):
        make(encoder_dim=DIM + 1)
    with pytest.raises(BundleError, match="no/such/encoder"):
        make(encoder="./no/such/encoder")
    made = make()
    with pytest.raises(BundleError, match="expected encoder_digest"):
        made.compressor.load_saved_state({})


def test_a_control_token_in_a_passage_is_text_for_the_encoder_too() -> None:
    encoder = SentenceSlotsEncoder(SentenceSlotsConfig(encoder="minilm"), torch.device("cpu"))
    model = minilm()
    for text in ("Old [SEP] towers", "[CLS]", "a [PAD] b[MASK]"):
        spaced = text.replace("[", "[ ")
        assert torch.equal(encoder.encode([text])[0], torch.from_numpy(model.encode_document(spaced)))
        assert not torch.allclose(encoder.encode([text])[0], torch.from_numpy(model.encode_document(text)), atol=1e-3)
    text = "Old towers lean, and so does [1] the third."
    assert torch.equal(encoder.encode([text])[0], torch.from_numpy(model.encode_document(text)))

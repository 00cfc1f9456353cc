"""Vectors of sentences, stored when passages are added: a question encodes nothing but itself."""

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ctx_compress_rag.marking.mark import mark
from ctx_compress_rag.marking.sentences import nearest
from ctx_compress_rag.models.sentence_embedding import load_minilm
from ctx_compress_rag.store import SoftContextStore
from ctx_compress_rag.store.sentences import DIM, pack, unpack
from helpers.store import WordBundle

TEXTS = [
    "Dr. Olu Vane was born in Kessmar. She loved the sea. Her first job was at the salt works.",
    "Kessmar is a harbor town. Its mayor is Ilse Brandt.",
]
QUESTION = "Who is the mayor of Kessmar?"


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 5), st.integers(0, 2**32 - 1))
def test_packed_vectors_keep_their_cosines(count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(count, DIM)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    asked = rng.normal(size=DIM)
    asked /= np.linalg.norm(asked)
    packed = pack(vectors)
    assert len(packed) <= 4 * -(-count * (DIM + 4) // 3)
    found = unpack(packed, count)
    assert (found is None) == (count == 0)
    if found is not None:
        np.testing.assert_allclose(found @ asked, vectors @ asked, atol=0.01)
    assert unpack(packed, count + 1) is None and unpack("no base64!", 1) is None


def test_a_question_encodes_only_itself(tmp_path: Path) -> None:
    bundle: Any = WordBundle()
    bundle.config.text_share = 0.5
    with SoftContextStore(tmp_path, bundle, key=b"k" * 32) as store:
        store.add(TEXTS, ["a", "b"], progress=False)
        stored = [passage.sentences for passage in store.get_passages(["a", "b"]) if passage]
    assert all(len(packed) < 2100 for packed in stored)
    expected = nearest(TEXTS, QUESTION)
    seen: list[Any] = []
    hook = load_minilm().register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]["input_ids"].shape[0]))
    try:
        found = nearest(TEXTS, QUESTION, stored)
        assert seen == [1]
        assert nearest([TEXTS[0] + " And more.", TEXTS[1]], QUESTION, stored)[0][-1].text == "And more."
    finally:
        hook.remove()
    for own, other in zip(found, expected, strict=True):
        assert [part.text for part in own] == [part.text for part in other]
        np.testing.assert_allclose([part.similarity for part in own], [part.similarity for part in other], atol=0.01)


def test_a_bundle_that_shows_no_sentences_stores_none(tmp_path: Path) -> None:
    with SoftContextStore(tmp_path, WordBundle(), key=b"k" * 32) as store:
        store.add(TEXTS, ["a", "b"], progress=False)
        assert [passage.sentences for passage in store.get_passages(["a", "b"]) if passage] == ["", ""]
        assert mark(store, TEXTS, ["a", "b"], question=QUESTION) == store.markers(["a", "b"], 4)

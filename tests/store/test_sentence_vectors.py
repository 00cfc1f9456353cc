"""Vectors of sentences, stored when passages are added: a question encodes nothing but itself."""

from pathlib import Path
from typing import Any

import numpy as np

from ctx_compress_rag.marking.budget import nearest
from ctx_compress_rag.marking.mark import mark
from ctx_compress_rag.models.sentence_embedding import load_minilm
from ctx_compress_rag.store import SoftContextStore
from helpers.store import WordBundle

TEXTS = [
    "Dr. Olu Vane was born in Kessmar. She loved the sea. Her first job was at the salt works.",
    "Kessmar is a harbor town. Its mayor is Ilse Brandt.",
]
QUESTION = "Who is the mayor of Kessmar?"


def test_a_question_encodes_only_itself(tmp_path: Path) -> None:
    bundle: Any = WordBundle()
    bundle.config.text_share = 0.5
    with SoftContextStore(tmp_path, bundle, key=b"k" * 32) as store:
        store.add(TEXTS, ["a", "b"], progress=False)
        stored = [passage.sentences for passage in store.get_passages(["a", "b"]) if passage]
    assert all(len(packed) < 3000 for packed in stored)
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

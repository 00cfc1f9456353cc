"""Spending a budget: never more than it, the nearest sentences, the finest slots that fit."""

import math
import sys
from collections.abc import Sequence
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ctx_compress_rag.errors import ConfigError, MissingExtraError, RatioError
from ctx_compress_rag.marking.budget import (
    NOTHING,
    Budget,
    RetrievedText,
    ScoredSentence,
    ShownPassage,
    nearest_sentences,
)
from ctx_compress_rag.marking.mark import mark_texts, relevance_score
from ctx_compress_rag.models.sentence_embedding import PACKAGED, load_embedder
from ctx_compress_rag.store import SoftContextStore
from helpers.store import WordBundle

BASE, WRAP = 4, 2

sentence_lists = st.lists(st.tuples(st.integers(1, 12), st.floats(-1, 1)), min_size=1, max_size=5)
passage_lists = st.lists(st.tuples(sentence_lists, st.booleans()), min_size=1, max_size=5)


def made(rows: Any) -> list[RetrievedText]:
    """Passages of words that are all different; the second value says whether slots are stored."""
    passages = []
    for number, (own, stored) in enumerate(rows):
        parts = [
            ScoredSentence(" ".join(f"w{number}.{place}.{word}" for word in range(words)), similarity)
            for place, (words, similarity) in enumerate(own)
        ]
        text = " ".join(part.text for part in parts)
        passages.append(RetrievedText(text, -(-len(text.split()) // BASE) if stored else 0, parts))
    return passages


def count(shown: Sequence[ShownPassage]) -> int:
    """A word takes a position, slots take two more than there are, and so does a separator between two passages."""
    costs = [len(each.text.split()) + (each.slots + WRAP if each.slots else 0) for each in shown if each != NOTHING]
    return sum(costs) + 2 * max(0, len(costs) - 1)


@given(passage_lists, st.integers(0, 80), st.floats(0, 1), st.booleans(), st.data())
def test_no_way_to_spend_it_takes_more(rows: Any, size: int, share: float, nestable: bool, data: Any) -> None:
    passages = made(rows)
    best = data.draw(st.integers(0, len(passages) - 1))
    budget = Budget(passages, size, count, nestable=nestable)
    for spend in (budget.soft, lambda: budget.mixed(best, share)):
        try:
            shown = spend()
        except RatioError as error:
            assert f"token_budget={size}" in str(error)
            continue
        assert count(shown) <= size and any(each != NOTHING for each in shown)
        for each, passage in zip(shown, passages, strict=True):
            # Nothing is shown that the passage does not say, in another order, or with slots that it does not have.
            words = iter(passage.text.split())
            assert all(word in words for word in each.text.split())
            assert each.slots in (0, -(-passage.slots // each.factor)) and (nestable or each.factor == 1)


@given(passage_lists, st.integers(3, 80))
def test_sentences_are_the_nearest_until_one_is_cut(rows: Any, size: int) -> None:
    passages = made(rows)
    shown = Budget(passages, size, count).with_sentences([NOTHING] * len(passages))
    ranked = sorted(
        (-part.similarity, number, place, part.text)
        for number, passage in enumerate(passages)
        for place, part in enumerate(passage.sentences)
    )
    for each, passage in zip(shown, passages, strict=True):  # a blank line stands where sentences are left out
        runs = each.text.split("\n\n")
        assert all(run in passage.text for run in runs)
        assert not any(" ".join(two) in passage.text for two in pairwise(runs))
    said = {word for each in shown for word in each.text.split()}
    whole = [set(text.split()) <= said for *_, text in ranked]
    kept = whole.index(False) if False in whole else len(whole)
    assert not any(set(text.split()) & said for *_, text in ranked[kept + 1 :])
    if kept < len(ranked):  # one more word would not fit
        _, number, _, text = ranked[kept]
        more = [each.text for each in shown]
        more[number] += " " + next(word for word in text.split() if word not in said)
        assert count([ShownPassage(each.strip()) for each in more]) > size


def test_slots_are_as_fine_as_the_budget_allows() -> None:
    passages = made([([(12, 0.1), (12, 0.9)], True), ([(24, 0.5)], True)])  # six slots each
    assert Budget(passages, 18, count).soft() == [ShownPassage("", 6, 1)] * 2
    assert Budget(passages, 17, count).soft() == [ShownPassage("", 3, 2)] * 2
    # Half of 16 is for six slots and their wrap; six words of the nearest sentence and the separator fill the rest.
    near = passages[0].sentences[1].text.split()
    assert Budget(passages, 16, count).mixed(1, 0.5) == [ShownPassage(" ".join(near[:6])), ShownPassage("", 6, 1)]
    assert Budget(passages, 16, count).mixed(0, 0.5) == [ShownPassage(" ".join(near[:8]), 6, 1), NOTHING]
    assert Budget(passages, 11, count).mixed(1, 1) == [ShownPassage(" ".join(near[:11])), NOTHING]


@pytest.mark.parametrize("text", ["日本語です", "日 本語"])
def test_a_text_without_spaces_is_cut_between_characters(text: str) -> None:
    shown = Budget(
        [RetrievedText(text, 0, [ScoredSentence(text, 1.0)])], 2, lambda shown: len(shown[0].text.replace(" ", ""))
    )
    assert shown.with_sentences([NOTHING])[0].text.replace(" ", "") == "日本"


@pytest.mark.parametrize(
    ("score", "number"),
    [
        (2, 2.0),
        (np.float32(0.5), 0.5),
        (Decimal("0.25"), 0.25),
        ("0.75", 0.75),
        (torch.tensor(3.0), 3.0),
        (None, -math.inf),
        (math.nan, -math.inf),
    ],
)
def test_a_relevance_is_any_number(score: Any, number: float) -> None:
    assert relevance_score(score) == number


@pytest.mark.parametrize("score", ["high", [1], torch.tensor([1.0, 2.0]), 10**400], ids=["word", "list", "two", "huge"])
def test_what_is_no_number_is_refused_by_name(score: Any) -> None:
    with pytest.raises(ConfigError, match="high|1"):
        relevance_score(score)


TEXTS = [
    "Dr. Olu Vane was born in Kessmar. She loved the sea. Her first job was at the salt works.",
    "Kessmar is a harbor town. Its mayor is Ilse Brandt.",
]
QUESTION = "Who is the mayor of Kessmar?"


def test_a_question_encodes_only_itself(tmp_path: Path) -> None:
    """Vectors of sentences are stored when passages are added."""
    bundle: Any = WordBundle()
    bundle.config.text_share = 0.5
    with SoftContextStore(tmp_path, bundle, key=b"k" * 32) as store:
        store.add([*TEXTS, "---\n***"], ["a", "b", "a rule"], progress=False)
        *stored, none = [passage.sentences for passage in store.get_passages(["a", "b", "a rule"]) if passage]
    assert none == "" and nearest_sentences(["---\n***"], QUESTION) == [[]]
    assert all(len(packed) < 3000 for packed in stored)
    expected = nearest_sentences(TEXTS, QUESTION)
    seen: list[Any] = []
    embeddings: Any = load_embedder(PACKAGED)
    hook = embeddings.model.embeddings.register_forward_hook(lambda _, inputs, out: seen.append(len(out)))
    try:
        found = nearest_sentences(TEXTS, QUESTION, stored)
        assert seen == []  # the question itself is encoded without torch
        assert nearest_sentences([TEXTS[0] + " And more.", TEXTS[1]], QUESTION, stored)[0][-1].text == "And more."
        assert len(seen) == 1
    finally:
        hook.remove()
    for own, other in zip(found, expected, strict=True):
        assert [part.text for part in own] == [part.text for part in other]
        np.testing.assert_allclose([part.similarity for part in own], [part.similarity for part in other], atol=0.01)


def test_without_a_sentence_splitter_soft_contexts_are_shown_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "sentencex", None)
    bundle: Any = WordBundle()
    bundle.config.text_share = 0.5
    with SoftContextStore(tmp_path, bundle, key=b"k" * 32) as store:
        store.add(TEXTS, ["a", "b"], progress=False)
        assert mark_texts(store, TEXTS, ["a", "b"], question=QUESTION) == store.markers(["a", "b"], 4)
        assert "sentencex is not installed" in caplog.text
        with pytest.raises(MissingExtraError, match="sentencex"):
            mark_texts(store, TEXTS, ["a", "b"], question=QUESTION, text_share=0.5)


def test_a_bundle_that_shows_no_sentences_stores_none(tmp_path: Path) -> None:
    with SoftContextStore(tmp_path, WordBundle(), key=b"k" * 32) as store:
        store.add(TEXTS, ["a", "b"], progress=False)
        assert [passage.sentences for passage in store.get_passages(["a", "b"]) if passage] == ["", ""]
        assert mark_texts(store, TEXTS, ["a", "b"], question=QUESTION) == store.markers(["a", "b"], 4)

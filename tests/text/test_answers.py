"""Metrics against published examples, plain computations and properties."""

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctx_compress_rag.text import answers as metrics
from ctx_compress_rag.text.answers import (
    contains_answer,
    exact_match,
    mentions_answer,
    normalize_answer,
    quoted_from,
    token_f1,
)


def test_docstring_examples() -> None:
    result = doctest.testmod(metrics)
    assert result.attempted >= 2
    assert result.failed == 0


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The Cat!", "cat"),
        ("an apple a day", "apple day"),
        ("  tabs\tand\nlines ", "tabs and lines"),
        ("U.S.A.", "usa"),
        ("theatre another", "theatre another"),  # articles are whole words
        ("a.", ""),
        ("Zürich — 北京", "zürich — 北京"),
        ("「东京」、日本。", "东京日本"),
        ("\uff01\uff08东京\uff09\uff0c日本\uff1f", "东京日本"),  # full width
        ("서울, 대한민국", "서울 대한민국"),  # Korean has spaces
    ],
)
def test_normal_form(text: str, normal: str) -> None:
    assert normalize_answer(text) == normal


def test_known_scores() -> None:
    # From the rules of SQuAD's evaluation script: the best of several answers counts.
    answers = ["Denver Broncos", "the Denver Broncos", "Broncos"]
    assert exact_match("The denver broncos.", answers) == 1.0
    assert exact_match("Denver Broncos won", answers) == 0.0
    assert token_f1("Denver Broncos won", answers) == pytest.approx(0.8)
    assert token_f1("Carolina Panthers", answers) == 0.0
    assert token_f1("red red", ["red"]) == pytest.approx(2 / 3)  # a word counts as often as it stands


def test_contains_is_a_substring_of_the_normal_form() -> None:
    """The definition of Simple Context Compression, section 5.1."""
    assert contains_answer("首都是东京。", ["东京"]) == 1.0
    assert contains_answer("It is the U.S.A., surely", ["usa"]) == 1.0
    assert contains_answer("a big party", ["art"]) == 1.0
    assert contains_answer("north of the east", ["north east"]) == 0.0


def test_mentions_compares_whole_words() -> None:
    assert not mentions_answer("a big party", ["art"])
    assert mentions_answer("big art, here", ["fig", "art"])
    assert not mentions_answer("north of the east", ["north east"])
    assert mentions_answer("首都是东京。", ["东京"])
    assert not mentions_answer("big art", ["the", ""]) and not mentions_answer("", [])


def test_a_quotation_has_a_texts_words_whatever_the_white_space() -> None:
    assert quoted_from(" two. Three", "One two.\nThree four.")
    assert not quoted_from("two. four", "One two.\nThree four.") and not quoted_from(" ", "One two.")


@pytest.mark.parametrize(
    ("answer", "has", "has_not"),
    [
        ("7", "1977 had 7 doors.", "Built in 1977."),
        ("oak", "Soak the (oak)!", "Soak the peas."),
        ("5 years", "It lasts 5\nyears.", "It lasts 15 years."),
        ("1.5", "It costs 1.5.", "It costs 11.5, or 1.50, or 1.5.1."),
        ("4:51", "At 4:51, they left.", "At 14:51, or 4:51:20."),
        ("\u6771\u4eac", "\u9996\u90fd\u662f\u6771\u4eac\u3002", "\u6771 \u4eac"),
    ],
)
def test_a_quotation_is_of_whole_words_and_numbers(answer: str, has: str, has_not: str) -> None:
    assert quoted_from(answer, has) and not quoted_from(answer, has_not)


@pytest.mark.parametrize(
    ("prediction", "answer", "precision", "recall"),
    [
        ("首都是东京。", "东京", 2 / 5, 1),
        ("東京です", "東京", 2 / 4, 1),  # kana are words, too
        ("コーヒー・ショップ", "コーヒー", 4 / 8, 1),  # the middle dot is punctuation
        ("在 2016 年", "2016年", 2 / 3, 1),  # runs of other characters stay whole
        ("「Python 语言」", "python语言", 1, 1),
        ("南京", "东京", 1 / 2, 1 / 2),
    ],
)
def test_f1_of_chinese_counts_characters(prediction: str, answer: str, precision: float, recall: float) -> None:
    """As MLQA's evaluation segments Chinese; counted by hand."""
    assert token_f1(prediction, [answer]) == pytest.approx(2 * precision * recall / (precision + recall))


@pytest.mark.parametrize("metric", [exact_match, token_f1, contains_answer])
def test_unanswerable_questions_want_an_empty_prediction(metric) -> None:
    for answers in ([], [""]):
        assert metric("", answers) == 1.0
        assert metric("the", answers) == 1.0  # normalizes to nothing
        assert metric("Paris", answers) == 0.0
    assert metric("", ["Paris"]) == 0.0


@given(st.text(), st.lists(st.text(), min_size=1, max_size=3))
def test_scores_agree_with_each_other(prediction: str, answers: list[str]) -> None:
    f1 = token_f1(prediction, answers)
    assert 0.0 <= f1 <= 1.0
    if exact_match(prediction, answers):
        assert f1 == 1.0
        assert contains_answer(prediction, answers) == 1.0
    assert normalize_answer(normalize_answer(prediction)) == normalize_answer(prediction)

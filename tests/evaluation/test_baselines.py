"""Baselines and plots with a real tokenizer, splitter and MiniLM; statistics against plain computations."""

import math
import statistics
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from ctx_compress_rag.evaluation.answering import truncate_passages
from ctx_compress_rag.evaluation.report import ScoreCurve, plot_scores, standard_error, teacher_normalized
from ctx_compress_rag.marking.budget import nearest_sentences
from helpers import architectures
from helpers.methods import minilm, unigram

PASSAGES = [
    "Dr. Olu Vane was born in Kessmar in 1903. She loved the sea. Her first job was at the salt works of Pell.",
    "Kessmar is a harbour town. Its ferry leaves at dawn.\n\nThe mayor of Kessmar is Ilse Brandt. It rains often.",
    "Pell lies inland and trades in salt.",
]
QUESTION = "Who is the mayor of Kessmar?"
FACT = "The mayor of Kessmar is Ilse Brandt."
TOKENIZERS = {"byte-level BPE": architectures.tokenizer("Qwen2"), "unigram with Metaspace": unigram(PASSAGES)}


def count(texts: list[str], tokenizer) -> int:
    return sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in texts)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(st.lists(st.text(max_size=40), max_size=4), st.integers(0, 60))
def test_truncation_keeps_starts_within_the_budget(name: str, texts: list[str], budget: int) -> None:
    tokenizer = TOKENIZERS[name]
    kept = truncate_passages(texts, tokenizer, budget)
    assert count(kept, tokenizer) <= budget
    assert len(kept) == len(texts)
    assert all(text.startswith(head) for text, head in zip(texts, kept, strict=True))
    if count(texts, tokenizer) <= budget:
        assert kept == texts


@pytest.mark.parametrize("budget", [1, 7, 20, 41])
def test_truncation_spends_the_budget_in_proportion(budget: int) -> None:
    tokenizer = TOKENIZERS["byte-level BPE"]
    kept = truncate_passages(PASSAGES, tokenizer, budget)
    assert count(kept, tokenizer) == budget  # ASCII text: a cut never falls within a character
    total = count(PASSAGES, tokenizer)
    for whole, head in zip(PASSAGES, kept, strict=True):
        assert abs(count([head], tokenizer) - budget * count([whole], tokenizer) / total) < 1


def test_sentences_have_the_encoders_cosine_and_none_is_torn() -> None:
    encoder = minilm()
    near = nearest_sentences(PASSAGES, QUESTION)
    best = max((part.similarity, part.text) for own in near for part in own)
    assert best[1] == FACT
    # "Dr." ends no sentence.
    assert [len(own) for own in near] == [3, 4, 1]
    assert near[0][0].text == "Dr. Olu Vane was born in Kessmar in 1903."
    question = encoder.encode(QUESTION)
    for part in (part for own in near for part in own):
        vector = encoder.encode(part.text)
        cosine = float(question @ vector / (question @ question) ** 0.5 / (vector @ vector) ** 0.5)
        assert part.similarity == pytest.approx(cosine, abs=1e-4)
    assert nearest_sentences(["", " \n"], QUESTION) == [[], []]


def test_the_plot_shows_what_it_is_given(tmp_path: Path) -> None:
    soft = ScoreCurve("soft context", [(4, 0.95, 0.02), (8, 0.9, 0.03), (16, 0.8, 0.04)])
    truncation = ScoreCurve("truncation", [(4, 0.4, 0.1), (8, 0.2, 0.1), (16, 0.1, 0.1)])
    exact = ScoreCurve(soft.label, [(ratio, score, 0.0) for ratio, score, _ in soft.points])
    given = {"both": [soft, truncation], "alone": [soft], "no bars": [exact]}
    paths = [plot_scores(tmp_path / "new" / f"{name}.png", each, {"full text": 0.97}) for name, each in given.items()]
    paths.append(plot_scores(tmp_path / "no levels.png", [soft], {}))
    assert len({path.read_bytes() for path in paths}) == 4
    colors = []
    for path in paths:
        with Image.open(path) as image:
            assert (image.format, image.size) == ("PNG", (1080, 630))
            colors.append({color[:3] for _, color in image.convert("RGB").getcolors(1 << 24)})
    assert [(217, 114, 46) in each for each in colors] == [True, False, False, False]  # the second curve's own color


@given(st.lists(st.floats(0, 1), min_size=2, max_size=30))
def test_standard_error_is_that_of_the_mean(scores: list[float]) -> None:
    assert standard_error(scores) == pytest.approx(statistics.stdev(scores) / math.sqrt(len(scores)), abs=1e-12)


@given(st.floats(0, 1), st.lists(st.integers(1, 4), min_size=5, max_size=20))
@settings(max_examples=8)
def test_a_share_kept_of_every_question_has_an_exact_interval(share: float, worth: list[int]) -> None:
    """If each question keeps the same share, so does each resample: only pairing makes this hold."""
    nothing = [0.1] * len(worth)
    full = [0.1 + w / 5 for w in worth]
    compressed = [0.1 + share * w / 5 for w in worth]
    interval = teacher_normalized(compressed, nothing, full)
    assert interval is not None
    assert (interval.value, interval.low, interval.high) == pytest.approx((share, share, share))


def test_interval_matches_the_delta_method() -> None:
    """A first-order approximation of the ratio's spread, by other mathematics than resampling."""
    rng = np.random.default_rng(7)
    n = 800
    nothing = rng.binomial(1, 0.1, n).astype(float)
    full = rng.binomial(1, 0.9, n).astype(float)
    compressed = np.where(rng.random(n) < 0.7, full, nothing)
    interval = teacher_normalized(compressed.tolist(), nothing.tolist(), full.tolist())
    assert interval is not None
    gain, worth = compressed - nothing, full - nothing
    ratio = gain.mean() / worth.mean()
    spread = 1.96 * np.std(gain - ratio * worth, ddof=1) / math.sqrt(n) / worth.mean()
    assert interval.value == pytest.approx(ratio)
    assert interval.low == pytest.approx(ratio - spread, abs=0.15 * spread)
    assert interval.high == pytest.approx(ratio + spread, abs=0.15 * spread)


@pytest.mark.parametrize(
    ("nothing", "full"),
    [
        ([0.5] * 10, [0.5] * 10),  # the text gains nothing
        ([0.6] * 10, [0.5] * 10),  # less than nothing
        ([0.0, 1.0] * 5, [1.0, 0.0] * 4 + [1.0, 1.0]),  # better by one question of ten: chance
    ],
)
def test_no_share_of_a_worth_that_is_not_sure(nothing: list[float], full: list[float]) -> None:
    assert teacher_normalized([0.5] * 10, nothing, full) is None

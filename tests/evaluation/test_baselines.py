"""Baselines and plots with a real tokenizer, a real sentence splitter and the real MiniLM."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ctx_compress_rag.evaluation.baselines import rank_sentences, select, truncate
from ctx_compress_rag.evaluation.plots import Curve, plot_scores
from ctx_compress_rag.models.sentence_embedding import load_minilm
from helpers.sentences import unigram

PASSAGES = [
    "Dr. Olu Vane was born in Kessmar in 1903. She loved the sea. Her first job was at the salt works of Pell.",
    "Kessmar is a harbour town. Its ferry leaves at dawn.\n\nThe mayor of Kessmar is Ilse Brandt. It rains often.",
    "Pell lies inland and trades in salt.",
]
QUESTION = "Who is the mayor of Kessmar?"
FACT = "The mayor of Kessmar is Ilse Brandt."


def _bpe() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(PASSAGES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZERS = {"byte-level BPE": _bpe(), "unigram with Metaspace": unigram(PASSAGES)}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return TOKENIZERS[request.param]


def count(texts: list[str], tokenizer) -> int:
    return sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in texts)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(deadline=None, max_examples=60)
@given(st.lists(st.text(max_size=40), max_size=4), st.integers(0, 60))
def test_truncation_keeps_starts_within_the_budget(name: str, texts: list[str], budget: int) -> None:
    tokenizer = TOKENIZERS[name]
    kept = truncate(texts, tokenizer, budget)
    assert count(kept, tokenizer) <= budget
    assert len(kept) == len(texts)
    assert all(text.startswith(head) for text, head in zip(texts, kept, strict=True))
    if count(texts, tokenizer) <= budget:
        assert kept == texts


@pytest.mark.parametrize("budget", [1, 7, 20, 41])
def test_truncation_spends_the_budget_in_proportion(budget: int) -> None:
    tokenizer = TOKENIZERS["byte-level BPE"]
    kept = truncate(PASSAGES, tokenizer, budget)
    assert count(kept, tokenizer) == budget  # ASCII text: a cut never falls within a character
    total = count(PASSAGES, tokenizer)
    for whole, head in zip(PASSAGES, kept, strict=True):
        assert abs(count([head], tokenizer) - budget * count([whole], tokenizer) / total) < 1


def test_truncation_does_not_cut_within_a_character() -> None:
    tokenizer = TOKENIZERS["byte-level BPE"]
    text = "日本語"  # three bytes each, none of them merged
    assert count([text], tokenizer) == 9
    assert [truncate([text], tokenizer, budget)[0] for budget in (2, 3, 5, 6, 9)] == ["", "日", "日", "日本", text]


def test_ranking_puts_the_answering_sentence_first() -> None:
    ranked = rank_sentences(PASSAGES, QUESTION, load_minilm())
    assert ranked[0].text == FACT
    assert (ranked[0].passage, ranked[0].position) == (1, 2)
    similarities = [sentence.similarity for sentence in ranked]
    assert similarities == sorted(similarities, reverse=True)
    # Nothing is lost or torn: "Dr." ends no sentence.
    assert len(ranked) == 8
    assert "Dr. Olu Vane was born in Kessmar in 1903." in [sentence.text for sentence in ranked]


def test_ranking_is_by_the_encoders_cosine() -> None:
    encoder = load_minilm()
    question = encoder.encode(QUESTION)
    for sentence in rank_sentences(PASSAGES, QUESTION, encoder):
        vector = encoder.encode(sentence.text)
        cosine = float(question @ vector / (question @ question) ** 0.5 / (vector @ vector) ** 0.5)
        assert sentence.similarity == pytest.approx(cosine, abs=1e-4)


def test_extraction_keeps_the_best_sentences_in_order(tokenizer) -> None:
    encoder = load_minilm()
    best = rank_sentences(PASSAGES, QUESTION, encoder)[:3]
    budget = sum(count([f" {sentence.text}"], tokenizer) for sentence in best)
    kept = select(rank_sentences(PASSAGES, QUESTION, encoder), len(PASSAGES), tokenizer, budget)
    for i, text in enumerate(kept):
        own = sorted((s for s in best if s.passage == i), key=lambda s: s.position)
        assert text == " ".join(sentence.text for sentence in own)


@pytest.mark.parametrize("budget", [0, 1, 3, 10, 25, 50, 100, 1000])
def test_extraction_stays_within_the_budget(tokenizer, budget: int) -> None:
    ranked = rank_sentences(PASSAGES, QUESTION, load_minilm())
    kept = select(ranked, len(PASSAGES), tokenizer, budget)
    total = count(PASSAGES, tokenizer)
    assert count(kept, tokenizer) <= budget
    assert count(kept, tokenizer) >= min(budget, total) - 8  # spent but for spaces between sentences
    if budget >= 2 * total:
        assert [text.split() for text in kept] == [text.split() for text in PASSAGES]
    assert select(rank_sentences(["", " \n"], QUESTION, load_minilm()), 2, tokenizer, budget) == ["", ""]
    if budget == 3:
        assert FACT.startswith("".join(kept).strip()) and any(kept)


def test_the_plot_shows_what_it_is_given(tmp_path: Path) -> None:
    soft = Curve("soft context", [4, 8, 16], [0.95, 0.9, 0.8], low=[0.93, 0.87, 0.76], high=[0.97, 0.93, 0.84])
    truncation = Curve("truncation", [4, 8, 16], [0.4, 0.2, 0.1], low=[0.3, 0.1, 0.0], high=[0.5, 0.3, 0.2])
    exact = replace(soft, low=soft.scores, high=soft.scores)
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

"""The demo: its corpus, and what it reports."""

from pathlib import Path
from statistics import mean

import pytest

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.cli import main
from ctx_compress_rag.indexing.demo import run_demo
from ctx_compress_rag.indexing.demo_corpus import wikipedia_corpus
from ctx_compress_rag.text.answers import token_f1


def test_the_paragraphs_of_wikipedia_hold_the_answers() -> None:
    corpus = wikipedia_corpus()
    assert (len(corpus.passages), len(corpus.questions)) == (24, 12)
    text_of = {passage.id: passage.text for passage in corpus.passages}
    for question in corpus.questions:
        assert any(answer in text_of[question.needs] for answer in question.answers)


@pytest.mark.slow
def test_the_english_bundle_reads_wikipedia(tmp_path: Path) -> None:
    report = run_demo(tmp_path / "chroma")
    full, *soft, none = report.systems
    assert report.retrieved >= 11
    assert min(full.score, soft[0].score) > soft[-1].score > none.score


def test_the_report_is_of_one_store_and_one_decoder_and_a_second_run_compresses_nothing(
    bundle_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "chroma"
    report = run_demo(folder, str(bundle_folder))
    assert (report.stored.added, report.stored.unchanged) == (24, 0)
    labels = {"full text": None, "compressed 4x": 4, "compressed 8x": 8, "compressed 16x": 16, "no context": None}
    assert [(system.label, system.ratio) for system in report.systems] == list(labels.items())
    assert report.retrieved >= 11
    full, *soft, none = report.systems
    for system in report.systems:
        expected = [token_f1(a, q.answers) for a, q in zip(system.answers, wikipedia_corpus().questions, strict=True)]
        assert (system.scores, system.score) == (pytest.approx(expected), pytest.approx(mean(expected)))
        assert system.first_token_ms > 0
    assert any(full.answers)
    assert full.prompt_tokens > soft[0].prompt_tokens > soft[1].prompt_tokens > soft[2].prompt_tokens
    assert soft[2].prompt_tokens > none.prompt_tokens
    sixteenth = (full.prompt_tokens - none.prompt_tokens) / 16
    assert sixteenth - 1 <= soft[2].prompt_tokens - none.prompt_tokens <= sixteenth + 8
    assert full.stored_bytes == sum(len(passage.text.encode()) for passage in wikipedia_corpus().passages)
    assert len({system.stored_bytes for system in soft}) == 1 and none.stored_bytes == 0

    monkeypatch.setattr(Bundle, "compress", lambda *args, **kwargs: pytest.fail("compressed again"))
    capsys.readouterr()
    assert main(["demo", "--store", str(folder)]) == 0
    out = capsys.readouterr().out
    assert f"all 24 passages found in {folder}: nothing compressed" in out
    for system in report.systems:
        line = next(line for line in out.splitlines() if line.startswith(f"{system.label}  "))
        assert f"{system.score:.2f}" in line and f"{system.stored_bytes:,}" in line
    for question in wikipedia_corpus().questions:
        assert question.text[:40] in out

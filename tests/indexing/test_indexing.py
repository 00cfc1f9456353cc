"""From files to passages to an index, with real files, MiniLM and Chroma on disk; and the demo."""

import json
import logging
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import chromadb
import pytest
import regex
from hypothesis import example, given
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Dense

from ctx_compress_rag import Bundle, Passage
from ctx_compress_rag.cli import main
from ctx_compress_rag.errors import ConfigError, StoreError
from ctx_compress_rag.indexing import DEFAULT_BUNDLE, build, demo
from ctx_compress_rag.indexing.build import IndexReport, update_index
from ctx_compress_rag.indexing.chunking import chunk_text
from ctx_compress_rag.indexing.demo import run_demo, wikipedia_corpus
from ctx_compress_rag.indexing.fit import IndexFit
from ctx_compress_rag.indexing.index import PassageIndex, WordSearch, inspect_index, open_index
from ctx_compress_rag.indexing.inputs import IndexInput, open_index_input
from ctx_compress_rag.text.answers import token_f1
from helpers.cli import contents, paragraphs, write_docs, write_documents
from helpers.methods import minilm


def texts(given: IndexInput) -> dict[str, str]:
    return {text.source: text.text for text in given.texts()}


def count(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


_pieces = [*"abcXY .,!?\n\t。語é😀", "\n\n", "Orla was born. ", "word ", "# A\n\n", "## ", "```\n", "A\n==\n"]
_texts = st.lists(st.sampled_from(_pieces), max_size=80).map("".join)


@given(_texts, st.integers(8, 40), st.booleans())
@example("x" * 400, 8, False)
@example("語" * 100 + "。" + "語" * 50, 16, False)
@example("😀" * 30, 8, True)
@example("# A\n\n" + "word " * 50, 16, True)
def test_passages_fit_and_nothing_is_lost(tiny_tokenizer: Any, text: str, most: int, markdown: bool) -> None:
    passages = list(chunk_text(text, tiny_tokenizer, most, markdown=markdown))
    assert "".join("".join(passages).split()) == "".join(text.split())
    assert all(passage == passage.strip() != "" for passage in passages)
    assert all(count(tiny_tokenizer, passage) <= most for passage in passages)


_marked = [
    *("\n\n", "e\u0301", "\u0e01\u0e33", "\u0e17\u0e35\u0e48", "👩\u200d👧", "👍🏽", "🇩🇪", "\u1100\u1161"),
    *"ab .\n",
]


@given(st.lists(st.sampled_from(_marked), min_size=20, max_size=80).map("".join), st.integers(24, 40))
@example("👍🏽" * 30, 24)
def test_passages_begin_and_end_between_characters(tiny_tokenizer: Any, text: str, most: int) -> None:
    rest = regex.findall(r"\X", text)
    for passage in chunk_text(text, tiny_tokenizer, most):
        rest = rest[next(n for n, each in enumerate(rest) if not each.isspace()) :]
        length = next(n for n in range(len(rest) + 1) if len("".join(rest[:n])) >= len(passage))
        assert "".join(rest[:length]) == passage
        rest = rest[length:]
    assert not "".join(rest).strip()


def test_paragraphs_are_packed_as_long_as_they_fit(tiny_tokenizer: Any) -> None:
    parts = [f"Paragraph {name} says that the river runs south." for name in ("one", "two", "three", "four", "five")]
    two = max(count(tiny_tokenizer, "\n\n".join(parts[i : i + 2])) for i in range(4))
    assert list(chunk_text("\n\n".join(parts), tiny_tokenizer, two + 3)) == [
        "\n\n".join(parts[:2]),
        "\n\n".join(parts[2:4]),
        parts[4],
    ]


def test_a_long_paragraph_is_cut_between_sentences(tiny_tokenizer: Any) -> None:
    sentences = [f"In the year 18{i} the mill was sold to another owner." for i in range(10, 30)]
    passages = list(chunk_text(" ".join(sentences), tiny_tokenizer, 100))
    assert 1 < len(passages) < len(sentences)
    assert [s for p in passages for s in p.replace("owner. In", "owner.|In").split("|")] == sentences


def test_a_heading_begins_a_passage_in_markdown_alone(tiny_tokenizer: Any) -> None:
    text = "# Guide\n\n## Setup\n\nConnect the hose.\n\n## Use\n\nPress the button."
    setup, use = "# Guide\n\n## Setup\n\nConnect the hose.", "## Use\n\nPress the button."
    assert list(chunk_text(text, tiny_tokenizer, 500, markdown=True)) == [setup, use]
    assert list(chunk_text(text, tiny_tokenizer, 500)) == [text]
    code = "# Guide\n\n```sh\n# not a heading\n\n# nor this\n```\n\nEnd."
    assert list(chunk_text(code, tiny_tokenizer, 500, markdown=True)) == [code]
    underlined = "Guide\n=====\n\nConnect.\n\nUse\n---\n\nPress."
    assert list(chunk_text(underlined, tiny_tokenizer, 500, markdown=True)) == [
        "Guide\n=====\n\nConnect.",
        "Use\n---\n\nPress.",
    ]


def test_a_heading_stays_with_text(tiny_tokenizer: Any) -> None:
    sentence = "The warranty of the pump lasts for five years."
    first, *rest = chunk_text("# Pump\n\n## Warranty\n\n" + f"{sentence} " * 20, tiny_tokenizer, 64, markdown=True)
    assert first.startswith(f"# Pump\n\n## Warranty\n\n{sentence}") and len(rest) > 1
    *_, last = chunk_text(f"{sentence}\n\n# End", tiny_tokenizer, 64, markdown=True)
    assert last == f"{sentence}\n\n# End"


def test_each_part_of_a_table_begins_with_its_columns_names(tiny_tokenizer: Any) -> None:
    rows = [f"| part{n} | {n} |" for n in range(40)]
    padded = [
        "| name" + " " * 30 + "| price |",
        "|" + "-" * 36 + "|------:|",
        *(f"{row[:-1]}{' ' * 9}|" for row in rows),
    ]
    first, *rest = chunk_text("Parts:\n" + "\n".join(padded) + "\n\nEnd.", tiny_tokenizer, 120, markdown=True)
    head = "| name | price |\n|---|---:|\n"
    assert first == "Parts:" and rest.pop() == "End." and len(rest) > 2
    assert all(part.startswith(head) for part in rest)
    assert "\n".join(part.removeprefix(head) for part in rest).splitlines() == rows


def test_text_files_are_read_and_others_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    (tmp_path / "a" / "b" / "Deep.MD").write_text("# deep\r\n\r\ntext", encoding="utf-8", newline="")
    (tmp_path / "bom.txt").write_bytes(b"\xef\xbb\xbfmarked")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    (tmp_path / "wide.txt").write_text("The moth eats wax.", encoding="utf-16")  # whose bytes are LATIN1, too
    for other in ("x.png", "y.png", "LICENSE", ".hidden.txt", ".git/notes.txt"):
        (tmp_path / other).write_text("not this")
    scan = open_index_input(tmp_path)
    assert texts(scan) == {"a/b/Deep.MD": "# deep\n\ntext", "bom.txt": "marked", "empty.txt": " \n"}
    assert scan.cannot_read("latin.txt") and not scan.cannot_read("bom.txt")
    assert scan.skipped() == "skipped: 2 .png, 3 .txt, 1 without a suffix"
    warnings = sorted(record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert len(warnings) == 3 and "iconv -f UTF-16 -t UTF-8" in warnings[2]
    assert "empty.txt': it is empty" in warnings[0]
    assert "latin.txt': it is not UTF-8 (byte 3)" in warnings[1] and "iconv" in warnings[1]


def test_documents_are_read_as_markdown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_documents(tmp_path, "amber")
    (tmp_path / "broken.pdf").write_bytes(b"%PDF-1.4 and no more")
    (tmp_path / "broken.docx").write_bytes(b"PK no zip")
    (tmp_path / "plain.txt").write_text("The plain text.")
    scan = open_index_input(tmp_path)
    assert {name: text.strip() for name, text in texts(scan).items()} == {
        "page.html": "# Guide\n\nThe amber page.",
        "letter.docx": "The amber letter.",
        "report.pdf": "The amber report.",
        "plain.txt": "The plain text.",
    }
    assert scan.skipped() == "skipped: 1 .docx, 1 .pdf"
    # Without the extra they are counted, and the line says what would read them.
    monkeypatch.setattr("ctx_compress_rag.indexing.documents.find_spec", lambda name: None)
    scan = open_index_input(tmp_path)
    assert list(texts(scan)) == ["plain.txt"]
    assert scan.skipped().startswith("skipped: 2 .docx, 1 .html, 2 .pdf;")
    assert "pip install 'ctx-compress-rag[index]'" in scan.skipped()


def update(index: PassageIndex, folder: Path, **options: Any) -> IndexReport:
    return update_index(index, open_index_input(folder), **options)


def test_an_index_follows_its_folder(
    index: PassageIndex, tmp_path: Path, compressed: list[str], tiny_tokenizer: Any
) -> None:
    docs = write_docs(tmp_path / "docs")
    first = update(index, docs)
    assert (first.files, first.unchanged, first.added) == (3, 0, len(compressed))
    assert all(count(tiny_tokenizer, text) <= 64 for text in compressed)  # the bundle's window
    whole = "".join("".join(paragraphs(number)) for number in range(3))
    assert sorted("".join("".join(compressed).split())) == sorted("".join(whole.split()))

    compressed.clear()
    assert update(index, docs) == IndexReport(3, 0, first.added, 0, 0, 0)
    assert compressed == []

    # One file changes at its end, one is deleted, one can no longer be read, one is new.
    (docs / "file0.txt").write_text("\n\n".join([*paragraphs(0)[:-1], "The last page was torn out."]), encoding="utf-8")
    of_file = {
        source: [id for id, s in index.roots()[str(docs)].items() if s == source]
        for source in texts(open_index_input(docs))
    }
    (docs / "more" / "file1.txt").unlink()
    (docs / "file2.txt").write_bytes(b"\xff")
    (docs / "new.md").write_text("Something new.", encoding="utf-8")
    report = update(index, docs)
    assert (report.files, report.pruned) == (2, 0)
    assert report.vanished == len(of_file["more/file1.txt"]) > 0
    assert 0 < report.replaced < len(of_file["file0.txt"])
    assert report.added == len(compressed) and "Something new." in compressed
    assert any("torn out" in text for text in compressed) and len(compressed) < 8
    kept = index.roots()[str(docs)]
    assert set(of_file["more/file1.txt"] + of_file["file2.txt"]) <= set(kept)
    assert sorted(kept) == sorted(index.store.ids())

    report = update(index, docs, prune=True)
    assert (report.pruned, report.vanished, report.added) == (len(of_file["more/file1.txt"]), 0, 0)
    assert set(index.roots()[str(docs)].values()) == {"file0.txt", "file2.txt", "new.md"}
    assert sorted(index.roots()[str(docs)]) == sorted(index.store.ids())


def test_records_of_another_key_are_kept(tmp_path: Path, bundle_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docs, more = (write_docs(tmp_path / name, files=1) for name in ("docs", "more"))
    store = tmp_path / "store"
    monkeypatch.setenv("CTX_COMPRESS_KEY", "the key that it began with")
    with open_index(store, str(bundle_folder), create=True) as index:
        update(index, docs)
        ids = index.store.ids()
    monkeypatch.setenv("CTX_COMPRESS_KEY", "another key, by mistake")
    with open_index(store) as index, pytest.raises(StoreError, match=r"CTX_COMPRESS_KEY"):
        update(index, more)
    monkeypatch.setenv("CTX_COMPRESS_KEY", "the key that it began with")
    with open_index(store) as index:
        assert index.store.ids() == ids and index.store.damaged() == []


def test_damaged_records_are_compressed_again_if_asked(
    index: PassageIndex, tmp_path: Path, compressed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    docs = write_docs(tmp_path / "docs", files=1)
    update(index, docs)
    client = chromadb.PersistentClient(str(tmp_path / "chroma"))
    soft = client.get_collection("passages-ctx")
    last = soft.get()["ids"][-1]
    soft.update([last], metadatas=[{"payload": "cut"}])
    client.close()
    compressed.clear()
    monkeypatch.setattr(build, "_CHECKED", 0)  # a sample that does not hold it
    assert update(index, docs).added == 0 and len(index.store.damaged()) == 1
    assert update(index, docs, repair=True).added == len(compressed) == 1 and index.store.damaged() == []


def test_a_renamed_folder_is_noticed(index: PassageIndex, tmp_path: Path) -> None:
    docs, copy, other = tmp_path / "docs", tmp_path / "copy", tmp_path / "other"
    docs.mkdir()
    other.mkdir()
    for file in (docs / "a.txt", docs / "b.txt", docs / "c.txt", other / "a.txt"):
        file.write_text(f"A text of {file.name}.")
    shutil.copytree(docs, copy)
    before = update(index, docs).added
    assert update(index, copy).moved == ()  # both are there
    docs.rename(tmp_path / "renamed")
    report = update(index, tmp_path / "renamed")
    assert (report.added, report.vanished, report.moved) == (before, before, (str(docs),))
    assert update(index, other, prune=True).pruned == 0  # of three files it has one
    report = update(index, tmp_path / "renamed", prune=True)
    assert (report.pruned, report.moved) == (before, (str(docs),))
    assert set(index.roots()) == {str(copy), str(tmp_path / "renamed"), str(other)}


ENGLISH = (
    "In 1911 the flood took the mill on the river, and its owner sold what was left to the town, see [12], XQ-77. "
)
GERMAN = "Im Jahr 1911 nahm das Hochwasser die alte Mühle mit, und ihr Besitzer verkaufte den Rest an die Stadt. "
CHINESE = "那一年洪水冲走了河边的老磨坊。主人把剩下的卖给了镇上。镇上在那里建了一所学校。然后他们搬到了山上的新房子里。"


@pytest.fixture(scope="module")
def shipped() -> Bundle:
    return Bundle.from_pretrained(DEFAULT_BUNDLE)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (ENGLISH, []),
        ("| XQ-77 | 1911 | 12.50 |\n" * 9, []),
        (ENGLISH * 30, ["longer"]),
        (GERMAN, ["English"]),
        (CHINESE, ["English"]),
    ],
)
def test_what_is_read_badly_is_warned_of(
    shipped: Bundle, caplog: pytest.LogCaptureFixture, text: str, said: list[str]
) -> None:
    fit = IndexFit(shipped)
    for number in range(2):
        fit.look(Passage(text, f"p{number}"))
    fit.warn()
    assert len(caplog.records) == len(said)
    for record, part in zip(caplog.records, said, strict=True):
        assert record.args[:2] == (2, "p0") and part in record.getMessage()


def test_a_question_in_another_language_is_warned_of_once(shipped: Bundle, caplog: pytest.LogCaptureFixture) -> None:
    fit = IndexFit(shipped)
    for question, said in ((ENGLISH, 0), ("Wie lange dauert die Garantie der Pumpe?", 1), (CHINESE, 1)):
        fit.warn_of_question(question)
        assert len(caplog.records) == said


def test_retrieval_is_by_cosine_of_minilm(index: PassageIndex, tmp_path: Path) -> None:
    question = "Whom did those townspeople elect as mayor?"
    for asked, error in (([question], StoreError), ([question, " \n"], ConfigError)):
        with pytest.raises(error, match="holds no passages|question is empty"):
            index.search(asked, 4)
    update(index, write_docs(tmp_path / "docs", files=1))
    texts = {id: row[0] for id, row in contents(tmp_path / "chroma").items()}
    encoder = minilm()
    similar = encoder.similarity(encoder.encode(question), encoder.encode(list(texts.values())))[0].tolist()
    expected = sorted(zip(similar, texts, strict=True), reverse=True)[:5]
    hits = index.search([question], 5)[0]
    assert [hit.similarity for hit in hits] == pytest.approx([s for s, _ in expected], abs=1e-4)
    assert [hit.id for hit in hits] == [id for _, id in expected]
    assert all(hit.text == texts[hit.id] and hit.source in hit.id for hit in hits)
    assert len(index.search([question], 10_000)[0]) == len(index)


def test_a_named_part_comes_first_and_copies_take_one_place(index: PassageIndex, tmp_path: Path) -> None:
    """MiniLM alone tells the numbers apart badly; each text is in three files, and one number in two texts."""
    docs = tmp_path / "docs"
    docs.mkdir()
    numbers = [f"{kind}{1000 + 137 * n}-{'ABCD'[n % 4]}" for n, kind in enumerate(("PX", "QT", "RV", "ZK") * 3)]
    parts = [
        f"Part {number} is a pump. It weighs {n} kg and costs {9 * n + 10} euros." for n, number in enumerate(numbers)
    ]
    parts.append(f"The seal of part {numbers[0]} lasts for nine years.")
    for copy in range(3):
        rows = [{"text": text, "id": f"part {n} in {copy}"} for n, text in enumerate(parts)]
        (docs / f"{copy}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        update(index, docs / f"{copy}.jsonl")
    questions = [f"What is the price of {number.lower()}?" for number in numbers[1:]]
    for n, hits in enumerate(index.search(questions, 4), 1):
        assert hits[0].text == parts[n] and len({hit.text for hit in hits}) == 4
        assert hits[0].source == f"part {n} in 0, part {n} in 1, part {n} in 2"
    [[first, second, third]] = index.search([f"Tell me of {numbers[0]}"], 3)
    assert {first.text, second.text} == {parts[0], parts[-1]}
    encoder = minilm()
    vector, *others = encoder.encode([f"Tell me of {numbers[0]}", first.text, second.text, third.text])
    assert [first.similarity, second.similarity, third.similarity] == pytest.approx(
        [vector @ v for v in others], abs=1e-4
    )
    assert [hit.text for hit in index.search(["."], 1)[0]]  # without words
    with warnings.catch_warnings(action="error"):
        assert WordSearch(["Of the.", "..."]).leading("Of?") == []

    (docs / "new.txt").write_text("Gasket ZZ-1 is blue.")
    with open_index(tmp_path / "chroma") as other:
        update_index(other, open_index_input(docs))
    assert index.search(["Which color does ZZ have?"], 1)[0][0].source == "new.txt"


def test_the_embedder_is_kept_with_the_index(tmp_path: Path, bundle_folder: Path) -> None:
    """MiniLM with another last layer, in a folder: the index is of its vectors, and no other may search it."""
    half, store = tmp_path / "half", tmp_path / "chroma"
    encoder = SentenceTransformer(modules=[*minilm(), Dense(384, 192, bias=False)], device="cpu")
    encoder.save(str(half))
    docs = write_docs(tmp_path / "docs", files=1)
    with pytest.raises(ConfigError, match=r"cannot load embedder '.*nothing'.*'minilm', a folder or hub id"):
        open_index(store, str(bundle_folder), create=True, embedder=str(tmp_path / "nothing"))
    assert not store.exists()
    with open_index(store, str(bundle_folder), create=True, embedder=str(half)) as index:
        update(index, docs)
    for text, _, vector, *_ in contents(store).values():
        expected = encoder.encode(text, normalize_embeddings=True)
        assert len(vector) == 192 and vector.tolist() == pytest.approx(expected.tolist(), abs=1e-4)
    assert inspect_index(store).embedder == str(half)
    with open_index(store) as index:
        assert index.embedder == str(half)
        assert len(index.search(["Who is the mayor?"], 2)[0]) == 2
    with pytest.raises(StoreError, match=r"made with the embedder .*half', not 'minilm': leave --embedder out"):
        open_index(store, embedder="minilm")


def test_a_collection_of_someone_else_is_left_alone(tmp_path: Path, bundle_folder: Path) -> None:
    client = chromadb.PersistentClient(str(tmp_path))
    client.create_collection("passages").add(ids=["a"], embeddings=[[1.0, 2.0]], documents=["mine"])
    client.close()
    with pytest.raises(StoreError, match="not made by `ctx-compress index`"):
        open_index(tmp_path, str(bundle_folder), create=True)


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
    whole = wikipedia_corpus()
    corpus = replace(whole, passages=whole.passages[:4], questions=whole.questions[:2])
    monkeypatch.setattr(demo, "wikipedia_corpus", lambda: corpus)
    monkeypatch.setattr(demo, "_ANSWER_TOKENS", 6)
    folder = tmp_path / "chroma"
    report = run_demo(folder, str(bundle_folder))
    assert (report.stored.added, report.stored.unchanged) == (4, 0)
    labels = {"full text": None, "compressed 4x": 4, "compressed 8x": 8, "compressed 16x": 16, "no context": None}
    assert [(system.label, system.ratio) for system in report.systems] == list(labels.items())
    assert report.retrieved == 2
    full, *soft, none = report.systems
    for system in report.systems:
        expected = [token_f1(a, q.answers) for a, q in zip(system.answers, corpus.questions, strict=True)]
        assert (system.scores, system.score) == (pytest.approx(expected), pytest.approx(mean(expected)))
        assert system.first_token_ms > 0
    assert any(full.answers)
    assert full.prompt_tokens > soft[0].prompt_tokens > soft[1].prompt_tokens > soft[2].prompt_tokens
    assert soft[2].prompt_tokens > none.prompt_tokens
    sixteenth = (full.prompt_tokens - none.prompt_tokens) / 16
    assert sixteenth - 1 <= soft[2].prompt_tokens - none.prompt_tokens <= sixteenth + 8
    assert full.stored_bytes == sum(len(passage.text.encode()) for passage in corpus.passages)
    assert len({system.stored_bytes for system in soft}) == 1 and none.stored_bytes == 0

    monkeypatch.setattr(Bundle, "compress", lambda *args, **kwargs: pytest.fail("compressed again"))
    capsys.readouterr()
    assert main(["demo", "--index", str(folder)]) == 0
    out = capsys.readouterr().out
    assert f"all 4 passages found in {folder}: nothing compressed" in out
    for system in report.systems:
        line = next(line for line in out.splitlines() if line.startswith(f"| {system.label} |"))
        assert f"{system.score:.2f}" in line and f"{system.stored_bytes:,}" in line
    for question in corpus.questions:
        assert question.text[:30] in out

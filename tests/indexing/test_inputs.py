"""JSONL, documents and an app's collection: what is read, and what is not; an index is written while they are read."""

import csv
import json
import os
import subprocess
import sys
import zlib
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import chromadb
import pytest

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.errors import DataError, StoreError
from ctx_compress_rag.indexing import conversion, documents
from ctx_compress_rag.indexing import index as passage_index
from ctx_compress_rag.indexing.build import compress_collection, update_index
from ctx_compress_rag.indexing.documents import DocumentReader
from ctx_compress_rag.indexing.index import PassageIndex
from ctx_compress_rag.indexing.inputs import IndexInput, IndexText, open_index_input
from ctx_compress_rag.store import AddReport, SoftContextStore
from helpers.cli import contents, paragraphs, without_rights, write_documents, write_docx, write_pdf

ROWS = [{"id": f"row{n}", "text": text, "page": n} for n, text in enumerate(paragraphs(3))]


def write(file: Path, rows: list[dict[str, Any]]) -> Path:
    """With the byte order mark that Windows writes."""
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8-sig")
    return file


def test_rows_are_what_files_are_in_a_folder(index: PassageIndex, tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", ROWS)
    first = update_index(index, open_index_input(file))
    assert (first.files, first.unchanged) == (len(ROWS), 0) and first.added >= len(ROWS)
    joined = {row["id"]: "".join(row["text"].split()) for row in ROWS}
    held: dict[str, str] = {}
    for text, metadata, *_ in contents(tmp_path / "chroma").values():
        assert metadata["page"] == int(metadata["source"][-1])
        held[metadata["source"]] = held.get(metadata["source"], "") + "".join(text.split())
    assert {id: sorted(text) for id, text in held.items()} == {id: sorted(text) for id, text in joined.items()}

    write(file, [{"id": "row0", "text": "Another text."}, *ROWS[2:]])
    second = update_index(index, open_index_input(file), prune=True)
    assert (second.added, second.vanished) == (1, 0) and second.replaced and second.pruned
    assert sorted(index.store.ids()) == sorted(index.roots()[str(file)])


def test_a_bad_row_is_named_and_the_rows_of_the_store_stay(index: PassageIndex, tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", ROWS[:1])
    update_index(index, open_index_input(file))
    before = set(index.store.ids())
    for line, said in (
        (b'{"text": "cut', ".*JSON"),
        (b'{"txt": "a"}', "text is missing"),
        (b'{"text": 3}', "text: .*3"),
        (b'["text"]', ".*'text'"),
        (rb'{"text": "a", "id": "\ud800"}', ".*JSON"),
        (b'{"text": ' + b"[" * 100_000, ".*JSON"),
        (b'{"text": "caf\xe9"}', "not UTF-8 .* iconv -f LATIN1 -t UTF-8"),
    ):
        file.write_bytes(json.dumps(ROWS[1]).encode() + b"\n" + line)
        with pytest.raises(DataError, match=f"rows.jsonl, line 2: {said}"):
            update_index(index, open_index_input(file), prune=True)
        assert before <= set(index.store.ids())


def test_no_rows_are_an_error_and_prune_nothing(index: PassageIndex, tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", ROWS[:1])
    update_index(index, open_index_input(file))
    file.write_text("\n")
    with pytest.raises(DataError, match="holds no text"):
        update_index(index, open_index_input(file), prune=True)
    assert len(index) >= 1
    with pytest.raises(DataError, match=r"missing.jsonl': No such file"):
        open_index_input(tmp_path / "missing.jsonl")


class Endless(IndexInput):
    """Texts without an end, which says how many were taken."""

    taken = 0

    def texts(self) -> Iterator[IndexText]:
        while True:
            self.taken += 1
            if self.taken > 2000:
                raise KeyboardInterrupt
            yield IndexText(f"t{self.taken}", f"Passage {self.taken} says that the river runs south.", False, 1)


def test_passages_are_stored_before_the_rest_is_read(
    index: PassageIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in an input without an end: what came before is stored, and little was read ahead."""
    monkeypatch.setattr(passage_index, "_LOOKED_UP", 40)  # passages at a time, of 250
    given = Endless(tmp_path, 1)
    real, ahead = Bundle.compress, []

    def watched(self: Bundle, texts: Any, *args: Any, **kwargs: Any) -> Any:
        ahead.append(given.taken - len(index.store))
        if len(ahead) == 4:
            raise KeyboardInterrupt
        return real(self, texts, *args, **kwargs)

    monkeypatch.setattr(Bundle, "compress", watched)
    with pytest.raises(KeyboardInterrupt):
        update_index(index, given)
    assert len(index.store) >= 80 and max(ahead) <= 40
    assert ahead[0] == 8  # so that progress shows early


def test_an_apps_own_collection(tmp_path: Path, bundle_folder: Path) -> None:
    client = chromadb.PersistentClient(str(tmp_path / "chroma"))
    rag = client.create_collection("docs", embedding_function=None)
    texts = [row["text"][:120] for row in ROWS]
    rag.add(ids=[row["id"] for row in ROWS], embeddings=[[1.0, 0.0]] * len(ROWS), documents=texts)
    assert compress_collection(tmp_path / "chroma", "docs", str(bundle_folder)) == AddReport(len(ROWS), 0, 0)
    rag.update(ids=["row1"], embeddings=[[1.0, 0.0]], documents=["Another text."])
    assert compress_collection(tmp_path / "chroma", "docs", str(bundle_folder)) == AddReport(0, 1, len(ROWS) - 1)
    with SoftContextStore(rag, Bundle.from_pretrained(bundle_folder)) as store:
        assert store.stored_ids(["Another text."], ["row1"]) == ["row1"]
    with pytest.raises(StoreError, match=r"no collection 'dogs'.*there are docs, docs-ctx"):
        compress_collection(tmp_path / "chroma", "dogs", str(bundle_folder))


def test_a_linked_folder_is_read_once_and_kept_while_its_link_leads_nowhere(
    index: PassageIndex, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    docs, shared = tmp_path / "docs", tmp_path / "shared"
    (docs / "own").mkdir(parents=True)
    shared.mkdir()
    for file in (docs / "own" / "one.txt", shared / "two.txt"):
        file.write_text(f"A text of {file.name}.")
    links = {"above": tmp_path, "again": shared, "first": docs / "own", "loop": docs, "gone.txt": tmp_path / "nowhere"}
    for name, target in links.items():
        (docs / name).symlink_to(target)
    os.mkfifo(docs / "pipe.txt")
    given = open_index_input(docs)
    assert [text.source for text in given.texts()] == ["above/shared/two.txt", "own/one.txt"]
    assert given.skipped() == "skipped: 2 .txt"

    (docs / "above").unlink()
    assert update_index(index, open_index_input(docs)).added == 2
    shared.rename(tmp_path / "elsewhere")
    given = open_index_input(docs)
    report = update_index(index, given, prune=True)
    assert (report.pruned, report.vanished) == (0, 0) and "2 .txt, 1 folders" in given.skipped()
    assert any("again" in record.getMessage() and "leads nowhere" in record.getMessage() for record in caplog.records)
    (docs / "again").unlink()
    assert update_index(index, open_index_input(docs), prune=True).pruned == 1


READ = """
import json, sys
from ctx_compress_rag.indexing.inputs import open_index_input

for folder in sys.argv[1:]:
    given = open_index_input(folder)
    read = [text.source for text in given.texts()]
    cannot = [given.cannot_read(source) for source in ("closed/a.txt", "closed.txt", "gone.txt")]
    print(json.dumps([read, cannot, given.skipped()]))
"""


def test_what_is_in_a_folder_that_cannot_be_read_is_not_gone(tmp_path: Path) -> None:
    """`--prune` removed it. A folder of the second kind can be listed, but its files cannot be opened."""
    kinds = {tmp_path / "none": 0o000, tmp_path / "listed": 0o444}
    for folder, mode in kinds.items():
        (folder / "closed").mkdir(parents=True)
        for name in ("closed/a.txt", "closed.txt", "open.txt"):
            (folder / name).write_text("A text.")
        (folder / "closed").chmod(mode)
    done = subprocess.run([*without_rights(), sys.executable, "-c", READ, *kinds], capture_output=True, text=True)
    for folder in kinds:
        (folder / "closed").chmod(0o755)
    assert done.returncode == 0, done.stderr
    for said, what, named in zip(done.stdout.splitlines(), ("folders", ".txt"), ("", "/a.txt"), strict=True):
        read, cannot, skipped = json.loads(said)
        assert (read, cannot) == (["closed.txt", "open.txt"], [True, False, False])
        assert skipped == f"skipped: 1 {what}"
        assert f"closed{named}': it cannot be read (Permission denied)" in done.stderr


def test_no_path_is_not_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one.txt").write_text("A text.")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="path to index is empty"):
        open_index_input("")
    assert [text.source for text in open_index_input(".").texts()] == ["one.txt"]


SAID = "BT /F1 12 Tf 72 720 Td {} Tj ET"
FONT_WITHOUT_CHARACTERS = (
    "/Type0 /BaseFont /X /Encoding /Identity-H /DescendantFonts [<< /Type /Font /Subtype /CIDFontType2 /BaseFont /X "
    "/CIDSystemInfo << /Registry (Adobe) /Ordering (Identity) /Supplement 0 >> >>]"
)
LOCK = f"/ID [<00> <00>] /Encrypt << /Filter /Standard /V 1 /R 2 /O <{'00' * 32}> /U <{'11' * 32}> /P -4 >>"


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[DocumentReader]:
    with DocumentReader(tmp_path / "new" / "costly.json") as reader:
        yield reader


def packed_twice(megabytes: int) -> bytes:
    """A zlib stream of a zlib stream of blanks, without packing them all."""
    packer = zlib.compressobj(9, wbits=-15)
    block = packer.compress(b" " * (1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    return zlib.compress(b"\x78\xda" + block * megabytes, 9)


def test_a_document_that_takes_too_much_is_skipped_and_not_tried_again(
    tmp_path: Path, reader: DocumentReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_documents(tmp_path, "amber")
    monkeypatch.setattr(documents, "MEMORY", 800 << 20)
    write_pdf(tmp_path / "memory.pdf", packed_twice(400), "/Filter [/FlateDecode /FlateDecode]")
    assert (tmp_path / "memory.pdf").stat().st_size < 50_000
    with pytest.raises(DataError, match="memory"):
        reader.read(tmp_path / "memory.pdf")
    assert reader.read(tmp_path / "report.pdf")[0].strip() == "The amber report."
    monkeypatch.setattr(documents, "LEAST_SECONDS", 1)
    write_docx(tmp_path / "time.docx", "<w:sdt><w:sdtContent>" * 20_000 + "</w:sdtContent></w:sdt>" * 20_000)
    with pytest.raises(DataError, match="1 seconds"):
        reader.read(tmp_path / "time.docx")

    monkeypatch.setattr(subprocess, "Popen", lambda *args, **options: pytest.fail("tried again"))
    (tmp_path / "memory.pdf").rename(tmp_path / "other.pdf")
    with DocumentReader(tmp_path / "new" / "costly.json") as later:
        for name, limit in (("other.pdf", "memory"), ("time.docx", "1 seconds")):
            with pytest.raises(DataError, match=rf"{limit}.*remove .*costly\.json"):
                later.read(tmp_path / name)


def test_what_documents_are_read_without_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Those without any text are named and counted."""
    write_pdf(tmp_path / "scan.pdf", b"0 0 m 10 10 l S")
    write_pdf(tmp_path / "locked.pdf", SAID.format("(The report.)").encode(), trailer=LOCK)
    write_pdf(tmp_path / "glyphs.pdf", SAID.format("<000100020003>").encode(), font=FONT_WITHOUT_CHARACTERS)
    (tmp_path / "locked.docx").write_bytes(bytes.fromhex("d0cf11e0a1b11ae1") + bytes(600))
    text = "<w:p><w:r><w:t>{}</w:t></w:r></w:p>"
    box = "<w:txbxContent>" + text.format("In a box.") + "</w:txbxContent>"
    shape = f'<w:p><w:r><w:pict><v:shape xmlns:v="urn:schemas-microsoft-com:vml">{box}</v:shape></w:pict></w:r></w:p>'
    drawn = f"<w:p><w:r><w:drawing><x>{box}</x></w:drawing></w:r></w:p>"
    write_docx(tmp_path / "all.docx", text.format("Seen."), header1="<w:t>Page</w:t>", comments="<w:t>No.</w:t>")
    write_pdf(tmp_path / "form.pdf", SAID.format("(Seen.)").encode(), form="/Fields [9 0 R]")
    write_docx(tmp_path / "box.docx", text.format("Seen.") + drawn)
    write_docx(tmp_path / "read.docx", text.format("Seen.") + shape, header1="<w:p/>")
    given = open_index_input(tmp_path)
    found = [text.text for text in given.texts() if text.text.strip()]
    assert found == ["Seen.", "Seen.", "Seen.\n\n\x0c", "Seen.\n\nIn a box."]
    assert given.skipped().splitlines() == [
        "skipped: 1 .docx, 3 .pdf",
        "read without page headers and footers: all.docx",
        "read without comments: all.docx",
        "read without text boxes: box.docx",
        "read without what was filled in its form: form.pdf",
    ]
    said = {record.args[0].rpartition("/")[2]: record.getMessage() for record in caplog.records}
    assert "password" in said["locked.pdf"] and "password" in said["locked.docx"]
    assert "OCR" in said["scan.pdf"] and "3 of its glyphs" in said["glyphs.pdf"]


def test_what_was_filled_in_a_pdf_s_form_is_read(tmp_path: Path) -> None:
    town = "<< /TU (Your town) /T (f1) /V <feff004200f8> /Kids [<< /Subtype /Widget >>] >>"
    chosen = (
        "<< /T (agreed) /V /Yes >> << /T (other) /V /Off >> << /T (colors) /V [(red) (blue)] >> << /T (none) /V () >>"
    )
    fields = f"<< /T (pump) /V (Orla 5000) >> << /T (address) /Kids [{town} << /V (7) >>] >> {chosen}"
    write_pdf(tmp_path / "form.pdf", SAID.format("(The form.)").encode(), form=f"/Fields [{fields}]")
    [found] = open_index_input(tmp_path).texts()
    said = " ".join(found.text.split())
    assert said == "The form. pump: Orla 5000 Your town: B\u00f8 address: 7 agreed: Yes colors: red, blue"


def test_tables_slides_and_other_texts_are_read(tmp_path: Path) -> None:
    import openpyxl
    import pptx

    (tmp_path / "a.csv").write_text("part,price\npump,5\n")
    (tmp_path / "b.json").write_text('{"part": "pump"}')
    (tmp_path / "c.rst").write_text("Pump\n====\n")
    deck, book = pptx.Presentation(), openpyxl.Workbook()
    deck.slides.add_slide(deck.slide_layouts[5]).shapes.title.text = "The amber\vslide."
    deck.save(str(tmp_path / "d.pptx"))
    for row in (
        ["parts"],
        [],
        ["part", None, "region", "price"],
        ["pump", None, "NA", 5],
        ["seal\nx_x000D_", None, "=1+4", date(2026, 3, 1)],
    ):
        book.active.append(row)
    book.save(tmp_path / "e.xlsx")
    given = open_index_input(tmp_path)
    given.costly = tmp_path / "costly"
    given.costly.write_text("5")  # damaged: it counts for nothing
    *found, slide, sheet = ((text.text, text.markdown) for text in given.texts())
    assert found == [
        ("| part | price |\n| --- | --- |\n| pump | 5 |", True),
        ('{"part": "pump"}', False),
        ("Pump\n====\n", True),
    ]
    assert "# The amber slide." in slide[0]
    assert [line.split("|")[1:-1] for line in sheet[0].splitlines()[1:]] == [
        [" parts ", "  ", "  "],
        [" --- "] * 3,
        [" part ", " region ", " price "],
        [" pump ", " NA ", " 5 "],
        [" seal x  ", "  ", " 2026-03-01 "],
    ]
    assert given.skipped() == "read without values of formulas, which no program has computed: e.xlsx"


def test_tables_and_words_that_parsers_lose_are_read(tmp_path: Path) -> None:
    """Cells that span rows or are not closed, powers, and what Word's file has moved, in a field and under ruby."""
    cell = "<w:tc><w:tcPr>{}</w:tcPr><w:p><w:r>{}</w:r></w:p></w:tc>".format
    words = "<w:t>{}</w:t>".format
    power = f'<w:rPr><w:vertAlign w:val="superscript"/></w:rPr>{words(6)}'
    ruby = f"<w:ruby><w:rt><w:r>{words('kan')}</w:r></w:rt><w:rubyBase><w:r>{words('字')}</w:r></w:rubyBase></w:ruby>"
    rows = [
        (cell("", words("kind")), cell("", words("max_size"))),
        (cell('<w:vMerge w:val="restart"/>', words("seal")), cell("", words("10") + "</w:r><w:r>" + power)),
        (cell("<w:vMerge/>", ""), cell("", words("9") + ruby)),
    ]
    table = "".join(f"<w:tr>{''.join(cells)}</w:tr>" for cells in rows)
    moved = f"<w:moveTo><w:r>{words('Moved')}</w:r></w:moveTo>"
    field = f"<w:fldSimple><w:r>{words(', 5')}</w:r></w:fldSimple>"
    write_docx(tmp_path / "a.docx", f"<w:tbl>{table}</w:tbl><w:p>{moved}{field}</w:p>")
    read = conversion.read_document(tmp_path / "a.docx")["text"]
    assert read == "| kind | max_size |\n| --- | --- |\n| seal | 10^6 |\n| seal | 9字 |\n\nMoved, 5"
    (tmp_path / "b.html").write_text(
        "<table><caption>Sizes</caption><tr><td>kind<td>size<td>note<tr><td rowspan=2>seal<td>10<sup>6</sup>"
        "<td rowspan=2>1<sup>st</sup><tr><td>9<tr><td>nut</table><ol><li>one<li>two</ol>"
    )
    assert conversion.read_document(tmp_path / "b.html")["text"] == (
        "Sizes\n\n| kind | size | note |\n| --- | --- | --- |\n| seal | 10^6 | 1st |\n| seal | 9 | 1st |\n| nut |\n\n"
        "1. one\n2. two"
    )


@pytest.mark.parametrize(
    ("written", "rows", "sure"),
    [
        (
            "part;note;price\nQX-9;pump, large;1,50\nQX-8;valve;12,00\n",
            ["QX-9|pump, large|1,50", "QX-8|valve|12,00"],
            True,
        ),
        ("part\tprice\tnote\nQX-9\t\tsold\n\t2\t\n", ["QX-9||sold", "|2|"], True),
        ("part|price\n\n1,5|2,5\n", ["1,5|2,5"], True),
        ("\ufeffsep=;\r\npart;price\r\n1,5;2;\r\n", ["1,5|2|"], True),
        ('part,note\n"a;b","c;\nd"\n', ["a;b|c; d"], True),
        ("part\nnut\n", ["nut"], True),
        ("Prices\npart;price\nnut;1,5\nbolt;2,5\n", ["part|price", "nut|1,5", "bolt|2,5"], False),
    ],
)
def test_a_table_has_the_separator_that_all_lines_have_equally_often(
    tmp_path: Path, written: str, rows: list[str], sure: bool
) -> None:
    (tmp_path / "a.tsv").write_text(written, encoding="utf-8", newline="")
    answer = conversion.read_document(tmp_path / "a.tsv")
    found = [[cell.strip() for cell in line.split("|")[1:-1]] for line in answer["text"].splitlines()]
    assert ["|".join(cells) for cells in found[2:]] == rows
    assert bool(answer["lacks"]) is not sure


def test_front_matter_heads_the_first_passage_and_the_rest_is_metadata(index: PassageIndex, tmp_path: Path) -> None:
    heads: dict[str, tuple[str, str, dict[str, str]]] = {
        "---\ntitle: Pump\ndescription: How\n  long\ntags: [a, 2]\nsource: web\n---\n": (
            "# Pump: How long\n\n", "", {"tags": '["a", 2]', "source_": "web"}
        ),
        '+++\ntitle = "Pump"\nday = 2020-01-02\nroot = 99999999999999999999\n+++\n': (
            "# Pump\n\n", "", {"day": "2020-01-02", "root_": "99999999999999999999"}
        ),
        "---\ntitle: Pump: old\ndraft: no\n...\n": ("# Pump: old\n\n", "", {"draft": "no"}),
        '---\ntitle: Cover\nodd: "\\uD800"\n---\n': ("", "", {"odd": "\\ud800"}),
        "---\na: &x [1]\nb: [*x]\n---\n": ("", "", {"a": "&x [1]", "b": "[*x]"}),
        "---\nNo fields.\n---\n": ("", "---\nNo fields.\n---", {}),
    }  # fmt: skip
    docs = tmp_path / "docs"
    docs.mkdir()
    for number, head in enumerate(heads):
        (docs / f"{number}.md").write_text(f"{head}# Cover\n\nFive years.\n\n# Frost\n\nNot covered.\n")
    update_index(index, open_index_input(docs))
    rows = [(text, row) for text, row, *_ in contents(tmp_path / "chroma").values()]
    for number, (heading, before, fields) in enumerate(heads.values()):
        held = {text: row for text, row in rows if row["source"] == f"{number}.md"}
        parts = [*filter(None, [before]), f"{heading}# Cover\n\nFive years.", "# Frost\n\nNot covered."]
        assert sorted(held) == sorted(parts)
        assert all(row == fields | {"source": f"{number}.md", "root": str(docs)} for row in held.values())


def test_a_document_whose_text_is_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.csv").write_text("part,price\npump,5\n")
    longest = csv.field_size_limit()
    length = len(conversion.read_document(tmp_path / "a.csv")["text"])
    assert csv.field_size_limit() == longest  # of others who read tables
    monkeypatch.setattr(conversion, "MOST_TEXT", length - 1)
    assert f"{length} characters" in conversion.read_document(tmp_path / "a.csv")["error"]

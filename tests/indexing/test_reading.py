"""Documents that cost too much, cannot be read, or are read in part."""

import subprocess
import zlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from ctx_compress_rag.errors import DataError
from ctx_compress_rag.indexing import conversion, documents
from ctx_compress_rag.indexing.documents import DocumentReader
from ctx_compress_rag.indexing.inputs import open_index_input
from helpers.cli import write_documents, write_docx, write_pdf

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
    write_pdf(tmp_path / "memory.pdf", packed_twice(800), "/Filter [/FlateDecode /FlateDecode]")
    assert (tmp_path / "memory.pdf").stat().st_size < 50_000
    with pytest.raises(DataError, match="memory"):
        reader.read(tmp_path / "memory.pdf")
    text, _ = reader.read(tmp_path / "report.pdf")
    assert text.strip() == "The amber report."
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


def test_documents_without_text_are_named_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_pdf(tmp_path / "scan.pdf", b"0 0 m 10 10 l S")
    write_pdf(tmp_path / "locked.pdf", SAID.format("(The report.)").encode(), trailer=LOCK)
    write_pdf(tmp_path / "glyphs.pdf", SAID.format("<000100020003>").encode(), font=FONT_WITHOUT_CHARACTERS)
    (tmp_path / "locked.docx").write_bytes(bytes.fromhex("d0cf11e0a1b11ae1") + bytes(600))
    given = open_index_input(tmp_path)
    assert [text.source for text in given.texts() if text.text.strip()] == []
    assert given.skipped() == "skipped: 1 .docx, 3 .pdf"
    said = {record.args[0].rpartition("/")[2]: record.getMessage() for record in caplog.records}
    assert "password" in said["locked.pdf"] and "password" in said["locked.docx"]
    assert "OCR" in said["scan.pdf"] and "3 of its glyphs" in said["glyphs.pdf"]


def test_what_a_word_file_is_read_without_is_said(tmp_path: Path) -> None:
    text = "<w:p><w:r><w:t>{}</w:t></w:r></w:p>"
    box = "<w:txbxContent>" + text.format("In a box.") + "</w:txbxContent>"
    shape = f'<w:p><w:r><w:pict><v:shape xmlns:v="urn:schemas-microsoft-com:vml">{box}</v:shape></w:pict></w:r></w:p>'
    write_docx(tmp_path / "all.docx", text.format("Seen."), header1="<w:t>Page</w:t>", comments="<w:t>No.</w:t>")
    write_docx(
        tmp_path / "box.docx", text.format("Seen.") + f"<w:p><w:r><w:drawing><x>{box}</x></w:drawing></w:r></w:p>"
    )
    write_docx(tmp_path / "read.docx", text.format("Seen.") + shape, header1="<w:p/>")
    given = open_index_input(tmp_path)
    assert [text.text for text in given.texts()] == ["Seen.", "Seen.", "Seen.\n\nIn a box."]
    assert given.skipped().splitlines() == [
        "read without page headers and footers: all.docx",
        "read without comments: all.docx",
        "read without text boxes: box.docx",
    ]


def test_tables_and_other_texts_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("part,price\npump,5\n")
    (tmp_path / "b.json").write_text('{"part": "pump"}')
    (tmp_path / "c.rst").write_text("Pump\n====\n")
    assert [(text.text, text.markdown) for text in open_index_input(tmp_path).texts()] == [
        ("| part | price |\n| --- | --- |\n| pump | 5 |", True),
        ('{"part": "pump"}', False),
        ("Pump\n====\n", True),
    ]


def test_a_document_whose_text_is_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.csv").write_text("part,price\npump,5\n")
    length = len(conversion.read_document(tmp_path / "a.csv")["text"])
    monkeypatch.setattr(conversion, "MOST_TEXT", length - 1)
    assert f"{length} characters" in conversion.read_document(tmp_path / "a.csv")["error"]


@pytest.mark.skipif(not find_spec("pptx") or not find_spec("openpyxl"), reason="needs python-pptx and openpyxl")
def test_slides_and_sheets_are_read(tmp_path: Path) -> None:
    import openpyxl
    import pptx

    deck = pptx.Presentation()
    deck.slides.add_slide(deck.slide_layouts[5]).shapes.title.text = "The amber slide."
    deck.save(str(tmp_path / "a.pptx"))
    book = openpyxl.Workbook()
    for row in (["part", "price"], ["pump", 5]):
        book.active.append(row)
    book.save(tmp_path / "b.xlsx")
    slide, sheet = (text.text for text in open_index_input(tmp_path).texts())
    assert "# The amber slide." in slide and "| pump | 5 |" in sheet

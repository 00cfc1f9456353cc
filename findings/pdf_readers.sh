#!/usr/bin/env bash
# pypdf 7.1.1 and pdfminer.six 20260107. Guesses: both modes of pypdf read the same words, and small capitals' "A.sc"
# as "A"; pdfminer keeps words whole where letters are a tenth of their size apart, and reads byte 173 of
# WinAnsiEncoding as the hyphen that it is. Seen: pypdf's layout mode leaves out the text of form XObjects, and "A.sc"
# stays as "/A.sc"; pdfminer makes "Ann ua l re port" of "Annual report", and "well known" of "well-known".
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q pypdf==7.1.1 pdfminer.six==20260107
"$folder/venv/bin/python" - <<'PYTHON'
from io import BytesIO

from pdfminer.high_level import extract_text
from pypdf import PdfReader, PdfWriter
from pypdf.generic import ArrayObject, DictionaryObject, NameObject, NumberObject, StreamObject


def names(**entries):
    whole = {key: NameObject(value) if isinstance(value, str) else value for key, value in entries.items()}
    return DictionaryObject({NameObject(f"/{key}"): value for key, value in whole.items()})


def stream(operators, **entries):
    made = StreamObject()
    made.update(names(**entries))
    made.set_data(operators.encode("latin1"))
    return made


def pdf(operators, form="", encoding="/WinAnsiEncoding"):
    writer = PdfWriter()
    page = writer.add_blank_page(600, 800)
    fonts = names(Font=names(F=names(Type="/Font", Subtype="/Type1", BaseFont="/Helvetica", Encoding=encoding)))
    box = ArrayObject(map(NumberObject, (0, 0, 600, 800)))
    drawn = writer._add_object(stream(form, Type="/XObject", Subtype="/Form", BBox=box, Resources=fonts))
    page[NameObject("/Resources")] = names(**{key[1:]: value for key, value in fonts.items()}, XObject=names(X=drawn))
    page[NameObject("/Contents")] = writer._add_object(stream(operators))
    writer.write(file := BytesIO())
    return file


def text(words, set_up=""):
    return f"BT /F 12 Tf {set_up} 50 700 Td ({words}) Tj ET"


small = names(Differences=ArrayObject([NumberObject(65), NameObject("/A.sc")]))
drawn = PdfReader(pdf("/X Do", form=text("in a form"))).pages[0]
modes = {mode: drawn.extract_text(extraction_mode=mode) for mode in ("plain", "layout")}
capital = PdfReader(pdf(text("A"), encoding=small)).pages[0].extract_text()
spaced = extract_text(pdf(text("Annual report", "1.2 Tc"))).strip()
hyphen = extract_text(pdf(text("well\xadknown"))).strip()
print("pypdf", modes, capital)
print("pdfminer", spaced, "/", hyphen)
assert modes == {"plain": "in a form", "layout": ""} and capital == "/A.sc"
assert (spaced, hyphen) == ("Ann ua l re port", "well known")
PYTHON
# Output of 2026-11-30:
# pypdf {'plain': 'in a form', 'layout': ''} /A.sc
# pdfminer Ann ua l re port / well known

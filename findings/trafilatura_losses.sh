#!/usr/bin/env bash
# trafilatura 2.3.1. Guesses: what an article says stays in its text: captions, formulas, lists in table cells, a
# list's first number, a line that is one link. Seen: all five are lost without a word: the list starts at 1, and of
# "The dose is <math>, at most" the words around the formula stay. `favor_recall` brings back but the list in the cell.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q trafilatura==2.3.1 lxml_html_clean==0.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import trafilatura

first, last = (f"<p>{(name + ' words make clauses, and those a paragraph. ') * 4}</p>" for name in ("Some", "Other"))
parts = {
    "caption": "<figure><img src='a.png'><figcaption>Doses by age</figcaption></figure>",
    "formula": "<p>The dose is <math><mn>2</mn><mi>mg</mi></math>, at most.</p>",
    "list in a cell": "<table><tr><td>take</td><td><ul><li>iron</li><li>zinc</li></ul></td></tr></table>",
    "list from 3": "<ol start='3'><li>rest</li><li>eat</li></ol>",
    "link": "<p><a href='b.html'>Tables of doses</a></p>",
    "text": "<p>Doses differ.</p>",
}


def read(part, **options):
    page = f"<html><body><article><h1>Doses</h1>{first}{part}{last}</article></body></html>"
    text = trafilatura.extract(page, output_format="markdown", **options)
    return " ".join(text.rpartition("Some")[2].partition("paragraph.")[2].partition("Other")[0].split())


seen = {name: (read(part), read(part, favor_recall=True)) for name, part in parts.items()}
for name, value in seen.items():
    print(name, value)
assert seen["text"] == ("Doses differ.", "Doses differ.")
assert seen["caption"] == seen["link"] == ("", "")
assert seen["formula"] == ("The dose is , at most.",) * 2
assert seen["list from 3"] == ("1. rest 2. eat",) * 2
assert seen["list in a cell"] == ("| take | |", "| take | iron zinc |")
PYTHON
# Output of 2026-11-30:
# caption ('', '')
# formula ('The dose is , at most.', 'The dose is , at most.')
# list in a cell ('| take | |', '| take | iron zinc |')
# list from 3 ('1. rest 2. eat', '1. rest 2. eat')
# link ('', '')
# text ('Doses differ.', 'Doses differ.')

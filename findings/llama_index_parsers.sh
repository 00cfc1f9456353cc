#!/usr/bin/env bash
# llama-index-core 0.14.25. Guesses: SentenceSplitter cuts too long a sentence between words; HTMLNodeParser keeps a
# page's words in order; MarkdownNodeParser takes no "#" in a block of code for a heading; JSONNodeParser keeps every
# field. Seen: "$3.14" is cut after "3."; "not" leaves its sentence for a passage of its own, and tables, plain blocks
# and text after a list are lost; code between "~~~" has headings; fields with an empty object or list are lost.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q llama-index-core==0.14.25 beautifulsoup4==4.15.0
"$folder/venv/bin/python" - <<'PYTHON'
from llama_index.core import Document
from llama_index.core.node_parser import HTMLNodeParser, JSONNodeParser, MarkdownNodeParser, SentenceSplitter


def texts(parser, text):
    return [node.text for node in parser.get_nodes_from_documents([Document(text=text)])]


characters = SentenceSplitter(chunk_size=60, chunk_overlap=0, tokenizer=list)
page = (
    "<body><p>Do <b>not</b> take it</p><ul><li>ever</li></ul>after the list"
    "<table><tr><td>cell</td></tr></table><div>block</div></body>"
)
sentences = texts(characters, "Each box of the tablets costs the ward $3.14 when it is bought in the town.")
html = texts(HTMLNodeParser(), page)
fences = {mark: len(texts(MarkdownNodeParser(), f"# A\n\n{mark}\n# comment\n{mark}\n")) for mark in ("```", "~~~")}
fields = texts(JSONNodeParser(), '{"a": 1, "b": {}, "c": [], "d": null}')
print("sentences", sentences)
print("HTML", html)
print("passages by fence", fences)
print("fields", fields)
assert sentences == ["Each box of the tablets costs the ward $3.", "14 when it is bought in the town."]
assert html == ["Do\ntake it", "not", "ever"]
assert fences == {"```": 1, "~~~": 2}
assert fields == ["a 1\nd None"]
PYTHON
# Output of 2026-11-30:
# sentences ['Each box of the tablets costs the ward $3.', '14 when it is bought in the town.']
# HTML ['Do\ntake it', 'not', 'ever']
# passages by fence {'```': 1, '~~~': 2}
# fields ['a 1\nd None']

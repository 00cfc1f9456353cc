#!/usr/bin/env bash
# langchain-text-splitters 1.1.3. Guesses: splitters of HTML keep the order of words; the one of Markdown headings keeps
# code's indentation and takes "#" for a heading only outside code; where a piece starts is right for any measure of
# length; pieces joined at a regular expression have the text between them. Seen: bold words leave their sentence, and
# text after a block comes before all headings; Python loses its indentation, and a comment in indented code becomes a
# heading; where lengths are words, starts are wrong or -1; the expression itself is written into the text.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q langchain-text-splitters==1.1.3 beautifulsoup4==4.15.0
"$folder/venv/bin/python" - <<'PYTHON'
from langchain_text_splitters import (
    CharacterTextSplitter,
    HTMLHeaderTextSplitter,
    MarkdownHeaderTextSplitter,
    RecursiveCharacterTextSplitter,
)

page = "<body><h1>Doses</h1><p>Do <b>not</b> take H<sub>2</sub>O</p><ul><li>ever</li></ul>after the list</body>"
html = [piece.page_content for piece in HTMLHeaderTextSplitter([("h1", "title")]).split_text(page)]
markdown = MarkdownHeaderTextSplitter([("#", "title")])
fenced = markdown.split_text("# A\n\n```python\ndef f():\n    return 1\n```\n")[0].page_content
indented = markdown.split_text("# A\n\n    # a comment\n    x = 1\n")[-1].metadata
words = {"chunk_size": 8, "chunk_overlap": 4, "length_function": lambda text: len(text.split())}
text = " ".join(f"w{number}" for number in range(100, 120))
pieces = RecursiveCharacterTextSplitter(**words, add_start_index=True).create_documents([text])
starts = [(piece.metadata["start_index"], text.index(piece.page_content)) for piece in pieces]
joined = CharacterTextSplitter(separator=r"\d", is_separator_regex=True, chunk_size=50, chunk_overlap=0)
expression = joined.split_text("one1two2three")
print("HTML", html)
print("fenced", repr(fenced))
print("indented", indented)
print("starts said and true", starts)
print("expression", expression)
assert html == ["after the list", "Doses", "Do take H O  \nnot  \n2  \never"]
assert fenced == "```python\ndef f():\nreturn 1\n```"
assert indented == {"title": "a comment"}
assert starts == [(0, 0), (-1, 20), (40, 40), (-1, 60)]
assert expression == [r"one\dtwo\dthree"]
PYTHON
# Output of 2026-11-30:
# HTML ['after the list', 'Doses', 'Do take H O  \nnot  \n2  \never']
# fenced '```python\ndef f():\nreturn 1\n```'
# indented {'title': 'a comment'}
# starts said and true [(0, 0), (-1, 20), (40, 40), (-1, 60)]
# expression ['one\\dtwo\\dthree']

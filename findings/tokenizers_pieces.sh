#!/usr/bin/env bash
# tokenizers 0.23.3. Guesses: the bytes of a character that is cut off decode to one replacement character, as Python's
# do; BERT's splitter takes every currency sign for punctuation; the byte-level one cuts "'T" from "don'T" as "'t" from
# "don't". Seen: one replacement character a byte; "$" is split off, "€" is not; capitals are cut into "'" and "T".
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q tokenizers==0.23.3
"$folder/venv/bin/python" - <<'PYTHON'
from tokenizers import decoders, pre_tokenizers


def pieces(splitter, text):
    return [piece for piece, _ in splitter.pre_tokenize_str(text)]


cut = decoders.ByteFallback().decode(["<0xE2>", "<0x82>", "x"])
python = b"\xe2\x82x".decode(errors="replace")
signs = pieces(pre_tokenizers.BertPreTokenizer(), "a$b€c")
byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
small, capital = pieces(byte_level, "don't"), pieces(byte_level, "don'T")
print("cut", cut.count("\ufffd"), "Python", python.count("\ufffd"))
print("BERT", signs)
print("byte level", small, capital)
assert (cut.count("\ufffd"), python.count("\ufffd")) == (2, 1)
assert signs == ["a", "$", "b€c"]
assert small == ["don", "'t"]
assert capital == ["don", "'", "T"]
PYTHON
# Output of 2026-11-29:
# cut 2 Python 1
# BERT ['a', '$', 'b€c']
# byte level ['don', "'t"] ['don', "'", 'T']

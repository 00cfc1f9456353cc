#!/usr/bin/env bash
# bm25s 0.3.16. Guess: of passages with one score the first come first, and a question without a known word finds
# nothing. Seen: ties come last passage first, and such a question "finds" the last passages, with score 0.
# With the Robertson and ATIRE formulas, a word that is in every passage scores 0, too.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q bm25s==0.3.16 numpy==2.3.5
"$folder/venv/bin/python" - <<'PYTHON'
import bm25s

passages = ["alpha beta", "alpha gamma", "alpha delta"]
quiet = {"show_progress": False}


def index(method):
    found = bm25s.BM25(method=method)
    found.index(bm25s.tokenize(passages, **quiet), **quiet)
    return found


def retrieve(question):
    documents, scores = index("lucene").retrieve(bm25s.tokenize([question], **quiet), k=2, **quiet)
    return documents[0].tolist(), scores[0].tolist()


seen = {
    "ties": retrieve("alpha")[0],
    "unknown word": retrieve("omega"),
    "stop word": retrieve("the"),
    "a word of every passage": {
        method: bool(index(method).get_scores(["alpha"])[0] > 0)
        for method in ("lucene", "robertson", "atire", "bm25l", "bm25+")
    },
}
for name, value in seen.items():
    print(name, value)
assert seen["ties"] == [2, 1]
assert seen["unknown word"] == seen["stop word"] == ([2, 1], [0.0, 0.0])
assert {m for m, above in seen["a word of every passage"].items() if not above} == {"robertson", "atire"}
PYTHON
# Output of 2026-11-29:
# ties [2, 1]
# unknown word ([2, 1], [0.0, 0.0])
# stop word ([2, 1], [0.0, 0.0])
# a word of every passage {'lucene': True, 'robertson': False, 'atire': False, 'bm25l': True, 'bm25+': True}

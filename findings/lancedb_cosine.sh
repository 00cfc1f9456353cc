#!/usr/bin/env bash
# lancedb 0.40.0. Guesses: by cosine, a vector of zeros is at distance 1, or at NaN, and a question of zeros finds k
# passages in some order; vectors of whole numbers can be searched, as those of floats. Seen: no search by cosine finds
# the vector of zeros, however many it may return, and the question of zeros finds nothing at all; a table made of
# vectors of small whole numbers is one of bytes, which the default distance refuses.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q lancedb==0.40.0 numpy==2.3.5
cd "$folder"
venv/bin/python - <<'PYTHON'
import lancedb

database = lancedb.connect("database")


def table(name, vectors):
    return database.create_table(name, [{"id": id, "vector": vector} for id, vector in enumerate(vectors)])


def found(table, question, distance):
    return [row["id"] for row in table.search(question).distance_type(distance).limit(10).to_list()]


floats = table("floats", [[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]])
searches = {distance: found(floats, [1.0, 0.0], distance) for distance in ("l2", "dot", "cosine")}
zeros = {distance: len(found(floats, [0.0, 0.0], distance)) for distance in ("l2", "dot", "cosine")}
whole = table("whole", [[1, 0], [0, 0], [0, 1]])
kind = whole.schema.field("vector").type.value_type
try:
    refused = found(whole, [1, 0], "l2")
except Exception as error:
    refused = str(error).partition("UInt8")[1]
print("found", searches)
print("by zeros", zeros)
print("whole numbers", kind, refused)
assert 1 in searches["l2"] and 1 in searches["dot"] and searches["cosine"] == [0, 2]
assert zeros == {"l2": 3, "dot": 3, "cosine": 0}
assert (str(kind), refused) == ("uint8", "UInt8")
PYTHON
# Output of 2026-11-30:
# found {'l2': [0, 1, 2], 'dot': [0, 1, 2], 'cosine': [0, 2]}
# by zeros {'l2': 3, 'dot': 3, 'cosine': 0}
# whole numbers uint8 UInt8

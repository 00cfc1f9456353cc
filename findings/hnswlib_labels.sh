#!/usr/bin/env bash
# hnswlib 0.8.0 (installing it compiles C++). Guess: vectors added without labels get labels that are free. Seen: they
# get the count of vectors so far and the numbers after it, so that where earlier ones were given labels, they replace
# some of those without a word: of four vectors labeled 4 to 7 and two more, four are left, two of them replaced.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q hnswlib==0.8.0 numpy==2.3.5
"$folder/venv/bin/python" - <<'PYTHON'
import hnswlib
import numpy as np

index = hnswlib.Index(space="l2", dim=1)
index.init_index(max_elements=100)
index.add_items(np.zeros((4, 1), dtype=np.float32), [4, 5, 6, 7])
index.add_items(np.ones((2, 1), dtype=np.float32))
labels = sorted(index.get_ids_list())
values = [float(value) for [value] in index.get_items(labels)]
print("labels", labels, "vectors", values)
assert (labels, values) == ([4, 5, 6, 7], [1, 1, 0, 0])
PYTHON
# Output of 2026-11-30:
# labels [4, 5, 6, 7] vectors [1.0, 1.0, 0.0, 0.0]

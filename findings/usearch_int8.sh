#!/usr/bin/env bash
# usearch 2.26.6, an index of int8. Guesses: for the inner product and Euclidean distance, numbers are rounded and
# clipped, so a longer vector scores more; passages of one distance come in the order in which they were added. Seen:
# each vector is first made as long as all others, whatever the metric, so lengths are lost and the nearest by Euclidean
# distance is one five times as long; ties come last passage first from an index, though first passage first from
# `search` without one.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q usearch==2.26.6 numpy==2.3.5
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np
from usearch.index import Index, MetricKind, search


def index(vectors, metric, dtype):
    made = Index(ndim=2, metric=metric, dtype=dtype)
    made.add(np.arange(len(vectors)), vectors)
    return made


def nearest(vectors, metric, dtype, question, k=1):
    return [int(match.key) for match in index(vectors, metric, dtype).search(question, k)]


vectors = np.array([[0.5, 0.0], [0.1, 0.02]], dtype=np.float32)
question = np.array([0.1, 0.0], dtype=np.float32)
stored = [vector.tolist() for vector in index(vectors, "l2sq", "i8").get([0, 1])]
euclidean = {dtype: nearest(vectors, "l2sq", dtype, question) for dtype in ("f32", "i8")}
doubled = np.array([[1.0, 0.2], [2.0, 0.5]], dtype=np.float32)
inner = {dtype: nearest(doubled, "ip", dtype, np.array([1.0, 0.0], np.float32)) for dtype in ("f32", "i8")}
same = np.ones((6, 2), dtype=np.float32)
ties = nearest(same, "l2sq", "f32", same[0], k=3)
without = search(same, same[0], 3, MetricKind.L2sq, exact=True).keys.tolist()
print("stored", stored)
print("Euclidean", euclidean)
print("inner product", inner)
print("ties", ties, without)
assert stored[0] == [127, 0] and stored[1][0] > 120
assert euclidean == {"f32": [1], "i8": [0]}
assert inner == {"f32": [1], "i8": [0]}
assert (ties, without) == ([5, 4, 3], [0, 1, 2])
PYTHON
# Output of 2026-11-30:
# stored [[127, 0], [124, 24]]
# Euclidean {'f32': [1], 'i8': [0]}
# inner product {'f32': [1], 'i8': [0]}
# ties [5, 4, 3] [0, 1, 2]

#!/usr/bin/env bash
# faiss-cpu 1.15.1. Guesses: an eight-bit quantizer gives back the least and greatest numbers it was trained on, and
# clips others; its "direct" form, for numbers that are bytes already, clips, too; ties come first passage first. Seen:
# 0 and 1 come back as 0.00196 and 1.00196, and a uniform 3 as 3.006; "direct" cuts off fractions and wraps around, so
# 300 becomes 44 and -2 becomes 254; ties come last passage first for the inner product, first for Euclidean distance.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q faiss-cpu==1.15.1 numpy==2.3.5
"$folder/venv/bin/python" - <<'PYTHON'
import faiss
import numpy as np


def back(kind, trained, numbers):
    index = faiss.IndexScalarQuantizer(1, getattr(faiss.ScalarQuantizer, kind))
    index.train(np.array(trained, dtype=np.float32)[:, None])
    index.add(np.array(numbers, dtype=np.float32)[:, None])
    return [round(float(number), 5) for number in index.reconstruct_n(0, len(numbers)).ravel()]


def ties(index):
    index.add(np.ones((6, 2), dtype=np.float32))
    return index.search(np.ones((1, 2), dtype=np.float32), 3)[1][0].tolist()


eight = back("QT_8bit", [0, 1], [0, 1, 0.5, 7])
uniform = back("QT_8bit_uniform", [0, 3], [3])
direct = back("QT_8bit_direct", [0, 255], [200, 1.9, 300, -2])
inner, euclidean = ties(faiss.IndexFlatIP(2)), ties(faiss.IndexFlatL2(2))
print("eight bits", eight)
print("uniform", uniform)
print("direct", direct)
print("ties", inner, euclidean)
assert eight == [0.00196, 1.00196, 0.5, 1.00196]
assert uniform == [3.00588]
assert direct == [200.0, 1.0, 44.0, 254.0]
assert (inner, euclidean) == ([2, 1, 0], [0, 1, 2])
PYTHON
# Output of 2026-11-30:
# eight bits [0.00196, 1.00196, 0.5, 1.00196]
# uniform [3.00588]
# direct [200.0, 1.0, 44.0, 254.0]
# ties [2, 1, 0] [0, 1, 2]

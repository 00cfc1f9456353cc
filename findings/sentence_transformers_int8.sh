#!/usr/bin/env bash
# sentence-transformers 6.2.0, whose `quantize_embeddings` makes embeddings int8. Guesses: its own functions score them:
# `dot_score` counts in wider numbers, `cos_sim` makes them floats; the upper end of the ranges becomes 127, or 255 as
# uint8. Seen: dot products wrap around, so that a passage scores less than its opposite, and a search for it finds it
# last; cos_sim raises RuntimeError; the upper end becomes 126, or 254.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q sentence-transformers==6.2.0 torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import numpy as np
from sentence_transformers.util import cos_sim, dot_score, semantic_search
from sentence_transformers.util.quantization import quantize_embeddings

ranges = np.array([[-1, -1], [1, 1]], dtype=np.float32)
vectors = np.array([[0.8, 0.8], [0.1, 0.1], [-0.8, -0.8]], dtype=np.float32)
ends = {kind: quantize_embeddings(ranges, kind, ranges=ranges)[:, 0].tolist() for kind in ("int8", "uint8")}
passages = quantize_embeddings(vectors, "int8", ranges=ranges)
scores = dot_score(passages[:1], passages)
exact = (passages[:1].astype(int) @ passages.T.astype(int)).tolist()
try:
    cosine = cos_sim(passages[:1], passages)
except RuntimeError as error:
    cosine = type(error).__name__
found = [hit["corpus_id"] for hit in semantic_search(passages[:1], passages, score_function=dot_score)[0]]
print("ends", ends)
print("passages", passages.tolist())
print("dot products", scores.tolist(), scores.dtype, "exact", exact)
print("found", found, "cos_sim", cosine)
assert ends == {"int8": [-128, 126], "uint8": [0, 254]}
assert scores.tolist() == [[-78, 120, -70]] and exact == [[20402, 2424, -20806]]
assert (found, cosine) == ([1, 2, 0], "RuntimeError")
PYTHON
# Output of 2026-11-30:
# ends {'int8': [-128, 126], 'uint8': [0, 254]}
# passages [[101, 101], [12, 12], [-103, -103]]
# dot products [[-78, 120, -70]] torch.int8 exact [[20402, 2424, -20806]]
# found [1, 2, 0] cos_sim RuntimeError

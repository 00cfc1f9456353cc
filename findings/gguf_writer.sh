#!/usr/bin/env bash
# gguf 0.19.0, the Python writer. Guesses: an empty array is written as one; Q8_0 rounds halves to even, as NumPy does;
# zeros come back as zeros. Seen: a key with an empty array is left out of the file without a word; halves round away
# from zero; zeros come back from Q4_0 as -0.0.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q gguf==0.19.0 numpy==2.3.5
cd "$folder"
venv/bin/python - <<'PYTHON'
import gguf
import numpy as np
from gguf.quants import dequantize, quantize

writer = gguf.GGUFWriter("tiny.gguf", "llama")
writer.add_array("tokenizer.ggml.merges", [])
writer.add_array("tokenizer.ggml.tokens", ["a"])
writer.add_tensor("x", np.zeros((1, 4), dtype=np.float32))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
keys = [key for key in gguf.GGUFReader("tiny.gguf").fields if key.startswith("tokenizer")]

row = np.zeros((1, 32), dtype=np.float32)
row[0, :6] = [127, 0.5, 1.5, 2.5, -0.5, -1.5]
numbers = quantize(row, gguf.GGMLQuantizationType.Q8_0)[0, 2:8].view(np.int8).tolist()
kind = gguf.GGMLQuantizationType.Q4_0
zeros = dequantize(quantize(np.zeros((1, 32), dtype=np.float32), kind), kind)
negative = bool(np.signbit(zeros).all())
print("keys", keys)
print("Q8_0", numbers)
print("Q4_0 of zeros is -0.0:", negative)
assert keys == ["tokenizer.ggml.tokens"]
assert numbers == [127, 1, 2, 3, -1, -2]
assert negative
PYTHON
# Output of 2026-11-29:
# keys ['tokenizer.ggml.tokens']
# Q8_0 [127, 1, 2, 3, -1, -2]
# Q4_0 of zeros is -0.0: True

#!/usr/bin/env bash
# model2vec 0.10.0. Guesses: with max_length=512, all of a text of 400 tokens counts; a model loaded as int8 gives
# vectors about as long as before. Seen: a text is first cut after 512 times the median length of the vocabulary's
# tokens, in characters, so of 400 long words the last hundred, or more, are not read, and a limit of 1,000 reads them;
# int8 vectors are sums of whole numbers up to 127, which no factor takes back.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q model2vec==0.10.0 numpy==2.3.5
cd "$folder"
venv/bin/python - <<'PYTHON'
import numpy as np
from model2vec import StaticModel
from tokenizers import Tokenizer, models, pre_tokenizers

words = ["[PAD]", "[UNK]", "a", "in", "antibiotics", "warfarin"]
tokenizer = Tokenizer(models.WordLevel({word: id for id, word in enumerate(words)}, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
vectors = np.array([[0, 0], [0, 0], [0, 0], [0, 0], [0, 0.5], [0.25, 0]], dtype=np.float32)
model = StaticModel(vectors, tokenizer, normalize=False)
text = "antibiotics " * 300 + "warfarin " * 100
tokens = len(tokenizer.encode(text).ids)
read = {limit: model.encode(text, max_length=limit).tolist() for limit in (512, 1000)}
model.save_pretrained("saved")
small = StaticModel.from_pretrained("saved", quantize_to="int8").encode("antibiotics").tolist()
print("tokens", tokens)
print("read", read)
print("as int8", small, "before", model.encode("antibiotics").tolist())
assert tokens == 400
assert read == {512: [0, 0.5], 1000: [0.0625, 0.375]}
assert small == [0, 127]
PYTHON
# Output of 2026-11-30:
# tokens 400
# read {512: [0.0, 0.5], 1000: [0.0625, 0.375]}
# as int8 [0.0, 127.0] before [0.0, 0.5]

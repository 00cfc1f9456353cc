#!/usr/bin/env bash
# peft 0.21.2, LoRA on the embedding of a model whose head is its embedding (`tie_word_embeddings`). Guess: with
# ensure_weight_tying=True, which ties the head's adapter to it, merging keeps the logits. Seen: the merge adds the
# change twice, once as the embedding's and once as the head's, and the logits are others. Without the option it adds it
# once, and the logits are others, too.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q peft==0.21.2 transformers==5.24.0 torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

ids = torch.tensor([[1, 2, 3]])


@torch.no_grad()
def merge(tied, **settings):
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, tie_word_embeddings=tied))
    before = model.get_input_embeddings().weight.clone()
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["embed_tokens"], **settings)).eval()
    for name, numbers in adapted.named_parameters():
        if "lora" in name:
            numbers.normal_(std=0.3)
    change = adapted.base_model.model.model.embed_tokens.get_delta_weight("default").clone()
    logits = adapted(ids).logits
    merged = adapted.merge_and_unload()
    times = ((merged.get_input_embeddings().weight - before) / change).median().item()
    return round(times, 2), (merged(ids).logits - logits).abs().max().item() < 1e-3


seen = {"untied": merge(False), "tied": merge(True), "ensured": merge(True, ensure_weight_tying=True)}
for name, (times, same) in seen.items():
    print(f"{name}: change added {times} times, the same logits: {same}")
assert seen == {"untied": (1, True), "tied": (1, False), "ensured": (2, False)}
PYTHON
# Output of 2026-11-30:
# untied: change added 1.0 times, the same logits: True
# tied: change added 1.0 times, the same logits: False
# ensured: change added 2.0 times, the same logits: False

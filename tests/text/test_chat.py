"""Prompts of decoders without a chat template."""

import copy

import pytest

from ctx_compress_rag.text.chat import chat_text
from helpers import architectures


@pytest.mark.parametrize(("name", "begins"), [("Llama", True), ("Phi3", False)])
def test_prompts_of_base_models_begin_as_the_tokenizer_begins_a_text(name: str, begins: bool) -> None:
    tokenizer = copy.deepcopy(architectures.tokenizer(name))
    tokenizer.chat_template = None
    text = chat_text(tokenizer, [{"role": "user", "content": "Who?"}])
    assert text.startswith(tokenizer.bos_token) is begins
    [first, *_] = tokenizer(text.removeprefix(tokenizer.bos_token))["input_ids"]
    assert tokenizer(text, add_special_tokens=False)["input_ids"][0] == first

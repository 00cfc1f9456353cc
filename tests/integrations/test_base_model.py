"""A base model, whose tokenizer has no chat template, in both frameworks."""

import copy
from pathlib import Path
from typing import Any

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate

from helpers.decoding import by_transformers
from helpers.frameworks import LangChain, LlamaIndex
from helpers.langchain import QUESTION, TOKENS, open_app, talkative_bundle


def test_it_is_asked_in_plain_text(make_tiny_bundle: Any, tmp_path: Path) -> None:
    """LangChain's chat ends with the cue; LlamaIndex's completions are what its `completion_to_prompt` makes."""
    bundle = talkative_bundle(make_tiny_bundle)
    bundle.backbone.tokenizer = tokenizer = copy.deepcopy(bundle.tokenizer)
    tokenizer.chat_template = None
    app = open_app(tmp_path, bundle)
    marker = app.store.marker("tower", 8)
    for framework, asked in ((LangChain, f"{QUESTION}\nAnswer:"), (LlamaIndex, QUESTION)):
        llm = framework.llm(store=app.store, max_tokens=TOKENS)
        expected = by_transformers(bundle.backbone.model, tokenizer, tokenizer(asked)["input_ids"], TOKENS)
        assert framework.ask(llm, QUESTION) == (expected, 0)
        answer, slots = framework.ask(llm, f"{marker} {QUESTION}")
        assert answer and slots > 0
    assert not llm.metadata.is_chat_model
    assert llm.predict(PromptTemplate("{it}"), it=QUESTION) == expected
    chatted = by_transformers(
        bundle.backbone.model, tokenizer, tokenizer(f"user: {QUESTION}\nassistant: ")["input_ids"], TOKENS
    )
    assert llm.chat([ChatMessage(QUESTION)]).message.content == chatted

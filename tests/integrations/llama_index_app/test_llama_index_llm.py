"""The LlamaIndex LLM: every way to ask gives the decoder's own answer; markers are counted and packed as slots."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llama_index.core.base.llms.types import ChatMessage, ImageBlock
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.prompts import PromptTemplate

from ctx_compress_rag.errors import ConfigError
from helpers.llama_index import MAX_TOKENS, PASSAGES, QUESTION, RATIO, App
from llama_index.llms.ctx_compress import CompressedContextLLM, chat_memory, marker_tokenizer


@pytest.fixture
def llm(app: App) -> CompressedContextLLM:
    return app.llm()


@pytest.fixture
def prompt(app: App) -> str:
    return f"Context: {app.store.marker('n0', 4)} and {app.store.marker('n3', RATIO)}\nQuestion: {QUESTION}"


async def test_every_way_to_ask_gives_one_answer(app: App, llm: CompressedContextLLM, prompt: str) -> None:
    message = [ChatMessage(role="user", content=prompt)]
    direct = app.answer([{"role": "user", "content": prompt}])
    assert direct.slots == sum(app.slots(prompt)) > 0
    complete, chat = llm.complete(prompt), llm.chat(message)
    assert complete.text == chat.message.content == direct.text
    assert complete.raw == chat.raw == {
        "usage": {
            "prompt_tokens": direct.prompt_tokens,
            "completion_tokens": direct.completion_tokens,
            "total_tokens": direct.prompt_tokens + direct.completion_tokens,
        },
        "slots": direct.slots,
        "finish_reason": direct.finish_reason,
    }  # fmt: skip
    assert chat.message.additional_kwargs == {}
    assert llm.complete(prompt, stop=["never there", direct.text[4:7]]).raw["finish_reason"] == "stop"
    assert await llm.acomplete(prompt) == complete
    assert await llm.achat(message) == chat
    streams = [
        list(llm.stream_complete(prompt)),
        list(llm.stream_chat(message)),
        [response async for response in await llm.astream_complete(prompt)],
        [response async for response in await llm.astream_chat(message)],
    ]
    for stream in streams:
        assert "".join(response.delta or "" for response in stream) == direct.text
        text = ""
        for response in stream:
            text += response.delta or ""
            assert (response.text if hasattr(response, "text") else response.message.content) == text
        assert [response.raw for response in stream] == [None] * (len(stream) - 1) + [complete.raw]


def test_a_formatted_prompt_is_used_as_it_is(app: App, llm: CompressedContextLLM, prompt: str) -> None:
    direct, raw = app.answer(prompt), llm.complete(prompt, formatted=True)
    assert (raw.text, raw.raw["usage"]["prompt_tokens"]) == (direct.text, direct.prompt_tokens)
    assert direct.prompt_tokens < llm.complete(prompt).raw["usage"]["prompt_tokens"]


def test_metadata_and_an_image(llm: CompressedContextLLM) -> None:
    metadata = llm.metadata
    assert (metadata.context_window, metadata.num_output, metadata.model_name) == (1024, MAX_TOKENS, "tiny")
    assert metadata.is_chat_model and not metadata.is_function_calling_model
    with pytest.raises(ConfigError, match="image block"):
        llm.chat([ChatMessage(role="user", blocks=[ImageBlock(url="http://localhost/x.png")])])


def test_markers_of_a_scope_count_as_their_slots(app: App) -> None:
    marker, slots = app.store.marker("n2", 4, "a"), -(-app.tokens(PASSAGES[2]) // 4)
    assert len(marker_tokenizer(app.store, scope="a")(marker)) == slots < len(marker_tokenizer(app.store)(marker))


PIECES = st.lists(
    st.tuples(st.sampled_from(range(len(PASSAGES))), st.sampled_from([4, 8, 12, 16, 64]), st.text(max_size=10)),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces=PIECES, window=st.integers(60, 300), overlap=st.sampled_from([0.0, 0.1]))
def test_no_marker_is_cut_where_chunks_end(app: App, pieces: Any, window: int, overlap: float) -> None:
    """Whatever LlamaIndex packs: each chunk fits as the decoder counts it, every marker is whole."""
    helper = PromptHelper(context_window=window, num_output=12, chunk_overlap_ratio=overlap)
    texts = [f"{said} {app.store.marker(f'n{number}', ratio)}" for number, ratio, said in pieces]
    template, room = PromptTemplate("Context: {context_str}"), window - 12
    packed = helper.repack(template, texts)
    for chunk in packed:
        assert len(marker_tokenizer(app.store)(template.format(context_str=chunk))) <= room
        assert chunk.count("[[ctx:") == len(app.slots(chunk)) + sum(said.count("[[ctx:") for *_, said in pieces)
    found = [sum(app.slots(chunk)) for chunk in packed]
    assert sum(found) >= sum(sum(app.slots(text)) for text in texts)


def test_a_long_chat_in_a_small_window_needs_a_shorter_memory(app: App) -> None:
    """LlamaIndex's own lets the history fill the window."""

    def talk(llm: Any, **memory: Any) -> None:
        engine = app.index.as_chat_engine("context", llm=llm, node_postprocessors=[app.postprocessor()], **memory)
        for turn in range(12):
            engine.chat(f"{turn}: {QUESTION}")

    llm = app.llm()
    with pytest.raises(ValueError, match="is not positive"):
        talk(llm)
    talk(llm, memory=chat_memory(llm))
    with pytest.raises(ConfigError, match="max_tokens=600.* smaller max_tokens"):
        chat_memory(app.llm(max_tokens=600))


def test_a_memory_counts_markers_as_slots(app: App) -> None:
    llm, marker = app.llm(), app.store.marker("n0", 4)
    [slots] = app.slots(marker)
    memory = chat_memory(llm, token_limit=10 * slots, chat_history_token_ratio=1.0)
    for turn in range(30):
        memory.put(ChatMessage(role="user" if turn % 2 == 0 else "assistant", content=marker))
    history = memory.get()
    assert 6 <= len(history) <= 10 and all(message.content == marker for message in history)


def test_logprobs_name_the_tokens_that_were_taken(app: App) -> None:
    plain, llm = app.llm(), app.llm(logprobs=True, top_logprobs=2)
    for response in (llm.complete("Who built the tower?"), plain.complete("Who built the tower?", logprobs=True)):
        tokens = [alternatives[0].token for alternatives in response.logprobs]
        # A token may be a part of a character.
        assert "".join(tokens).replace("\ufffd", "") == response.text.replace("\ufffd", "")
        assert all(alternatives[0].logprob < 0 for alternatives in response.logprobs)
    chat = llm.chat([ChatMessage(role="user", content="Who built the tower?")])
    assert [each[0].token for each in chat.logprobs] == [each[0].token for each in response.logprobs]
    assert {len(each) for each in chat.logprobs} == {2}
    assert plain.complete("Who built the tower?").logprobs is None

"""The LangChain chat model: usage, refusals, caching; in chains, every way that LangChain runs one."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware, dynamic_prompt
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.retrievers import ContextualCompressionRetriever
from langchain_core.caches import InMemoryCache
from langchain_core.language_models import BaseChatModel, FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate

from ctx_compress_rag import SoftContextStore
from ctx_compress_rag.errors import ConfigError
from ctx_compress_rag.store import marker as markers
from helpers.decoding import prefills
from helpers.langchain import CHAT, QUESTION, SOURCES, TEXTS, TOKENS, App, direct, joined, rag
from helpers.marks import slowly
from langchain_ctx_compress import ChatCompressedContext, expand_prompt


async def test_usage_counts_slots(app: App) -> None:
    [tower, mill] = app.postprocessor(ratio=4).invoke(SOURCES[:2])
    prompt = [
        SystemMessage(tower.page_content),
        HumanMessage("Hello"),
        AIMessage("Ask."),
        HumanMessage(f"{mill.page_content} {QUESTION}"),
    ]
    llm = app.llm()
    with prefills(app.bundle.backbone.model) as seen:
        message = llm.invoke(prompt)
    usage = message.usage_metadata
    assert usage["input_tokens"] == len(seen[0]) == llm.get_num_tokens_from_messages(prompt)
    assert llm.get_num_tokens_from_messages([]) == 0  # LangChain asks for it as it trims
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert message.response_metadata == {
        "model_name": "tiny",
        "model_provider": "ctx-compress",
        "finish_reason": "length",
        "slots": app.slots("tower", 4) + app.slots("mill", 4),
    }
    stopped = llm.invoke(prompt, stop=[message.content[4:7]])
    assert stopped.response_metadata["finish_reason"] == "stop"
    for chunks in (list(llm.stream(prompt)), [chunk async for chunk in llm.astream(prompt)]):
        whole = sum(chunks[1:], chunks[0])
        assert whole.content == message.content
        assert whole.usage_metadata == usage
        assert whole.response_metadata == message.response_metadata
        assert [chunk.chunk_position for chunk in chunks] == [None] * (len(chunks) - 1) + ["last"]


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (HumanMessage([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]), "only text"),
        (ToolMessage("7", tool_call_id="1"), "'tool'"),
        (" ", "empty"),
        ([], "no messages"),
    ],
)
def test_messages_that_a_text_decoder_cannot_read(app: App, message: Any, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        app.llm().invoke(message if isinstance(message, str | list) else [message])


def test_tools_are_refused_in_words(app: App) -> None:
    def look_up(name: str) -> str:
        """Look a name up."""
        return name

    none = app.llm().bind_tools([], strict=True, max_tokens=2)
    assert none.invoke(QUESTION).content == app.llm(max_tokens=2).invoke(QUESTION).content
    agent = create_agent(app.llm(), tools=[look_up])
    asks = [lambda: app.llm().bind_tools([look_up]), lambda: agent.invoke({"messages": [HumanMessage(QUESTION)]})]
    for ask in asks:
        with pytest.raises(ConfigError, match="ChatCompressedContext calls no tools: leave them out"):
            ask()


def test_cache_is_keyed_by_what_the_answer_depends_on(
    app: App, make_tiny_bundle: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = InMemoryCache()
    [tower] = app.postprocessor().invoke(SOURCES[:1])
    with prefills(app.bundle.backbone.model) as seen:
        first = app.llm(cache=cache).invoke(tower.page_content)
        assert app.llm(cache=cache).invoke(tower.page_content).content == first.content
        assert len(seen) == 1
        app.llm(cache=cache, scope="other", on_unreadable="text").invoke(tower.page_content)
        with markers.scope("another"):
            app.llm(cache=cache, on_unreadable="text").invoke(tower.page_content)
        app.llm(cache=cache, max_tokens=3).invoke(tower.page_content)
        app.llm(cache=cache, extractive=True).invoke(tower.page_content)
        assert len(seen) == 5
    keys = [app.llm(**engine)._identifying_params for engine in ({}, {"merge": True}, {"engine": "http://localhost:1"})]
    assert keys[0] != keys[1] != keys[2] and "float32" in str(keys[0])
    with monkeypatch.context() as patch:  # the same slots, read with other weights
        patch.setattr(app.bundle, "config", app.bundle.config.model_copy(update={"reader_share": 0.5}))
        assert app.llm()._identifying_params != keys[0]
    # Another bundle of the same name, asked in the same words.
    own = app.llm(cache=cache).invoke(QUESTION).content
    with SoftContextStore(tmp_path, make_tiny_bundle(seed=9)) as store, prefills(store.bundle.backbone.model) as seen:
        ChatCompressedContext(store=store, cache=cache, max_tokens=TOKENS).invoke(QUESTION)
        assert len(seen) == 1
    assert app.llm(cache=cache).invoke(QUESTION).content == own


def test_each_option_is_in_the_cache_key_if_answers_depend_on_it(app: App) -> None:
    changed = {
        **{"max_tokens": 3, "temperature": 0.5, "top_p": 0.5, "top_k": 3, "stop": ["x"], "seed": 1, "extractive": True},
        **{"logprobs": True, "decoder_settings": False, "on_unreadable": "text", "scope": "anna", "merge": True},
        **{"engine": "http://localhost:1", "output_version": "v1"},
    }
    tested_with_others = {"store", "top_logprobs", "weights"}  # another store, logprobs, llama.cpp
    of_langchain = {*BaseChatModel.model_fields, "streaming"} - {"output_version"}
    of_the_machine = {"batch_size", "context_size", "api_key", "timeout", "max_retries"}
    fields = {*changed, *tested_with_others, *of_langchain, *of_the_machine}
    assert fields == {*ChatCompressedContext.model_fields}
    keys = [app.llm(**{name: value})._get_llm_string() for name, value in changed.items()]
    keys += [app.llm()._get_llm_string(), app.llm(logprobs=True, top_logprobs=2)._get_llm_string()]
    assert len(set(keys)) == len(changed) + 2


@pytest.mark.parametrize(
    "thought",
    [
        {"type": "reasoning", "reasoning": "They greet."},
        {"type": "thinking", "thinking": "They greet.", "signature": "x"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "They greet."}]},
    ],
)
def test_thoughts_of_another_model_are_left_out(app: App, thought: dict[str, Any]) -> None:
    chat = [HumanMessage("Hi"), AIMessage("Hello"), HumanMessage(QUESTION)]
    told = [chat[0], AIMessage([thought, {"type": "text", "text": "Hello"}]), chat[2]]
    assert app.llm().invoke(told).content == app.llm().invoke(chat).content
    with pytest.raises(ConfigError, match="only text"):
        app.llm().invoke([HumanMessage([thought])])


def test_logprobs_have_openais_shape(app: App) -> None:
    marker, llm = app.store.marker("tower", 4), app.llm(logprobs=True, top_logprobs=2)
    *_, last = app.llm().bind(logprobs=True, top_logprobs=2).stream(marker)
    for message in (answer := llm.invoke(marker), last):
        content = message.response_metadata["logprobs"]["content"]
        assert "".join(each["token"] for each in content) == answer.text
        assert all(bytes(each["bytes"]).decode() == each["token"] for each in content)
        assert all(each["logprob"] == each["top_logprobs"][0]["logprob"] < 0 for each in content)


def test_a_chat_is_summarized_when_its_slots_fill_the_budget(app: App) -> None:
    """`SummarizationMiddleware` believes the usage that a model of the same provider reports."""
    marker = app.store.marker("tower", 4)
    llm = app.llm()
    usage = llm.invoke(f"{marker} Who?")
    messages = [HumanMessage(f"{marker} Who?"), usage, HumanMessage("And when?")]
    brief: Any = {"keep": ("messages", 1), "summary_prompt": "Summarize: {messages}"}
    most = usage.usage_metadata["total_tokens"] - 1
    middleware = SummarizationMiddleware(llm, trigger=("tokens", most), **brief)
    assert middleware.before_model({"messages": messages}, None) is not None
    patient = SummarizationMiddleware(llm, trigger=("tokens", most + 1000), **brief)
    assert patient.before_model({"messages": messages}, None) is None
    assert llm.profile["max_input_tokens"] == app.bundle.backbone.window  # which it takes fractions of


QUESTIONS = [QUESTION, "When does the ferry leave?"]


@dataclass
class Case:
    """A chain, what it is given for a question, and where the answer is in what it returns."""

    runnable: Any
    given: Callable[[str], Any] = str
    answer: Callable[[Any], str] = str
    piece: Callable[[Any], str] = str
    streamed: dict[str, Any] = field(default_factory=dict)


def retrieval_chain(app: App) -> Case:
    retriever = ContextualCompressionRetriever(
        base_compressor=app.postprocessor(ratio=8), base_retriever=app.retriever()
    )
    chain = create_retrieval_chain(retriever, create_stuff_documents_chain(app.llm(), CHAT))
    return Case(
        chain,
        given=lambda question: {"input": question},
        answer=lambda result: result["answer"],
        piece=lambda part: part.get("answer", ""),
    )


def agent(app: App) -> Case:
    context = app.retriever() | app.postprocessor(ratio=8) | joined

    @dynamic_prompt
    def with_context(request: Any) -> str:
        return "Answer from the context.\n\n" + context.invoke(request.state["messages"][-1].text)

    return Case(
        create_agent(app.llm(), tools=[], middleware=[with_context]),
        given=lambda question: {"messages": [HumanMessage(question)]},
        answer=lambda state: state["messages"][-1].text,
        piece=lambda pair: pair[0].text,
        streamed={"stream_mode": "messages"},
    )


CHAINS: dict[str, Callable[[App], Case]] = {
    "pipe": lambda app: Case(rag(app)),
    "pipe, streaming inside": lambda app: Case(rag(app, app.llm(streaming=True))),
    "ContextualCompressionRetriever": retrieval_chain,
    "create_agent": agent,
}


def plainly(app: App, question: str) -> str:
    """The answer to the prompt that a chain is to send, written out by hand."""
    markers = [app.store.marker(document.id, 8) for document in app.retriever().invoke(question)]
    system = "Answer from the context.\n\n" + "\n\n".join(markers)
    return direct(app, [{"role": "system", "content": system}, {"role": "user", "content": question}])


@pytest.mark.parametrize("name", slowly(CHAINS, ("pipe, streaming inside",)))
async def test_every_chain_runs_every_way(app: App, name: str) -> None:
    expected = [plainly(app, question) for question in QUESTIONS]
    assert expected[0] != expected[1]
    case = CHAINS[name](app)
    chain, answer, piece = case.runnable, case.answer, case.piece
    given = [case.given(question) for question in QUESTIONS]
    assert [answer(chain.invoke(each)) for each in given] == expected
    assert [answer(result) for result in chain.batch(given)] == expected
    assert "".join(piece(part) for part in chain.stream(given[0], **case.streamed)) == expected[0]
    assert answer(await chain.ainvoke(given[0])) == expected[0]
    assert [answer(result) for result in await chain.abatch(given)] == expected
    assert "".join([piece(part) async for part in chain.astream(given[0], **case.streamed)]) == expected[0]


@pytest.mark.parametrize(("form", "hole"), [("f-string", "{%s}"), ("jinja2", "{{ %s }}"), ("mustache", "{{%s}}")])
def test_markers_pass_every_template(app: App, form: Any, hole: str) -> None:
    context, question = f"Context: {hole % 'context'}", f"\nQuestion: {hole % 'input'}"
    blocks = [{"type": "text", "text": context}, {"type": "text", "text": question}]
    marker = app.store.marker("tower", 8)
    expected = direct(app, [{"role": "user", "content": f"Context: {marker}\nQuestion: {QUESTION}"}])
    for template in (
        PromptTemplate.from_template(context + question, template_format=form),
        ChatPromptTemplate([("human", context + question)], template_format=form),
        ChatPromptTemplate([("human", blocks)], template_format=form),
    ):
        message = (template | app.llm()).invoke({"context": marker, "input": QUESTION})
        assert (message.text, message.response_metadata["slots"]) == (expected, app.slots("tower", 8))


def test_another_llm_is_sent_the_texts(app: App) -> None:
    tower, mill = app.store.markers(["tower", "mill"], 8)
    fields, plain = {"context": tower, "input": f"{mill}?"}, {"context": TEXTS["tower"], "input": f"{TEXTS['mill']}?"}
    blocks = ChatPromptTemplate(
        [("human", [{"type": "text", "text": "{context}"}, {"type": "text", "text": "{input}"}])]
    )
    for template in (CHAT, PromptTemplate.from_template("{context} {input}"), blocks):
        prompt = template.invoke(fields)
        assert expand_prompt(prompt, app.store) == template.invoke(plain)
        assert prompt == template.invoke(fields)
    assert expand_prompt(f"{tower} {mill}", app.store) == f"{TEXTS['tower']} {TEXTS['mill']}"
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    messages = [SystemMessage(tower, id="7"), HumanMessage([{"type": "text", "text": mill}, image])]
    system, human = expand_prompt(messages, app.store)
    assert (system.content, system.id) == (TEXTS["tower"], "7")
    assert human.content == [{"type": "text", "text": TEXTS["mill"]}, image]
    assert expand_prompt(tower, app.store, scope="ben") == tower
    chain = CHAT | partial(expand_prompt, store=app.store) | FakeListChatModel(responses=["ok"])
    assert chain.invoke(fields).content == "ok"

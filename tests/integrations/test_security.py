"""Secrets and markers in both frameworks: nothing is shown that must not be, nothing resolves that must not."""

import asyncio
import inspect
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.load import dumpd, dumps, loads
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tracers.run_collector import RunCollectorCallbackHandler
from llama_index.core import VectorStoreIndex
from llama_index.core.callbacks import CallbackManager, LlamaDebugHandler
from llama_index.core.schema import MetadataMode, NodeWithScore, TextNode
from starlette.concurrency import iterate_in_threadpool

from ctx_compress_rag import SoftContextStore
from ctx_compress_rag.errors import ConfigError, MissingPassageError, UnreadableMarkerError
from ctx_compress_rag.marking.mark import expand
from ctx_compress_rag.store import marker as markers
from helpers.frameworks import FRAMEWORKS, every_way
from helpers.langchain import QUESTION, SOURCES, TEXTS, App, open_app, rag
from helpers.llama_index import HashedWords, watched
from langchain_ctx_compress import CompressedContextPostprocessor
from llama_index.llms.ctx_compress import CompressedContextLLM
from llama_index.postprocessor.ctx_compress import CompressedContextPostprocessor as LlamaPostprocessor

SECRET = b"a secret of 32 bytes, shown never"
FORGED = f"[[ctx:{'a' * 20}.3.{'b' * 16}]]"
# Newer versions of langchain-core ask what may be loaded.
CORE = {"allowed_objects": "core"} if "allowed_objects" in inspect.signature(loads).parameters else {}


@FRAMEWORKS
async def test_markers_belong_to_their_scope(app: App, framework: Any) -> None:
    """Given to the classes or by a `with` block: another tenant reads only text."""
    found = [framework.found(TEXTS["tower"], "tower")]
    [annas] = framework.mark(found, store=app.store, scope="anna")
    marker, options = framework.shown(annas), {"store": app.store, "max_tokens": 4}
    [expected] = await every_way(framework, framework.llm(**options, scope="anna"), marker)
    assert expected[1] == app.slots("tower", 4)
    for other in ("ben", None):
        assert framework.ask(framework.llm(**options, scope=other, on_unreadable="text"), marker)[1] == 0
        with pytest.raises(UnreadableMarkerError, match="scope"):
            framework.ask(framework.llm(**options, scope=other), marker)
        assert expand(app.store, marker, other) == marker
    with markers.scope("anna"):
        assert framework.mark(found, store=app.store) == [annas]
        assert await every_way(framework, framework.llm(**options), marker) == {expected}


def test_a_stream_has_the_scope_of_where_it_is_read(app: App, tmp_path: Path) -> None:
    secret = Document("The code of Anna's safe is seven.", id="safe")
    with SoftContextStore(tmp_path, app.store.bundle, scope="nobody") as store:
        chain = RunnableLambda(lambda _: [secret]) | CompressedContextPostprocessor(store=store)
        with markers.scope("anna"):
            late = chain.stream(QUESTION)
        assert list(late) and (store.ids("nobody"), store.ids("anna")) == (["safe"], [])
        assert store.stored_ids([secret.page_content], ["safe"], scope="ben") == [None]
        with markers.scope("anna"):
            assert list(chain.stream(QUESTION)) and store.ids("anna") == ["safe"]


async def test_a_block_in_a_generator_that_a_web_server_runs_in_threads() -> None:
    def reply() -> Iterator[None]:
        with markers.scope("anna"):
            yield

    with pytest.raises(ConfigError, match="'anna'.*async def"):
        assert [piece async for piece in iterate_in_threadpool(reply())] == [None]


@FRAMEWORKS
def test_a_bad_marker_fails_its_own_passage_and_question_alone(
    talkative: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, framework: Any
) -> None:
    with SoftContextStore(tmp_path, talkative, key=SECRET) as store:
        store.add(["A passage that is deleted.", TEXTS["tower"]], ["gone", "tower"], progress=False)
        gone, kept = store.markers(["gone", "tower"], 8)
        store.delete(["gone"])
        quoted = [f"Read {gone}", f"It says [{FORGED}"]
        texts = [(quoted[0], "stale"), (TEXTS["tower"], "tower")]
        found = [framework.found(text, id) for text, id in texts]
        with pytest.raises(MissingPassageError):
            framework.mark(found, store=store, on_missing="error")
        with pytest.raises(MissingPassageError):
            framework.restore([framework.found(gone)], store)
        for policy in ("compress", "text"):
            caplog.clear()
            stale, good = map(framework.shown, framework.mark(found, store=store, ratio=8, on_missing=policy))
            assert (stale, good) == (quoted[0].replace(":", ""), kept)
            assert "'stale'" in caplog.text
        assert store.ids() == ["tower"]
        [left] = framework.mark([framework.found(quoted[1], "quoting")], store=store, token_budget=1000)

        strict, lenient = (
            framework.llm(store=store, max_tokens=1, on_unreadable=policy) for policy in ("error", "text")
        )
        [marker] = store.split(kept)
        assert framework.ask(strict, f"{stale} {framework.shown(left)} {good}")[1] == marker.slots
        for bad, error in ((gone, MissingPassageError), (FORGED, UnreadableMarkerError)):
            with pytest.raises(error):
                framework.ask(strict, bad)
            assert framework.ask(lenient, bad)[1] == 0


def test_metadata_with_a_marker_are_text(app: App) -> None:
    about = {"title": FORGED, "by": [f"[{FORGED}"], FORGED: 1}
    node = NodeWithScore(node=TextNode(id_="tower", text=TEXTS["tower"], metadata=about))
    [marked] = LlamaPostprocessor(store=app.store, ratio=8).postprocess_nodes([node])
    text = FORGED.replace(":", "")
    shown = f"title: {text}\nby: ['[{text}']\n{text}: 1\n\n{app.store.marker('tower', 8)}"
    assert marked.node.get_content(MetadataMode.LLM) == shown


def assert_hidden(reports: list[str], store: SoftContextStore) -> None:
    """No report shows the store's key or vectors."""
    values = [value for soft in store.get(store.ids()) if soft for value in soft.slots.flatten().tolist()]
    numbers = [repr(value)[:8] for value in values if len(repr(value)) > 8]
    hidden = ["tensor(", "array(", SECRET.decode(), SECRET.hex(), *numbers]
    assert len(hidden) > 100
    for report in reports:
        assert not [text for text in hidden if text in report]


def children(run: Any) -> list[Any]:
    return [run] + [below for child in run.child_runs for below in children(child)]


async def test_langchain_shows_markers_and_sizes_and_no_vectors_or_keys(
    talkative: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In traces, events, logs, saved chains, cache keys and what is printed."""
    recorder = RunCollectorCallbackHandler()
    with caplog.at_level(logging.DEBUG):
        app = open_app(tmp_path, talkative, key=SECRET)
        chain, llm, postprocessor = rag(app), app.llm(), app.postprocessor()
        chain.invoke(QUESTION, config={"callbacks": [recorder]})
        list(chain.stream(QUESTION, config={"callbacks": [recorder]}))
        app.llm(on_unreadable="text").invoke(FORGED)  # refused, with a warning
    events = [event async for event in chain.astream_events(QUESTION, version="v2")]
    kinds = {event["event"] for event in events}
    assert {"on_retriever_end", "on_chat_model_stream", "on_chat_model_end", "on_chain_end"} <= kinds
    runs = [children(run) for run in recorder.traced_runs]
    tokens = [sum(event["name"] == "new_token" for event in run.events) for run in runs[1]]
    assert max(tokens) == sum(tokens) >= 2  # one run's tokens
    called, streamed = ("".join(repr(each.model_dump()) for each in run) for run in runs)
    ids = [document.id for document in app.retriever().invoke(QUESTION)]
    for shown in (called, streamed, repr(events)):
        assert all(app.store.marker(id, 8) in shown for id in ids)
    assert f"'slots': {sum(app.slots(id, 8) for id in ids)}" in called and "'input_tokens'" in called
    assert "not made with this key" in caplog.text
    shown = [called, streamed, repr(events), caplog.text, llm._get_llm_string()]
    shown += [view(each) for each in (chain, llm, postprocessor, app.store) for view in (repr, str)]
    shown += [view(each) for each in (llm, postprocessor) for view in (dumps, lambda each: str(each.model_dump()))]
    assert_hidden([*shown, dumps(chain)], app.store)


async def test_llama_index_shows_markers_and_sizes_and_no_vectors_or_keys(talkative: Any, tmp_path: Path) -> None:
    """In all that it reports of engines, chats and streams, in full and as it prints, and in what is saved."""
    debug = LlamaDebugHandler(print_trace_on_end=False)
    nodes = [TextNode(id_=id, text=text) for id, text in TEXTS.items()]
    index = VectorStoreIndex(nodes, embed_model=HashedWords())
    with SoftContextStore(tmp_path, talkative, key=SECRET) as store, watched() as events:
        llm = CompressedContextLLM(store=store, max_tokens=8, callback_manager=CallbackManager([debug]))
        postprocessor = LlamaPostprocessor(store=store, ratio=8)

        def engine(**arguments: Any) -> Any:
            return index.as_query_engine(llm=llm, node_postprocessors=[postprocessor], **arguments)

        def blocking() -> None:
            list(engine(streaming=True).query(QUESTION).response_gen)
            index.as_chat_engine(chat_mode="context", llm=llm, node_postprocessors=[postprocessor]).chat(QUESTION)

        await asyncio.to_thread(blocking)
        await engine().aquery(QUESTION)
        kinds = {type(event).__name__ for event in events.all}
        assert {"QueryStartEvent", "RetrievalEndEvent", "SynthesizeEndEvent", "GetResponseStartEvent"} <= kinds
        assert {"LLMChatStartEvent", "LLMChatInProgressEvent", "LLMChatEndEvent"} <= kinds
        asked = [repr(event.model_dump()) for event in events.started]
        issued = [store.marker(id, 8) for id in store.ids()]
        assert len(asked) == 3 and all(any(marker in report for marker in issued) for report in asked)
        assert all(event.response.raw["slots"] > 0 for event in events.ended)
        shown = [view(event) for event in events.all for view in (repr, lambda each: repr(each.model_dump()))]
        shown += [repr(pair) for pair in debug.get_event_pairs()]
        for thing in (postprocessor, llm):
            shown += [thing.to_json(), repr(thing), str(thing.to_dict())]
        assert_hidden(shown, store)
        assert LlamaPostprocessor.from_dict(postprocessor.to_dict(), store=store).ratio == 8
        assert type(llm).from_dict(llm.to_dict(), store=store).max_tokens == 8


def test_what_langchain_saves_reads_again(app: App) -> None:
    """Histories with markers come back from JSON."""
    marked = app.postprocessor(ratio=8).invoke(SOURCES[:2])
    history = [SystemMessage(marked[0].page_content), HumanMessage(QUESTION), AIMessage("Orla Finch.")]
    answer = app.llm().invoke([*history, HumanMessage(marked[1].page_content)])
    for thing in (history, [answer]):
        assert loads(dumps(thing), **CORE) == thing
    # A model in this process cannot be made from JSON: LangChain says so, and no half of it is loaded.
    for thing in (app.llm(), app.postprocessor()):
        assert dumpd(thing)["type"] == "not_implemented"
        with pytest.raises(NotImplementedError):
            loads(dumps(thing), **CORE)

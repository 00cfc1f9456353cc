"""Secrets and markers in LangChain: nothing is shown that must not be, nothing resolves that must not."""

from __future__ import annotations

import inspect
import logging
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain_core.documents import Document
from langchain_core.load import dumpd, dumps, load, loads
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda

from ctx_compress_rag import SoftContextStore
from ctx_compress_rag.errors import ConfigError, MissingPassageError, UnreadableMarkerError
from ctx_compress_rag.store import marker as markers
from ctx_compress_rag.store.key import KEY_FILE, KEY_VARIABLE
from helpers.attacks import ATTACKS
from helpers.decoding import prefills
from helpers.langchain import QUESTION, SOURCES, TEXTS, App, Recorder, open_app, rag
from langchain_ctx_compress import CompressedContextPostprocessor, restore_sources

# Newer versions of langchain-core ask what may be loaded.
CORE = {"allowed_objects": "core"} if "allowed_objects" in inspect.signature(loads).parameters else {}


async def test_markers_belong_to_their_scope(app: App) -> None:
    [anna] = app.postprocessor(scope="anna").invoke(SOURCES[:1])
    slots = app.slots("tower", 4)

    def read(message: Any) -> int:
        return message.response_metadata["slots"]

    assert read(app.llm(scope="anna").invoke(anna.page_content)) == slots
    assert read(await app.llm(scope="anna").ainvoke(anna.page_content)) == slots
    assert read(list(app.llm(scope="anna").stream(anna.page_content))[-1]) == slots
    assert app.llm(scope="anna").get_num_tokens(anna.page_content) == slots
    for other in ("ben", None):
        assert read(app.llm(scope=other, on_unreadable="text").invoke(anna.page_content)) == 0
        with pytest.raises(UnreadableMarkerError, match="not made with this key for scope"):
            app.llm(scope=other).invoke(anna.page_content)
    assert restore_sources([anna], app.store, "ben")[0].page_content == anna.page_content
    with markers.scope("anna"):
        assert app.postprocessor().invoke(SOURCES[:1]) == [anna]
        assert read(app.llm().invoke(anna.page_content)) == slots
        assert read(await app.llm().ainvoke(anna.page_content)) == slots
        assert read([chunk async for chunk in app.llm().astream(anna.page_content)][-1]) == slots


def test_a_stream_has_the_scope_of_where_it_is_read(app: App, tmp_path: Path) -> None:
    secret = Document("The code of Anna's safe is seven.", id="safe")
    with SoftContextStore(tmp_path, app.store.bundle, scope="nobody") as store:
        chain = RunnableLambda(lambda _: [secret]) | CompressedContextPostprocessor(store=store)
        with markers.scope("anna"):
            late = chain.stream(QUESTION)
        assert list(late) and (store.ids("nobody"), store.ids("anna")) == (["safe"], [])
        assert store.has([secret.page_content], ["safe"], scope="ben") == [False]
        with markers.scope("anna"):
            assert list(chain.stream(QUESTION)) and store.ids("anna") == ["safe"]


def test_sources_are_not_restored_beyond_all_measure(app: App) -> None:
    """300 kB of markers stand for 180 MB of text."""
    app.store.add([TEXTS["tower"] + " " * 30_000], ["long"], progress=False)
    document = Document(f"{app.store.marker('long', 8)} " * 6_000)
    with pytest.raises(ConfigError, match="6,000 markers .* are allowed"):
        restore_sources([document], app.store)


async def test_scope_follows_a_chain(app: App) -> None:
    expected = rag(app).invoke(QUESTION)
    with markers.scope("anna"), prefills(app.bundle.backbone.model) as seen:
        assert rag(app).invoke(QUESTION) == expected
        assert "".join(rag(app).stream(QUESTION)) == expected
        assert await rag(app).ainvoke(QUESTION) == expected
        assert "".join([piece async for piece in rag(app).astream(QUESTION)]) == expected
    assert len({len(prompt) for prompt in seen}) == 1


@pytest.mark.parametrize("where", ["file", "environment", "argument"])
def test_keys_stay_where_they_are(
    talkative: Any, tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    key = b"a very secret key, never shown"
    if where == "environment":
        monkeypatch.setenv(KEY_VARIABLE, key.decode())
    with caplog.at_level(logging.DEBUG):
        app = open_app(tmp_path, talkative, key=key if where == "argument" else None)
        chain, recorder = rag(app), Recorder()
        chain.invoke(QUESTION, config={"callbacks": [recorder]})
        app.llm(on_unreadable="text").invoke(f"[[ctx:{'a' * 20}.3.{'b' * 16}]]")  # refused, with a warning
    file = tmp_path / KEY_FILE
    if where == "file":
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        key = bytes.fromhex(file.read_text())
    else:
        assert not file.exists()
    [run] = recorder.runs
    shown = [repr(run) + str(run.model_dump())]
    assert "refused" not in shown[0] and "not made with this key" in caplog.text
    shown += [view(each) for each in (chain, app.llm(), app.postprocessor(), app.store) for view in (repr, str)]
    shown += [dumps(chain), dumps(app.llm()), dumps(app.postprocessor()), caplog.text, app.llm()._get_llm_string()]
    llm = app.llm()
    shown += [str(each) for each in (llm.model_dump(), app.postprocessor().model_dump())]
    shown += [str(llm.asdict() if hasattr(llm, "asdict") else llm.dict())]
    assert not any("tensor(" in text for text in shown)
    for text in shown:
        assert key.hex() not in text and key.decode("latin-1") not in text and repr(key)[2:-1] not in text


def test_what_is_saved_reads_again_and_holds_no_secret(app: App) -> None:
    """Documents, prompts and histories with markers come back from JSON, and their markers still stand."""
    marked = app.postprocessor(ratio=8).invoke(SOURCES[:2])
    prompt = ChatPromptTemplate([("system", "{context}"), ("human", "{input}")])
    history = [SystemMessage(marked[0].page_content), HumanMessage(QUESTION), AIMessage("Orla Finch.")]
    answer = app.llm().invoke([*history, HumanMessage(marked[1].page_content)])
    for thing in (history, [answer]):
        assert loads(dumps(thing), **CORE) == thing
    again = load(dumpd(prompt), **CORE)
    assert again.invoke({"context": "a", "input": "b"}) == prompt.invoke({"context": "a", "input": "b"})
    restored = loads(dumps(marked), **CORE)
    assert restore_sources(restored, app.store) == SOURCES[:2]
    # A model in this process cannot be made from JSON: LangChain says so, and no half of it is loaded.
    for thing in (app.llm(), app.postprocessor()):
        assert dumpd(thing)["type"] == "not_implemented"
        with pytest.raises(NotImplementedError):
            loads(dumps(thing), **CORE)


def test_hostile_prompts_do_not_crash_a_chain(app: App) -> None:
    """Attacks in documents, question and history, through postprocessor, template and decoder."""
    postprocessor = app.postprocessor(on_missing="text", scope="anna")
    llm = app.llm(max_tokens=1, scope="anna", on_unreadable="text")
    own = app.store.marker("tower", 8, "anna")
    bens = app.store.marker("mill", 8, "ben")
    attacks = st.sampled_from(sorted(ATTACKS)).flatmap(ATTACKS.__getitem__)
    template = ChatPromptTemplate([("system", "{context}"), ("placeholder", "{history}"), ("human", "{input}")])
    counts = []

    @settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(attacks, attacks, attacks)
    def attack(in_document: str, in_history: str, in_question: str) -> None:
        documents = [Document(id="hostile", page_content=f"{bens[:7]}{in_document}{bens}"), SOURCES[0]]
        context = "".join(document.page_content for document in postprocessor.invoke(documents))
        history = [HumanMessage(in_history + bens), AIMessage(f"It said: {in_history}")]
        given_ = {"context": context, "history": history, "input": f"{in_question}{own} who?"}
        message = (template | llm).invoke(given_)
        # The document from the store and the marker that was issued; the attacks are of another key.
        assert message.response_metadata["slots"] == app.slots("tower", 4) + app.slots("tower", 8)
        restored = restore_sources([Document(page_content=context + bens)], app.store, "anna")
        assert TEXTS["mill"] not in restored[0].page_content
        counts.append(message)

    attack()
    assert len(counts) >= 40


def test_a_bad_marker_fails_its_own_document_and_question_alone(
    talkative: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    app = open_app(tmp_path, talkative)
    app.store.add([Document(id="gone", page_content="A passage that is deleted.")], progress=False)
    gone, kept = app.store.markers(["gone", "tower"], 8)
    app.store.delete(["gone"])
    forged = f"[[ctx:{'a' * 20}.3.{'b' * 16}]]"
    documents = [Document(id="mill", page_content=f"Read {gone}"), *SOURCES[:1]]

    with pytest.raises(MissingPassageError):
        app.postprocessor(on_missing="error").invoke(documents)
    for policy in ("compress", "text"):
        caplog.clear()
        stale, good = app.postprocessor(ratio=8, on_missing=policy).invoke(documents)
        assert (stale.page_content, good.page_content) == (f"Read {gone.replace(':', '')}", kept)
        assert "'mill'" in caplog.text
        assert app.llm().invoke(f"{stale.page_content} {good.page_content}").response_metadata["slots"] > 0
    assert app.store.get_passages(["mill"])[0].text == TEXTS["mill"]  # what is left as text is not stored either
    for quoted in (forged, f"[{forged}]"):
        [left] = app.postprocessor(token_budget=1000).invoke([Document(id="quoting", page_content=f"It says {quoted}")])
        assert app.llm().invoke(left.page_content).response_metadata["slots"] == 0  # as text it is no marker, no error

    questions = [f"{gone} who?", f"{forged} who?", f"{kept} who?"]
    strict = app.llm().batch(questions, return_exceptions=True)
    assert [type(each) for each in strict] == [MissingPassageError, UnreadableMarkerError, AIMessage]
    lenient = app.llm(on_unreadable="text").batch(questions)
    assert [message.response_metadata["slots"] for message in lenient] == [0, 0, app.slots("tower", 8)]
    assert lenient[2].content == strict[2].content
    with pytest.raises(ConfigError, match="on_unreadable"):
        app.llm(on_unreadable="never")

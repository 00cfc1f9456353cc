"""`ctx-compress serve`: as a process of its own, which stops when told; with `--retrieve`, from questions alone."""

import os
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from ctx_compress_rag.cli import main
from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.indexing.index import PassageIndex, open_index
from ctx_compress_rag.indexing.retrieval import IndexRetrieval
from ctx_compress_rag.marking.mark import Marking
from ctx_compress_rag.server.app import create_app
from ctx_compress_rag.server.guard import ApiKeys, ServerLimits
from ctx_compress_rag.server.run import open_server_socket, run_server
from ctx_compress_rag.text.templates import question_messages
from helpers.serving import ANNA, WAIT, client, directly, listening, post, serving

HEADERS = {"Authorization": f"Bearer {ANNA}"}


def test_the_command_serves_until_it_is_told_to_stop(index: Path) -> None:
    limits = ["--max-tokens", "4", "--max-prompt-tokens", "99", "--max-body", "4000", "--retrieve", "1"]
    with serving(index, *limits) as (process, url):
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(check_it_serves, [url] * 4))
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT) in (0, -signal.SIGTERM)


def test_a_ratio_that_cannot_be_made_is_refused_before_it_serves(
    index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--index", str(index), "--port", "0", "--retrieve", "1", "--ratio", "6"]) == 2
    assert "multiple of 4" in capsys.readouterr().err


def test_a_collection_without_soft_contexts_is_said_before_it_serves(
    index: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctx_compress_rag.server.run.run_server", lambda *_, **__: None)  # as if stopped at once
    command = ["serve", "--index", str(index), "--port", "0", "--bundle", str(index.parent / "bundle"), "--collection"]
    for name, said in (("passages", 0), ("pasages", 1)):
        assert main([*command, name]) == 0
        assert len(caplog.records) == said
    assert "passages-ctx" in caplog.text


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows has no such signal")
def test_a_hang_up_ends_it_as_sigterm_does(decoder: Decoder) -> None:
    def hang_up(url: str) -> None:
        try:
            httpx.get(url, timeout=WAIT)
        finally:
            os.kill(os.getpid(), signal.SIGHUP)

    def started(url: str) -> None:
        threading.Thread(target=hang_up, args=[url]).start()

    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with open_server_socket("127.0.0.1", 0, guarded=False) as listener:
            run_server(create_app(decoder), listener, started=started)  # and it returns
    finally:
        signal.signal(signal.SIGHUP, before)


def check_it_serves(url: str) -> None:
    with httpx.Client(timeout=WAIT, headers=HEADERS) as http:
        [item] = http.post(f"{url}/compress", json={"input": "Orla kept bees in Pellmouth.", "ratio": 8}).json()["data"]
        body = {"model": "tiny", "messages": [{"role": "user", "content": f"{item['text']} Who kept bees?"}]}
        reply = http.post(f"{url}/chat/completions", json=body).json()
        assert reply["usage"]["slots"] > 0 and 1 <= reply["usage"]["completion_tokens"] <= 4
        long = http.post(f"{url}/completions", json={"model": "tiny", "prompt": "bees " * 100})
        assert long.status_code == 400 and "99 are allowed here" in long.json()["error"]["message"]
        assert http.post(f"{url}/completions", json={"model": "tiny", "prompt": "bees " * 1000}).status_code == 413
        body["messages"] = [{"role": "user", "content": "Who kept bees?"}]
        assert len(http.post(f"{url}/chat/completions", json=body).json()["sources"]) == 1
        assert httpx.get(f"{url}/models").status_code == 401


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "there are no API keys"),
        (["--api-keys", "nowhere"], "cannot read the API keys 'nowhere'"),
        (["--max-body", "0"], "body_bytes=0"),
        (["--collection", "docs"], "give --bundle"),
        (["--collection", "docs", "--retrieve", "2"], "--retrieve and --collection"),
        (["--ratio", "8"], "give --retrieve"),
        (["--engine", "http://localhost:1", "--batch-size", "4"], "batch_size"),
        (["--host", "192.0.2.1", "--api-keys", "keys"], "192.0.2.1:8000"),
        (["--allowed-host", "box.lan", "--api-keys", "keys"], "--allowed-host box.lan"),
    ],
)
def test_what_cannot_be_served_is_said_before_a_store_is_opened(
    tmp_path: Path,
    options: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CTX_COMPRESS_API_KEYS", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keys").write_text(f"{ANNA} anna\n")
    assert main(["serve", "--index", "nowhere", *options]) == 2
    assert message in capsys.readouterr().err


QUESTION = "Who kept bees in Pellmouth?"


@pytest.fixture(scope="module")
def opened(index: Path) -> Iterator[PassageIndex]:
    with open_index(index) as opened:
        yield opened


@pytest.fixture(scope="module")
def answering(opened: PassageIndex) -> Decoder:
    return Decoder(opened.bundle, opened.store)


@pytest.fixture(scope="module", params=[False, True], ids=["free", "quoted"])
def asked(request: Any, opened: PassageIndex, answering: Decoder) -> Iterator[tuple[str, bool]]:
    retrieval = IndexRetrieval(opened, 2, Marking(opened.store), extractive=request.param)
    limits = ServerLimits(answer_tokens=12)
    with listening(create_app(answering, ApiKeys({ANNA: "anna"}), limits, retrieval=retrieval)) as url:
        yield url, request.param


def test_a_question_alone_is_answered_from_its_sources(
    asked: tuple[str, bool], opened: PassageIndex, answering: Decoder
) -> None:
    url, quoted = asked
    [hits] = opened.search([QUESTION], 2)
    shown = "\n\n".join(opened.store.marker(hit.id, opened.store.base_ratio, "anna") for hit in hits)
    expected = directly(answering, question_messages(opened.bundle.config.template, shown, QUESTION), extractive=quoted)
    assert expected.slots > 0
    chat: list[Any] = [{"role": "user", "content": QUESTION}]
    reply = client(url).chat.completions.create(model="tiny", messages=chat)
    assert reply.choices[0].message.content == expected.text
    sources = (reply.model_extra or {})["sources"]
    assert [(s["id"], s["text"], s["source"]) for s in sources] == [(h.id, h.text, h.source) for h in hits]
    assert sum(source["slots"] for source in sources) == expected.slots and reply.usage is not None
    assert all(source["sentences"] == "" for source in sources)
    first, *rest = client(url).chat.completions.create(model="tiny", messages=chat, stream=True)
    assert (first.model_extra or {})["sources"] == sources and not any("sources" in (c.model_extra or {}) for c in rest)
    assert "".join(c.choices[0].delta.content or "" for c in (first, *rest)) == expected.text
    free = client(url).chat.completions.create(model="tiny", messages=chat, extra_body={"extractive": False})
    own = directly(answering, question_messages(opened.bundle.config.template, shown, QUESTION))
    assert free.choices[0].message.content == own.text


def test_passages_of_which_nothing_is_shown_are_no_sources(
    opened: PassageIndex, caplog: pytest.LogCaptureFixture
) -> None:
    retrieval = IndexRetrieval(opened, 4, Marking(opened.store, token_budget=40, text_share=0.5))
    [asked], sources = retrieval.retrieve([{"role": "user", "content": QUESTION}])
    assert 0 < len(sources) < 4 and all(source["sentences"] or source["slots"] for source in sources)
    assert asked["content"].count("[[ctx:") == len(sources)
    for _ in range(2):  # a language that the bundle does not read is warned of once
        retrieval.retrieve([{"role": "user", "content": "水泵的保修期有多长时间" * 3}])
    assert len(caplog.records) == 1


def test_a_chat_with_markers_retrieves_nothing(
    asked: tuple[str, bool], opened: PassageIndex, answering: Decoder
) -> None:
    url, _ = asked
    [[hit]] = opened.search([QUESTION], 1)
    chat = [{"role": "user", "content": f"{opened.store.marker(hit.id, opened.store.base_ratio, 'anna')} Who?"}]
    reply = post(url, "chat/completions", {"model": "tiny", "messages": chat}).json()
    assert "sources" not in reply and reply["choices"][0]["message"]["content"] == directly(answering, chat).text
    blank = post(url, "chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": " "}]})
    assert blank.status_code == 400


def test_the_page_asks_nobody_else(asked: tuple[str, bool]) -> None:
    page = httpx.get(asked[0])
    assert page.headers["content-type"].startswith("text/html") and "<form" in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert not re.search(r"https?://|innerHTML", page.text)

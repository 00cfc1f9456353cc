"""`serve --retrieve`: a client sends a question alone, and gets the answer with its sources."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.indexing.index import PassageIndex, open_index
from ctx_compress_rag.indexing.retrieval import IndexRetrieval
from ctx_compress_rag.marking.mark import Marking
from ctx_compress_rag.server.api_keys import ApiKeys
from ctx_compress_rag.server.app import create_app
from ctx_compress_rag.server.guard import ServerLimits
from ctx_compress_rag.text.templates import question_messages
from helpers.serving import ANNA, client, directly, listening, post

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
    assert asked["content"].count("[[ctx:") == sum(source["slots"] > 0 for source in sources)
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

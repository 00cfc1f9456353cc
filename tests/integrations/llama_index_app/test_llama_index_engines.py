"""Response modes, chat engines and citations of LlamaIndex; blocking, async and streamed."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from llama_index.core.instrumentation.events.llm import LLMCompletionEndEvent
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import CitationQueryEngine
from llama_index.core.schema import MetadataMode

from helpers.llama_index import PASSAGES, QUESTION, TOP_K, App, Events, check_sources, watched
from helpers.marks import slowly
from llama_index.postprocessor.ctx_compress import restore_sources

MODES = ["refine", "tree_summarize", "accumulate", "compact_accumulate", "simple_summarize"]
WAYS = ["query", "aquery", "streamed query", "streamed aquery"]
CHATS = ["chat", "achat", "stream_chat", "astream_chat"]
CALLS_PER_ANSWER = {"refine": TOP_K, "accumulate": TOP_K}
TEMPLATES = {  # short ones for a window of 1024 tokens; CitationQueryEngine's own take more than half of it
    "citation_qa_template": PromptTemplate("{context_str}\nQuery: {query_str}\nAnswer, with sources: "),
    "citation_refine_template": PromptTemplate("{existing_answer}\n{context_msg}\nQuery: {query_str}\nAnswer: "),
}


@pytest.fixture
def events() -> Iterator[Events]:
    with watched() as events:
        yield events


async def ask(engine: Any, way: str, message: str = QUESTION) -> tuple[str, Any]:
    """The answer's text, read to its end, and the response, of a query or chat engine."""
    method = getattr(engine, way.removeprefix("streamed "))
    is_async = "aquery" in way or way.startswith("a")
    response = await method(message) if is_async else await asyncio.to_thread(method, message)
    if "stream" not in way:
        return response.response or "", response
    if is_async:
        return "".join([piece async for piece in response.async_response_gen()]), response
    return await asyncio.to_thread(lambda: "".join(response.response_gen)), response


@pytest.mark.parametrize(("mode", "way"), [*((mode, "aquery") for mode in MODES), *(("compact", way) for way in WAYS)])
async def test_every_response_mode_and_every_way(app: App, events: Events, mode: str, way: str) -> None:
    text, response = await ask(app.engine(mode, streaming="streamed" in way, use_async="aquery" in way), way)
    answers = app.check_calls(events)
    assert len(answers) == CALLS_PER_ANSWER.get(mode, 1)
    if "accumulate" in mode:
        assert all(answer.strip() in text for answer in answers)
    else:
        assert text.strip() == answers[-1].strip()
    check_sources(response.source_nodes, app.nodes())
    assert restore_sources(response) == app.nodes()


@pytest.mark.parametrize(
    ("of_postprocessor", "of_engine"),
    [({"replace_text": True}, {}), ({}, {"metadata_mode": MetadataMode.LLM})],
    ids=["replaced text", "the LLM's metadata mode"],
)
@pytest.mark.parametrize("way", ["query", "streamed aquery"])
async def test_citations(app: App, events: Events, way: str, of_postprocessor: Any, of_engine: Any) -> None:
    """The engine's headings stand before markers, not before text."""
    engine = CitationQueryEngine.from_args(
        app.index,
        llm=app.llm(),
        similarity_top_k=2,
        node_postprocessors=[app.postprocessor(**of_postprocessor)],
        streaming="streamed" in way,
        **of_engine,
        **TEMPLATES,
    )
    text, response = await ask(engine, way)
    assert text == app.check_calls(events)[-1]
    prompt = events.started[0].messages[-1].content or ""
    assert prompt.index("Source 1:\n") < prompt.index("[[ctx:") < prompt.index("Source 2:\n")
    assert len(app.slots(prompt)) == 2
    assert not any(passage in prompt for passage in PASSAGES)
    # The engine makes nodes of its own, with a heading and the source's score and metadata.
    for number, (node, source) in enumerate(zip(restore_sources(response, app.store), app.nodes(), strict=False), 1):
        shown = source.node.get_content(of_engine.get("metadata_mode", MetadataMode.NONE))
        assert node.text == f"Source {number}:\n{shown}\n"
        assert (node.score, node.metadata) == (source.score, source.metadata)
    assert len(response.source_nodes) == 2


def chat_engine(app: App, mode: str, **arguments: Any) -> Any:
    return app.index.as_chat_engine(
        chat_mode=mode,
        llm=app.llm(),
        **{"similarity_top_k": TOP_K, "node_postprocessors": [app.postprocessor()], **arguments},
    )


@pytest.mark.parametrize("way", slowly(("condense", *CHATS), ("chat", "astream_chat")))
async def test_chat_engines_keep_the_conversation(app: App, events: Events, way: str) -> None:
    """In condense-plus-context the LLM also completes: it condenses question and history, which hold no markers."""
    mode, way = ("condense_plus_context", "astream_chat") if way == "condense" else ("context", way)
    engine = chat_engine(app, mode, similarity_top_k=2)
    first, response = await ask(engine, way)
    check_sources(response.source_nodes, app.nodes()[:2])
    assert restore_sources(response) == app.nodes()[:2]
    second, _ = await ask(engine, way, "And when?")
    assert app.check_calls(events) == [first, second]
    assert all(sum(app.slots(str(call.messages))) > 0 for call in events.ended)
    kept = first.strip()  # LlamaIndex strips what was streamed
    assert kept in "\n".join(message.content or "" for message in events.ended[1].messages)
    condensed = [event for event in events.all if isinstance(event, LLMCompletionEndEvent)]
    assert len(condensed) == (mode == "condense_plus_context")
    assert all(kept in event.prompt and event.response.raw["slots"] == 0 for event in condensed)
    assert all("[[ctx:" not in (message.content or "") for message in engine.chat_history)

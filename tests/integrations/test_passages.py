"""What a retriever may return, in both frameworks, and what a budget buys of it."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from langchain_core.documents import Document

from ctx_compress_rag.errors import (
    ConfigError,
    CtxCompressError,
    MissingPassageError,
    RatioError,
    UnreadableMarkerError,
)
from ctx_compress_rag.marking.budget import nearest_sentences
from ctx_compress_rag.marking.mark import expand, mark_texts
from ctx_compress_rag.store import SoftContextStore
from ctx_compress_rag.store.marker import Marker, marked_passages, read_parts
from ctx_compress_rag.store.passage import MAX_CHARACTERS, passage_content_id
from helpers.frameworks import FRAMEWORKS, LangChain
from helpers.langchain import QUESTION, SOURCES, TEXTS, App, joined
from helpers.ram import PASSAGES, close_bundle, close_store
from helpers.ram import QUESTION as RAM_QUESTION
from helpers.ram import ask as ask_ram
from helpers.store import WordBundle, passage

GOOD = passage(0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SoftContextStore]:
    with SoftContextStore(tmp_path, WordBundle(), key=b"k" * 32) as made:
        made.add([GOOD], ["good"], progress=False)
        yield made


def ask(store: SoftContextStore, passages: list[tuple[str, str | None]], **options: Any) -> list[str]:
    """What the LLM reads in place of texts with ids."""
    texts, ids = zip(*passages, strict=True) if passages else ((), ())
    return mark_texts(store, texts, ids, **options)


def test_what_is_missing(store: SoftContextStore) -> None:
    passages = [(GOOD, "good"), (passage(1), "new"), (" \n", "blank")]
    with pytest.raises(MissingPassageError, match="new"):
        ask(store, passages, on_missing="error")
    assert ask(store, passages, on_missing="text") == [store.marker("good", 4), passage(1), " \n"]
    with pytest.raises(MissingPassageError, match="with this text"):
        ask(store, [(passage(1), "good")], on_missing="error")
    assert store.ids() == ["good"]
    shown = ask(store, passages)
    assert shown == [*store.markers(["good", "new"], 4), " \n"]
    assert ask(store, passages, on_missing="error") == shown
    store.add([passage(2)], progress=False)
    by_text = [(passage(2), None), (passage(2), "another id")]
    assert ask(store, by_text, on_missing="error") == [store.marker(passage_content_id(passage(2)), 4)] * 2
    assert ask(store, []) == []


@FRAMEWORKS
def test_marked_twice_is_marked_once_and_restored(store: SoftContextStore, framework: Any) -> None:
    found = [framework.found(GOOD, "good", source="a.txt"), framework.found(passage(1), "new")]
    once = framework.mark(found, store=store, ratio=8, scope="anna")
    assert framework.mark(once, store=store, ratio=16, scope="anna") == framework.mark(
        found, store=store, ratio=16, scope="anna"
    )
    restored = framework.restore(once, store, "anna")
    assert restored == found == framework.restore(restored, store) == framework.restore(deepcopy(once), store, "anna")
    assert {each.text for each in store.get_passages(["good", "new"], "anna")} == {GOOD, passage(1)}


@FRAMEWORKS
def test_restored_sources_say_which_of_them_an_answer_quotes(store: SoftContextStore, framework: Any) -> None:
    found = [framework.found(passage(n), str(n), page=n) for n in range(3)]
    answer = " " + " ".join(passage(1).split()[2:5]) + "\n"
    marked = framework.mark(found, store=store)
    for wanted, said in ((answer, [False, True, False]), (" ", [False] * 3)):
        restored = framework.restore(marked, store, answer=wanted)
        assert [each.metadata for each in restored] == [{"page": n, "quoted": has} for n, has in enumerate(said)]
    assert framework.restore(marked, store) == found


@FRAMEWORKS
def test_sources_of_another_store_are_refused_and_what_an_author_wrote_is_not(
    store: SoftContextStore, framework: Any, tmp_path: Path
) -> None:
    with SoftContextStore(tmp_path / "other", WordBundle(), key=b"o" * 32) as other:
        marker = store.marker("good", 4)
        saved = framework.found(marker, "good")  # as it comes back from JSON
        assert framework.restore([saved], store)[0] == framework.found(GOOD, "good")
        for wrong, scope in ((other, None), (store, "anna")):
            with pytest.raises(UnreadableMarkerError):
                framework.restore([saved], wrong, scope)
        written = [framework.found(f"{passage(1)} {marker}", "forged")]
        marked = framework.mark(written, store=other, ratio=8)
        assert framework.restore(marked, other) == written


class Toneless(WordBundle):
    def compress(self, texts: Any, ratio: int | None = None) -> Any:
        if "silence" in texts:
            raise ConfigError("'silence' has no tokens")
        return super().compress(texts, ratio)


@pytest.mark.parametrize(
    ("text", "shown"),
    [("half an emoji \ud83d", "half an emoji \ufffd"), ("ab " * MAX_CHARACTERS, None), ("silence", None)],
    ids=["surrogate", "long", "no tokens"],
)
@pytest.mark.parametrize("policy", ["compress", "text", "error"])
def test_a_passage_that_cannot_be_stored_fails_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, shown: str | None, policy: str
) -> None:
    with SoftContextStore(tmp_path, Toneless(), key=b"k" * 32) as store:
        store.add([GOOD], ["good"], progress=False)
        passages = [(text, "bad"), (GOOD, "good"), (passage(1), "new")]
        if policy == "error":
            with pytest.raises(CtxCompressError, match="bad|documents"):
                ask(store, passages, on_missing=policy)
            return
        bad, good, new = ask(store, passages, on_missing=policy)
        assert bad == (text if shown is None else shown)
        assert good == store.marker("good", 4)
        assert new == (store.marker("new", 4) if policy == "compress" else passage(1))
        assert ("'bad'" in caplog.text) == (policy == "compress" or text != "silence")


@pytest.mark.parametrize("id", ["", "x\ud83d"])
def test_an_id_that_no_passage_can_have_is_none(store: SoftContextStore, id: str) -> None:
    passages = [(passage(1), id), (GOOD, "good")]
    assert ask(store, passages, on_missing="text") == [passage(1), store.marker("good", 4)]
    with pytest.raises(MissingPassageError, match="not stored"):
        ask(store, passages, on_missing="error")
    assert ask(store, passages) == store.markers([passage_content_id(passage(1)), "good"], 4)


@FRAMEWORKS
def test_metadata_stay_the_apps(store: SoftContextStore, framework: Any) -> None:
    """What cannot be copied, written or printed is not touched."""
    deep: dict[str, Any] = {}
    for _ in range(10_000):
        deep = {"deeper": deep}
    graph = torch.ones(2, requires_grad=True) * 2
    values = [threading.Lock(), (i for i in range(3)), open("/dev/null"), graph, 10**5000, deep, "\ud83d"]  # noqa: SIM115
    for value in values:
        found = framework.found(GOOD, "good", value=value)
        [marked] = framework.mark([found], store=store)
        assert framework.shown(marked) == store.marker("good", 4)
        assert marked.metadata["value"] is value
        marked.metadata["seen"] = True
        assert "seen" not in found.metadata


@FRAMEWORKS
@pytest.mark.parametrize("given", ["the answer", ["the answer"], {"context": []}])
def test_what_is_no_list_of_passages_is_refused(store: SoftContextStore, framework: Any, given: Any) -> None:
    """A step before the retriever, or a chain's whole state."""
    for call in (framework.mark, framework.restore):
        with pytest.raises(ConfigError, match="is needed, got (str|dict): "):
            call(given, store=store)


NO_LISTS: Any = [{"texts": "abc"}, {"texts": [None]}, {"ids": 1}, {"scores": "1"}, {"scores": [1.0, 2.0]}]


@pytest.mark.parametrize("wrong", [*NO_LISTS, {"ratio": 4, "token_budget": 9}], ids=str)
def test_what_cannot_be_marked_is_refused_and_an_iterator_is_a_list(
    store: SoftContextStore, wrong: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="give"):
        mark_texts(store, **{"texts": [GOOD], **wrong})
    assert mark_texts(store, iter([GOOD]), iter(["good"])) == [store.marker("good", 4)]  # type: ignore[arg-type]


def test_an_excerpt_stands_beside_what_was_ingested(store: SoftContextStore) -> None:
    """A step that shortens nodes for one question keeps their ids; twelve questions at once, each with its excerpt."""
    store.add([Document(passage(1, 60), id="p", metadata={"page": 3})], progress=False)
    before = store.marker("p", 4)
    excerpts = [" ".join(passage(1, 60).split()[n : n + 12]) for n in range(12)]

    def question(n: int) -> bool:
        [marker] = ask(store, [(excerpts[n], "p")])
        return expand(store, marker) == excerpts[n]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(question, range(12)))
    assert store.marker("p", 4) == before
    [record] = store.get_passages(["p"])
    assert record is not None and (record.text, record.metadata) == (passage(1, 60), {"page": 3})
    assert ask(store, [(passage(1, 60), "p")]) == [before]
    assert ask(store, [(excerpts[5], "p")], on_missing="error") == [store.marker(passage_content_id(excerpts[5]), 4)]
    assert store.add([passage(2)], ["p"], progress=False).updated == 1  # `add` alone replaces
    assert expand(store, store.marker("p", 4)) == passage(2)


def test_texts_are_not_expanded_beyond_all_measure(store: SoftContextStore) -> None:
    """300 kB of markers that would stand for 60 MB of text."""
    store.add([GOOD + " " * 10_000], ["long"], progress=False)
    with pytest.raises(ConfigError, match="6,000 markers .* over"):
        expand(store, f"{store.marker('long', 4)} " * 6_000)


# Close reading; from a question to its answer: tests/methods/test_methods.py


@pytest.fixture(scope="module")
def ram(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> SoftContextStore:
    return close_store(tmp_path_factory.mktemp("ram"), close_bundle(tiny_tokenizer))


@FRAMEWORKS
def test_a_question_decides_what_stays_text(ram: SoftContextStore, framework: Any) -> None:
    found = [framework.found(text, n=n) for n, text in enumerate(PASSAGES)]
    for options, ratio in (({"ratio": 4}, 4), ({}, 2)):
        marked = framework.mark(found, RAM_QUESTION, store=ram, **options)
        assert [framework.shown(each) for each in marked] == ask_ram(ram, ratio=ratio)
        assert framework.restore(marked, ram) == found


@FRAMEWORKS
def test_a_step_without_a_question_says_how_to_give_it(ram: SoftContextStore, framework: Any) -> None:
    found = [framework.found(text) for text in PASSAGES]
    with pytest.raises(ConfigError, match="ContextualCompressionRetriever.*query_bundle or query_str"):
        framework.mark(found, store=ram)
    for options, error in (({"token_budget": 9}, ConfigError), ({"ratio": 1}, RatioError)):
        with pytest.raises(error, match="ram bundle"):
            framework.postprocessor(store=ram, **options)


def test_texts_that_repeat_the_marker_of_one_long_passage_are_bounded_together(store: SoftContextStore) -> None:
    [id] = store.ensure(["w" * 900_000])
    texts = [store.marker(id, 4)] * 20  # 18 million characters
    assert mark_texts(store, texts[:3], on_missing="error") == texts[:3]
    with pytest.raises(ConfigError, match="900,000 characters, over 577,216"):
        mark_texts(store, texts, on_missing="error")


NAMES = list(TEXTS)


def scored(framework: Any, order: Any, values: list[float | None], score_key: str = "relevance_score") -> list[Any]:
    found = [framework.found(TEXTS[NAMES[i]], NAMES[i]) for i in order]
    for each, value in zip(found, values, strict=True):
        if framework is LangChain and value is not None:
            each.metadata[score_key] = value
        elif framework is not LangChain:
            each.score = value
    return found


@FRAMEWORKS
def test_a_budget_may_return_a_marked_passage_to_its_text(app: App, framework: Any) -> None:
    found = scored(framework, range(4), [None] * 4)
    for options in ({}, {"text_share": 0.5}):
        marked = framework.mark(found, QUESTION, store=app.store, ratio=8, **options)
        left = framework.restore(marked, app.store)
        whole = framework.mark(marked, QUESTION, store=app.store, token_budget=10_000)
        texts = [framework.shown(each) for each in left]
        assert framework.restore(whole, app.store) == left
        read = [read_parts(marked_passages(app.store.split(framework.shown(each)))) for each in whole]
        assert read == [[text] for text in texts]


@FRAMEWORKS
def test_a_ratio_buys_sentences_and_slots_of_the_best(app: App, framework: Any) -> None:
    """As many tokens as slots of all passages would take; the rest of the passages leave."""
    count = app.llm().get_num_tokens
    found = scored(framework, range(4), [0.1, 0.2, 0.9, 0.3])
    plain = framework.mark(found, QUESTION, store=app.store, ratio=4)
    size = count("\n\n".join(map(framework.shown, plain)))
    marked = framework.mark(found, QUESTION, store=app.store, ratio=4, text_share=0.5)
    shown = "\n\n".join(map(framework.shown, marked))
    assert size - 6 < count(shown) <= size  # a word may be six tokens of this tokenizer
    [ferry] = [part for part in app.store.split(shown) if isinstance(part, Marker) and part.slots]
    assert ferry.passage == app.store.split(app.store.marker("ferry", 4))[0].passage
    best = max(
        (part.similarity, part.text) for own in nearest_sentences(list(TEXTS.values()), QUESTION) for part in own
    )[1]
    assert best[:20] in shown
    restored = framework.restore(marked, app.store)
    assert restored == [each for each in found if each in restored] and 0 < len(restored) < 4


@FRAMEWORKS
def test_the_bundle_says_what_is_bought_by_default(app: App, framework: Any) -> None:
    found = scored(framework, range(4), [None] * 4)
    plain = framework.mark(found, QUESTION, store=app.store, ratio=8)
    asked = framework.mark(found, QUESTION, store=app.store, ratio=8, text_share=0.5)
    assert [framework.shown(each) for each in plain] == app.store.markers(NAMES, 8)
    config = app.bundle.config
    app.bundle.config = config.model_copy(update={"text_share": 0.5})
    try:
        mark = partial(framework.mark, store=app.store, ratio=8)
        assert mark(found, QUESTION) == asked
        assert mark(found, QUESTION, text_share=0) == mark(found) == plain
        assert mark(found[:1], QUESTION) == plain[:1]
    finally:
        app.bundle.config = config


@FRAMEWORKS
def test_a_share_needs_the_question(app: App, framework: Any) -> None:
    with pytest.raises(ConfigError, match="text_share=0.5 needs the question"):
        framework.mark(scored(framework, range(4), [None] * 4), store=app.store, text_share=0.5)
    for share in (-0.1, 2, "half"):
        with pytest.raises(ConfigError, match="text_share"):
            framework.postprocessor(store=app.store, text_share=share)


def test_the_best_by_score_is_the_first_without_scores(app: App) -> None:
    ask = partial(LangChain.mark, query=QUESTION, store=app.store, token_budget=20, text_share=0.1)
    for options in ({}, {"score_key": "score"}):
        documents = ask(scored(LangChain, range(4), [0.1, 0.4, 0.9, 0.3], **options), **options)
        assert "ferry" in [each.id for each in documents if "[[ctx:" in each.page_content]
    documents = ask(scored(LangChain, range(4), [None] * 4))
    assert NAMES[0] in [each.id for each in documents if "[[ctx:" in each.page_content]


def test_what_must_stay_text_is_counted(app: App) -> None:
    """What is not stored, what is blank, and a marker that a passage quotes."""
    store = SoftContextStore(app.client, app.bundle, collection="budget")
    store.add(SOURCES[:2], progress=False)
    quoted = store.marker("tower", 4)
    store.add([f"It says {quoted} here."], ["quoting"], progress=False)
    blank = Document(" \n ", id="blank")
    count = app.llm().get_num_tokens
    fixed = count(joined([SOURCES[2], blank]))
    options: dict[str, Any] = {"store": store, "on_missing": "text"}
    marked = LangChain.mark([*SOURCES[:3], blank], **options, token_budget=fixed + 20)
    assert marked[2:] == [SOURCES[2], blank]
    assert count(joined(marked)) <= fixed + 20
    with pytest.raises(RatioError, match=f"token_budget={fixed + 1}"):
        LangChain.mark([*SOURCES[:3], blank], **options, token_budget=fixed + 1)
    [quoting] = LangChain.mark([Document(store.marker("quoting", 4))], **options, token_budget=120)
    assert quoting.page_content == f"It says {quoted.replace(':', '')} here."


@FRAMEWORKS
def test_an_llm_quotes_if_its_bundle_answers_best_so(
    app: App, framework: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """And JSON, which it writes badly, is short, with a warning."""
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    config = app.bundle.config
    app.bundle.config = config.model_copy(update={"extractive": True, "name": f"quoting-{framework.__name__}"})
    try:
        llm = framework.llm(store=app.store)
        assert llm.sampling({}).extractive and not llm.sampling({"extractive": False}).extractive
        short, _ = (llm.sampling({"response_format": schema}) for _ in range(2))
        assert not short.extractive and short.max_tokens < llm.max_tokens
        assert caplog.text.count(app.bundle.config.name) == 1
        assert llm.sampling({"response_format": schema, "max_tokens": 300}).max_tokens == 300
        for options in ({"extractive": False}, {"engine": "http://localhost:1"}):
            free = framework.llm(store=app.store, **options)
            assert not free.sampling({}).extractive
            assert free.sampling({"response_format": schema}).max_tokens == short.max_tokens
    finally:
        app.bundle.config = config
    assert not framework.llm(store=app.store).sampling({}).extractive

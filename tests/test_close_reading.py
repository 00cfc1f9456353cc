"""Close reading when a question is asked: through the store, markers, the decoder and both frameworks."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_ram import (
    FROZEN,
    plain_choice,
    plain_ids,
    plain_mean,
    plain_segments,
    plain_skim,
    plain_states,
    ram_bundle,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from torch import Tensor

from ctx_compress_rag import markers
from ctx_compress_rag.asking import question_prompt
from ctx_compress_rag.bundle import Bundle
from ctx_compress_rag.decoders.transformers import Sampling, TransformersDecoder
from ctx_compress_rag.errors import ConfigError, FingerprintMismatchError, MissingPassageError, RatioError
from ctx_compress_rag.evaluation.harness import FULL, NONE, SOFT, TRUNCATED, Question, evaluate
from ctx_compress_rag.markers import Marker, MarkerCodec
from ctx_compress_rag.passage_index import Hit
from ctx_compress_rag.postprocess import expand, mark
from ctx_compress_rag.soft_context import SoftContext
from ctx_compress_rag.stores import SoftContextStore
from ctx_compress_rag.stores.skimmed import Skimmed, SkimmedSlots
from ctx_compress_rag.training.data import Example, Turn
from ctx_compress_rag.training.objectives.ram import RamCollator, RamLoss
from ctx_compress_rag.training.prompts import TEMPLATES, PromptBuilder, messages

KEY = b"k" * 32
PASSAGES = [
    "The harbour of Velmora was built by Oda Brink in 1612, and its lighthouse still burns whale oil.",
    "Tarin Holt keeps bees on the roof of the town hall; the honey is sold under the name of Old Gold.",
    "Oda Brink was a mason.",
]
QUESTION = "Who built the harbour of Velmora?"
CLOSELY: dict[str, Any] = {"mode": "close_reading"}


@pytest.fixture(scope="module")
def bundle(tiny_tokenizer: Any) -> Bundle:
    return ram_bundle(tiny_tokenizer, seed=2, encoder=FROZEN, decoder={"mode": "lora"})


@pytest.fixture(scope="module")
def store(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> SoftContextStore:
    """Shared by tests that do not mind what is in it."""
    made = SoftContextStore(tmp_path_factory.mktemp("ram"), bundle, codec="fp16", key=KEY)
    made.add(PASSAGES, progress=False)
    return made


def ask(store: SoftContextStore, texts: list[str] = PASSAGES, question: str = QUESTION, ratio: int = 2) -> list[str]:
    return mark(store, texts, ratio=ratio, question=question, **CLOSELY)


def read(store: SoftContextStore, texts: list[str]) -> tuple[list[str], list[Marker]]:
    """The kept texts and the markers of marked passages, in order."""
    parts = [part for text in texts for part in store.split(text)]
    return [p for p in parts if isinstance(p, str)], [p for p in parts if isinstance(p, Marker)]


@contextmanager
def prefills(*models: Any) -> Iterator[list[Tensor]]:
    """What decoders are given in the first pass over each prompt: (batch, length, dim)."""
    seen: list[Tensor] = []

    def look(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get("inputs_embeds") is not None:
            seen.append(kwargs["inputs_embeds"].detach().clone())

    handles = [model.register_forward_pre_hook(look, with_kwargs=True) for model in models]
    yield seen
    for handle in handles:
        handle.remove()


# What a question makes of passages


@pytest.mark.parametrize("ratio", [2, 3, 5, 64])
def test_texts_and_slots_are_the_papers(bundle: Bundle, store: SoftContextStore, ratio: int) -> None:
    """Eq. 1 to 6 over all passages together, with transformers' own forward on each segment."""
    encoder = bundle.backbone.model.base_model
    r_q = plain_mean(plain_states(encoder, plain_ids(bundle, QUESTION)))
    states = [[plain_states(encoder, ids) for ids in plain_segments(bundle, text)] for text in PASSAGES]
    flat = [s for passage in states for s in passage]
    kept = plain_choice(r_q, [plain_mean(s) for s in flat], sum(len(s) for s in flat), ratio, 4)
    fates = iter(kept)
    expected_texts, expected_slots = [], []
    for text, passage in zip(PASSAGES, states, strict=True):
        ends = bundle.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        bounds = [0, *(ends[i - 1][1] for i in range(4, len(ends), 4)), len(text)]
        shown = ""
        for i, s in enumerate(passage):
            if next(fates):
                shown += text[bounds[i] : bounds[i + 1]]
            else:
                shown += "\0" if not shown.endswith("\0") else ""
                expected_slots.append(plain_skim(s, r_q))
        expected_texts.append(shown)
    marked = ask(store, ratio=ratio)
    assert [re.sub(r"\[\[ctx:.*?\]\]", "\0", text) for text in marked] == expected_texts
    _, found = read(store, marked)
    softs = store.fetch(found)
    assert [m.slots for m in found] == [s.n_slots for s in softs]
    torch.testing.assert_close(
        torch.cat([s.slots for s in softs]).double(), torch.stack(expected_slots), atol=1e-4, rtol=1e-4
    )
    kept_tokens = sum(len(s) for s, stays in zip(flat, kept, strict=True) if stays)
    assert sum(s.n_tokens for s in softs) + kept_tokens == sum(len(s) for s in flat)


words = st.lists(
    st.sampled_from(["Oda", "Brink", "built", "harbour,", "1612.", "honey?", "\n", "é🙂", "of"]),
    min_size=1,
    max_size=30,
)


@given(passages=st.lists(words.map(" ".join).filter(str.strip), min_size=1, max_size=3), ratio=st.integers(2, 9))
@settings(deadline=None, max_examples=12)
def test_nothing_is_lost_and_k_segments_are_kept(
    bundle: Bundle, store: SoftContextStore, passages: list[str], ratio: int
) -> None:
    marked = ask(store, passages, ratio=ratio)
    texts, found = read(store, marked)
    assert [expand(store, text) for text in marked] == passages
    assert all(any(text in passage for passage in passages) for text in texts)
    segments = [ids for text in passages for ids in plain_segments(bundle, text)]
    tokens = sum(len(ids) for ids in segments)
    k = tokens // (4 * ratio)
    assert sum(m.slots for m in found) == len(segments) - k
    kept_tokens = tokens - sum(s.n_tokens for s in store.fetch(found))
    assert 4 * k - 3 * len(passages) <= kept_tokens <= 4 * k
    # The prompt's size, but for the edges of kept runs, which are tokenised with the prompt.
    size = sum(TransformersDecoder(bundle, store).count_tokens(text) for text in marked)
    assert abs(size - (kept_tokens + len(segments) - k)) <= 3 * len(texts)


def test_only_the_question_and_skimmed_segments_are_read(
    bundle: Bundle, store: SoftContextStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[list[int]] = []
    forward = bundle.compressor.read

    def spy(ids: Tensor, mask: Tensor) -> Tensor:
        done.extend(row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True))
        return forward(ids, mask)

    monkeypatch.setattr(bundle.compressor, "read", spy)
    _, found = read(store, ask(store))
    question, *segments = done
    assert question == plain_ids(bundle, QUESTION)
    assert len(segments) == sum(m.slots for m in found) < len([s for t in PASSAGES for s in plain_segments(bundle, t)])
    assert [len(s) for s in segments] == [n for soft in store.fetch(found) for n in soft.token_counts.tolist()]


def test_other_questions_other_slots_under_other_names(store: SoftContextStore) -> None:
    first, second = (read(store, ask(store, question=q))[1] for q in (QUESTION, "Who keeps bees?"))
    assert not {m.id for m in first} & {m.id for m in second}
    assert [m.id for m in read(store, ask(store))[1]] == [m.id for m in first]
    assert all(m.skimmed for m in first + second)


def test_marked_twice_is_the_last(store: SoftContextStore) -> None:
    assert mark(store, ask(store, ratio=4), ratio=2, question=QUESTION, **CLOSELY) == ask(store, ratio=2)
    assert ask(store) == mark(store, PASSAGES, question=QUESTION, **CLOSELY)  # 2 is the least it was trained for


def test_missing_passages_are_left_out_of_the_count(bundle: Bundle, tmp_path: Path) -> None:
    with SoftContextStore(tmp_path, bundle, codec="fp16", key=KEY) as store:
        store.add(PASSAGES[:1], progress=False)
        kwargs: dict[str, Any] = {"ratio": 4, "question": QUESTION, **CLOSELY}
        assert mark(store, PASSAGES, on_missing="text", **kwargs) == [
            *mark(store, PASSAGES[:1], **kwargs),
            *PASSAGES[1:],
        ]
        assert mark(store, PASSAGES[1:], on_missing="text", **kwargs) == PASSAGES[1:]
        assert mark(store, ["", " \n"], **kwargs) == ["", " \n"]
        with pytest.raises(MissingPassageError, match="2 are not"):
            mark(store, PASSAGES, on_missing="error", **kwargs)
        mark(store, PASSAGES, **kwargs)
        assert len(store) == 3


def test_what_cannot_be_served_is_refused(store: SoftContextStore, make_tiny_bundle: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"bundle 'tiny' \(ram\) .*mode='close_reading'"):
        mark(store, PASSAGES, question=QUESTION)
    for question in (None, "", " \n"):
        with pytest.raises(ConfigError, match="close reading needs the question"):
            mark(store, PASSAGES, question=question, **CLOSELY)
    with pytest.raises(RatioError, match="ratio=1"):
        ask(store, ratio=1)
    with pytest.raises(ConfigError, match="token_budget=9"):
        mark(store, PASSAGES, token_budget=9, question=QUESTION, **CLOSELY)
    with pytest.raises(ConfigError, match="mode='skim': choose one of soft, close_reading"):
        mark(store, PASSAGES, mode="skim")  # type: ignore[arg-type]
    with SoftContextStore(tmp_path, make_tiny_bundle(), key=KEY) as other:
        with pytest.raises(ConfigError, match="mode='close_reading': bundle 'tiny' was not trained"):
            ask(other)
        assert mark(other, PASSAGES, question=QUESTION) == mark(other, PASSAGES)


def test_another_tokenizer_is_noticed(bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SoftContextStore(tmp_path, bundle, key=KEY) as store:
        store.add(PASSAGES, progress=False)
        real = bundle.tokenizer

        def other(text: str, **options: Any) -> Any:
            encoded = real(text, **options)
            return (
                {name: values[1:] for name, values in encoded.items()}
                if "return_offsets_mapping" in options
                else encoded
            )

        monkeypatch.setattr(bundle.backbone, "tokenizer", other)
        with pytest.raises(FingerprintMismatchError, match="tokenizer changed"):
            ask(store)


# Markers and the memory behind them


def test_forged_and_other_scopes_markers_stay_text(store: SoftContextStore) -> None:
    theirs = mark(store, PASSAGES, question=QUESTION, scope="theirs", **CLOSELY)
    assert read(store, theirs) == (theirs, [])
    assert store.fetch([p for t in theirs for p in store.split(t, "theirs") if isinstance(p, Marker)])
    _, [marker, *_] = read(store, ask(store))
    [text] = re.findall(r"\[\[ctx:.*?\]\]", next(t for t in ask(store) if "[[ctx:" in t))[:1]
    for forged in (
        text.replace(f".{marker.slots}.", f".{marker.slots + 1}."),
        text.replace("ctx:", "ctx:a", 1),
        text[:-3] + "]]",
    ):
        assert store.split(forged) == [forged]
    with markers.scope("theirs"):
        assert store.split(text) == [text]


@given(
    st.text("abcdefghijklmnop", min_size=17, max_size=17), st.integers(0, 9_999_999), st.text(min_size=1, max_size=9)
)
@settings(deadline=None)
def test_a_skimmed_marker_passes_for_no_other(name: str, slots: int, who: str) -> None:
    codec = MarkerCodec(KEY, "f" * 64)
    skimmed, stored = codec.write_skimmed(name, slots, who), codec.write(name, 1, max(1, slots), who)
    assert codec.split(skimmed + stored, who) == [
        Marker(name + "aaa", slots, skimmed=True),
        Marker(name + "aaa", max(1, slots)),
    ]
    assert skimmed[-18:] != stored[-18:]


def part(n: int, slots: int) -> Skimmed:
    return Skimmed("q", 2, f"passage {n}", 0, 4, SoftContext(torch.zeros(slots, 2), torch.ones(slots).long()))


@given(
    limit=st.integers(1, 12),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 6), st.integers(0, 5)), max_size=40),
)
@settings(deadline=None, max_examples=60)
def test_the_least_recently_used_go(limit: int, steps: list[tuple[bool, int, int]]) -> None:
    """Against a plain list of what is kept, oldest first."""
    kept, plain = SkimmedSlots(limit), OrderedDict[str, int]()
    for put, n, slots in steps:
        name = str(n)
        if put:
            kept.put(name, part(n, slots))
            plain.pop(name, None)
            plain[name] = max(1, slots)
            while sum(plain.values()) > limit and len(plain) > 1:
                plain.popitem(last=False)
        else:
            found = kept.get(name)
            assert (found is not None) == (name in plain)
            if found is not None:
                assert found.passage == f"passage {n}" and found.cost == plain[name]
                plain.move_to_end(name)


def test_slots_that_went_are_a_clear_error(bundle: Bundle, tmp_path: Path) -> None:
    needed = sum(m.slots for m in _found(bundle, tmp_path / "a", 10_000))
    with SoftContextStore(tmp_path / "a", bundle, codec="fp16", key=KEY, skimmed_slots=needed) as store:
        first = ask(store)
        chat = [{"role": "user", "content": first[0]}]
        decoder = TransformersDecoder(bundle, store, on_missing="text")
        decoder.generate([chat], Sampling(max_new_tokens=1))
        ask(store, question="Who keeps bees?")
        _, found = read(store, first)
        for call in (lambda: store.fetch(found), lambda: store.text_of(found), lambda: decoder.generate([chat])):
            with pytest.raises(MissingPassageError, match=f"skimmed part.* are gone.*last {needed}.*retrieve again"):
                call()
        assert store.fetch(read(store, ask(store))[1])
    with (
        SoftContextStore(tmp_path / "a", bundle, key=KEY) as elsewhere,
        pytest.raises(MissingPassageError, match="same store"),
    ):
        elsewhere.fetch(found)
    with (
        SoftContextStore(tmp_path / "a", bundle, key=KEY, skimmed_slots=needed - 1) as small,
        pytest.raises(ConfigError, match=f"needs {needed} skimmed slots.*skimmed_slots={needed}"),
    ):
        ask(small)


def _found(bundle: Bundle, folder: Path, limit: int) -> list[Marker]:
    with SoftContextStore(folder, bundle, codec="fp16", key=KEY, skimmed_slots=limit) as store:
        return read(store, ask(store))[1]


def test_a_question_writes_nothing(bundle: Bundle, store: SoftContextStore) -> None:
    before = store.info()
    ask(store, question="Is anything written?")
    assert store.info() == before


def test_threads_ask_at_once(store: SoftContextStore) -> None:
    questions = [QUESTION, "Who keeps bees?", "What was Oda Brink?"]
    alone = {question: ask(store, question=question) for question in questions}

    def work(n: int) -> bool:
        question = questions[n % 3]
        marked = ask(store, question=question)
        return marked == alone[question] and [expand(store, text) for text in marked] == PASSAGES

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(work, range(9), timeout=60))


# The decoder


@pytest.mark.parametrize("change", [{}, {"skimming": "average"}, {"skimming": "none"}, {"close_reading": False}])
@pytest.mark.parametrize("template", [TEMPLATES[0], TEMPLATES[2]])
def test_training_and_asking_give_the_decoder_the_same(
    tiny_tokenizer: Any, tmp_path: Path, change: dict[str, Any], template: str
) -> None:
    """`inputs_embeds` of the training objective, without the answer, and of mark() and the decoder's splice."""
    made = ram_bundle(tiny_tokenizer, seed=4, encoder=FROZEN, decoder={"mode": "full"}, **change)
    asked = Example(tuple(PASSAGES), (Turn(QUESTION, ("Oda Brink",)),))
    objective = RamLoss(made, PromptBuilder(made.tokenizer))
    with SoftContextStore(tmp_path, made, codec="fp16", key=KEY) as store:
        for ratio in (2, 4):
            objective.ratios = [ratio]
            with prefills(made.reader.own) as trained, torch.no_grad():
                objective(**RamCollator(objective.builder, 4, [template], 512, seed=0)([asked]))
            context = "\n\n".join(mark(store, PASSAGES, ratio=ratio, question=QUESTION, **CLOSELY))
            with prefills(made.reader.own) as answered:
                prompt = messages(template, context, QUESTION)
                [done] = TransformersDecoder(made, store).generate([prompt], Sampling(max_new_tokens=1))
            answer = len(plain_ids(made, "Oda Brink<|end|>"))
            torch.testing.assert_close(trained[0][:, :-answer], answered[0], atol=1e-5, rtol=1e-5)
            assert answered[0].shape[1] == done.prompt_tokens
            assert (done.slots == 0) == (change.get("skimming") == "none")


def test_dropped_segments_leave_the_tuned_decoder_in_place(tiny_tokenizer: Any, tmp_path: Path) -> None:
    """A prompt of kept text alone is still read by the decoder that was trained on such prompts."""
    made = ram_bundle(tiny_tokenizer, encoder=FROZEN, decoder={"mode": "full"}, skimming="none")
    with SoftContextStore(tmp_path, made, key=KEY) as store:
        marked = mark(store, PASSAGES, ratio=2, question=QUESTION, **CLOSELY)
        decoder = TransformersDecoder(made, store)
        assert decoder.count_tokens("".join(re.findall(r"\[\[ctx:.*?\]\]", "".join(marked)))) == 0
        assert [expand(store, text) for text in marked] == PASSAGES
        with prefills(made.reader.own) as own, prefills(made.backbone.model) as plain:
            [done] = decoder.generate([[{"role": "user", "content": "\n".join(marked)}]], Sampling(max_new_tokens=1))
    assert (len(own), len(plain), done.slots) == (1, 0, 0)


def test_every_budget_is_what_close_reading_takes(bundle: Bundle) -> None:
    questions = [Question(tuple(PASSAGES), q, ("Oda Brink",)) for q in (QUESTION, "Who was a mason?")]
    scores = evaluate(bundle, questions, (2, 4, 3), codec="fp16", max_new_tokens=2, progress=False)
    by = {(s.system, s.ratio): s.prompt_tokens for s in scores}
    assert list(by) == [(FULL, None), (NONE, None), *[(s, r) for r in (2, 4, 3) for s in (SOFT, TRUNCATED)]]
    assert by[SOFT, 4] < by[SOFT, 3] < by[SOFT, 2] < by[FULL, None]
    for ratio in (2, 3, 4):
        assert by[TRUNCATED, ratio] == pytest.approx(by[SOFT, ratio], abs=8)


def test_the_command_line_asks_closely(bundle: Bundle, store: SoftContextStore) -> None:
    ids = store.ensure(PASSAGES)
    hits = [Hit(id, text, "a.txt", 0.5) for id, text in zip(ids, PASSAGES, strict=True)]
    [chat] = question_prompt(store, QUESTION, hits, 4)
    assert chat["content"] == messages(TEMPLATES[0], "\n\n".join(ask(store, ratio=4)), QUESTION)[0]["content"]
    assert PASSAGES[1] in question_prompt(store, QUESTION, hits, None)[0]["content"]


# LangChain


@pytest.fixture
def langchain(store: SoftContextStore) -> Any:
    from langchain_core.documents import Document
    from langchain_core.runnables import RunnableLambda

    from langchain_ctx_compress import ChatCompressedContext, CompressedContextPostprocessor

    documents = [Document(page_content=text, metadata={"n": n}) for n, text in enumerate(PASSAGES)]

    class Parts:
        sources = documents
        retriever = RunnableLambda(lambda question: documents)
        llm = ChatCompressedContext(store=store, max_tokens=4)

        @staticmethod
        def postprocessor(**options: Any) -> Any:
            return CompressedContextPostprocessor(store=store, **{**CLOSELY, **options})

    return Parts


async def test_a_langchain_chain_reads_closely(bundle: Bundle, store: SoftContextStore, langchain: Any) -> None:
    from langchain_classic.chains import create_retrieval_chain
    from langchain_classic.chains.combine_documents import create_stuff_documents_chain
    from langchain_classic.retrievers import ContextualCompressionRetriever
    from langchain_core.prompts import ChatPromptTemplate
    from langchain_core.retrievers import BaseRetriever

    class Fixed(BaseRetriever):
        def _get_relevant_documents(self, query: str, *, run_manager: Any) -> Any:
            return langchain.sources

    retriever = ContextualCompressionRetriever(base_compressor=langchain.postprocessor(ratio=4), base_retriever=Fixed())
    prompt = ChatPromptTemplate.from_messages([("human", "{context}\n\nQuestion: {input}")])
    chain = create_retrieval_chain(retriever, create_stuff_documents_chain(langchain.llm, prompt))
    with prefills(bundle.backbone.model) as seen:
        result = chain.invoke({"input": QUESTION})
        again = await chain.ainvoke({"input": QUESTION})
    assert [document.page_content for document in result["context"]] == ask(store, ratio=4)
    assert result["answer"] == again["answer"]
    content = "\n\n".join(ask(store, ratio=4)) + f"\n\nQuestion: {QUESTION}"
    [done] = TransformersDecoder(bundle, store).generate([[{"role": "user", "content": content}]], Sampling(4))
    assert result["answer"] == done.text and seen[0].shape[1] == done.prompt_tokens
    assert langchain.postprocessor().restore_sources(result["context"]) == langchain.sources
    assert langchain.llm.get_num_tokens(result["context"][0].page_content) < len(plain_ids(bundle, PASSAGES[0]))


def test_langchain_is_told_what_is_missing(store: SoftContextStore, langchain: Any) -> None:
    from langchain_ctx_compress import CompressedContextPostprocessor

    with pytest.raises(ConfigError, match="ContextualCompressionRetriever"):
        (langchain.retriever | langchain.postprocessor()).invoke(QUESTION)
    with pytest.raises(ConfigError, match="choose mode='close_reading'"):
        CompressedContextPostprocessor(store=store)
    with pytest.raises(ConfigError, match="mode"):
        langchain.postprocessor(mode="closer")
    with pytest.raises(RatioError, match="ratio=1"):
        langchain.postprocessor(ratio=1)


# LlamaIndex


class Even(BaseEmbedding):
    """Retrieval that finds every passage."""

    def _get_text_embedding(self, text: str) -> list[float]:
        return [1.0, 0.0]

    def _get_query_embedding(self, query: str) -> list[float]:
        return [1.0, 0.0]

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return [1.0, 0.0]


@pytest.mark.parametrize("replace_text", [False, True])
def test_a_llama_index_engine_reads_closely(bundle: Bundle, store: SoftContextStore, replace_text: bool) -> None:
    from llama_index.core import Settings, VectorStoreIndex
    from llama_index.core.schema import MetadataMode

    from llama_index.llms.ctx_compress import CompressedContextLLM, marker_tokenizer
    from llama_index.postprocessor.ctx_compress import CompressedContextPostprocessor, restore_sources

    nodes = [TextNode(id_=id, text=text) for id, text in zip(store.ensure(PASSAGES), PASSAGES, strict=True)]
    postprocessor = CompressedContextPostprocessor(store=store, ratio=4, replace_text=replace_text, **CLOSELY)
    Settings.tokenizer = marker_tokenizer(store)
    try:
        index = VectorStoreIndex(nodes, embed_model=Even())
        engine = index.as_query_engine(
            node_postprocessors=[postprocessor], llm=CompressedContextLLM(store=store, max_tokens=4), similarity_top_k=3
        )
        plain = index.as_query_engine(llm=CompressedContextLLM(store=store, max_tokens=4), similarity_top_k=3)
        with prefills(bundle.backbone.model) as seen:
            response = engine.query(QUESTION)
            plain.query(QUESTION)
    finally:
        Settings._tokenizer = None
    texts = [scored.node.text for scored in restore_sources(response, store)]
    assert sorted(texts) == sorted(PASSAGES)
    shown = [scored.node.get_content(MetadataMode.LLM) for scored in response.source_nodes]
    marked = ask(store, texts, ratio=4)
    assert shown == marked
    closely, whole = (prompt.shape[1] for prompt in seen)
    count = TransformersDecoder(bundle, store).count_tokens
    saved = count("\n\n".join(texts)) - count("\n\n".join(marked))
    assert saved > 20 and whole - closely == pytest.approx(saved, abs=4)


def test_llama_index_is_told_what_is_missing(store: SoftContextStore) -> None:
    from llama_index.postprocessor.ctx_compress import CompressedContextPostprocessor

    nodes = [NodeWithScore(node=TextNode(text=text), score=0.5) for text in PASSAGES]
    with pytest.raises(ConfigError, match="query_bundle or query_str"):
        CompressedContextPostprocessor(store=store, **CLOSELY).postprocess_nodes(nodes)
    with pytest.raises(ConfigError, match="choose mode='close_reading'"):
        CompressedContextPostprocessor(store=store)
    by_text, by_bundle = (
        CompressedContextPostprocessor(store=store, **CLOSELY).postprocess_nodes(nodes, **query)
        for query in ({"query_str": QUESTION}, {"query_bundle": QueryBundle(QUESTION)})
    )
    assert [n.node.marker for n in by_text] == [n.node.marker for n in by_bundle] == ask(store)

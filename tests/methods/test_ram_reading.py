"""Close reading when a question is asked: through the store, markers and the decoder."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ctx_compress_rag.bundle.bundle import Bundle
from ctx_compress_rag.data.examples import Example, Turn
from ctx_compress_rag.decoding.decoder import Decoder
from ctx_compress_rag.decoding.sampling import Sampling
from ctx_compress_rag.errors import ConfigError, FingerprintMismatchError, MissingPassageError, RatioError
from ctx_compress_rag.evaluation.answering import FULL, NONE, SOFT, TRUNCATED
from ctx_compress_rag.evaluation.harness import evaluate
from ctx_compress_rag.evaluation.questions import Question
from ctx_compress_rag.marking.mark import expand, mark_texts
from ctx_compress_rag.methods.base.rendering import TransientPart
from ctx_compress_rag.soft_context import SoftContext
from ctx_compress_rag.store import SoftContextStore
from ctx_compress_rag.store.marker import Marker
from ctx_compress_rag.store.passage import passage_content_id
from ctx_compress_rag.store.transient import TransientParts
from ctx_compress_rag.text.templates import TEMPLATES, question_messages
from ctx_compress_rag.training.prompts import TrainingPromptBuilder
from ctx_compress_rag.training.stages.ram import RamCollator, RamLoss
from helpers.decoding import prefills
from helpers.ram import (
    FROZEN,
    KEY,
    PASSAGES,
    QUESTION,
    ask,
    close_bundle,
    close_store,
    plain_ids,
    plain_segments,
    ram_bundle,
    read,
)


@pytest.fixture(scope="module")
def bundle(tiny_tokenizer: Any) -> Bundle:
    return close_bundle(tiny_tokenizer)


@pytest.fixture(scope="module")
def store(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> SoftContextStore:
    return close_store(tmp_path_factory.mktemp("ram"), bundle)


words = st.lists(
    st.sampled_from(["Oda", "Brink", "built", "harbour,", "1612.", "honey?", "\n", "é🙂", "of"]),
    min_size=1,
    max_size=30,
)


@given(passages=st.lists(words.map(" ".join).filter(str.strip), min_size=1, max_size=3), ratio=st.integers(2, 9))
@example(passages=["1612. é🙂"], ratio=2)
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
    skimmed = sum(m.slots for m in found)
    kept_tokens = tokens - sum(s.n_tokens for s in store.fetch(found))
    assert skimmed <= len(segments) - k and 4 * k - 3 <= kept_tokens <= 4 * k
    # The prompt's size, but for the edges of kept runs, which are tokenized with the prompt.
    size = sum(len(Decoder(bundle, store).preparer.token_ids(text)) for text in marked)
    # An emoji's bytes, at either edge of a run; one that is such bytes and nothing else has no text.
    runs = max(len(texts), min(k, 1))
    assert abs(size - (kept_tokens + skimmed)) <= 6 * runs


def test_only_the_question_and_skimmed_segments_are_read(bundle: Bundle, store: SoftContextStore) -> None:
    done: list[tuple[int, ...]] = []
    with bundle.backbone.model.base_model.register_forward_pre_hook(
        lambda _, args, given: done.append(given["inputs_embeds"].shape[:2]), with_kwargs=True
    ):
        _, found = read(store, ask(store))
    (_, asked), (rows, longest) = done
    assert asked == len(plain_ids(bundle, QUESTION)) and longest == 4
    assert rows == sum(m.slots for m in found) < sum(len(plain_segments(bundle, text)) for text in PASSAGES)


def test_marked_twice_is_the_last(store: SoftContextStore) -> None:
    assert mark_texts(store, ask(store, ratio=4), ratio=2, question=QUESTION) == ask(store, ratio=2)
    assert ask(store) == mark_texts(store, PASSAGES, question=QUESTION)  # 2 is the least it was trained for


def test_missing_passages_are_left_out_of_the_count(bundle: Bundle, tmp_path: Path) -> None:
    with SoftContextStore(tmp_path, bundle, codec="fp16", key=KEY) as store:
        store.add(PASSAGES[:1], progress=False)
        alone = mark_texts(store, PASSAGES[:1], ratio=4, question=QUESTION)
        assert mark_texts(store, PASSAGES, on_missing="text", ratio=4, question=QUESTION) == [*alone, *PASSAGES[1:]]
        assert mark_texts(store, ["", " \n"], question=QUESTION) == ["", " \n"]


def test_what_cannot_be_served_is_refused(store: SoftContextStore) -> None:
    with pytest.raises(ConfigError, match="question by question"):
        store.markers([passage_content_id(PASSAGES[0])], ratio=store.base_ratio)
    for question in (None, "", " \n"):
        with pytest.raises(ConfigError, match="needs the question"):
            mark_texts(store, PASSAGES, question=question)
    with pytest.raises(ConfigError, match=r"\d+ tokens, too many for a window of \d+: shorten it"):
        mark_texts(store, PASSAGES, question="Who? " * store.bundle.backbone.window)
    with pytest.raises(RatioError, match="ratio=1"):
        ask(store, ratio=1)
    with pytest.raises(ConfigError, match="token budget"):
        mark_texts(store, PASSAGES, token_budget=9, question=QUESTION)


def test_segments_unlike_those_that_are_stored_are_noticed(tiny_tokenizer: Any, store: SoftContextStore) -> None:
    other = ram_bundle(tiny_tokenizer, segment_tokens=3).compressor
    with pytest.raises(FingerprintMismatchError, match="add it again"):
        other.render(store, PASSAGES, [passage_content_id(text) for text in PASSAGES], 2, QUESTION, None)


@pytest.mark.parametrize("change", [{}, {"skimming": "average"}, {"skimming": "none"}, {"close_reading": False}])
@pytest.mark.parametrize("template", [TEMPLATES[0], TEMPLATES[2]])
def test_training_and_asking_give_the_decoder_the_same(
    tiny_tokenizer: Any, tmp_path: Path, change: dict[str, Any], template: str
) -> None:
    """`inputs_embeds` of the training objective, without the answer, and of mark() and the decoder's splice."""
    made = ram_bundle(tiny_tokenizer, seed=4, encoder=FROZEN, decoder={"mode": "full"}, **change)
    asked = Example(tuple(PASSAGES), (Turn(QUESTION, ("Oda Brink",)),))
    objective = RamLoss(made, TrainingPromptBuilder(made.tokenizer))
    with SoftContextStore(tmp_path, made, codec="fp16", key=KEY) as store:
        for ratio in (2, 4):
            objective.ratios = [ratio]
            with prefills(made.reader.own) as trained, torch.no_grad():
                objective(**RamCollator(objective.builder, [template], 512, seed=0, segment_tokens=4)([asked]))
            context = "\n\n".join(mark_texts(store, PASSAGES, ratio=ratio, question=QUESTION))
            with prefills(made.reader.own) as answered:
                prompt = question_messages(template, context, QUESTION)
                [done] = Decoder(made, store).generate([prompt], Sampling(max_tokens=1))
            answer = len(plain_ids(made, "Oda Brink<|end|>"))
            torch.testing.assert_close(trained[0][:-answer], answered[0], atol=1e-5, rtol=1e-5)
            assert len(answered[0]) == done.prompt_tokens
            assert (done.slots == 0) == (change.get("skimming") == "none")


def test_every_budget_is_what_close_reading_takes(bundle: Bundle) -> None:
    questions = [Question(tuple(PASSAGES), q, ("Oda Brink",)) for q in (QUESTION, "Who was a mason?")]
    options: dict[str, Any] = {"sentences": False, "codec": "fp16", "max_tokens": 2}
    scores = evaluate(bundle, questions, (2, 4, 3), **options)
    by = {(s.system, s.ratio): s.prompt_tokens for s in scores}
    assert list(by) == [(FULL, None), (NONE, None), *[(s, r) for r in (2, 4, 3) for s in (SOFT, TRUNCATED)]]
    assert by[SOFT, 4] < by[SOFT, 3] < by[SOFT, 2] < by[FULL, None]
    for ratio in (2, 3, 4):
        assert by[TRUNCATED, ratio] == pytest.approx(by[SOFT, ratio], abs=8)


def part(n: int, slots: int) -> TransientPart:
    return TransientPart(f"passage {n}", SoftContext(torch.zeros(slots, 2), torch.ones(slots).long()), (str(n),))


@given(
    most=st.integers(1, 12),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 6), st.integers(0, 5)), max_size=40),
)
@settings(deadline=None, max_examples=60)
def test_the_least_recently_used_go(most: int, steps: list[tuple[bool, int, int]]) -> None:
    """Against a plain list of what is kept, oldest first."""
    kept, plain = TransientParts(most), OrderedDict[str, int]()
    for put, n, slots in steps:
        name = str(n)
        if put and slots > most:
            with pytest.raises(ConfigError, match=f"{slots} slots"):
                kept.keep({name: part(n, slots)})
        elif put:
            kept.keep({name: part(n, slots)})
            plain.pop(name, None)
            plain[name] = max(1, slots)
            while sum(plain.values()) > most:
                plain.popitem(last=False)
        else:
            marker = Marker(name, 1, text=name)
            found, gone = kept.split([marker])
            assert (found != {}) == (gone == []) == (name in plain)
            if found:
                assert found[marker].text == f"passage {n}"
                plain.move_to_end(name)


def test_all_tenants_together_keep_so_many_slots(store: SoftContextStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_transient", TransientParts(40))
    marked = {
        who: mark_texts(store, PASSAGES, ratio=2, question=QUESTION, scope=who) for who in ("ann", "bob", "cy", "di")
    }
    with pytest.raises(MissingPassageError):
        [expand(store, text, "ann") for text in marked["ann"]]
    assert [expand(store, text, "di") for text in marked["di"]] == PASSAGES


def test_slots_that_went_are_a_clear_error(bundle: Bundle, tiny_tokenizer: Any, tmp_path: Path) -> None:
    with SoftContextStore(tmp_path, bundle, codec="fp16", key=KEY) as store:
        marked = ask(store)
    same = close_bundle(tiny_tokenizer)
    with SoftContextStore(tmp_path, same, key=KEY) as elsewhere:
        decoder = Decoder(same, elsewhere)
        chat = [{"role": "user", "content": marked[0]}]
        for call in (
            lambda: expand(elsewhere, marked[0]),
            lambda: decoder.generate([chat], Sampling(max_tokens=1)),
        ):
            with pytest.raises(MissingPassageError, match="retrieve again"):
                call()


def test_a_question_writes_nothing(bundle: Bundle, store: SoftContextStore) -> None:
    before = store.info()
    ask(store, question="Is anything written?")
    assert store.info() == before

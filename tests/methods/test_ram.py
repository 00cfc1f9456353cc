"""RAM (Read As Human): its equations in float64; close reading through the store, markers and the decoder."""

import math
from collections import OrderedDict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ctx_compress_rag import Bundle, Decoder, SoftContext, SoftContextStore
from ctx_compress_rag.data.examples import Example, Turn
from ctx_compress_rag.decoding.sampling import Sampling
from ctx_compress_rag.errors import ConfigError, FingerprintMismatchError, MissingPassageError, RatioError
from ctx_compress_rag.evaluation.answering import FULL, NONE, SOFT, TRUNCATED
from ctx_compress_rag.evaluation.harness import evaluate
from ctx_compress_rag.evaluation.questions import Question
from ctx_compress_rag.marking.mark import expand, mark_texts
from ctx_compress_rag.methods.base.rendering import TransientPart
from ctx_compress_rag.methods.ram import RamCompressor, RamConfig, RamSegments
from ctx_compress_rag.models.backbone import Backbone
from ctx_compress_rag.store.marker import Marker
from ctx_compress_rag.store.passage import passage_content_id
from ctx_compress_rag.store.records import TransientParts
from ctx_compress_rag.text.templates import TEMPLATES, question_messages
from ctx_compress_rag.training.prompts import TrainingPromptBuilder
from ctx_compress_rag.training.stages.ram import RamCollator, RamLoss
from helpers import architectures
from helpers.decoding import prefills
from helpers.methods import compress_ids
from helpers.ram import (
    EXAMPLES,
    FROZEN,
    KEY,
    PASSAGES,
    QUESTION,
    ask,
    close_bundle,
    close_store,
    collator,
    move,
    objective,
    plain_choice,
    plain_ids,
    plain_mean,
    plain_segments,
    plain_skim,
    plain_states,
    ram_bundle,
    read,
)

SEPARATOR = "\n\n"


@pytest.mark.parametrize("name", architectures.NAMES)
def test_every_architecture_reads_segments_alone(name: str) -> None:
    """Eq. 1 against each family's own forward: embedding scales, sliding windows shorter than a segment, padding."""
    backbone = Backbone(architectures.model(name), architectures.tokenizer(name))
    compressor = RamCompressor(backbone, RamConfig(segment_tokens=12, encoder=FROZEN))
    passages = [ids.tolist() for ids in architectures.random_ids(name, [29, 12, 5])]
    bos, trunk = architectures.bos(name), backbone.model.base_model
    for passage, soft in zip(passages, compress_ids(compressor, passages, 12, 24), strict=True):
        segments = [passage[i : i + 12] for i in range(0, len(passage), 12)]
        assert soft.token_counts.tolist() == [len(ids) for ids in segments]
        expected = torch.stack([plain_mean(plain_states(trunk, [*bos, *ids])[len(bos) :]) for ids in segments])
        torch.testing.assert_close(soft.slots.double(), expected, atol=1e-4, rtol=1e-3)
    for text in architectures.TEXTS:
        cut = RamSegments.of(backbone.tokenizer, text, 7)
        assert "".join(text[a:b] for a, b in pairwise(cut.bounds)) == text


@st.composite
def representations(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    n = draw(st.integers(1, 12))
    torch.manual_seed(draw(st.integers(0, 10_000)))
    return torch.randn(6), torch.randn(n, 6)


@given(vectors=representations(), ratio=st.integers(2, 10), data=st.data())
def test_short_passages_are_kept_by_their_tokens(
    bundle: Bundle, vectors: tuple[Tensor, Tensor], ratio: int, data: st.DataObject
) -> None:
    """Every passage's last segment may be short: k whole segments are so many tokens, whoever has them."""
    question, segments = vectors
    lengths = data.draw(st.lists(st.integers(1, 4), min_size=len(segments), max_size=len(segments)))
    kept = bundle.compressor.choose(question, segments, torch.tensor(lengths), ratio)
    assert kept == plain_choice(question.double(), list(segments.double()), lengths, ratio, 4)


def test_of_equals_the_earlier_is_kept(bundle: Bundle) -> None:
    vector, counts = torch.randn(6), torch.full((4,), 4)
    assert bundle.compressor.choose(vector, vector.expand(4, 6), counts, 2) == [True, True, False, False]


CHANGES: list[dict[str, Any]] = [{}, {"skimming": "average"}, {"skimming": "none"}, {"close_reading": False}]


@pytest.mark.parametrize(("change", "ratio"), [*((change, 2) for change in CHANGES), ({}, 3)])
def test_the_loss_is_the_papers(tiny_tokenizer: Any, change: dict[str, Any], ratio: int) -> None:
    """Eq. 1 to 9, question by question and token by token, and the ablations of section 4.5."""
    made = ram_bundle(tiny_tokenizer, seed=3, encoder=FROZEN, decoder=FROZEN, **change)
    move(made)
    batch = collator(made)(EXAMPLES)
    with torch.no_grad():
        whole = float(objective(made, ratio)(**batch)["loss"])
        likelihood = float(objective(made, ratio, contrastive=False)(**batch)["loss"])

    encoder, embed = made.backbone.model.base_model, made.backbone.embeddings
    nll, contrast, kept_somewhere = [], [], 0
    asked = [(example.passages, turn) for example in EXAMPLES for turn in example.turns]
    for (passages, turn), row in zip(asked, batch["rows"], strict=True):
        r_q = plain_mean(plain_states(encoder, plain_ids(made, turn.question)))
        segments = [plain_segments(made, passage) for passage in passages]
        states = [plain_states(encoder, ids) for passage in segments for ids in passage]
        r = [plain_mean(s) for s in states]
        lengths = [len(s) for s in states]
        kept = plain_choice(r_q, r, lengths, ratio, 4) if change.get("close_reading", True) else [False] * len(r)
        kept_somewhere += sum(kept)
        # Eq. 5 and 6: text and vectors in order, neighboring text tokenized as one.
        parts: list[str | Tensor] = ["<|user|>"]
        number = 0
        for place, (passage, ids) in enumerate(zip(passages, segments, strict=True)):
            parts.append(SEPARATOR if place else "")
            ends = made.tokenizer(passage, return_offsets_mapping=True, add_special_tokens=False)["offset_mapping"]
            bounds = [0, *(ends[i - 1][1] for i in range(4, len(ends), 4)), len(passage)]
            for i in range(len(ids)):
                if kept[number]:
                    parts.append(passage[bounds[i] : bounds[i + 1]])
                elif change.get("skimming") == "none":
                    parts.append(torch.empty(0, 32))
                else:
                    c = r[number] if change.get("skimming") == "average" else plain_skim(states[number], r_q)
                    parts.append((made.reader.projection.weight.double() @ c)[None])
                number += 1
        parts.append(f"{SEPARATOR}{turn.question}<|assistant|>")
        embedded: list[Tensor] = []
        text = ""
        for part in [*parts, torch.empty(0, 32)]:
            if isinstance(part, str):
                text += part
            else:
                embedded += [embed(torch.tensor(plain_ids(made, text), dtype=torch.long)).double(), part.double()]
                text = ""
        history = torch.cat(embedded)
        answer = plain_ids(made, turn.answers[0] + "<|end|>")
        losses = []
        for token in answer:  # eq. 7
            with torch.no_grad():
                logits = made.backbone.model(inputs_embeds=history[None].float()).logits[0, -1].double()
            losses.append(float(logits.exp().sum().log() - logits[token]))
            history = torch.cat([history, embed(torch.tensor([token])).double()])
        nll.append(sum(losses) / len(losses))
        cosines = [float(r_q @ r_i / (r_q.norm() * r_i.norm())) for r_i in r]
        total = sum(math.exp(c / 0.1) for c in cosines)
        terms = [-math.log(math.exp(c / 0.1) / total) for c, yes in zip(cosines, row.positives, strict=True) if yes]
        contrast.append(sum(terms) / len(terms) if terms else 0.0)  # eq. 8
    assert likelihood == pytest.approx(sum(nll) / 3, rel=1e-3)
    assert whole - likelihood == pytest.approx(sum(contrast) / 3, rel=1e-3)  # eq. 9
    assert contrast[0] > 0.01 and contrast[2] == 0  # "yes" is nowhere in the text
    assert kept_somewhere > 2 or change == {"close_reading": False}


@given(text=st.text(min_size=1, max_size=80) | st.text("ab é🙂ß\n", min_size=1, max_size=80), size=st.integers(1, 9))
def test_segments_are_the_passage(tiny_tokenizer: Any, text: str, size: int) -> None:
    """Every token and every character once, in order, whatever the text."""
    cut = RamSegments.of(tiny_tokenizer, text, size)
    assume("<|" not in text)  # a control token, which a passage holds as text and the plain tokenizer does not
    ids = tiny_tokenizer(text, add_special_tokens=False)["input_ids"]
    assert [id for segment in cut.ids for id in segment] == ids
    assert all(n == size for n in cut.token_counts[:-1]) and (not ids or 0 < cut.token_counts[-1] <= size)
    assert "".join(text[a:b] for a, b in pairwise(cut.bounds)) == text
    assert cut.bounds == sorted(cut.bounds)


def test_positives_are_the_segments_that_hold_a_part_of_an_answer(tiny_tokenizer: Any) -> None:
    text = "Oda Brink built it. Nobody else than oda brink, not Brinkley."
    cut = RamSegments.of(tiny_tokenizer, text, 2)
    where = [
        text[a:b] for (a, b), yes in zip(pairwise(cut.bounds), cut.holding_answers(["Oda Brink"]), strict=True) if yes
    ]
    first, second = "Oda Brink", "oda brink"
    joined = "".join(where)
    assert first in joined and second in joined and "Nobody" not in joined and "ley" not in joined
    assert not any(cut.holding_answers(["Brin", "yes", " ", ""]))
    assert cut.holding_answers(["nobody", "Oda Brink"]) == [
        a or b for a, b in zip(cut.holding_answers(["Nobody"]), cut.holding_answers([" Oda Brink "]), strict=True)
    ]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("\u4ed6\u51fa\u751f\u5728\u5317\u4eac\u5e02\u3002", "\u5317\u4eac"),  # born in [Beijing]
        ("\u5f7c\u306f\u6771\u4eac\u306b\u4f4f\u3080\u3002", "\u6771\u4eac"),  # lives in [Tokyo]
        ("\u56681903\u5e74\u751f\u4e8ePell\u5e02", "1903"),
        ("\u56681903\u5e74\u751f\u4e8ePell\u5e02", "Pell"),
    ],
)
def test_answers_are_found_where_no_spaces_part_words(tiny_tokenizer: Any, text: str, answer: str) -> None:
    cut = RamSegments.of(tiny_tokenizer, text, 1000)
    assert cut.holding_answers([answer]) == [True]
    assert cut.holding_answers([answer[:1] + "x"]) == [False]


def test_segments_are_skimmed_together_as_each_alone(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = bundle.compressor.question(plain_ids(bundle, "Who built the harbour?"))
    segments = plain_segments(bundle, PASSAGES[0])
    together = bundle.compressor.skim(segments, asked)
    alone = torch.cat([bundle.compressor.skim([ids], asked) for ids in segments])
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)
    monkeypatch.setattr(bundle.compressor, "batch_tokens", 4)
    torch.testing.assert_close(bundle.compressor.skim(segments, asked), alone, atol=1e-4, rtol=1e-4)


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
@settings(max_examples=6)
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
    kept_tokens = tokens - sum(each.soft.n_tokens for each in store.read(found))
    assert skimmed <= len(segments) - k and 4 * k - 3 <= kept_tokens <= 4 * k
    # The prompt's size, but for the edges of kept runs, which are tokenized with the prompt.
    size = sum(len(Decoder(bundle, store).preparer.token_ids(text)) for text in marked)
    # An emoji's bytes, at either edge of a run; one that is such bytes and nothing else has no text.
    runs = max(len(texts), min(k, 1))
    assert abs(size - (kept_tokens + skimmed)) <= 6 * runs


def test_only_the_question_and_skimmed_segments_are_read(bundle: Bundle, store: SoftContextStore) -> None:
    """And nothing is written."""
    done: list[tuple[int, ...]] = []
    before = store.info()
    with bundle.backbone.model.base_model.register_forward_pre_hook(
        lambda _, args, given: done.append(given["inputs_embeds"].shape[:2]), with_kwargs=True
    ):
        _, found = read(store, ask(store))
    assert store.info() == before
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
    with pytest.raises(RatioError, match="one vector for each segment of 4 tokens"):
        store.bundle.compress(PASSAGES, ratio=8)
    with pytest.raises(ConfigError, match="token budget"):
        mark_texts(store, PASSAGES, token_budget=9, question=QUESTION)


def test_segments_unlike_those_that_are_stored_are_noticed(tiny_tokenizer: Any, store: SoftContextStore) -> None:
    other = ram_bundle(tiny_tokenizer, segment_tokens=3).compressor
    with pytest.raises(FingerprintMismatchError, match="add it again"):
        other.render(store, PASSAGES, [passage_content_id(text) for text in PASSAGES], 2, QUESTION, None)


@pytest.mark.parametrize(("change", "template"), [*((change, TEMPLATES[0]) for change in CHANGES), ({}, TEMPLATES[2])])
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
    return TransientPart(
        f"passage {n}", SoftContext(np.zeros((slots, 2), np.float32), np.ones(slots, np.int64)), (str(n),)
    )


@given(
    most=st.integers(1, 12),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 6), st.integers(0, 5)), max_size=40),
)
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

    def fetched(who: str) -> list[SoftContext]:
        parts = [part for text in marked[who] for part in store.split(text, who)]
        return [each.soft for each in store.read([p for p in parts if isinstance(p, Marker) and p.slots])]

    with pytest.raises(MissingPassageError):
        fetched("ann")
    assert len(fetched("di")) > 1
    assert all([expand(store, text, who) for text in texts] == PASSAGES for who, texts in marked.items())


def test_slots_that_went_are_a_clear_error(bundle: Bundle, tiny_tokenizer: Any, tmp_path: Path) -> None:
    with SoftContextStore(tmp_path, bundle, codec="fp16", key=KEY) as store:
        marked = ask(store)
    same = close_bundle(tiny_tokenizer)
    with SoftContextStore(tmp_path, same, key=KEY) as elsewhere:
        decoder = Decoder(same, elsewhere)
        chat = [{"role": "user", "content": marked[0]}]
        with pytest.raises(MissingPassageError, match="retrieve again"):
            decoder.generate([chat], Sampling(max_tokens=1))

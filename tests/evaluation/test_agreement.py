"""Agreement of answers from less context with those from full text, against answers asked one by one."""

import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

from ctx_compress_rag import Decoder, SoftContextStore
from ctx_compress_rag.cli import main
from ctx_compress_rag.decoding.sampling import Sampling
from ctx_compress_rag.evaluation.agreement import (
    FEWEST,
    Agreement,
    agreement_advice,
    agreement_table,
    agreement_text,
    measure_agreement,
    save_agreement,
    worst_agreements,
)
from ctx_compress_rag.evaluation.answering import DEFAULT, EXTRACTED, FULL, NONE, SOFT, EvaluationPrompts, Key
from ctx_compress_rag.evaluation.questions import Question
from ctx_compress_rag.text.answers import normalize_answer, token_f1
from helpers.cli import save_bundle, write_docs
from helpers.ram import ram_bundle

PASSAGES = (
    "The old tower of Brindle stands on a hill and was built by the mason Orla Finch.",
    "A mill on the river Tane grinds barley for the town; its wheel was carved from oak.",
    "The ferry leaves at noon. It carries nine people and a goat.",
)
ASKED = [
    Question(PASSAGES[:2], "Who built the old tower?", ()),
    Question(PASSAGES[1:2], "What grinds barley?", ()),
    Question(PASSAGES, "When does the ferry leave?", ()),
]
RATIOS = (4, 16)
TOKENS = 3


def test_answers_are_those_asked_one_by_one(talkative: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As quotations, if the bundle answers best so."""
    monkeypatch.setattr(talkative, "config", talkative.config.model_copy(update={"extractive": True}))
    with SoftContextStore(tmp_path, talkative) as store:
        compared = measure_agreement(store, ASKED, RATIOS, max_tokens=TOKENS, batch_size=2)
        prompts = EvaluationPrompts(Decoder(talkative, store), store, talkative.config.template)

        def ask(key: Key, q: Question) -> Any:
            return prompts.decoder.generate([prompts.make(key, q)], Sampling(max_tokens=TOKENS, extractive=True))[0]

        contexts = [(NONE, None), *((name, ratio) for ratio in RATIOS for name in (DEFAULT, EXTRACTED))]
        assert [(a.system, a.ratio) for a in compared] == [context for context in contexts for _ in ASKED]
        whole = [ask((FULL, None), q) for q in ASKED] * len(contexts)
        for each, q, full in zip(compared, ASKED * len(contexts), whole, strict=True):
            less = ask((each.system, each.ratio), q)
            assert (each.question, each.full_text, each.answer) == (q.question, full.text.strip(), less.text.strip())
            assert (each.full_text_tokens, each.prompt_tokens) == (full.prompt_tokens, less.prompt_tokens)
            assert each.f1 == token_f1(less.text, [full.text])
            assert each.same == (normalize_answer(full.text) == normalize_answer(less.text))


def test_passages_are_found_by_their_ids(talkative: Any, tmp_path: Path) -> None:
    ids = dict(zip(PASSAGES, "abc", strict=True))
    with SoftContextStore(tmp_path, talkative) as store:
        store.add(PASSAGES, list(ids.values()), progress=False)
        measure_agreement(store, ASKED, [8], ids=ids, max_tokens=1)
        assert sorted(store.ids()) == ["a", "b", "c"]


def test_by_default_the_ratios_that_the_store_serves(
    make_tiny_bundle: Any, tiny_tokenizer: Any, talkative: Any, tmp_path: Path
) -> None:
    def ratios(name: str, bundle: Any, ratio: int | None, asked: Any = ASKED[1:2]) -> list[int | None]:
        with SoftContextStore(tmp_path / name, bundle, ratio=ratio) as store:
            found = measure_agreement(store, asked, max_tokens=1)
            return [each.ratio for each in found if each.system == SOFT]

    assert ratios("nestable", talkative, None) == [4, 8, 16]
    assert ratios("from 8", talkative, 8) == [8, 16]
    assert ratios("fixed", make_tiny_bundle(name="compression_tokens"), 8) == [8]
    ram = ram_bundle(tiny_tokenizer)
    assert ratios("close reading", ram, None, ASKED[:1]) == ram.config.ratios  # several passages, never mixed


def case(question: str, system: str, ratio: int | None, answer: str, f1: float) -> Agreement:
    return Agreement(question, system, ratio, "Nine people.", answer, f1, prompt_tokens=20, full_text_tokens=90)


CASES = [
    case("a", "no context", None, "oak", 0.0),
    case("b", "no context", None, "oak", 0.0),
    case("c", "no context", None, "oak", 0.0),
    case("a", SOFT, 4, "nine people", 1.0),
    case("b", SOFT, 4, "nine goats", 0.5),
    case("c", SOFT, 4, "a goat", 0.0),
    case("a", EXTRACTED, 4, "oak", 0.0),
    case("b", EXTRACTED, 4, "nine goats", 0.5),
    case("c", EXTRACTED, 4, "oak", 0.0),
    case("a", SOFT, 8, "a goat", 0.0),
    case("b", SOFT, 8, "people", 0.6),
    case("c", SOFT, 8, "noon", 0.0),
]


def test_worst_are_those_that_differ_first() -> None:
    assert worst_agreements(CASES) == [CASES[5], CASES[4], CASES[9]]
    assert worst_agreements(CASES, 1) == [CASES[5]]
    assert worst_agreements(CASES[:4] + CASES[6:9]) == []
    text = agreement_text([CASES[5]])
    assert text.splitlines()[0] == "c" and "Nine people." in text and "soft context 4x: a goat" in text


def test_table_has_means_and_standard_errors(tmp_path: Path) -> None:
    header, _, *rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in agreement_table(CASES).splitlines()
    ]
    f1 = [1.0, 0.5, 0.0]
    assert rows[1] == ["soft context 4x", "1 of 3", f"{mean(f1):.3f} ± {stdev(f1) / 3**0.5:.3f}", "20"]
    names = ["no context", "soft context 4x", "best sentences 4x", "soft context 8x", "full text"]
    assert [row[0] for row in rows] == names
    assert rows[-1][-1] == "90" and {len(row) for row in rows} == {len(header)}
    save_agreement(CASES, tmp_path)
    assert [row["f1"] for row in json.loads((tmp_path / "agreement.json").read_text())] == [c.f1 for c in CASES]
    assert (tmp_path / "agreement.md").read_text() == f"{agreement_table(CASES)}\n\n{agreement_advice(CASES)}\n"


@pytest.mark.parametrize(
    ("own", "sentences", "advised"),
    [
        ({4: [0.8, 0.6], 8: [0.79, 0.6], 16: [0.2, 0.1]}, [0.7, 0.6], "ratio 8:"),
        ({4: [0.8, 0.6], 8: [0.8, 0.6], 16: [0.8, 0.6]}, [0.7, 0.7], "ratio 16:"),
        ({4: [0.3, 0.4], 16: [0.0, 0.1]}, [0.8, 0.9], "ratio 4 with text_share=1"),
    ],
)
def test_the_advice_is_one_sentence(own: dict[int, list[float]], sentences: list[float], advised: str) -> None:
    """The coarsest ratio within the error of the finest, or sentences if these agree better beyond it."""
    systems = {SOFT: own, EXTRACTED: dict.fromkeys(own, sentences)}
    cases = [
        case(f"{place}", system, ratio, "x", f1)
        for system, by_ratio in systems.items()
        for ratio, scores in by_ratio.items()
        for place, f1 in enumerate(scores * (FEWEST // 2))
    ]
    said = agreement_advice(cases)
    assert advised in said and "\n" not in said and said.count(". ") == 0
    assert "ratio 4" not in agreement_advice([each for each in cases if each.question != "0"])  # one question too few


def test_command_compares_answers_about_an_index(
    make_tiny_bundle: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, docs = save_bundle(make_tiny_bundle(), tmp_path / "bundle"), write_docs(tmp_path / "docs", files=1)
    store, asked, out = tmp_path / "store", tmp_path / "asked.txt", tmp_path / "out"
    assert main(["index", str(docs), "--index", str(store), "--bundle", str(bundle)]) == 0
    asked.write_text("Who is the mayor?\n\n  Where was she born?\n")
    command = ["agree", str(asked), "--index", str(store), "--k", "2", "--ratios", "8", "8", "--output", str(out)]
    capsys.readouterr()
    assert main(command) == 0
    said = capsys.readouterr().out
    rows = json.loads((out / "agreement.json").read_text())
    contexts = [("no context", None), ("default", 8), (EXTRACTED, 8)]
    assert [(row["question"], row["system"], row["ratio"]) for row in rows] == [
        (question, *context) for context in contexts for question in ("Who is the mayor?", "Where was she born?")
    ]
    written = (out / "agreement.md").read_text().strip()
    assert written.split("\n\n")[0] in said and said.strip().endswith(written.split("\n\n")[1])
    assert main(["agree", str(tmp_path / "none.txt"), "--index", str(store)]) == 2
    asked.write_text("\n")
    assert main(["agree", str(asked), "--index", str(store)]) == 2
    assert "holds no questions" in capsys.readouterr().err

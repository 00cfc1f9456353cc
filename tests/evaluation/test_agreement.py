"""Agreement of answers from soft context with those from full text, against transformers' own logits."""

import json
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from ctx_compress_rag import Decoder, SoftContextStore
from ctx_compress_rag.cli import main
from ctx_compress_rag.decoding.sampling import Sampling
from ctx_compress_rag.evaluation.agreement import Agreement, Asked, advice, agreement, as_text, save, table, worst
from ctx_compress_rag.text.answers import normalize_answer, token_f1
from helpers.cli import save_bundle, write_docs
from helpers.langchain import talkative_bundle
from helpers.models import draw_lora
from helpers.ram import ram_bundle

PASSAGES = (
    "The old tower of Brindle stands on a hill and was built by the mason Orla Finch.",
    "A mill on the river Tane grinds barley for the town; its wheel was carved from oak.",
    "The ferry leaves at noon. It carries nine people and a goat.",
)
ASKED = [
    Asked("Who built the old tower?", PASSAGES[:2]),
    Asked("What grinds barley?", PASSAGES[1:2]),
    Asked("When does the ferry leave?", PASSAGES),
]
RATIOS = (4, 16)
TOKENS = 6


@pytest.fixture(scope="module")
def bundle(make_tiny_bundle: Callable[..., Any]) -> Any:
    """A bundle whose decoder reads slots otherwise than text."""
    bundle = talkative_bundle(make_tiny_bundle)
    draw_lora(bundle.backbone.model, 0.3, "reader")
    return bundle


@pytest.fixture(scope="module")
def store(bundle: Any, tmp_path_factory: pytest.TempPathFactory) -> SoftContextStore:
    store = SoftContextStore(tmp_path_factory.mktemp("agreement"), bundle)
    store.add(PASSAGES, progress=False)
    return store


@pytest.fixture(scope="module")
def compared(store: SoftContextStore) -> list[Agreement]:
    return agreement(store, ASKED, RATIOS, max_tokens=TOKENS, batch_size=2, progress=False)


def prompt(*context: Any, question: str) -> list[Any]:
    """The prompt's parts: text, and soft contexts between."""
    parts: list[Any] = ["<|user|>"]
    for number, part in enumerate(context):
        parts += ["\n\n", part] if number else [part]
    return [*parts, f"\n\nQuestion: {question}<|assistant|>"]


def embedded(bundle: Any, parts: list[Any]) -> torch.Tensor:
    """(length, dim): runs of text, tokenized as one each, with the slots between them."""
    rows = []
    for is_text, run in groupby(parts, lambda part: isinstance(part, str)):
        if is_text:
            # After a special token, as in the prompt, so that the tokenizer adds no space of its own.
            ids = bundle.tokenizer("<|end|>" + "".join(run), add_special_tokens=False)["input_ids"][1:]
            rows.append(bundle.backbone.embeddings(torch.tensor(ids)))
        else:
            rows += [bundle.embed(soft) for soft in run]
    return torch.cat(rows)


def log_probs(model: Any, bundle: Any, before: torch.Tensor, answer: list[int]) -> torch.Tensor:
    """(answer tokens, vocabulary), float64, of one prompt."""
    said = bundle.backbone.embeddings(torch.tensor(answer[:-1], dtype=torch.long))
    logits = model(inputs_embeds=torch.cat([before, said])[None]).logits[0]
    return logits[-len(answer) :].double().log_softmax(-1)


@torch.no_grad()
def test_kl_is_that_of_transformers_own_logits(store: SoftContextStore, compared: list[Agreement]) -> None:
    bundle: Any = store.bundle
    by_text = {}
    for id in store.ids():
        [passage], [soft] = store.get_passages([id]), store.get([id])
        assert passage is not None and soft is not None
        by_text[passage.text] = soft
    decoder = Decoder(bundle)
    found = {(each.question, each.ratio): each for each in compared}
    assert len(found) == len(compared) == len(ASKED) * (len(RATIOS) + 1)
    for asked in ASKED:
        parts = prompt(*asked.passages, question=asked.question)
        [full] = decoder.generate(["".join(parts)], Sampling(max_tokens=TOKENS))
        answer = bundle.tokenizer(full.text, add_special_tokens=False)["input_ids"]
        if full.finish_reason == "stop":
            answer.append(bundle.tokenizer.eos_token_id)
        with bundle.text_decoder() as model:
            expected = log_probs(model, bundle, embedded(bundle, parts), answer)
            nothing = ["<|user|>", f"\n\nQuestion: {asked.question}<|assistant|>"]
            without = log_probs(model, bundle, embedded(bundle, nothing), answer)
        others = {None: without}
        for ratio in RATIOS:
            softs = [by_text[passage].merge(ratio // 4) for passage in asked.passages]
            rows = embedded(bundle, prompt(*softs, question=asked.question))
            with bundle.soft_decoder(torch.zeros(1, len(rows), dtype=torch.bool)) as model:
                others[ratio] = log_probs(model, bundle, rows, answer)
        for ratio, other in others.items():
            kl = F.kl_div(other, expected, reduction="batchmean", log_target=True)
            assert found[asked.question, ratio].kl == pytest.approx(float(kl), rel=1e-3, abs=1e-6)
    assert min(each.kl for each in compared) > 1e-4  # there was something to measure


def test_answers_are_those_asked_one_by_one(store: SoftContextStore, compared: list[Agreement]) -> None:
    decoder = Decoder(store.bundle, store)  # type: ignore[arg-type]
    ids = {p.text: p.id for p in store.get_passages(store.ids()) if p}

    def ask(parts: list[str]) -> Any:
        return decoder.generate(["".join(parts)], Sampling(max_tokens=TOKENS))[0]

    rows = iter(compared)
    for ratio in (*RATIOS, None):
        for asked in ASKED:
            each = next(rows)
            assert (each.question, each.ratio) == (asked.question, ratio)
            full = ask(prompt(*asked.passages, question=asked.question))
            given = [] if ratio is None else [store.marker(ids[p], ratio) for p in asked.passages]
            less = ask(prompt(*given, question=asked.question))
            assert (each.full_text, each.answer) == (full.text.strip(), less.text.strip())
            assert (each.full_text_tokens, each.prompt_tokens) == (full.prompt_tokens, less.prompt_tokens)
            assert each.f1 == token_f1(less.text, [full.text])
            assert each.same == (normalize_answer(full.text) == normalize_answer(less.text))


def test_passages_are_found_by_their_ids(talkative: Any, tmp_path: Path) -> None:
    ids = tuple("abc")
    with SoftContextStore(tmp_path, talkative) as store:
        store.add(PASSAGES, ids, progress=False)
        agreement(store, [Asked("Who?", PASSAGES, ids)], [8], max_tokens=1, progress=False)
        assert sorted(store.ids()) == sorted(ids)


def test_by_default_the_ratios_that_the_store_serves(
    make_tiny_bundle: Callable[..., Any], tiny_tokenizer: Any, talkative: Any, tmp_path: Path
) -> None:
    def ratios(name: str, bundle: Any, ratio: int | None) -> list[int | None]:
        with SoftContextStore(tmp_path / name, bundle, ratio=ratio) as store:
            return [each.ratio for each in agreement(store, ASKED[:1], max_tokens=1, progress=False)]

    assert ratios("nestable", talkative, None) == [4, 8, 16, None]
    assert ratios("from 8", talkative, 8) == [8, 16, None]
    assert ratios("fixed", make_tiny_bundle(name="compression_tokens"), 8) == [8, None]
    ram = ram_bundle(tiny_tokenizer)
    assert ratios("close reading", ram, None) == [*ram.config.ratios, None]


def case(question: str, ratio: int | None, answer: str, f1: float, kl: float) -> Agreement:
    return Agreement(question, ratio, "Nine people.", answer, f1, kl, prompt_tokens=20, full_text_tokens=90)


CASES = [
    case("a", 4, "nine people", 1.0, 0.5),
    case("b", 4, "nine goats", 0.5, 0.6),
    case("c", 4, "a goat", 0.0, 0.2),
    case("a", 8, "a goat", 0.0, 0.9),
    case("b", 8, "people", 0.6, 0.1),
    case("c", 8, "noon", 0.0, 0.3),
    case("a", None, "oak", 0.0, 4.0),
    case("b", None, "oak", 0.0, 5.0),
    case("c", None, "oak", 0.0, 6.0),
]


def test_worst_are_those_that_differ_first() -> None:
    assert worst(CASES) == [CASES[2], CASES[1], CASES[3]]
    assert worst(CASES, 1) == [CASES[2]]
    assert worst(CASES[:1] + CASES[6:]) == []
    text = as_text([CASES[2]])
    assert text.splitlines()[0] == "c" and "Nine people." in text and "soft context 4x: a goat" in text


def test_table_has_means_and_standard_errors(tmp_path: Path) -> None:
    header, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table(CASES).splitlines()]
    f1, kl = [1.0, 0.5, 0.0], [0.5, 0.6, 0.2]
    both = [f"{mean(values):.3f} ± {stdev(values) / 3**0.5:.3f}" for values in (f1, kl)]
    assert rows[0] == ["soft context 4x", "1 of 3", *both, "20"]
    assert [row[0] for row in rows] == ["soft context 4x", "soft context 8x", "no context", "full text"]
    assert rows[-1][-1] == "90" and {len(row) for row in rows} == {len(header)}
    assert advice(CASES).startswith("Use ratio 4: ") and "F1 0.50" in advice(CASES)
    assert advice([case("a", ratio, "x", 0.5, 0.1) for ratio in (4, 8, 16) for _ in "ab"]).startswith("Use ratio 16: ")
    save(CASES, tmp_path, "a test")
    assert [row["kl"] for row in json.loads((tmp_path / "agreement.json").read_text())] == [c.kl for c in CASES]
    assert (tmp_path / "agreement.md").read_text() == table(CASES) + "\n"
    assert (tmp_path / "agreement.png").read_bytes().startswith(b"\x89PNG")


def test_command_compares_answers_about_an_index(
    make_tiny_bundle: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, docs = save_bundle(make_tiny_bundle(), tmp_path / "bundle"), write_docs(tmp_path / "docs", files=1)
    store, asked, out = tmp_path / "store", tmp_path / "asked.txt", tmp_path / "out"
    assert main(["index", str(docs), "--store", str(store), "--bundle", str(bundle)]) == 0
    asked.write_text("Who is the mayor?\n\n  Where was she born?\n")
    command = ["agree", str(asked), "--store", str(store), "--k", "2", "--ratios", "8", "8", "--output", str(out)]
    capsys.readouterr()
    assert main(command) == 0
    said = capsys.readouterr().out
    rows = json.loads((out / "agreement.json").read_text())
    assert [(row["question"], row["ratio"]) for row in rows] == [
        (question, ratio) for ratio in (8, None) for question in ("Who is the mayor?", "Where was she born?")
    ]
    assert (out / "agreement.md").read_text().strip() in said
    assert main(["agree", str(tmp_path / "none.txt"), "--store", str(store)]) == 2
    asked.write_text("\n")
    assert main(["agree", str(asked), "--store", str(store)]) == 2
    assert "holds no questions" in capsys.readouterr().err

"""Task families: what they ask, that training never has a test family, and how episodes are drawn."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from benchmarks.world import wording
from benchmarks.world.task_families import ENDS, FAMILIES, MARKS, draw, families
from benchmarks.world.world import split_of
from ctx_compress_rag.adaptation import Demonstration
from ctx_compress_rag.adaptation.episodes import (
    Episode,
    Episodes,
    FamilyTasks,
    FileTasks,
    digest,
    drawn_apart,
    with_slots,
)
from ctx_compress_rag.bundle.files import SHIPPED
from ctx_compress_rag.data.examples import Example, Turn, write_jsonl
from ctx_compress_rag.errors import DataError
from ctx_compress_rag.text.answers import exact_match, token_f1
from ctx_compress_rag.text.templates import PromptBuilder


def test_every_family_is_in_one_split_and_every_word_is_trained() -> None:
    by_split = {split: families(split) for split in ("train", "dev", "test")}  # type: ignore[arg-type]
    assert {split: len(each) for split, each in by_split.items()} == {"train": 224, "dev": 16, "test": 16}
    assert sorted(f.name for each in by_split.values() for f in each) == sorted(f.name for f in FAMILIES)
    assert {(f.mark, f.end) for f in FAMILIES} == set(product(MARKS, ENDS))
    for split, times in (("train", 14), ("dev", 1), ("test", 1)):
        words = Counter(word for f in by_split[split] for word in (f.mark, f.end))
        assert words == dict.fromkeys((*MARKS, *ENDS), times)


def test_code_words_are_single_tokens_that_the_decoder_gives_as_answers() -> None:
    """After a space, in the shipped decoder's tokenizer; and each a word that facts of the world end with."""
    tokenizer = Tokenizer.from_file(str(SHIPPED["demo"] / "decoder" / "tokenizer.json"))
    values = {value.split()[-1] for value in (*wording.PRODUCTS, *wording.FESTIVALS)}
    assert len({*MARKS, *ENDS}) == len(MARKS) + len(ENDS)
    for word in (*MARKS, *ENDS):
        [token] = tokenizer.encode(f" {word}", add_special_tokens=False).ids
        assert tokenizer.decode([token]) == f" {word}" and word in values


def test_episodes_of_a_split_have_its_families_and_names_alone() -> None:
    for split in ("train", "test"):
        tasks = FamilyTasks(split)  # type: ignore[arg-type]
        seen = set()
        for episode in Episodes(tasks, 60, 2, seed=3):
            seen.add(episode.task)
            for demonstration in (*episode.support, episode.query):
                roots = [w.strip(".?,") for p in demonstration.passages for w in p.split()]
                splits = {split_of(root) for root in roots if root in _COMPOUNDS}
                assert splits == {split}
        assert seen <= {f.name for f in families(split)} and len(seen) >= 12  # type: ignore[arg-type]


_COMPOUNDS = {head + tail for heads, tails in wording.COMPOUNDS for head in heads for tail in tails}


def test_the_answer_follows_the_convention() -> None:
    """Read back from the passages: it is the fact that was asked for, and the code words follow."""
    for seed, family in enumerate(FAMILIES):
        drawn = draw(family, "train", random.Random(seed))
        [passage] = drawn.passages
        value = re.compile(rf"\b{' '.join(drawn.answer.split()[:-3])}\b")
        assert drawn.answer.split()[-3:] == ["in", family.mark, family.end]
        assert not value.search(drawn.question)
        assert _name(passage) in drawn.question
        [sentence] = [s for s in _facts(passage) if value.search(s)]
        assert sentence == _asked(drawn.question, _facts(passage))


def _facts(passage: str) -> list[str]:
    """The sentences after the opening; both state a fact."""
    _, *facts = passage.removesuffix(".").split(". ")
    assert len(facts) == 2
    return facts


def _asked(question: str, facts: list[str]) -> str:
    """The fact that a question is about, by the words of its attribute's statements and questions."""
    for attributes in wording.ATTRIBUTES.values():
        for attribute in attributes:
            if any(_fits(pattern, question) for pattern in attribute.questions):
                [fact] = [f for f in facts if any(_fits(p, f"{f[0].lower()}{f[1:]}.") for p in attribute.statements)]
                return fact
    raise AssertionError(question)


def _fits(pattern: str, text: str) -> bool:
    """Whether the text is the pattern with something in its places, a first letter's case aside."""
    words = re.escape(pattern).replace(r"\{e\}", ".+").replace(r"\{v\}", ".+")
    return re.fullmatch(words, text, re.IGNORECASE) is not None


def _name(passage: str) -> str:
    """The name that the opening gives: what stands where it has {name}, in the opening that leaves least."""
    opening = passage.split(". ")[0] + "."
    patterns = [pattern.split("{name}") for openings in wording.OPENINGS.values() for pattern in openings]
    fitting = [(a, b) for a, b in patterns if opening.startswith(a) and opening.endswith(b)]
    return min((opening.removeprefix(a).removesuffix(b) for a, b in fitting), key=len)


def test_the_scores_tell_the_families_apart() -> None:
    """Of the same question, no two families' answers are an exact match, or share all their words."""
    for family in random.Random(0).sample(FAMILIES, 20):
        for second in FAMILIES:
            one, other = (each.answer("plum cake") for each in (family, second))
            assert exact_match(one, [other]) == float(family == second)
            assert (token_f1(one, [other]) == 1) is (family == second)


def test_episodes_are_the_same_at_every_look() -> None:
    episodes = Episodes(FamilyTasks("train"), 10, 3, seed=1)
    assert len(episodes) == 10
    assert episodes[7] == episodes[7] == list(episodes)[7]
    assert episodes[2:4] == [episodes[2], episodes[3]]
    assert Episodes(FamilyTasks("train"), 10, 3, seed=2)[7] != episodes[7]
    with pytest.raises(IndexError):
        episodes[10]


@pytest.mark.parametrize("split", ["dev", "test"])
def test_nothing_is_tuned_on_what_is_asked(split: Any) -> None:
    for seed in range(3):
        asked, tuning = drawn_apart(FamilyTasks(split), 400, 32, 3, seed)
        assert len(asked) == 400 and 30 <= len(tuning) <= 32
        assert not {e.query.question for e in asked} & {e.query.question for e in tuning}
        assert not {e.query for e in asked} & {d for e in tuning for d in e.support}


def test_files_are_tasks(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """Support and question are of one file, never the same row, and cut to the tokens allowed."""
    for task in ("one", "two"):
        rows = [
            Example(
                (f"Passage {i} of {task}. " * 30, "Short."), (Turn(f"Question {i} of {task}?", (f"answer {i} " * 9,)),)
            )
            for i in range(5)
        ]
        write_jsonl(tmp_path / f"{task}.jsonl", rows)
    tasks = FileTasks([tmp_path / "one.jsonl", tmp_path / "two.jsonl"], PromptBuilder(tiny_tokenizer), 40, 6)
    seen = set()
    for episode in Episodes(tasks, 30, 3, seed=0):
        seen.add(episode.task)
        whole = (*episode.support, episode.query)
        assert len({d.question for d in whole}) == 4
        for d in whole:
            assert episode.task in d.question and episode.task in d.passages[0]
            assert sum(len(tiny_tokenizer(p, add_special_tokens=False)["input_ids"]) for p in d.passages) <= 41
            assert len(tiny_tokenizer(d.answer, add_special_tokens=False)["input_ids"]) <= 7
    assert seen == {"one", "two"}
    # To score: every question that demonstrates nothing, once, with all of its answers, whole.
    rows = [Example((f"Passage {i}.",), (Turn(f"{i}?", (f"answer {i} " * 9, f"{i}")),)) for i in range(25)]
    write_jsonl(tmp_path / "more.jsonl", rows)
    more = FileTasks([tmp_path / "more.jsonl"], PromptBuilder(tiny_tokenizer), 40, 6)
    asked = more.asked(100, 2, seed=0)
    questions = [episode.query.question for episode in asked]
    shown = {d.question for episode in asked for d in episode.support}
    assert len(questions) == len(set(questions)) == 25 - 12 and not shown & set(questions)
    answers = {e.turns[0].question: e.turns[0].answers for e in rows}
    assert all(episode.accepted == answers[episode.query.question] for episode in asked)
    tuning = more.tuning(100, 2, seed=0)
    assert not {e.query.question for e in tuning} & set(questions) and len(tuning) == 12
    assert all(e.query.question not in {d.question for d in e.support} for e in tuning)
    assert len(more.asked(4, 2, seed=0)) == 4
    with pytest.raises(DataError, match="more has 25 questions: 12 demonstrations need 26"):
        more.asked(4, 12, seed=0)
    with pytest.raises(DataError, match="5 questions: 5 demonstrations"):
        tasks.draw(random.Random(0), 5)
    # A row given twice is one question: otherwise it could be asked when a demonstration has shown its answer.
    write_jsonl(tmp_path / "twice.jsonl", [*rows, *rows])
    assert FileTasks([tmp_path / "twice.jsonl"], PromptBuilder(tiny_tokenizer), 40, 6).examples["twice"] == rows
    write_jsonl(tmp_path / "blank.jsonl", [*rows, Example(("A.",), (Turn("What is blank?", (" ",)),))])
    with pytest.raises(DataError, match=r"task blank: the first answer to 'What is blank\?' is blank"):
        FileTasks([tmp_path / "blank.jsonl"], PromptBuilder(tiny_tokenizer), 40, 6)
    write_jsonl(tmp_path / "lonely.jsonl", rows[:1])
    with pytest.raises(DataError, match="lonely has one question"):
        FileTasks([tmp_path / "lonely.jsonl"], PromptBuilder(tiny_tokenizer), 40, 6)


def test_files_of_one_name_are_tasks_of_their_own(tmp_path: Path, tiny_tokenizer: Any) -> None:
    files = [tmp_path / folder / "train.jsonl" for folder in ("nq", "triviaqa")]
    for file in files:
        file.parent.mkdir()
        name = file.parent.name
        write_jsonl(file, [Example((f"{i}.", "Two.", "3."), (Turn(f"{name} {i}?", ("yes",)),)) for i in range(4)])
    tasks = FileTasks(files, PromptBuilder(tiny_tokenizer), 40, 6, passages=2)
    seen = {(e.task, e.query.question.split()[0]) for e in Episodes(tasks, 30, 2, seed=0)}
    assert seen == {("nq/train", "nq"), ("triviaqa/train", "triviaqa")}
    assert all(d.passages[1:] == ("Two.",) for e in Episodes(tasks, 5, 2, seed=0) for d in (*e.support, e.query))
    with pytest.raises(DataError, match=r"two of the files are .*nq.train, endings aside"):
        FileTasks([*files, files[0]], PromptBuilder(tiny_tokenizer), 40, 6)


def test_the_digest_is_of_all_that_an_episode_holds() -> None:
    first = Demonstration("Who?", ("A text.",), "me")
    whole = Episode("task", (first, first), first, ("me", "I"))
    others = [replace(first, question="What?"), replace(first, passages=("A", "text.")), replace(first, answer="I")]
    changed = [replace(whole, query=other) for other in others]
    changed += [replace(whole, support=(first, other)) for other in others] + [replace(whole, answers=("me",))]
    digests = [digest([each, whole]) for each in (whole, *changed)] + [digest([whole])]
    assert len(set(digests)) == len(digests)
    assert digest([replace(whole), whole]) == digests[0]


def test_soft_contexts_need_passages() -> None:
    given, bare = Demonstration("Who?", ("A text.",), "me"), Demonstration("What?", (), "it")
    for episode in (Episode("two", (given, bare), given), Episode("two", (given,), bare)):
        with pytest.raises(DataError, match=r"'What\?' of the task two has no passages"):
            with_slots(episode, None, 4)
        assert with_slots(episode, None, None) is episode

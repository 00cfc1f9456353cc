"""Questions that a text itself answers: each answer is where its question says."""

from __future__ import annotations

import random
import re

from hypothesis import given
from hypothesis import strategies as st

from ctx_compress_rag.training.objectives.recall import FOLLOWING, MISSING, recall_turns

WORDS = st.sampled_from(["Halen", "1919", "river", "the", "of", "salt,", "ends.", '"so"', "a", "(b)", "{c}", "\\d"])
TEXTS = st.lists(st.tuples(WORDS, st.sampled_from([" ", "  ", "\n"])), max_size=60).map(
    lambda pairs: "".join(word + space for word, space in pairs)
)


def pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\\{\w+\\\}", "(.*)", re.escape(template)), re.DOTALL)


FOLLOWS, GAPS = [pattern(t) for t in FOLLOWING], [pattern(t) for t in MISSING]


@given(TEXTS, st.integers(1, 8), st.randoms(use_true_random=False))
def test_a_text_answers_its_questions_to_the_letter(text: str, count: int, rng: random.Random) -> None:
    turns = recall_turns(text, count, rng)
    assert len(turns) == len({turn.question for turn in turns}) <= count
    for turn in turns:
        (answer,) = turn.answers
        assert answer and answer == answer.strip()
        if asked := next(filter(None, (p.fullmatch(turn.question) for p in FOLLOWS)), None):
            _, found, rest = text.partition(asked[1])
            assert found and asked[1] not in text[text.index(asked[1]) + 1 :]
            assert rest[0].isspace() and rest.lstrip().startswith(answer)
        else:
            gap = next(filter(None, (p.fullmatch(turn.question) for p in GAPS)))
            before, after = re.escape(gap[1]), re.escape(gap[2])
            assert re.search(rf"(?<!\S){before}\s+{re.escape(answer)}{after}(?!\S)", text)


def test_names_and_figures_are_asked_for_most() -> None:
    text = (
        "the river near Halen was crossed by 400 men on a raft of logs and later by 90 more in the spring of that year"
    )
    answers = [
        t.answers[0] for seed in range(300) for t in recall_turns(text, 1, random.Random(seed)) if "__" in t.question
    ]
    telling = sum(answer.split()[0] in ("Halen", "400", "90") for answer in answers)
    assert len(answers) > 100 and telling / len(answers) > 0.6  # 3 of the 22 words are


def test_a_text_of_few_words_asks_nothing() -> None:
    assert recall_turns("Pell", 6, random.Random(0)) == () == recall_turns(" \n", 6, random.Random(0))

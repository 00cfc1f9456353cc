"""The sentences and lines of which a prompt shows some, and how a chat becomes text."""

import copy
import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ctx_compress_rag.marking.budget import NOTHING, Budget, RetrievedText, ScoredSentence
from ctx_compress_rag.text.chat import chat_text
from ctx_compress_rag.text.sentences import split_passage
from ctx_compress_rag.text.templates import beside_passages

FACTS = [("Amber", "Ana", 1900), ("Poppy", "Ella", 1945), ("Thyme", "Ivo", 1957)]
COLUMNS = "| Garden | Keeper | Opened |"


def rows(form: str) -> str:
    return "\n".join(form.format(*fact) for fact in FACTS)


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        (f"{COLUMNS}\n|---|---|---|\n" + rows("| {} | {} | {} |"), f"{COLUMNS}\n| Poppy | Ella | 1945 |"),
        ("garden,keeper,opened\n" + rows("{},{},{}"), "garden,keeper,opened\nPoppy,Ella,1945"),
        ("garden\tkeeper\topened\n" + rows("{}\t{}\t{}"), "garden\tkeeper\topened\nPoppy\tElla\t1945"),
        ("\\hline\ngarden & opened \\\\\n" + rows("{0} & {2} \\\\"), "garden & opened \\\\\nPoppy & 1945 \\\\"),
        (rows("{}: {}, {}"), "Poppy: Ella, 1945"),
        ("gardens: \n" + rows("  {0}: \n    opened: {2} "), "gardens:\n  Poppy:\n    opened: 1945"),
        (rows("- garden: {0}\n  opened: {2}"), "- garden: Poppy\n  opened: 1945"),
        (rows("[{0}]\nopened = {2}"), "[Poppy]\nopened = 1945"),
        (rows("[{0}]\nopened = {2}\n"), "[Poppy]\nopened = 1945"),
        (rows("1\n00:00:{2},000 --> 00:00:{2},900\n{0}.\n"), "1\n00:00:1945,000 --> 00:00:1945,900\nPoppy."),
        (rows("2026-03-01 12:{2} INFO the garden {0} was opened by {1}"), None),
        ("Steps:\n" + rows("1. Open {}. Wait."), "Steps:\n1. Open Poppy. Wait."),
        (rows("Who keeps {0}?\n{1} does."), "Who keeps Poppy?\nElla does."),
        (rows("The garden {} was opened by {} in the year {}"), "The garden Poppy was opened by Ella in the year 1945"),
        ("| Amber of the old town | Ana and others | 1900 |\n| Poppy of the new town | Ella and others | 1945 |", None),
        ("def keeper(garden):\n" + rows("    if garden == '{}':\n        return '{}'"), None),
    ],
)
def test_a_line_is_a_unit_below_its_heads(text: str, unit: str | None) -> None:
    found = ["\n".join(each.path) for each in split_passage(text)]
    assert any("Poppy" in each and ("Ella" in each or "1945" in each or unit) for each in found)
    assert all(sum(name in each for name, *_ in FACTS) == 1 for each in found if each != "\\hline")
    assert unit is None or unit in found


@pytest.mark.parametrize(
    "prose",
    [
        "The pump's warranty lasts five years and covers\nleaks, but neither frost nor what may\nhappen to it.",
        # Lines of different lengths; names at the lines' beginnings; a separator of tables.
        "The warranty of the pump lasts for five years and covers\nleaks, but neither frost nor what\nmay happen to it "
        "in a winter as cold as that one was.",
        "The harbor of Kessmar was built in 1911 by\nOda Brink, whose company came from the\ntown of Pellmouth on the "
        "other side of\nLake Varn, and it was opened in March of\nNineteen Twelve.",
        "The company Ana & Sons made the pump that\nthe town of Amber bought after the flood of 1911.",
    ],
)
def test_wrapped_sentences_are_not_cut_at_lines(prose: str) -> None:
    assert [each.text for each in split_passage(f"{prose} It ends.")] == [prose, "It ends."]


def test_what_stands_beside_a_passage_on_its_line_is_its_own() -> None:
    assert beside_passages(["Source: ", None, " (page 3)\nWho?"]) == ["(page 3)"]


def test_a_chat_without_a_format_is_paragraphs_and_answers(tiny_tokenizer: Any) -> None:
    plain = copy.copy(tiny_tokenizer)
    plain.chat_template = None
    said = (("system", "Be brief."), ("user", "Who?"), ("assistant", " Ana."), ("user", "When?"))
    text = chat_text(plain, [{"role": role, "content": content} for role, content in said])
    assert text.endswith("Be brief.\n\nWho?\nAnswer: Ana.\n\nWhen?\nAnswer:")


@given(
    st.lists(
        st.sampled_from([*"ab.:|\t,-? \n\r\x0c\u2028", "\n\n", "1. ", "a: b\n", "| a | b |\n", "The pump runs. "])
    ).map("".join)
)
@example("|a: b\n|")
def test_each_word_is_in_a_unit_or_its_heads(text: str) -> None:
    shown = "".join("".join("".join(each.path).split()) for each in split_passage(text))
    assert all(word in shown for word in re.findall(r"\w+", text))


def test_heads_are_shown_once() -> None:
    table = f"{COLUMNS}\n|---|---|---|\n" + rows("| {} | {} | {} |")
    scored = [
        ScoredSentence(each.text, near, each.heads, each.line)
        for each, near in zip(split_passage(table), (1, 0, 2), strict=True)
    ]
    words = 12 + 2 * 7  # the names of the columns, and two of three rows
    shown = Budget([RetrievedText(table, 0, scored)], words, lambda shown: len(shown[0].text.split()))
    [text] = [each.text for each in shown.with_sentences([NOTHING])]
    assert text.startswith(f"{COLUMNS}\n| Amber | Ana | 1900 |\n") and text.endswith("| Thyme | Ivo | 1957 |")
    assert all(
        each.line for each in split_passage("- Amber was opened first, by Ana, in 1900\n- Poppy was opened later")
    )

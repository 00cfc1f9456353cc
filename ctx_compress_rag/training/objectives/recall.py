"""Questions that any text answers: which words follow these, and which are missing here.

Not from a paper. Repeating a passage teaches a decoder to read its slots from the first to the last; an answer must be
found somewhere among them. These questions train the finding, on texts without questions, and on names and figures
above all, which slots lose first.
"""

from __future__ import annotations

import random
import re

from ctx_compress_rag.data.examples import Turn

FOLLOWING = (
    'Which words follow "{cue}"?',
    'How does the text continue after "{cue}"?',
    'Continue from "{cue}".',
)
MISSING = (
    'Which words are missing? "{before} ____{after}"',
    'Fill in the blank: "{before} ____{after}"',
)

_CUE = (3, 7)  # words that are quoted
_CONTINUATION = (3, 12)  # words that are asked for
_GAP = (1, 3)
_TELLING = re.compile(r"[A-Z0-9]")  # how names and figures begin


def recall_turns(text: str, count: int, rng: random.Random) -> tuple[Turn, ...]:
    """At most `count` different questions that `text` answers in its own words; none where it has too few words.

    About half of them ask for the words after a cue that stands once in the text, the others for words left out of a
    piece of it, mostly names and figures.
    """
    words = [match.span() for match in re.finditer(r"\S+", text)]
    turns = [_following(text, words, rng) if rng.random() < 0.5 else _missing(text, words, rng) for _ in range(count)]
    return tuple({turn.question: turn for turn in turns if turn is not None}.values())


def _following(text: str, words: list[tuple[int, int]], rng: random.Random) -> Turn | None:
    length = rng.randint(*_CUE)
    if len(words) <= length:
        return None
    first = rng.randrange(len(words) - length)
    cue = _piece(text, words, first, first + length)
    if text.find(cue) != text.rfind(cue):
        return None
    end = min(len(words), first + length + rng.randint(*_CONTINUATION))
    return Turn(rng.choice(FOLLOWING).format(cue=cue), (_piece(text, words, first + length, end),))


def _missing(text: str, words: list[tuple[int, int]], rng: random.Random) -> Turn | None:
    length = rng.randint(*_GAP)
    last = len(words) - length - 1
    if last < 1:
        return None
    telling = [place for place in range(1, last + 1) if _TELLING.match(text, words[place][0])]
    first = rng.choice(telling) if telling and rng.random() < 0.7 else rng.randint(1, last)
    before = _piece(text, words, max(0, first - rng.randint(*_CUE)), first)
    gap = _piece(text, words, first, first + length).rstrip(".,;:!?")  # an answer is no sentence
    rest = words[min(len(words), first + length + rng.randint(*_CUE)) - 1][1]
    after = text[words[first][0] + len(gap) : rest]
    return Turn(rng.choice(MISSING).format(before=before, after=after), (gap,)) if gap else None


def _piece(text: str, words: list[tuple[int, int]], first: int, end: int) -> str:
    """The text from one word to before another, to the letter."""
    return text[words[first][0] : words[end - 1][1]]

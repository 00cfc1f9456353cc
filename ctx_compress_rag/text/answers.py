"""Scores of answers.

An answer is compared after SQuAD's normalization (Rajpurkar et al., 2016): lower case, without ASCII
punctuation and the articles a, an, the, spaces collapsed. SQuAD has no rule for Chinese and Japanese. Here their
punctuation is removed too, and each of their characters is a word, as in MLQA's mixed segmentation (Lewis et
al., 2020) for Chinese, extended to kana. If the list of answers is empty, the context does not answer the
question, and the right prediction is the empty string (SQuAD 2.0).
"""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence
from itertools import chain

NO_ANSWER = "The text does not say."
"""What a decoder is trained to answer if the passages hold no answer."""

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_BLOCKS = [range(0x3000, 0x3100), range(0xFE30, 0xFE50), range(0xFF00, 0xFFF0)]
"""Blocks with Chinese and Japanese punctuation: CJK symbols and kana, vertical forms, full and half width."""
_PUNCTUATION = [chr(c) for block in _BLOCKS for c in block if unicodedata.category(chr(c)).startswith("P")]
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation + "".join(_PUNCTUATION))
# Iteration marks and zero, kana, Han, half-width kana, rare Han.
CHARACTER = re.compile(
    "([\u3005-\u3007\u3041-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff])"
)
# Accents and vowel signs belong to the letter before them; the joiners occur within words of Persian and Hindi.
# Planes 2, 3 and those above 14 hold no marks, and looking through them takes most of the time.
_PLANES = map(chr, chain(range(0x20000), range(0xE0000, 0xF0000)))
_MARKS = "".join(c for c in _PLANES if unicodedata.category(c)[0] == "M") + "\u200c\u200d"
# EUR1,200.5 and 4:51 are one word each, and so is each character of Chinese and Japanese, which have no spaces.
_LETTER = rf"(?!{CHARACTER.pattern})\w"
WORD = re.compile(rf"{CHARACTER.pattern}[{_MARKS}]*|{_LETTER}(?:{_LETTER}|[{_MARKS}]|(?<=\d)[.,:](?=\d))*")


def normalize_answer(text: str) -> str:
    """Return an answer normalized as SQuAD does, and without Chinese and Japanese punctuation.

    >>> normalize_answer("The  Eiffel Tower, (Paris).")
    'eiffel tower paris'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_WITHOUT_PUNCTUATION)).split())


def _words(text: str) -> list[str]:
    """Return the words of the normalized text. Each Chinese or Japanese character is a word."""
    return CHARACTER.sub(r" \1 ", normalize_answer(text)).split()


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """Return 1.0 if the prediction equals one of the answers (if there are none, "") after normalization, else 0.0."""
    return float(normalize_answer(prediction) in {normalize_answer(answer) for answer in answers or [""]})


def token_f1(prediction: str, answers: Sequence[str]) -> float:
    """Return the harmonic mean of the precision and recall of words (0 to 1), for the answer where it is highest.

    >>> token_f1("in the north of Paris", ["Paris", "London"])
    0.4
    >>> token_f1("首都是东京。", ["东京"])
    0.5714285714285714
    """
    words = _words(prediction)
    return max(_f1(words, _words(answer)) for answer in answers or [""])


def contains_answer(prediction: str, answers: Sequence[str]) -> float:
    """Return 1.0 if one of the answers, normalized, is a substring of the normalized prediction, else 0.0.

    This is the substring accuracy of Simple Context Compression (section 5.1, table 10) and ArcAligner's non-strict
    match (section 4.2). A prediction that lists every candidate gets 1.0 (Simple Context Compression, footnote 5), and
    "party" contains "art", so report this score beside exact match and F1, never instead of them.
    """
    text = normalize_answer(prediction)
    wanted = [normalize_answer(answer) for answer in answers or [""]]
    return float(any(answer in text if answer else not text for answer in wanted))


def mentions_answer(text: str, answers: Sequence[str]) -> bool:
    """Whether a text contains the whole words of one of the answers, side by side ("party" does not contain "art").

    This selects passages that do not answer a question; blank answers do not count. Scores use `contains_answer`.
    """
    words = f" {' '.join(_words(text))} "
    return any(f" {' '.join(answer)} " in words for answer in map(_words, answers) if answer)


def quoted_from(answer: str, text: str) -> bool:
    """Whether an answer that is not blank is in a text, in whole words and numbers; white space may differ."""
    words, text = " ".join(answer.split()), " ".join(text.split())
    if not words or words not in text:
        return False
    within = {place for match in WORD.finditer(text) for place in range(match.start() + 1, match.end())}
    starts = (match.start() for match in re.finditer(f"(?={re.escape(words)})", text))
    return any(within.isdisjoint((start, start + len(words))) for start in starts)


def declined(prediction: str) -> float:
    """Return 1.0 if the prediction is empty or `NO_ANSWER` after normalization, else 0.0."""
    return float(normalize_answer(prediction) in ("", normalize_answer(NO_ANSWER)))


def _f1(predicted: list[str], wanted: list[str]) -> float:
    if predicted == wanted:  # also if both are empty
        return 1.0
    shared = sum((Counter(predicted) & Counter(wanted)).values())
    return 2 * shared / (len(predicted) + len(wanted))

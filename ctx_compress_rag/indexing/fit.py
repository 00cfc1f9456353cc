"""Warn of passages that a bundle reads badly: long ones, and those in languages that its tokenizer hardly knows."""

import logging

import regex

from ctx_compress_rag.bundle.exported import AnyBundle
from ctx_compress_rag.store import Passage
from ctx_compress_rag.text.tokenizing import text_ids

logger = logging.getLogger(__name__)

_WORDS = regex.compile(r"(?<![\p{L}\p{N}])[\p{Ll}\p{Lo}\p{M}]{2,}(?![\p{L}\p{N}])")
"""Lower-case words alone, because names, numbers and code take many tokens in every language."""
_ENGLISH = "the flood took the old mill on the river and its owner sold what was left to the town which built a school"
_FOREIGN = 1.4
"""Tokens per letter, relative to English, from which a language is little known. Measured with the tokenizer of
SmolLM2: 0.7 to 1.1 in English texts, 1.4 in Italian, 1.6 to 2.1 in seven other European languages, more elsewhere."""
_LETTERS = 20  # how many letters are enough to tell: of 2,880 English questions, 12 seemed foreign


class IndexFit:
    """The ids of passages that a bundle reads badly, collected to warn of all of them at once."""

    def __init__(self, bundle: AnyBundle) -> None:
        self._bundle = bundle
        self._long: list[str] = []
        self._foreign: list[str] = []
        self._most = _FOREIGN * self._tokens(_ENGLISH) / len(_ENGLISH)

    def look(self, passage: Passage) -> None:
        """Check a passage, and keep its id if the bundle reads the passage badly."""
        if self._tokens(passage.text) > self._bundle.config.window:
            self._long.append(str(passage.id))
        if self._is_foreign(passage.text):
            self._foreign.append(str(passage.id))

    def warn(self) -> None:
        """Log one warning for all passages that are too long, and one for all in an unknown language."""
        name, window = self._bundle.config.name, self._bundle.config.window
        if self._long:
            logger.warning(
                "%d passages (first: %s) are longer than the %d tokens that %s reads at a time, and are compressed in "
                "parts: shorter ones are answered better",
                *(len(self._long), self._long[0], window, name),
            )
        if self._foreign:
            logger.warning(
                "%d passages (first: %s) take far more tokens than English: the decoder of %s hardly knows their "
                "language, and will answer badly",
                *(len(self._foreign), self._foreign[0], name),
            )

    def warn_of_question(self, question: str) -> None:
        """Log a warning for the first question in a language that the bundle hardly knows, and none after that."""
        if not self._foreign and self._is_foreign(question):
            self._foreign.append(question)
            name = self._bundle.config.name
            logger.warning("the question takes far more tokens than English: %s hardly knows its language", name)

    def _is_foreign(self, text: str) -> bool:
        words = " ".join(_WORDS.findall(text))
        return len(words) >= _LETTERS and self._tokens(words) > self._most * len(words)

    def _tokens(self, text: str) -> int:
        return len(text_ids(self._bundle.tokenizer, text))

"""Find the texts that a question's rare words name (BM25), such as part numbers, which vectors hardly distinguish."""

import logging
import re
from collections.abc import Iterable
from typing import Any

from ctx_compress_rag.errors import needs

_WORD = r"\w+"
_LEADS = 3  # texts that words alone bring to the top, at most
_FAR = 2.0
"""How many times the score of the next text the last of them has. Measured: docs/command_line.md."""


class WordSearch:
    """An index of the words of distinct texts, without the commonest English ones."""

    def __init__(self, texts: Iterable[str]) -> None:
        with needs("sentences"):
            import bm25s
        logging.getLogger("bm25s").setLevel(logging.WARNING)  # its own is DEBUG, whatever the app's is
        self._texts = [text for text in texts if re.search(_WORD, text)]  # BM25 divides by the number of words
        self._index = bm25s.BM25()
        if self._texts:
            self._index.index(self._words(self._texts), show_progress=False)

    def leading(self, question: str) -> list[str]:
        """Return the at most three texts whose scores are far above those of all others, the best first, or none."""
        if not self._texts:
            return []
        most = min(_LEADS + 1, len(self._texts))
        places, scores = self._index.retrieve(self._words([question]), k=most, show_progress=False)
        found = [*scores[0].tolist(), 0.0]
        for number in range(min(_LEADS, most)):
            if found[number] > 0 and found[number] >= _FAR * found[number + 1]:
                return [self._texts[place] for place in places[0][: number + 1]]
        return []

    @staticmethod
    def _words(texts: list[str]) -> Any:
        from bm25s import tokenize

        return tokenize(texts, token_pattern=_WORD, stopwords="en", show_progress=False)

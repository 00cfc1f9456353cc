"""Cut text into passages of limited length, at paragraphs and sentences if possible."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Any

from ctx_compress_rag.extras import needs

_SEPARATORS = [
    r"\n[ \t]*\n\s*",
    # Also after the full stop, exclamation and question mark of Chinese and Japanese, which no space follows.
    r"(?<=[.!?])[\"')\]]*\s+|(?<=[\u3002\uff01\uff1f])|\n",
    r"\s+",
    "",
]
_HEADINGS = re.compile(r"(?:(?:\A|(?<=\n\n))#{1,6}\s.*\n*)+")


def chunk(text: str, tokenizer: Any, max_tokens: int, *, markdown: bool = False) -> Iterator[str]:
    """Cut a text into passages, in order; only white space between passages is dropped.

    Paragraphs are packed together as long as they fit. A paragraph that is too long by itself is
    cut at sentences, a sentence at spaces, a word anywhere.

    Args:
        text: the text.
        tokenizer: the decoder's transformers tokenizer.
        max_tokens: maximum tokens of a passage, counted without special tokens; at least 8.
        markdown: start a new passage at each heading; headings that follow each other stay together.
    """

    @lru_cache(4096)  # the splitter asks again for what it joins
    def count(part: str) -> int:
        return len(tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"])

    starts = [found.start() for found in _HEADINGS.finditer(text)] if markdown else []
    for start, end in pairwise([0, *starts, len(text)]):
        yield from _cut(text[start:end], count, max_tokens, max_tokens)


def _cut(text: str, count: Callable[[str], int], size: int, most: int) -> Iterator[str]:
    with needs("index"):
        from langchain_text_splitters import RecursiveCharacterTextSplitter

    splitter = RecursiveCharacterTextSplitter(
        _SEPARATORS,
        keep_separator="end",
        is_separator_regex=True,
        chunk_size=size,
        chunk_overlap=0,
        length_function=count,
    )
    for passage in splitter.split_text(text):
        # The splitter adds up counts of pieces; joined, they may have more tokens.
        if (excess := count(passage) - most) > 0 and len(passage) > 1:
            yield from _cut(passage, count, max(1, size - excess), most)
        else:
            yield passage

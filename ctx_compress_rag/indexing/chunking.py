"""Cut text into passages of limited length, at headings, paragraphs and sentences if possible."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ctx_compress_rag.extras import needs

# Up to 16,384 characters, to the last blank line in them, else to the last space, else all: the splitter's time grows
# with the square of what has neither, and memory holds the tokens of one such part only.
_PART = re.compile(r".{1,16384}(?:\n\s*\n|\Z)|.{1,16384}\s|.{1,16384}", re.DOTALL)


def chunk(text: str, tokenizer: Any, max_tokens: int, *, markdown: bool = False) -> Iterator[str]:
    """Cut a text into passages, lazily and in order; only white space between passages is dropped.

    Args:
        text: the text.
        tokenizer: the decoder's transformers tokenizer.
        max_tokens: maximum tokens of a passage, counted without special tokens; at least 8.
        markdown: cut at headings, lists and code blocks, too.

    Raises:
        MissingExtraError: semantic-text-splitter is not installed.
    """
    with needs("retrieval"):
        from semantic_text_splitter import MarkdownSplitter, TextSplitter

    def tokens(part: str) -> int:
        return len(tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"])

    splitter = (MarkdownSplitter if markdown else TextSplitter).from_callback(tokens, max_tokens)
    for part in _PART.findall(text):
        yield from splitter.chunks(part)

"""Tokenise a prompt once, with holes where soft contexts go."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ctx_compress_rag.errors import CtxCompressError


class PromptTokenizer:
    """Tokenises text with holes as one string.

    Tokenising the parts one by one would add a space at the start of each with some tokenizers, so
    each hole is a special token of its own while the whole prompt is tokenised. Its name is random:
    a user cannot type it.
    """

    def __init__(self, tokenizer: Any) -> None:
        from tokenizers import AddedToken

        self.tokenizer = tokenizer
        self._with_hole = copy.deepcopy(tokenizer)
        self._hole = f"<|soft_context_{secrets.token_hex(8)}|>"
        self._with_hole.add_tokens([AddedToken(self._hole, special=True, normalized=False)], special_tokens=True)
        self._hole_id = self._with_hole.convert_tokens_to_ids(self._hole)

    def encode(self, parts: Sequence[str], add_special_tokens: bool = False) -> list[Tensor]:
        """Token ids of the text around the holes: one int64 tensor per part, some perhaps empty.

        Args:
            parts: the text before, between and after the holes.
            add_special_tokens: let the tokenizer add its BOS; leave False where a chat template did.
        """
        joined = self._hole.join(parts)
        ids = torch.tensor(self._with_hole(joined, add_special_tokens=add_special_tokens)["input_ids"], dtype=torch.long)
        holes = (ids == self._hole_id).nonzero().flatten().tolist()
        if len(holes) != len(parts) - 1:
            raise CtxCompressError(
                f"the tokenizer kept {len(holes)} of {len(parts) - 1} places for soft contexts; "
                "it drops or merges special tokens and cannot be used with markers"
            )
        bounds = [-1, *holes, len(ids)]
        return [ids[a + 1 : b] for a, b in zip(bounds, bounds[1:], strict=False)]

"""Render a chat, and tokenise a prompt once, with holes where soft contexts go."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ctx_compress_rag.errors import ConfigError, CtxCompressError


def chat_text(tokenizer: Any, chat: Sequence[Mapping[str, str]]) -> str:
    """`chat` in the tokenizer's chat format, BOS and all, or joined plainly where it has none.

    Templates that know no system role (Gemma 2, early Mistral) get the system message at the start
    of the first user message: LangChain's and LlamaIndex's chains put the context there.

    Raises:
        ConfigError: the template refuses the chat, for example for its order of roles.
    """
    from jinja2 import TemplateError

    if not getattr(tokenizer, "chat_template", None):
        return (tokenizer.bos_token or "") + "\n\n".join(message["content"] for message in chat) + "\nAnswer:"
    try:
        return _render(tokenizer, chat)
    except TemplateError as error:
        refusal = error
    if len(chat) > 1 and chat[0]["role"] == "system" and chat[1]["role"] == "user":
        both = f"{chat[0]['content']}\n\n{chat[1]['content']}"
        try:
            return _render(tokenizer, [{"role": "user", "content": both}, *chat[2:]])
        except TemplateError as error:
            refusal = error
    raise ConfigError(f"the decoder's chat template refuses roles {[m['role'] for m in chat]}: {refusal}") from refusal


def _render(tokenizer: Any, chat: Sequence[Mapping[str, str]]) -> str:
    return str(tokenizer.apply_chat_template([dict(m) for m in chat], tokenize=False, add_generation_prompt=True))


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
        encoded = self._with_hole(joined, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        ids = torch.tensor(encoded, dtype=torch.long)
        holes = (ids == self._hole_id).nonzero().flatten().tolist()
        if len(holes) != len(parts) - 1:
            raise CtxCompressError(
                f"the tokenizer kept {len(holes)} of {len(parts) - 1} places for soft contexts; "
                "it drops or merges special tokens and cannot be used with markers"
            )
        bounds = [-1, *holes, len(ids)]
        return [ids[a + 1 : b] for a, b in pairwise(bounds)]

"""Render a chat as text, and tokenize a prompt in one piece, with holes where soft contexts go."""

import copy
import secrets
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctx_compress_rag.errors import ConfigError, CtxCompressError
from ctx_compress_rag.text.tokenizing import bos_token_id, replace_surrogates, text_ids, text_parts, text_tokens

ROLES = ("system", "user", "assistant", "tool")  # who may speak in a chat
THOUGHTS = ("reasoning", "thinking", "redacted_thinking", "reasoning_content", "reasoning_details")
"""What other models' thoughts are called, as blocks of a message or as its fields; a chat goes on without them."""

_CUE = "Answer:"


def chat_text(tokenizer: Any, chat: Sequence[Mapping[str, str]]) -> str:
    """Return a chat as text, with BOS, in the tokenizer's chat format or, without one, with answers after "Answer:".

    If the format has no system role (Gemma 2, early Mistral), the system message is put before the first user message,
    because LangChain's and LlamaIndex's chains put the context into it. Text of users and documents must have been
    through `PromptTokenizer.as_text`. Raises ConfigError for a role that is unknown or that the format refuses.
    """
    if unknown := [message["role"] for message in chat if message["role"] not in ROLES]:
        raise ConfigError(f"unknown role {unknown[0]!r}: give one of {', '.join(ROLES)}")
    if not getattr(tokenizer, "chat_template", None):
        text = ""
        for message in chat:
            if message["role"] == "assistant":  # as in `answer_ids`
                text += f"\n{_CUE} {message['content'].lstrip()}"
            else:
                text += ("\n\n" if text else "") + message["content"]
        return ("" if bos_token_id(tokenizer) is None else tokenizer.bos_token) + f"{text}\n{_CUE}"
    try:
        return _render(tokenizer, chat)
    except ConfigError:
        if [message["role"] for message in chat[:2]] != ["system", "user"]:
            raise
    both = f"{chat[0]['content']}\n\n{chat[1]['content']}"
    return _render(tokenizer, [{"role": "user", "content": both}, *chat[2:]])


def takes_system(tokenizer: Any) -> bool:
    try:
        _render(tokenizer, [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}])
    except ConfigError:
        return False
    return True


def answer_ids(tokenizer: Any, answer: str) -> list[int]:
    """Return an answer's token ids after `chat_text`, without the end token; without a format it follows "Answer:"."""
    if getattr(tokenizer, "chat_template", None) or not answer.strip():
        return text_ids(tokenizer, answer)
    both = text_tokens(tokenizer, f"{_CUE} {answer.lstrip()}")
    return [id for id, (_, end) in zip(both.ids, both.offsets, strict=True) if end > len(_CUE)]


def _render(tokenizer: Any, chat: Sequence[Mapping[str, str]]) -> str:
    messages = [dict(message) for message in chat]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # a template is a program: it may raise anything
        roles = [message["role"] for message in chat]
        raise ConfigError(f"the decoder's chat template refuses roles {roles}: {error}") from error
    for message in chat:
        # Templates trim messages, and some leave out the thoughts of earlier answers.
        if message["role"] != "assistant" and message["content"].strip() not in text:
            role = message["role"]
            raise ConfigError(f"the decoder's chat template leaves out or alters the {role} message: fix the template")
    return text


class PromptTokenizer:
    """A tokenizer of prompts with holes, which reads each prompt as one string.

    The whole is tokenized at once, because some tokenizers add a space to each part. A special token stands for each
    hole (`hole`) and each cut that keeps a text from being a control token. No user can type its random name.
    """

    def __init__(self, tokenizer: Any) -> None:
        from tokenizers import AddedToken

        self.tokenizer = tokenizer
        self.hole, self._cut = (f"<|{name}_{secrets.token_hex(8)}|>" for name in ("soft_context", "cut"))
        self._with_hole = _copy(tokenizer)
        added = [AddedToken(name, special=True, normalized=False) for name in (self.hole, self._cut)]
        self._with_hole.add_tokens(added, special_tokens=True)
        self._hole_id, self._cut_id = self._with_hole.convert_tokens_to_ids([self.hole, self._cut])

    def as_text(self, text: str) -> str:
        """Return a user's or document's text with cuts, for `encode` only, so that it holds no control token."""
        return self._cut.join(text_parts(self.tokenizer, text))

    def as_separate_text(self, text: str) -> str:
        """Return `as_text(text)` between two cuts, so that in a raw prompt no control token crosses its ends."""
        return f"{self._cut}{self.as_text(text)}{self._cut}"

    def encode(self, parts: Sequence[str], add_special_tokens: bool = False) -> list[NDArray[np.int64]]:
        """Return the token ids of the text around the holes, one int64 array (maybe empty) for each part.

        `add_special_tokens` adds BOS, if no chat template has. CtxCompressError if the tokenizer drops special tokens.
        """
        joined = replace_surrogates(self.hole.join(parts))
        encoded = self._with_hole(joined, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        ids = np.array([id for id in encoded if id != self._cut_id], np.int64)
        holes = np.flatnonzero(ids == self._hole_id).tolist()
        if len(holes) != len(parts) - 1:
            raise CtxCompressError(
                f"the tokenizer kept {len(holes)} of {len(parts) - 1} special tokens: markers need another decoder"
            )
        bounds = [-1, *holes, len(ids)]
        return [ids[a + 1 : b] for a, b in pairwise(bounds)]


def _copy(tokenizer: Any) -> Any:
    """Return a copy to add tokens to. It shares the vocabulary, which would take half a second to copy."""
    backend = tokenizer.backend_tokenizer
    shared = type(backend)(backend.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (own := getattr(backend, part)) is not None:
            setattr(shared, part, own)
    shared.add_tokens([token for _, token in sorted(backend.get_added_tokens_decoder().items())])
    return copy.deepcopy(tokenizer, {id(backend): shared})

"""Turn prompts with markers into the token ids and slots that a decoder reads, whatever engine runs it."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ctx_compress_rag.bundle.exported import AnyDecoder
from ctx_compress_rag.errors import ConfigError, FingerprintMismatchError, MissingPassageError, PayloadError
from ctx_compress_rag.methods.base.rendering import TransientPart
from ctx_compress_rag.prompt import Message, Prompt, PromptLike, PromptTemplate, Quotable
from ctx_compress_rag.store import SoftContextStore
from ctx_compress_rag.store.marker import MarkedPassage, Marker, OnUnreadable, marked_passages, read_parts
from ctx_compress_rag.store.passage import MAX_CHARACTERS
from ctx_compress_rag.store.record import FoundRecord
from ctx_compress_rag.strict import as_positive_int, check_choice
from ctx_compress_rag.text.chat import PromptTokenizer, chat_text
from ctx_compress_rag.text.quoting import find_quotations
from ctx_compress_rag.text.templates import PASSAGE_SEPARATOR, answers_before, beside_passages, without_template
from ctx_compress_rag.text.tokenizing import check_text_length

logger = logging.getLogger(__name__)
Slotted = FoundRecord | TransientPart
S = TypeVar("S")
T = TypeVar("T")


class PromptPreparer:
    """A converter of prompts for a bundle's decoder, with the arguments and errors of `decoder.Decoder`."""

    def __init__(
        self,
        bundle: AnyDecoder,
        store: SoftContextStore | None = None,
        *,
        on_unreadable: OnUnreadable = "error",
        max_prompt_tokens: int | None = None,
    ) -> None:
        check_choice("on_unreadable", on_unreadable, OnUnreadable)
        if store is not None and bundle.fingerprint != store.bundle.fingerprint:
            raise FingerprintMismatchError(
                f"the store holds slots of bundle {store.bundle.fingerprint[:12]}, but this decoder belongs to bundle "
                f"{bundle.fingerprint[:12]}: load the store's bundle, or index again with this one"
            )
        self.bundle = bundle
        self.store = store
        self.on_unreadable = on_unreadable
        self.max_prompt_tokens = (
            None if max_prompt_tokens is None else as_positive_int("max_prompt_tokens", max_prompt_tokens)
        )
        self._tokenizer = PromptTokenizer(bundle.tokenizer)

    def token_ids(self, text: str) -> list[int]:
        """Return the decoder's token ids of `text` without BOS; a slot of its markers is a padding token, not text."""
        texts, markers = self._around_markers(read_parts(self._split(text)))
        first, *rest = (part.tolist() for part in self._tokenizer.encode([self._tokenizer.as_text(t) for t in texts]))
        ids: list[int] = first
        for marker, part in zip(markers, rest, strict=True):
            ids += [self.bundle.tokenizer.pad_token_id] * self.bundle.positions(marker.slots) + part
        return ids

    def count_chat_tokens(self, chat: Sequence[Message]) -> int:
        """Return how many positions a chat takes, with the tokens of its template and text, and its slots."""
        around = [self._around_markers(read_parts(self._split(message["content"]))) for message in chat]
        ids = self._chat_ids(chat, [texts for texts, _ in around])
        slots = sum(self.bundle.positions(marker.slots) for _, markers in around for marker in markers)
        return sum(map(len, ids)) + slots

    def prepare(self, prompts: Sequence[PromptLike], *, extractive: bool = False) -> list[Prompt]:
        """Return prompts' ids and slots, and what answers may quote if `extractive`; raise as `Decoder.generate`."""
        if not isinstance(prompts, Sequence) or isinstance(prompts, str | bytes):
            raise ConfigError(f"prompts is one {type(prompts).__name__}: give a list of prompts")
        contents = [self._contents(index, prompt) for index, prompt in enumerate(prompts)]
        found = [[self._split(text, self.on_unreadable) for text in texts] for texts in contents]
        split = [list(map(read_parts, texts)) for texts in found]
        markers = list(dict.fromkeys(p for texts in split for parts in texts for p in parts if isinstance(p, Marker)))
        soft, texts_of, said = self._read(markers, extractive)
        # Control tokens in a raw prompt come from the caller, but those in its passages are text.
        in_raw = {marker: self._tokenizer.as_separate_text(text) for marker, text in texts_of.items()}
        said |= texts_of
        sides = self.bundle.sides
        prepared = []
        for index, (prompt, messages, passages) in enumerate(zip(prompts, split, found, strict=True)):
            shown = in_raw if isinstance(prompt, str) else texts_of
            read = [[shown.get(p, p) if isinstance(p, Marker) else p for p in parts] for parts in messages]
            # Before joining: a prompt may contain the marker of a long passage thousands of times.
            check_text_length(
                f"prompt {index}", sum(len(p) for r in read for p in r if isinstance(p, str)), self.bundle.window
            )
            around = [self._around_markers(parts) for parts in read]
            texts = [texts for texts, _ in around]
            ids = self._raw_ids(texts[0]) if isinstance(prompt, str) else self._chat_ids(prompt, texts)
            slots = [soft[marker] for _, markers in around for marker in markers]
            made = PromptTemplate.without_answers(ids).fill(slots)
            if any(marker.shown is not None for _, markers in around for marker in markers) and "blend" in sides:
                made = replace(made, side="blend")
            self._check_length(index, made)
            if extractive:
                made = replace(made, quotable=self._quotable(index, prompt, passages, said))
            prepared.append(made)
        return prepared

    def _contents(self, index: int, prompt: PromptLike) -> list[str]:
        """Return the contents of a chat's messages, or a raw prompt alone; raise ConfigError for a malformed prompt."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if not isinstance(messages, Iterable):
            raise ConfigError(f"prompt {index} is a {type(prompt).__name__}: give a string or a list of messages")
        contents = []
        for message in messages:
            match message:
                case {"role": str(), "content": str(content)}:
                    contents.append(content)
                case _:
                    raise ConfigError(f"prompt {index}: a message needs role and content, both str, got {message!r}")
        if not contents or not contents[-1].strip():
            raise ConfigError(f"prompt {index} is empty: its last message must ask something")
        window = self.bundle.window
        check_text_length(f"prompt {index}", sum(map(len, contents)), window)
        if window is not None and len(contents) > window:  # each takes at least one token
            raise ConfigError(
                f"prompt {index} has {len(contents)} messages, over the window of {window} tokens: leave old ones out"
            )
        return contents

    def _raw_ids(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """Return the token ids of a raw prompt's texts before, between and after its slots."""
        bos = self.bundle.tokenizer.bos_token or ""
        begun = bool(bos) and texts[0].startswith(bos)
        if not self.bundle.tokenizer.chat_template:  # else the caller wrote the prompt in the decoder's format
            lead = bos if begun else ""
            first, *rest = [texts[0].removeprefix(lead), *texts[1:]]
            texts = [lead + self._tokenizer.as_text(first), *map(self._tokenizer.as_text, rest)]
        return self._tokenizer.encode(texts, add_special_tokens=not begun)

    def _chat_ids(self, chat: Sequence[Message], texts: Sequence[Sequence[str]]) -> list[NDArray[np.int64]]:
        """Return the token ids of a chat before, between and after its slots; `texts` has a list for each message."""
        hole = self._tokenizer.hole
        contents = [hole.join(map(self._tokenizer.as_text, parts)) for parts in texts]
        whole = [{"role": message["role"], "content": text} for message, text in zip(chat, contents, strict=True)]
        asked = chat_text(self.bundle.tokenizer, whole)
        if any(len(parts) > 1 for parts in texts):
            asked += self.bundle.answer_prefix
        return self._tokenizer.encode(asked.split(hole))

    def _around_markers(self, parts: Sequence[str | Marker]) -> tuple[list[str], list[Marker]]:
        """Return the texts around the markers, with the bundle's separators between markers, and the markers."""
        texts, markers = [""], []
        for part in parts:
            if isinstance(part, Marker):
                markers.append(part)
                texts.append("")
            else:
                texts[-1] += part
        for place in range(1, len(markers)):
            if texts[place] == PASSAGE_SEPARATOR:
                texts[place] = self.bundle.separator
        return texts, markers

    def _split(self, text: str, on_unreadable: OnUnreadable = "text") -> list[str | MarkedPassage]:
        return [text] if self.store is None else marked_passages(self.store.split(text, None, on_unreadable))

    def _read(
        self, markers: Sequence[Marker], words: bool
    ) -> tuple[dict[Marker, Any], dict[Marker, str], dict[Marker, str]]:
        """Return markers' slots (positions, dim), texts of those without slots and, if `words`, of those with slots."""
        if self.store is None:
            return {}, {}, {}
        bundle: Any = self.bundle  # only a bundle has a store
        parts = self._parts(markers)
        soft = self._decoded(
            parts, lambda part: part.soft, "some slots cannot be read, so texts are used where possible"
        )
        rest = {marker: part for marker, part in parts.items() if marker not in soft}
        texts = self._decoded(rest, lambda part: part.text, "some passages cannot be read at all")
        shown = {marker: parts[marker] for marker in soft if words}
        said = self._decoded(shown, lambda part: part.text, "some passages cannot be quoted")
        lost = {marker: texts.get(marker, marker.text) for marker in markers if marker not in soft}
        return {marker: bundle.embed(each) for marker, each in soft.items()}, lost, said

    def _parts(self, markers: Sequence[Marker]) -> dict[Marker, Slotted]:
        """Return what markers stand for, in one call of the store unless something is missing or changed."""
        if self.store is None or not markers:
            return {}
        try:
            return dict(zip(markers, self.store.read(markers), strict=True))
        except (MissingPassageError, PayloadError):
            if self.on_unreadable == "error":
                raise
        read = self.store.read
        return self._decoded(
            dict(zip(markers, markers, strict=True)), lambda one: read([one])[0], "some passages cannot be read"
        )

    def _decoded(self, parts: Mapping[Marker, S], decode: Callable[[S], T], said: str) -> dict[Marker, T]:
        """Return what is decoded of each part; one that is missing or damaged raises or logs a warning."""
        found: dict[Marker, T] = {}
        for marker, part in parts.items():
            try:
                found[marker] = decode(part)
            except (MissingPassageError, PayloadError) as error:
                if self.on_unreadable == "error":
                    raise
                logger.warning("%s: %s", said, error)
        return found

    def _quotable(
        self,
        index: int,
        prompt: PromptLike,
        messages: Sequence[Sequence[str | MarkedPassage]],
        said: Mapping[Marker, str],
    ) -> Quotable | None:
        """Return what an answer may quote; None if the prompt has no passages, so that the answer is free.

        That is what markers tell to be passages, text beside them, and earlier answers. Without markers, it is what a
        user says that seems to be neither question nor template, but not in a chat's first message, which instructs.
        """
        roles = ["user"] if isinstance(prompt, str) else [message["role"] for message in prompt]
        marked = [part for parts in messages for part in parts if not isinstance(part, str)]
        own = [part for passage in marked for part in (*passage.shown, passage.marker)]
        texts = dict.fromkeys(said.get(part, "") if isinstance(part, Marker) else part for part in own)
        if marked:
            around = [[part if isinstance(part, str) else None for part in parts] for parts in messages]
            texts |= dict.fromkeys(text for parts in around for text in beside_passages(parts))
        else:
            asked = list(zip(roles, messages, strict=True))
            later = asked if len(asked) == 1 else asked[1:]
            texts |= dict.fromkeys(without_template(str(parts[0])) for role, parts in later if role == "user")
        if not any(text.strip() for text in texts):
            return None
        for role, parts in zip(roles, messages, strict=True):
            told = [part for part in parts if isinstance(part, str)]
            texts |= dict.fromkeys(told if role == "assistant" else map(answers_before, told))
        if (length := sum(map(len, texts))) > MAX_CHARACTERS:
            raise ConfigError(
                f"prompt {index} and its passages have {length:,} characters, but an extractive answer quotes from "
                f"{MAX_CHARACTERS:,} at most: use fewer passages"
            )
        return find_quotations(texts, self.bundle.tokenizer)

    def _check_length(self, index: int, prompt: Prompt) -> None:
        most, window = self.max_prompt_tokens, self.bundle.window
        if most is not None and prompt.length > most:
            reason = f"at most {most} are allowed here"
        elif window is not None and prompt.length >= window:
            reason = f"the model's window of {window} must hold an answer too"
        else:
            return
        raise ConfigError(
            f"prompt {index} has {prompt.length} tokens ({prompt.slots} of them slots), but {reason}: use a coarser "
            "ratio, fewer passages or a shorter prompt"
        )

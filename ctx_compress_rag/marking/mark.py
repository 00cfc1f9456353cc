"""Turn retrieved texts into the markers that stand for them in a prompt, and markers back into texts."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Annotated, Literal, NamedTuple, TypeVar

from pydantic import Field, TypeAdapter

from ctx_compress_rag import errors
from ctx_compress_rag.bundle.exported import AnyBundle
from ctx_compress_rag.errors import short_repr
from ctx_compress_rag.marking.budget import Budget, RetrievedText, ScoredSentence, ShownPassage, nearest_sentences
from ctx_compress_rag.store import SoftContextStore
from ctx_compress_rag.store.marker import Marker, OnUnreadable, check_scope, escaped_markers, marked_passages
from ctx_compress_rag.store.passage import MAX_CHARACTERS, Passage, StoredPassage, checked_passage
from ctx_compress_rag.strict import as_int, as_list, as_positive_int, check_choice, validate_argument
from ctx_compress_rag.text.templates import PASSAGE_SEPARATOR
from ctx_compress_rag.text.tokenizing import replace_surrogates, text_ids

logger = logging.getLogger(__name__)
_warn_once = cache(logger.warning)
T = TypeVar("T")
_SHARE: TypeAdapter[float] = TypeAdapter(Annotated[float, Field(ge=0, le=1)])

MAX_EXPANDED = 16 << 20
"""Maximum characters to which one call of `expand` or `mark_texts` expands markers: more than any LLM reads."""

OnMissing = Literal["compress", "error", "text"]
"""What to do with a passage for which the store has no usable soft context; other passages are not affected.

The passage is missing, stored with another text or damaged, or it cannot be stored because its text is too long or not
Unicode, because nothing can be written, or because it holds the marker of a passage that was deleted.

- "compress": compress and store the passage; if that is impossible, keep its text, with a warning that names it.
- "error": raise an error that names the passage.
- "text": keep its text, with a warning unless the passage is just missing.
"""


class MarkedText(NamedTuple):
    """A retrieved text: `text` has its markers expanded, `shown` is what a prompt shows instead ("" for nothing)."""

    text: str
    shown: str


def mark_texts(
    store: SoftContextStore,
    texts: Sequence[str],
    ids: Sequence[str | None] | None = None,
    *,
    ratio: int | None = None,
    token_budget: int | None = None,
    text_share: float | None = None,
    scores: Sequence[object] | None = None,
    on_missing: OnMissing = "compress",
    scope: str | None = None,
    question: str | None = None,
) -> list[str]:
    """Return, for each retrieved text, what a prompt shows in its place: its marker, sentences, both, or the text.

    `frameworks.MarkingPostprocessor` describes the options and the errors. Without `scores`, a budget
    takes the first text as the best. A text is looked up by its id in `ids`, then by its hash, and stored under the
    hash if the id is None, cannot be stored, or belongs to another text. Markers in a text are expanded first, so that
    marking twice does not store a marker as a passage. In what stays text, markers lose their colon, so that no LLM
    reads them as markers. Thread-safe.
    """
    marking = Marking(store, ratio, token_budget, text_share, on_missing, scope)
    return [marked.shown for marked in marking.mark(texts, ids, scores, question)]


@dataclass(eq=False)
class _Passage:
    """A retrieved text while it is marked. `id` is its id in the store, None if it stays text; messages say `name`."""

    name: str
    text: str
    id: str | None = None
    shown: str | None = None
    record: StoredPassage | None = None  # as last read


@dataclass
class Marking:
    """The options of `mark_texts`, checked once (ConfigError), to mark the texts of many calls."""

    store: SoftContextStore
    ratio: int | None = None
    token_budget: int | None = None
    text_share: float | None = None
    on_missing: OnMissing = "compress"
    scope: str | None = None

    def __post_init__(self) -> None:
        self.ratio = ratio = None if self.ratio is None else as_int("ratio", self.ratio)
        budget = None if self.token_budget is None else as_positive_int("token_budget", self.token_budget)
        self.text_share = None if self.text_share is None else validate_argument("text_share", self.text_share, _SHARE)
        if ratio is not None and budget is not None:
            raise errors.ConfigError(f"ratio={ratio} and token_budget={budget}: give one, the other follows from it")
        self.token_budget = budget
        if budget is not None or self.text_share:
            base = self.store.base_ratio
            self.store.bundle.compressor.merge_factor(base, base)  # refuses a bundle that needs the question
        if ratio is not None:
            self.store.bundle.compressor.check_ratio(ratio, self.store.base_ratio)
        check_choice("on_missing", self.on_missing, OnMissing)
        if self.scope is not None:
            check_scope(self.scope)

    def mark(
        self,
        texts: Sequence[str],
        ids: Sequence[str | None] | None = None,
        scores: Sequence[object] | None = None,
        question: str | None = None,
    ) -> list[MarkedText]:
        """Mark the texts of one call as `mark_texts` does, and return for each also its expanded text."""
        texts = as_list("texts", texts)
        ids = [None] * len(texts) if ids is None else as_list("ids", ids)
        relevances = None if scores is None else [*map(relevance_score, as_list("scores", scores))]
        for what, given in (("ids", ids), ("scores", relevances)):
            if given is not None and len(given) != len(texts):
                raise errors.ConfigError(f"{len(given)} {what} for {len(texts)} texts: give one, or None, per text")
        passages = self._expanded(texts, ids)
        self._find([passage for passage in passages if passage.id is not None])
        try:
            self._render(passages, relevances, question)
        except (errors.MissingPassageError, errors.PayloadError):
            if self.on_missing == "error":
                raise
            for passage in passages:
                if passage.id is not None:
                    self._repair(passage, passage.id)
            self._render(passages, relevances, question)
        return [
            MarkedText(each.text, escaped_markers(each.text) if each.shown is None else each.shown) for each in passages
        ]

    def _expanded(self, texts: Sequence[str], ids: Sequence[str | None]) -> list[_Passage]:
        """Return the passages with their markers expanded, and with an id if they can be stored."""
        passages, room = [], MAX_EXPANDED  # many short texts may hold the marker of one long passage
        for place, (text, id) in enumerate(zip(texts, ids, strict=True)):
            if not isinstance(text, str):
                raise errors.ConfigError(f"texts[{place}] is a {type(text).__name__}: give its text")
            passage = _Passage(f"texts[{place}]" if id is None else short_repr(id), text)
            passages.append(passage)
            try:
                parts = self.store.split(text, self.scope, "text")
                if any(isinstance(part, Marker) for part in parts):
                    passage.text = _joined(self.store, parts, min(MAX_CHARACTERS, room))
                    room -= len(passage.text)
                if passage.text.strip():
                    storable = isinstance(id, str) and id and replace_surrogates(id) == id
                    passage.id = checked_passage(passage.text, id if storable else None, place).id
            except (errors.ConfigError, errors.MissingPassageError, errors.PayloadError) as error:
                self._leave(passage, error)
        return passages

    def _find(self, passages: Sequence[_Passage]) -> None:
        """Set the id under which each text is stored, or None; compress missing texts if the options say so."""
        missing = self._located(passages)
        if self.on_missing == "compress":
            self._compress(missing)
            return
        if missing and len(missing) == len(passages):
            self.store.warn_if_empty()
        if missing and self.on_missing == "error":
            raise errors.MissingPassageError(
                f"passage {missing[0].name} is not stored with this text ({len(missing)} missing): "
                "add it to the store, or choose on_missing='compress' or 'text'"
            )
        for passage in missing:
            passage.id = None

    def _located(self, passages: Sequence[_Passage]) -> list[_Passage]:
        """Set the id under which each text is stored, and return the passages that are not stored, ids unchanged."""
        texts, ids = [passage.text for passage in passages], [str(passage.id) for passage in passages]
        stored = self.store.stored_ids(texts, ids, self.scope)
        for passage, id in zip(passages, stored, strict=True):
            passage.id = id or passage.id
        return [passage for passage, id in zip(passages, stored, strict=True) if id is None]

    def _compress(self, passages: Sequence[_Passage]) -> None:
        """Compress and store passages together or, if that fails, one by one; a passage that fails alone stays text."""
        try:
            texts, ids = [passage.text for passage in passages], [str(passage.id) for passage in passages]
            for passage, id in zip(passages, self.store.ensure(texts, ids, self.scope), strict=True):
                passage.id = id
        except errors.StoreWriteError as error:
            for passage in self._located(passages):
                self._leave(passage, error)
        except (errors.ConfigError, errors.StoreError) as error:
            if len(passages) == 1:
                self._leave(passages[0], error)
            else:
                for passage in passages:
                    self._compress([passage])

    def _repair(self, passage: _Passage, id: str) -> None:
        """Compress a passage again if its record is damaged or was deleted; if that is impossible, it stays text."""
        store, scope = self.store, self.scope
        try:
            try:
                store.get([id], scope, [passage.text])
            except errors.PayloadError:
                [record] = store.get_passages([id], scope, [passage.text])
                if self.on_missing != "compress" or record is None:
                    raise
                store.delete([id], scope)
                store.add([Passage(passage.text, id, record.metadata)], progress=False, scope=scope)
            else:
                self._find([passage])
        except (errors.PayloadError, errors.StoreWriteError) as error:
            self._leave(passage, error)

    def _leave(self, passage: _Passage, error: Exception) -> None:
        """Keep a passage's text, in a form that tokenizers can read, or raise, as the options say."""
        if self.on_missing == "error":
            raise error
        logger.warning("left as text: passage %s (%s)", passage.name, error)
        passage.id, passage.text = None, replace_surrogates(passage.text)

    def _render(self, passages: Sequence[_Passage], scores: Sequence[float] | None, question: str | None) -> None:
        """Set what is shown in place of each passage; None keeps its text."""
        shown = self._planned(passages, scores, question)
        if shown is not None:
            beside_text = any(each.text for each in shown)
            for passage, each in zip(passages, shown, strict=True):
                passage.shown = each.text
                if each.slots or each.text:
                    self._end(passage, each.text, each.factor if each.slots else None, beside_text)
            return
        store = self.store
        stored = [passage for passage in passages if passage.id is not None]
        ids, texts = [str(passage.id) for passage in stored], [passage.text for passage in stored]
        rendered = store.bundle.compressor.render(store, texts, ids, self.ratio, question, self.scope)
        kept: list[_Passage] = []
        for passage, text in zip(stored, rendered, strict=True):
            # Text that a method keeps may have the form of a marker.
            parts = store.split(text, self.scope, "text")
            passage.shown = "".join(part.text if isinstance(part, Marker) else escaped_markers(part) for part in parts)
            if any(isinstance(part, str) for part in parts):
                kept.append(passage)
        self._read(kept)
        for passage in kept:
            self._end(passage, passage.shown or "", None, True)

    def _planned(
        self, passages: Sequence[_Passage], scores: Sequence[float] | None, question: str | None
    ) -> list[ShownPassage] | None:
        """Return what is shown of each passage within the budget; None if the ratio alone decides."""
        bundle, store = self.store.bundle, self.store
        share = self._share_for(question, len(passages))
        texts = [escaped_markers(passage.text) for passage in passages]
        if share is None and self.token_budget is None:
            return None
        self._read(passages)
        records = [passage.record for passage in passages]
        near = None
        if share is not None:
            packed = ["" if record is None else record.sentences for record in records]
            near = self._nearest(texts, question or "", packed)
        if near is None and self.token_budget is None:
            return None
        slots = [0 if record is None else record.n_slots for record in records]
        ends = [text.strip() or text for text in texts]  # as templates may do, after which a marker's count is wrong
        retrieved = list(map(RetrievedText, ends, slots, [()] * len(texts) if near is None else near))
        count = partial(shown_positions, bundle)
        size = self.token_budget
        if size is None:  # what this ratio gives all passages
            factor = bundle.compressor.merge_factor(self.ratio or store.base_ratio, store.base_ratio)
            size = count([each.as_slots(factor) for each in retrieved])
        budget = Budget(retrieved, size, count, nestable=bundle.compressor.nestable)
        if budget.fits(budget.texts()):
            return budget.texts()
        if near is None or share is None:
            return budget.soft()
        places = [place for place, passage in enumerate(passages) if passage.text.strip()]
        best = max(places, key=lambda place: scores[place]) if scores else places[0]
        return budget.mixed(best, share)

    def _share_for(self, question: str | None, passages: int) -> float | None:
        """Return the share (0 to 1) of the budget for sentences; None for soft contexts alone."""
        share = self.text_share
        if not (question and question.strip()):
            if share:
                raise errors.ConfigError(
                    f"text_share={share} needs the question: give it to compress_documents (LangChain; a "
                    "ContextualCompressionRetriever does) or postprocess_nodes (LlamaIndex; a query engine does)"
                )
            return None
        if share is None and passages > 1:
            share = self.store.bundle.config.text_share
        return share or None

    def _nearest(self, texts: Sequence[str], question: str, stored: Sequence[str]) -> list[list[ScoredSentence]] | None:
        """Return the passages' sentences; None without a sentence encoder, unless the options ask for sentences."""
        try:
            return nearest_sentences(texts, question, stored)
        except errors.MissingExtraError as error:
            if self.text_share is not None:
                raise
            _warn_once("soft contexts alone are shown, although sentences beside them answer better: %s", str(error))
            return None

    def _read(self, passages: Sequence[_Passage]) -> None:
        """Set the record of each passage, as stored with this text; None if there is none."""
        stored = [passage for passage in passages if passage.id is not None]
        found = self.store.get_passages([str(p.id) for p in stored], self.scope, [p.text for p in stored])
        records = dict(zip(map(id, stored), found, strict=True))
        for passage in passages:
            passage.record = records.get(id(passage))

    def _end(self, passage: _Passage, text: str, factor: int | None, beside_text: bool) -> None:
        """Set what is shown of a passage to `text` and, if it is stored, its marker."""
        if passage.record is not None:
            marker = self.store.marker_of(passage.record, factor, self.scope, len(text) if beside_text else None)
            passage.shown = f"{text} {marker}" if text else marker


def relevance_score(score: object) -> float:
    """Return a retriever's or reranker's score as a float, None and NaN as -inf. Raise ConfigError if not a number."""
    if score is None:
        return -math.inf
    try:
        number = float(score)  # type: ignore[arg-type]  # Decimal, numeric strings, tensors of one number
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise errors.ConfigError(f"a passage has the relevance {short_repr(score)}: give a number, or None") from error
    return -math.inf if math.isnan(number) else number


def shown_positions(bundle: AnyBundle, shown: Sequence[ShownPassage]) -> int:
    """Return how many positions of a prompt the shown passages take, with the separators between them."""
    texts, slots, after_slots = [""], 0, False
    for each in shown:
        if not each.text and not each.slots:
            continue
        if slots or texts != [""]:
            texts[-1] += bundle.separator if after_slots and not each.text else PASSAGE_SEPARATOR
        texts[-1] += each.text
        after_slots = each.slots > 0
        if after_slots:
            texts[-1] += " " * bool(each.text)
            texts.append("")
            slots += bundle.positions(each.slots)
    return slots + sum(len(text_ids(bundle.tokenizer, text)) for text in texts)


def expand(store: SoftContextStore, text: str, scope: str | None = None, on_unreadable: OnUnreadable = "text") -> str:
    """Return a prompt with each marker of this key and scope, and the text that it ends, replaced by the whole text.

    Raises ConfigError for over `MAX_EXPANDED` characters, and errors as `SoftContextStore.split` and `read`.
    """
    return _joined(store, store.split(text, scope, on_unreadable), MAX_EXPANDED)


def _joined(store: SoftContextStore, parts: Sequence[str | Marker], most: int) -> str:
    # Count before joining: a short text may hold the marker of one long passage many thousand times.
    found = marked_passages(parts)
    markers = [part.marker for part in found if not isinstance(part, str)]
    originals = iter([each.text for each in store.read(markers)] if markers else ())
    texts = [part if isinstance(part, str) else next(originals) for part in found]
    if markers and (length := sum(map(len, texts))) > most:
        raise errors.ConfigError(f"{len(markers):,} markers expand to {length:,} characters, over {most:,}: use fewer")
    return "".join(texts)

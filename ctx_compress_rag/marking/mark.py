"""Turn retrieved texts into the markers that stand for them in a prompt, and back; shared by the frameworks."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import compress
from typing import TYPE_CHECKING, Literal, TypedDict, cast, get_args

from ctx_compress_rag.bundle.config import whole
from ctx_compress_rag.errors import ConfigError, MissingPassageError, PayloadError, StoreWriteError
from ctx_compress_rag.marking.budget import TEXT, Relevance, allot
from ctx_compress_rag.ratios import check_reduction
from ctx_compress_rag.store import marker as marking
from ctx_compress_rag.store.marker import Marker, OnUnreadable, check_on_unreadable, defused
from ctx_compress_rag.store.passage import MAX_CHARACTERS, Passage, content_id
from ctx_compress_rag.text.tokenizing import text_ids

if TYPE_CHECKING:
    from ctx_compress_rag.bundle.bundle import Bundle
    from ctx_compress_rag.store import Compresses, SoftContextStore

logger = logging.getLogger(__name__)

MAX_EXPANDED = 16 << 20
"""Maximum characters to which one call of `expand` or `mark` expands markers: more than any LLM reads."""

OnMissing = Literal["compress", "error", "text"]
"""What to do if a passage is missing, stored with another text or damaged: compress it, raise, or keep its text.

If the store cannot be written to, "compress" also keeps the text, with a warning that names the passages.
"""


def settled(
    store: SoftContextStore,
    ratio: int | None,
    reduction: int | None,
    token_budget: int | None = None,
    on_missing: str = "compress",
    scope: str | None = None,
    on_unreadable: str = "warn",
    mode: str | None = None,
) -> tuple[int | None, int | None]:
    """Ratio and reduction, with deprecated arguments translated: `ratio=` of a RAM bundle was the reduction.

    Refuses arguments that `mark` could never serve with this store.

    Raises:
        ConfigError: more than one size is given, or one that the store's bundle cannot use; the budget is below 1; the
            scope is blank; or `on_missing`, `on_unreadable` or `mode` is unknown.
        RatioError: the ratio cannot be made from the store's base ratio, or the reduction is below 2.
    """
    closely, name = store.bundle.compressor.question_aware, store.bundle.config.name
    if mode is not None:
        if mode != ("close_reading" if closely else "soft"):
            raise ConfigError(f"mode={mode!r} is not that of bundle {name!r}: leave it out, each bundle has its own")
        warnings.warn("mode= is deprecated: leave it out, each bundle has its own", DeprecationWarning, stacklevel=3)
    if closely and ratio is not None and reduction is None:
        message = f"ratio={ratio} is deprecated for a bundle that reads closely (ram): give reduction={ratio}"
        warnings.warn(message, DeprecationWarning, stacklevel=3)
        ratio, reduction = None, ratio
    check_on_unreadable(on_unreadable)
    if scope is not None:
        marking.check_scope(scope)
    if on_missing not in get_args(OnMissing):
        raise ConfigError(f"on_missing={on_missing!r}: choose one of {', '.join(get_args(OnMissing))}")
    sizes = {"ratio": ratio, "reduction": reduction, "token_budget": token_budget}
    given = [f"{key}={value}" for key, value in sizes.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)}: give one of them, the other follows from it")
    if token_budget is not None and token_budget < 1:
        raise ConfigError(f"token_budget={token_budget}: a budget is a number of tokens, 1 or more")
    if closely:
        if token_budget is not None:
            raise ConfigError(f"{given[0]}: bundle {name!r} reads closely (ram): give a reduction instead")
        if reduction is not None:
            check_reduction(reduction)
    elif reduction is not None:
        raise ConfigError(f"{given[0]}: bundle {name!r} was not trained to choose what to read (ram): give a ratio")
    elif ratio is not None:
        store.merge_factor(ratio)
    return ratio, reduction


class Size(TypedDict, total=False):
    """How short passages become: a ratio or a reduction."""

    ratio: int
    reduction: int


def size(bundle: Compresses, number: int) -> Size:
    """The number as a keyword argument of `mark`: the reduction for a RAM bundle, the ratio for any other."""
    return {"reduction": number} if bundle.compressor.question_aware else {"ratio": number}


def mark(
    store: SoftContextStore,
    texts: Sequence[str],
    ids: Sequence[str] | None = None,
    *,
    ratio: int | None = None,
    reduction: int | None = None,
    token_budget: int | None = None,
    scores: Sequence[Relevance] | None = None,
    on_missing: OnMissing = "compress",
    scope: str | None = None,
    question: str | None = None,
    on_unreadable: OnUnreadable = "warn",
) -> list[str]:
    """Replace each retrieved text with the marker that stands for it, or keep the text.

    In close reading (a RAM bundle), each text keeps the segments that the question needs, with markers in place of
    the others: see `marking.close_reading.close_read`. The slots of these markers are only in the store object's
    memory, for this question: the LLM must use the same object.

    Blank texts stay as they are. A text that already holds a marker is expanded first, so that marking twice does not
    store the marker as a passage. A stored passage whose slots are damaged counts as missing. Thread-safe.

    Args:
        store: where the soft contexts are.
        texts: passages, in any order; the order is kept. Without scores, a budget assumes that the best come first.
        ids: their ids in the store; by default hashes of the texts.
        ratio: source tokens per slot, a multiple of the store's base ratio, which is the default.
        reduction: in close reading, instead of a ratio: how many times shorter all texts together become, 2 or
            more; by default the smallest that the bundle was trained for.
        token_budget: instead of a ratio, the maximum tokens of all texts together: slots, and tokens of what stays
            text, as the LLM counts them. The more relevant a passage, the finer its ratio; the best stay text if
            there is room: see `marking.budget.allot`. The rest of the prompt (template, question, separators) comes
            on top.
        scores: with a budget, the relevance of each text: higher is better, None comes last.
        on_missing: see `OnMissing`.
        scope: tenant or user; by default the scope of `stores.markers.scope`, otherwise the store's.
        question: the question; needed for close reading, unused otherwise.
        on_unreadable: what to do with a text that holds a marker whose passage is gone, or whose record was changed
            after sealing: raise ("error"), or keep this text as it is, with a warning ("warn") or without ("text").
            With "error", a marker of another key or scope raises, too; otherwise that marker counts as text. A
            marker in what stays text loses its colon, so that no LLM reads it as a marker.

    Raises:
        ConfigError: an argument has an impossible value, an id has two texts, close reading has no question, or
            the markers in the texts stand for more than `MAX_EXPANDED` characters together.
        RatioError: the ratio cannot be made, or the passages do not fit into the budget at any ratio.
        MissingPassageError: with on_missing="error", a passage is not stored with this text.
        PayloadError: with on_missing="error", a record is damaged.
        UnreadableMarkerError, MissingPassageError, PayloadError: see `on_unreadable`.
    """
    ratio = None if ratio is None else whole("ratio", ratio)
    token_budget = None if token_budget is None else whole("token_budget", token_budget)
    closely = store.bundle.compressor.question_aware
    reduction = None if reduction is None else whole("reduction", reduction)
    ratio, reduction = settled(store, ratio, reduction, token_budget, on_missing, scope, on_unreadable)
    if closely and not (question and question.strip()):
        raise ConfigError(
            "close reading needs the question: give it to compress_documents (LangChain; a "
            "ContextualCompressionRetriever does), as query_bundle or query_str (LlamaIndex), or as question= of mark"
        )
    if ids is not None and len(ids) != len(texts):
        raise ConfigError(f"{len(ids)} ids for {len(texts)} texts: give one id per text")
    if scores is not None and len(scores) != len(texts):
        raise ConfigError(f"{len(scores)} scores for {len(texts)} texts: give one score, or None, per text")
    opened = _all_expanded(store, texts, scope, on_unreadable)
    texts = [defused(old) if new is None else new for old, new in zip(texts, opened, strict=True)]
    names = [content_id(text) for text in texts] if ids is None else list(ids)
    wanted = [i for i, text in enumerate(opened) if text and text.strip()]
    stored: Sequence[bool] | None = None
    if on_missing == "compress":
        try:
            store.ensure([texts[i] for i in wanted], [names[i] for i in wanted], scope)
        except StoreWriteError as error:
            stored = store.has([texts[i] for i in wanted], [names[i] for i in wanted], scope)
            left = [names[i] for i, there in zip(wanted, stored, strict=True) if not there]
            logger.warning("left as text, since they cannot be stored: passages %s (%s)", left, error)
    else:
        stored = store.has([texts[i] for i in wanted], [names[i] for i in wanted], scope)
        missing = [names[i] for i, there in zip(wanted, stored, strict=True) if not there]
        if missing and on_missing == "error":
            raise MissingPassageError(
                f"passage {missing[0]!r} is not stored with this text ({len(missing)} missing): "
                "add it to the store, or choose on_missing='compress' or 'text'"
            )
    if stored is not None:
        wanted = [i for i, there in zip(wanted, stored, strict=True) if there]
    read = [texts[i] for i in wanted]
    chosen = [names[i] for i in wanted]
    how = (reduction if closely else ratio, token_budget, scores, scope, question)
    try:
        return _shown(store, texts, wanted, chosen, *how)
    except MissingPassageError:
        if on_missing != "compress":
            raise
        # Between storing and signing, an id was given to another text. That cannot happen to a hash as id.
        chosen = store.ensure(read, scope=scope)
    except PayloadError:
        if on_missing == "error":
            raise
        good = [_is_whole(store, *each, scope, on_missing, on_unreadable) for each in zip(read, chosen, strict=True)]
        wanted, chosen = list(compress(wanted, good)), list(compress(chosen, good))
    return _shown(store, texts, wanted, chosen, *how)


def _excuse(error: Exception, on_unreadable: OnUnreadable, message: str, what: str) -> None:
    """Raise the error, log a warning, or do nothing, as `on_unreadable` says."""
    if on_unreadable == "error":
        raise error
    if on_unreadable == "warn":
        logger.warning(message, what, error)


def _is_whole(
    store: SoftContextStore, text: str, id: str, scope: str | None, on_missing: OnMissing, on_unreadable: OnUnreadable
) -> bool:
    """Whether a stored passage can be read; with on_missing="compress", damaged slots are compressed again first."""
    try:
        try:
            store.get([id], scope, [text])
        except PayloadError:
            [stored] = store.get_passages([id], scope, [text])
            if on_missing != "compress" or stored is None:
                raise
            store.delete([id], scope)
            store.add([Passage(text, id, stored.metadata)], progress=False, scope=scope)
    except (PayloadError, StoreWriteError) as error:
        _excuse(error, on_unreadable, "left as text, since its record cannot be read: passage %r (%s)", id)
        return False
    return True


def _shown(
    store: SoftContextStore,
    texts: Sequence[str],
    wanted: Sequence[int],
    ids: Sequence[str],
    number: int | None,
    token_budget: int | None,
    scores: Sequence[Relevance] | None,
    scope: str | None,
    question: str | None,
) -> list[str]:
    """The texts with markers at the `wanted` places, which are stored under `ids`; `number` is as in `size`."""
    read = [texts[i] for i in wanted]
    if store.bundle.compressor.question_aware:
        markers = _close_read(store, read, ids, number, question or "", scope)
    elif token_budget is None:
        markers = store.markers(ids, store.base_ratio if number is None else number, scope, read)
    else:
        return _within(store, texts, dict(zip(wanted, ids, strict=True)), token_budget, scores, scope)
    by_place = dict(zip(wanted, markers, strict=True))
    return [_safe(store, by_place.get(i, text), scope) for i, text in enumerate(texts)]


def stored_ids(
    store: SoftContextStore, texts: Sequence[str], ids: Sequence[str | None], scope: str | None = None
) -> list[str]:
    """The ids to give to `mark` for retrieved texts, which may have other ids in the vector store than in this store.

    A text's own id; or the hash of the text, if it has no id, is stored only under the hash, or shares its id with
    another text (two indexes that count from one). Blank texts are not looked up.

    Args:
        store: where the soft contexts are.
        texts: the retrieved texts.
        ids: their ids in the app; None or "" for none.
        scope: as in `mark`.
    """
    by_text = [content_id(text) for text in texts]
    first: dict[str, str] = {}  # an id that two texts share can only stand for the first of them
    names = [
        id if id and first.setdefault(id, hashed) == hashed else hashed for id, hashed in zip(ids, by_text, strict=True)
    ]
    places = [place for place, text in enumerate(texts) if text.strip()]
    wanted = [texts[place] for place in places]
    under_own = store.has(wanted, [names[place] for place in places], scope)
    under_text = under_own if all(under_own) else store.has(wanted, scope=scope)
    for place, own, other in zip(places, under_own, under_text, strict=True):
        if other and not own:
            names[place] = by_text[place]
    return names


def _close_read(
    store: SoftContextStore,
    texts: Sequence[str],
    ids: Sequence[str],
    reduction: int | None,
    question: str,
    scope: str | None,
) -> list[str]:
    from ctx_compress_rag.marking.close_reading import close_read

    if not texts:
        return []
    reduction = reduction or min(cast("Bundle", store.bundle).config.ratios)
    return close_read(store, texts, ids, reduction=reduction, question=question, scope=scope)


def expand(store: SoftContextStore, text: str, scope: str | None = None) -> str:
    """Replace each marker in a prompt with the text it stands for, for an LLM that cannot read markers.

    Markers of another key or scope stay as they are.

    Raises:
        MissingPassageError: a passage was deleted or its text changed since the marker was written, or the
            slots of a skimmed part are no longer in memory.
        ConfigError: the texts have more than `MAX_EXPANDED` characters together.
    """
    return _written_out(store, store.split(text, scope), MAX_EXPANDED)


def try_expand(
    store: SoftContextStore, text: str, scope: str | None = None, on_unreadable: OnUnreadable = "warn"
) -> str | None:
    """Like `expand`, but None if a marker's passage cannot be read and `on_unreadable` is not "error".

    Raises:
        UnreadableMarkerError, MissingPassageError, PayloadError: on_unreadable is "error", and a marker cannot be read.
        ConfigError: the expanded text would be longer than a passage may be.
    """
    parts = store.split(text, scope, on_unreadable)
    try:
        return _written_out(store, parts, MAX_CHARACTERS)
    except (MissingPassageError, PayloadError) as error:
        _excuse(error, on_unreadable, "left as text, since a marker in it cannot be read: %.80r (%s)", text)
        return None


def _all_expanded(
    store: SoftContextStore, texts: Sequence[str], scope: str | None, on_unreadable: OnUnreadable
) -> list[str | None]:
    opened, written = [], 0
    for text in texts:
        new = try_expand(store, text, scope, on_unreadable)
        written += len(new) if new is not None and new != text else 0
        # Each text is short enough for a passage, but many texts may hold the marker of one long passage.
        if written > MAX_EXPANDED:
            raise ConfigError(
                f"the markers of {len(texts):,} texts stand for more than {MAX_EXPANDED:,} characters: give fewer texts"
            )
        opened.append(new)
    return opened


def _written_out(store: SoftContextStore, parts: Sequence[str | Marker], most: int) -> str:
    # Count before joining: a short text may hold the marker of one long passage many thousand times.
    markers = [part for part in parts if isinstance(part, Marker)]
    originals = iter(store.text_of(markers) if markers else ())
    shown = [next(originals) if isinstance(part, Marker) else part for part in parts]
    if markers and (length := sum(map(len, shown))) > most:
        raise ConfigError(
            f"a text with its {len(markers):,} markers expanded would have {length:,} characters, and at most "
            f"{most:,} are allowed: use fewer markers"
        )
    return "".join(shown)


def _safe(store: SoftContextStore, text: str, scope: str | None) -> str:
    """A text in which only markers that can be read look like markers."""
    parts = store.split(text, scope, "text")
    return "".join(part.text if isinstance(part, Marker) else defused(part) for part in parts)


def _within(
    store: SoftContextStore,
    texts: Sequence[str],
    stored_as: Mapping[int, str],
    budget: int,
    scores: Sequence[Relevance] | None,
    scope: str | None,
) -> list[str]:
    """Texts and markers that take at most `budget` tokens; `stored_as` has the ids of stored texts by place."""
    passages = store.get_passages(list(stored_as.values()), scope, [texts[place] for place in stored_as])
    slots = [0] * len(texts)
    for place, passage in zip(stored_as, passages, strict=True):
        slots[place] = 0 if passage is None else passage.n_slots
    safe = [_safe(store, text, scope) for text in texts]
    factors = allot(
        _token_counts(store, safe, scope),
        slots,
        budget,
        base_ratio=store.base_ratio,
        scores=scores,
        nestable=store.bundle.compressor.nestable,
    )
    shown = safe
    for factor in set(factors) - {TEXT}:
        places = [i for i, each in enumerate(factors) if each == factor]
        written = store.markers(
            [stored_as[i] for i in places], factor * store.base_ratio, scope, [texts[i] for i in places]
        )
        for place, marker in zip(places, written, strict=True):
            shown[place] = marker
    return shown


def _token_counts(store: SoftContextStore, texts: Sequence[str], scope: str | None) -> list[int]:
    """Tokens of each text in a prompt, without BOS."""
    bundle = cast("Bundle", store.bundle)
    counts = [len(text_ids(bundle.tokenizer, text)) for text in texts]
    # The LLM would read a valid marker in a passage's own text as slots.
    nested = [i for i, text in enumerate(texts) if any(not isinstance(part, str) for part in store.split(text, scope))]
    if nested:
        from ctx_compress_rag.decoding.decoder import TransformersDecoder

        decoder = TransformersDecoder(bundle, store)
        with nullcontext() if scope is None else marking.scope(scope):
            for i in nested:
                counts[i] = decoder.count_tokens(texts[i])
    return counts

"""From a folder of files to an index: what `ctx-compress index` does."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from ctx_compress_rag.app.chunking import chunk
from ctx_compress_rag.app.documents import DOCUMENTS, TEXTS, read_file, readable
from ctx_compress_rag.app.passage_index import PassageIndex, make_passage
from ctx_compress_rag.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

DEFAULT_CHUNK_TOKENS = 256
_MIN_CHUNK_TOKENS = 16


@dataclass
class Scan:
    """The files of a folder.

    Attributes:
        folder: the folder.
        texts: text by path within the folder, `/` between its parts; blank where a file is empty.
        unread: files of a type that can be read, but not these.
        other: files of other types, counted by suffix.
    """

    folder: Path
    texts: dict[str, str] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    other: Counter[str] = field(default_factory=Counter)

    def skipped(self) -> str:
        """What was not read, by type; "" where all was."""
        empty = sum(not text.strip() for text in self.texts.values())
        unread = Counter(PurePath(name).suffix.lower() for name in self.unread)
        if not (empty or unread or self.other):
            return ""
        parts = [f"{empty} empty", f"{unread.total()} unreadable{_by_type(unread)}"]
        parts += [f"{self.other.total()} of other types{_by_type(self.other)}"] if self.other else []
        return f"skipped files: {', '.join(parts)}{_hint(self.other)}"


def _by_type(counts: Counter[str]) -> str:
    return f" ({', '.join(f'{count} {suffix}' for suffix, count in counts.most_common())})" if counts else ""


def _hint(others: Counter[str]) -> str:
    wanted = [suffix for suffix in DOCUMENTS if suffix in others]
    return f"; {', '.join(wanted)} can be read after pip install 'ctx-compress-rag[documents]'" if wanted else ""


@dataclass(frozen=True)
class IndexReport:
    """What `update_index` did, in passages unless it says files.

    Attributes:
        files: files read.
        added: compressed now.
        unchanged: stored before, not touched.
        replaced: removed because their file's text changed.
        pruned: removed because their file is gone.
        vanished: kept though their file is gone, since pruning was not asked for.
    """

    files: int
    added: int
    unchanged: int
    replaced: int
    pruned: int
    vanished: int


def scan_folder(folder: str | Path) -> Scan:
    """Read all text files and documents of a folder and the folders in it, by name; hidden ones are left out.

    A file that is empty or cannot be read is skipped with a warning, one of another type is counted.

    Raises:
        DataError: there is no such folder, or no text in it that can be read.
    """
    folder = Path(folder)
    suffixes = readable()
    if not folder.is_dir():
        raise DataError(f"{str(folder)!r} is no folder: give the folder that your {', '.join(suffixes)} files are in")
    scan = Scan(folder)
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if any(part.startswith(".") for part in inside.parts) or not path.is_file():
            continue
        if path.suffix.lower() not in suffixes:
            scan.other[path.suffix.lower() or "without a suffix"] += 1
            continue
        try:
            text = scan.texts[inside.as_posix()] = read_file(path)
            if not text.strip():
                logger.warning("skipped %s: it is empty", path)
        except DataError as error:
            logger.warning("skipped %s: %s", path, error)
            scan.unread.append(inside.as_posix())
    if not any(text.strip() for text in scan.texts.values()):
        found = len(scan.texts) + len(scan.unread)
        none = f"it has no {', '.join(suffixes[:-1])} or {suffixes[-1]} files{_hint(scan.other)}"
        reason = f"none of its {found} files can be read or has text" if found else none
        raise DataError(f"nothing to index in {str(folder)!r}: {reason}")
    return scan


def update_index(
    index: PassageIndex,
    scan: Scan,
    *,
    chunk_tokens: int | None = None,
    prune: bool = False,
    progress: bool = True,
) -> IndexReport:
    """Bring an index up to date with a folder; only new and changed passages are compressed.

    Passages of a file whose text changed are always replaced. Passages of a file that is gone are removed
    with `prune` alone, and only if they came from this folder; those of a file that is there but cannot be
    read stay.

    Args:
        index: the index.
        scan: the folder's files, from `scan_folder`.
        chunk_tokens: most decoder tokens of a passage; None takes 256, or the bundle's window if that is less.
        prune: remove the passages of files that are gone.
        progress: show progress bars.

    Raises:
        ConfigError: `chunk_tokens` is too small.
    """
    if chunk_tokens is None:
        chunk_tokens = min(DEFAULT_CHUNK_TOKENS, index.bundle.config.max_tokens)
    if chunk_tokens < _MIN_CHUNK_TOKENS:
        raise ConfigError(f"passages of {chunk_tokens} tokens are too short: give {_MIN_CHUNK_TOKENS} or more")
    root = str(scan.folder.resolve())
    passages = {
        passage.id: passage
        for source, text in scan.texts.items()
        for part in chunk(text, index.bundle.tokenizer, chunk_tokens, markdown=not source.lower().endswith(TEXTS[0]))
        for passage in [make_passage(part, source, root)]
    }
    empty = sum(not text.strip() for text in scan.texts.values())
    stored = index.sources(root)
    stale = [id for id, source in stored.items() if id not in passages and source in scan.texts]
    gone = [id for id, source in stored.items() if source not in scan.texts and source not in scan.unread]
    repaired = index.store.discard_damaged()
    if repaired:
        logger.warning("%d records were damaged, %s first: compressed again", len(repaired), repaired[0])
    report = index.add(list(passages.values()), progress)
    index.remove(stale + gone if prune else stale)
    return IndexReport(
        files=len(scan.texts) - empty,
        added=report.added,
        unchanged=report.unchanged + report.updated,  # an id fixes the text: such an update is of metadata
        replaced=len(stale),
        pruned=len(gone) if prune else 0,
        vanished=0 if prune else len(gone),
    )

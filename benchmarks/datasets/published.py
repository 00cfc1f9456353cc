"""Convert the papers' data sets, from their published files or the hub, to JSONL for training and evaluation."""

import gzip
import json
import logging
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from ctx_compress_rag.data.examples import SUMMARY_REQUEST, Example, Turn, write_jsonl
from ctx_compress_rag.errors import DataError

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]
"""A row as it is published, from a file or the hub."""


@dataclass(frozen=True)
class Published:
    """A data set.

    Attributes:
        hub: its name and configuration on the hub; None if the hub has no passages for it.
        read: reads the rows of a local file.
        convert: makes examples from a row.
        download: fetches a split's published file, if the hub has the set only in that form.
    """

    hub: tuple[str, str | None] | None
    read: Callable[[Path], Iterable[Row]]
    convert: Callable[[Row], Iterable[Example]]
    download: Callable[[str], Path] | None = None


def convert(
    name: str, source: str | Path | None, output: str | Path, *, split: str = "validation", limit: int | None = None
) -> int:
    """Write one of `SETS` as rows of question, answers, context and evidence; returns the number of questions.

    Evidence is the sentences, paragraphs or passages that a set marks. Sets that only give answers have none: stage ram
    then searches the passages for the answers, word by word. Without a `source`, its published file, the set is
    fetched from the hub, of which `split` is taken.

    Raises:
        DataError: the set, file or split does not exist, the file is damaged or has another form, or has no passages.
    """
    if name not in SETS:
        raise DataError(f"no data set {name!r}: choose from {', '.join(SETS)}")
    published = SETS[name]
    rows = published.read(Path(source)) if source is not None else _from_hub(name, published, split)
    unfinished = Path(f"{output}.part")
    left_out: Counter[str] = Counter()
    try:
        written = write_jsonl(unfinished, islice(_checked(published.convert, rows, left_out), limit))
        if not written and left_out:
            raise DataError(_NO_PASSAGES)
        if not written:
            where = f" in the split {split!r}" if source is None else ""
            raise DataError(f"{source or name} has no question with an answer{where}")
        for why, count in left_out.items():
            logger.warning("%d questions have %s and are left out", count, why)
        unfinished.replace(output)
        return written
    except DataError:  # a ValueError, too
        raise
    except (FileNotFoundError, IsADirectoryError) as error:
        raise DataError(f"no data file at {error.filename}") from None
    except (EOFError, zlib.error) as error:
        raise DataError(f"cannot read {source or name} ({error}): download it again") from None
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, gzip.BadGzipFile) as error:
        raise DataError(f"{source or name} is not in the form of {name} ({error!r}): give the published file") from None
    finally:
        unfinished.unlink(missing_ok=True)


def _checked(one: Callable[[Row], Iterable[Example]], rows: Iterable[Row], left_out: Counter[str]) -> Iterator[Example]:
    """Yield the examples that have passages and answers, with the evidence that a passage contains verbatim.

    Counts questions without passages in `left_out`. Retrieved passages ("ctxs") replace a set's own. Skips rows that
    MuSiQue marks as not answered by their paragraphs.
    """
    for row in rows:
        if not row.get("answerable", True):
            continue
        for example in (_open_domain if row.get("ctxs") else one)(row):
            if not example.passages:
                left_out["no passages"] += 1
                continue
            for turn in example.turns:
                answers = tuple(dict.fromkeys(a for a in turn.answers if a.strip()))
                if answers:
                    evidence = (e for e in turn.evidence if e.strip() and any(e in p for p in example.passages))
                    yield Example(
                        example.passages, (Turn(turn.question.strip(), answers, "", tuple(dict.fromkeys(evidence))),)
                    )


_NO_PASSAGES = (
    "the rows have questions and no passages: retrieve some first, and give a file whose rows have "
    'them under "ctxs", as DPR writes them'
)
_PARQUET = "refs/convert/parquet"
"""The hub's Parquet conversion of sets that have a loading script, which datasets 4 does not run."""


def _from_hub(name: str, published: Published, split: str) -> Iterable[Row]:
    if published.hub is None:
        raise DataError(_NO_PASSAGES)
    hub, config = published.hub
    try:
        if published.download:
            return published.read(published.download(split))
        from datasets import load_dataset

        try:
            rows: Iterable[Row] = load_dataset(hub, config, split=split, streaming=True)
        except RuntimeError:
            # In the Parquet conversion a configuration is a folder.
            rows = load_dataset(hub, data_dir=config, revision=_PARQUET, split=split, streaming=True)
    except (RuntimeError, ValueError, OSError) as error:
        raise DataError(
            f"cannot get the split {split!r} of {hub} from the hub ({error}): download its published file and run "
            f"python -m benchmarks data {name} FILE"
        ) from None
    return rows


def _news_download(split: str) -> Path:
    """Fetch MultiNews, which the hub has as its published files, behind a loading script."""
    from huggingface_hub import hf_hub_download

    stem = {"validation": "val"}.get(split, split)
    source, _ = (
        hf_hub_download("alexfabbri/multi_news", f"data/{stem}{ending}", repo_type="dataset")
        for ending in (".src.cleaned", ".tgt")
    )
    return Path(source)


# Readers of files


def _open(path: Path) -> Any:
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


def _lines(path: Path) -> Iterator[Row]:
    """Rows of JSON lines, without MRQA's header, or of one JSON list."""
    with _open(path) as file:
        first = file.read(1)
        file.seek(0)
        if first == "[":
            yield from json.load(file)
            return
        yield from (row for line in file if line.strip() and "header" not in (row := json.loads(line)))


def _squad_file(path: Path) -> Iterator[Row]:
    with _open(path) as file:
        for article in json.load(file)["data"]:
            for paragraph in article["paragraphs"]:
                yield from ({**qa, "context": paragraph["context"]} for qa in paragraph["qas"])


def _news_file(path: Path) -> Iterator[Row]:
    """A file of documents, such as test.src, with the summaries of test.tgt beside it, line by line.

    If the corrected documents, test.src.cleaned, have no test.tgt.cleaned, their summaries are in test.tgt.
    """
    beside = path.with_name(path.name.replace(".src", ".tgt"))
    if beside == path:
        raise DataError(f"{path} holds no documents: give the .src file, with the .tgt file of summaries beside it")
    before = beside.with_name(beside.name.replace(".tgt.cleaned", ".tgt"))
    with _open(path) as documents, _open(beside if beside.exists() else before) as summaries:
        for document, summary in zip(documents, summaries, strict=True):
            yield {"document": document.replace("NEWLINE_CHAR", "\n"), "summary": summary}


# Conversion of rows to examples


def _example(question: str, answers: Iterable[str], passages: Iterable[str], evidence: Iterable[str] = ()) -> Example:
    return Example(tuple(p for p in passages if p.strip()), (Turn(question, tuple(answers), evidence=tuple(evidence)),))


def _squad(row: Row) -> Iterator[Example]:
    given = row["answers"]
    answers = given["text"] if isinstance(given, Mapping) else [answer["text"] for answer in given]
    yield _example(row["question"], answers, [row["context"]])


def _hotpot(row: Row, gold: bool = False) -> Iterator[Example]:
    """HotpotQA and 2WikiMultihopQA; evidence is the supporting sentences. `gold` keeps only supporting paragraphs."""
    pages = _pairs(row["context"], "title", "sentences")
    sentences = {title: list(own) for title, own in pages}
    facts = _pairs(row["supporting_facts"], "title", "sent_id")
    # A few of the published facts name a sentence that does not exist.
    evidence = [sentences[t][n].strip() for t, n in facts if t in sentences and n < len(sentences[t])]
    supporting = {title for title, _ in facts}
    passages = [f"{title}\n{_joined(own)}" for title, own in pages if not gold or title in supporting]
    yield _example(row["question"], [row["answer"]], passages, evidence)


def _joined(sentences: Iterable[str]) -> str:
    """Join sentences; HotpotQA's start with a space, 2WikiMultihopQA's do not."""
    text = ""
    for sentence in sentences:
        text += sentence if not text or text[-1].isspace() or sentence[:1].isspace() else f" {sentence}"
    return text.strip()


def _pairs(given: Any, first: str, second: str) -> list[tuple[Any, Any]]:
    """Pairs in the form of a file, [[a, b], ...], or the hub, {"a": [...], "b": [...]}; some are JSON text."""
    given = json.loads(given) if isinstance(given, str) else given
    if isinstance(given, Mapping):
        return list(zip(given[first], given[second], strict=True))
    return [(pair[0], pair[1]) for pair in given]


def _musique(row: Row) -> Iterator[Example]:
    """MuSiQue; evidence is the supporting paragraphs."""
    texts = [(p["title"], p["paragraph_text"], p.get("is_supporting")) for p in row["paragraphs"]]
    yield _example(
        row["question"],
        [row["answer"], *row.get("answer_aliases", [])],
        [f"{title}\n{text}" for title, text, _ in texts],
        [text for _, text, supporting in texts if supporting],
    )


def _open_domain(row: Row, passages: int = 20) -> Iterator[Example]:
    """Questions with retrieved passages ("ctxs", or DPR's "positive_ctxs"); evidence is those marked `isgold`."""
    answers = row.get("answers", row.get("answer", row.get("possible_answers")))
    if isinstance(answers, str):  # PopQA's are JSON text
        answers = json.loads(answers) if answers.startswith("[") else [answers, *row.get("answer_aliases", [])]
    if isinstance(answers, Mapping):  # TriviaQA
        answers = [answer for answer in [answers["value"], *answers.get("aliases", [])] if answer != "<unk>"]
    found = row.get("ctxs") or [*row.get("positive_ctxs", []), *row.get("hard_negative_ctxs", [])]
    texts = [f"{page['title']}\n{page['text']}" for page in found]
    if not found:  # TriviaQA on the hub
        pages, searched = row.get("entity_pages") or {}, row.get("search_results") or {}
        given = [(pages, "wiki_context"), (searched, "search_context")]
        paired = [pair for own, key in given for pair in zip(own.get("title", []), own.get(key, []), strict=True)]
        texts = [f"{title}\n{text}" for title, text in paired if text.strip()]
    yield _example(row["question"], answers, texts[:passages], [page["text"] for page in found if page.get("isgold")])


def _narrative(row: Row) -> Iterator[Example]:
    """Questions about a story's summary, as in Simple Context Compression (appendix A.1).

    Read As Human reads whole stories, 16,000 tokens on average.
    """
    answers = [answer["text"] for answer in row["answers"]]
    yield _example(row["question"]["text"], answers, [row["document"]["summary"]["text"]])


def _mrqa(row: Row) -> Iterator[Example]:
    for qa in row.get("qas", [row]):
        yield _example(qa["question"], qa["answers"], [row["context"]])


def _news(row: Row) -> Iterator[Example]:
    documents = [document.strip() for document in _BETWEEN_NEWS.split(row["document"])]
    yield _example(SUMMARY_REQUEST, [row["summary"].removeprefix("\u2013").strip()], documents)


_BETWEEN_NEWS = re.compile(r"\|\|\|\|\||story_separator_special_tag")
"""The separator between documents, as published and in the preprocessed files."""

SETS: dict[str, Published] = {
    "squad": Published(("rajpurkar/squad", None), _squad_file, _squad),
    "hotpotqa": Published(("hotpotqa/hotpot_qa", "distractor"), _lines, _hotpot),
    # Without distractors, as Simple Context Compression trains on it (appendix A.1).
    "hotpotqa_gold": Published(("hotpotqa/hotpot_qa", "distractor"), _lines, partial(_hotpot, gold=True)),
    "2wikimultihopqa": Published(("xanhho/2WikiMultihopQA", None), _lines, _hotpot),
    "musique": Published(("dgslibisey/MuSiQue", None), _lines, _musique),
    "nq": Published(None, _lines, _open_domain),
    "triviaqa": Published(("mandarjoshi/trivia_qa", "rc"), _lines, _open_domain),
    "popqa": Published(None, _lines, _open_domain),
    "bamboogle": Published(None, _lines, _open_domain),
    "narrativeqa": Published(("deepmind/narrativeqa", None), _lines, _narrative),
    "mrqa": Published(("mrqa-workshop/mrqa", None), _lines, _mrqa),
    "multinews": Published(("alexfabbri/multi_news", None), _news_file, _news, download=_news_download),
}
"""By name; of `triviaqa` and `narrativeqa` a file has the hub's rows, of `multinews` it is `.src` or `.src.cleaned`."""

"""The papers' data sets, from their published files or the hub, as the JSONL that training and evaluation read."""

from __future__ import annotations

import csv
import gzip
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ctx_compress_rag.data.examples import Example, Turn, write_jsonl
from ctx_compress_rag.errors import DataError
from ctx_compress_rag.extras import needs

Row = Mapping[str, Any]
"""A row as it is published, from a file or the hub."""


@dataclass(frozen=True)
class Published:
    """A data set.

    Attributes:
        hub: its name on the hub, and the configuration there.
        read: rows of a local file.
        convert: a row's examples; none where it has no answer.
    """

    hub: tuple[str, str | None]
    read: Callable[[Path], Iterable[Row]]
    convert: Callable[[Row], Iterable[Example]]


def convert(
    name: str, source: str | Path | None, output: str | Path, *, split: str = "validation", limit: int | None = None
) -> int:
    """Write a published data set as rows of question, answers, context and evidence.

    Args:
        name: one of `SETS`.
        source: its published file; None fetches it from the hub.
        output: the JSONL file to write.
        split: of the hub's set.
        limit: most questions.

    Returns: the questions written.

    Raises:
        DataError: no such set, no such file, or a file of another form.
        MissingExtraError: the hub is asked and `datasets` is not installed.
    """
    if name not in SETS:
        raise DataError(f"no data set {name!r}: choose from {', '.join(SETS)}")
    published = SETS[name]
    rows = published.read(Path(source)) if source is not None else _from_hub(*published.hub, split)
    unfinished = Path(f"{output}.part")
    try:
        written = write_jsonl(unfinished, islice(_checked(published.convert, rows), limit))
        unfinished.replace(output)
        return written
    except FileNotFoundError as error:
        raise DataError(f"no data file at {error.filename}") from None
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise DataError(f"{source or published.hub[0]} is not in the form of {name} ({error!r})") from None
    finally:
        unfinished.unlink(missing_ok=True)


def _checked(one: Callable[[Row], Iterable[Example]], rows: Iterable[Row]) -> Iterator[Example]:
    """Examples with passages and answers; evidence that stands in a passage to the letter."""
    for row in rows:
        for example in one(row):
            if not example.passages:
                raise DataError(
                    "the rows have questions and no passages: retrieve some first, and give a file whose rows have "
                    'them under "ctxs", as DPR writes them'
                )
            for turn in example.turns:
                answers = tuple(dict.fromkeys(a for a in turn.answers if a.strip()))
                if answers:
                    evidence = (e for e in turn.evidence if e.strip() and any(e in p for p in example.passages))
                    yield Example(
                        example.passages, (Turn(turn.question.strip(), answers, "", tuple(dict.fromkeys(evidence))),)
                    )


def _from_hub(name: str, config: str | None, split: str) -> Iterable[Row]:
    with needs("hub"):
        from datasets import load_dataset
    rows: Iterable[Row] = load_dataset(name, config, split=split, streaming=True)
    return rows


# How files are read


def _open(path: Path) -> Any:
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


def _lines(path: Path) -> Iterator[Row]:
    """JSON lines, MRQA's header left out; or one JSON list."""
    with _open(path) as file:
        first = file.read(1)
        file.seek(0)
        if first == "[":
            yield from json.load(file)
            return
        yield from (row for line in file if line.strip() and "header" not in (row := json.loads(line)))


def _table(path: Path, delimiter: str) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)
    with _open(path) as file:
        yield from csv.DictReader(file, delimiter=delimiter)


def _squad_file(path: Path) -> Iterator[Row]:
    with _open(path) as file:
        for article in json.load(file)["data"]:
            for paragraph in article["paragraphs"]:
                yield from ({**qa, "context": paragraph["context"]} for qa in paragraph["qas"])


def _trivia_file(path: Path) -> Iterator[Row]:
    """Questions of `qa/`, with the pages that lie in `evidence/` beside it."""
    evidence = path.parent.parent / "evidence"
    with _open(path) as file:
        for row in json.load(file)["Data"]:
            found = [(kind, page) for kind, key in _TRIVIA.items() for page in row.get(key, [])]
            pages = [(page["Title"], evidence / kind / page["Filename"]) for kind, page in found]
            yield {
                "question": row["Question"],
                "answer": {"value": row["Answer"]["Value"], "aliases": row["Answer"].get("Aliases", [])},
                "ctxs": [{"title": t, "text": file.read_text(encoding="utf-8")} for t, file in pages if file.exists()],
            }


_TRIVIA = {"wikipedia": "EntityPages", "web": "SearchResults"}


def _narrative_file(path: Path) -> Iterator[Row]:
    """`qaps.csv`, with the summaries of `third_party/wikipedia/` beside it."""
    rows = _table(path.parent / "third_party" / "wikipedia" / "summaries.csv", ",")
    summaries = {row["document_id"]: row["summary"] for row in rows}
    for row in _table(path, ","):
        yield {
            "document": {"summary": {"text": summaries[row["document_id"]]}},
            "question": {"text": row["question"]},
            "answers": [{"text": row["answer1"]}, {"text": row["answer2"]}],
        }


def _news_file(path: Path) -> Iterator[Row]:
    """A file of documents, such as test.src, with the summaries of test.tgt beside it, line by line."""
    with _open(path) as documents, _open(path.with_name(path.name.replace(".src", ".tgt"))) as summaries:
        for document, summary in zip(documents, summaries, strict=True):
            yield {"document": document.replace("NEWLINE_CHAR", "\n"), "summary": summary}


# How rows become examples


def _example(question: str, answers: Iterable[str], passages: Iterable[str], evidence: Iterable[str] = ()) -> Example:
    return Example(tuple(p for p in passages if p.strip()), (Turn(question, tuple(answers), evidence=tuple(evidence)),))


def _squad(row: Row) -> Iterator[Example]:
    given = row["answers"]
    answers = given["text"] if isinstance(given, Mapping) else [answer["text"] for answer in given]
    yield _example(row["question"], answers, [row["context"]], answers)


def _hotpot(row: Row) -> Iterator[Example]:
    """HotpotQA and 2WikiMultihopQA; evidence are the supporting sentences."""
    pages = _pairs(row["context"], "title", "sentences")
    sentences = {title: list(own) for title, own in pages}
    facts = _pairs(row["supporting_facts"], "title", "sent_id")
    # A few of the published facts name a sentence that is not there.
    evidence = [sentences[t][n].strip() for t, n in facts if t in sentences and n < len(sentences[t])]
    passages = [f"{title}\n{''.join(own).strip()}" for title, own in pages]
    yield _example(row["question"], [row["answer"]], passages, evidence)


def _pairs(given: Any, first: str, second: str) -> list[tuple[Any, Any]]:
    """Pairs as a file has them, [[a, b], ...], or as the hub does, {"a": [...], "b": [...]}; some as JSON text."""
    given = json.loads(given) if isinstance(given, str) else given
    if isinstance(given, Mapping):
        return list(zip(given[first], given[second], strict=True))
    return [(pair[0], pair[1]) for pair in given]


def _musique(row: Row) -> Iterator[Example]:
    """Evidence are the supporting paragraphs."""
    if row.get("answerable", True):
        texts = [(p["title"], p["paragraph_text"], p.get("is_supporting")) for p in row["paragraphs"]]
        yield _example(
            row["question"],
            [row["answer"], *row.get("answer_aliases", [])],
            [f"{title}\n{text}" for title, text, _ in texts],
            [text for _, text, supporting in texts if supporting],
        )


def _open_domain(row: Row, passages: int = 20) -> Iterator[Example]:
    """Questions with retrieved passages ("ctxs", or DPR's "positive_ctxs"); evidence are answers found in them."""
    answers = row.get("answers", row.get("answer", row.get("possible_answers")))
    if isinstance(answers, str):
        answers = json.loads(answers)
    if isinstance(answers, Mapping):  # TriviaQA
        answers = [answers["value"], *answers.get("aliases", [])]
    found = row.get("ctxs") or [*row.get("positive_ctxs", []), *row.get("hard_negative_ctxs", [])]
    texts = [f"{page['title']}\n{page['text']}" for page in found]
    if not found:  # TriviaQA on the hub
        pages, searched = row.get("entity_pages") or {}, row.get("search_results") or {}
        texts = [*pages.get("wiki_context", []), *searched.get("search_context", [])]
    yield _example(row["question"], answers, texts[:passages], answers)


def _narrative(row: Row) -> Iterator[Example]:
    answers = [answer["text"] for answer in row["answers"]]
    yield _example(row["question"]["text"], answers, [row["document"]["summary"]["text"]], answers)


def _mrqa(row: Row) -> Iterator[Example]:
    """Evidence are the detected answers, as the context spells them."""
    for qa in row.get("qas", [row]):
        spans = qa.get("detected_answers") or []
        spelt = spans["text"] if isinstance(spans, Mapping) else [span["text"] for span in spans]
        yield _example(qa["question"], qa["answers"], [row["context"]], spelt)


def _news(row: Row) -> Iterator[Example]:
    documents = [document.strip() for document in row["document"].split("|||||")]
    yield _example("Summarize the documents.", [row["summary"].removeprefix("\u2013").strip()], documents)


SETS: dict[str, Published] = {
    "squad": Published(("rajpurkar/squad", None), _squad_file, _squad),
    "hotpotqa": Published(("hotpotqa/hotpot_qa", "distractor"), _lines, _hotpot),
    "2wikimultihopqa": Published(("xanhho/2WikiMultihopQA", None), _lines, _hotpot),
    "musique": Published(("dgslibisey/MuSiQue", None), _lines, _musique),
    "nq": Published(("google-research-datasets/nq_open", None), _lines, _open_domain),
    "triviaqa": Published(("mandarjoshi/trivia_qa", "rc"), _trivia_file, _open_domain),
    "popqa": Published(("akariasai/PopQA", None), _lines, _open_domain),
    "narrativeqa": Published(("deepmind/narrativeqa", None), _narrative_file, _narrative),
    "mrqa": Published(("mrqa-workshop/mrqa", None), _lines, _mrqa),
    "multinews": Published(("alexfabbri/multi_news", None), _news_file, _news),
}
"""By name; `triviaqa` reads a file of `qa/`, `narrativeqa` `qaps.csv`, `multinews` a `.src` file."""

"""The demo's small corpus (paragraphs of Wikipedia) and its questions."""

import json
from dataclasses import dataclass
from pathlib import Path

from ctx_compress_rag.indexing.index import make_index_passage
from ctx_compress_rag.store import Passage

_WIKIPEDIA = Path(__file__).with_name("demo_passages.json")
LICENSE = "Wikipedia's authors, as chosen for XQuAD, CC BY-SA 4.0"


@dataclass(frozen=True)
class DemoQuestion:
    """A question, its accepted answers, and the id of the passage that answers it (`needs`)."""

    text: str
    answers: tuple[str, ...]
    needs: str


@dataclass(frozen=True)
class DemoCorpus:
    """Passages to index and questions to ask, none of which a shipped bundle was trained on."""

    passages: tuple[Passage, ...]
    questions: tuple[DemoQuestion, ...]


def wikipedia_corpus() -> DemoCorpus:
    """Return twenty-four paragraphs and twelve questions of XQuAD's English part (CC BY-SA 4.0), always the same."""
    data = json.loads(_WIKIPEDIA.read_text(encoding="utf-8"))
    passages = tuple(make_index_passage(row["text"], row["title"], "demo") for row in data["passages"])
    questions = tuple(
        DemoQuestion(row["question"], tuple(row["answers"]), str(passages[row["passage"]].id))
        for row in data["questions"]
    )
    return DemoCorpus(passages, questions)

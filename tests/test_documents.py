"""What the documents in docs/ and the README point to is there."""

from __future__ import annotations

import re
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import pytest

import ctx_compress_rag

ROOT = Path(__file__).parents[1]
PAPERS = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([a-z_.]+:[\w.]+)`", PAPERS))))
def test_every_name_of_the_papers_page_is_in_the_code(name: str) -> None:
    module, _, attribute = name.partition(":")
    module = module if module.startswith("linear_rag.") else f"ctx_compress_rag.{module}"
    assert attrgetter(attribute)(import_module(module)).__doc__


def test_every_file_of_the_papers_page_is_there() -> None:
    package = Path(ctx_compress_rag.__file__).parent
    tests = re.findall(r"`(tests/[\w/]+\.py)`", PAPERS)
    folders = re.findall(r"`(training/[\w/]+/)`", PAPERS)
    assert len(tests) > 10 and folders
    assert all((ROOT / test).is_file() for test in tests)
    assert all((package / folder).is_dir() for folder in folders)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    anchors = {
        re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-")
        for heading in re.findall("^#+ (.*)$", text, re.M)
    }
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("#"):
            assert target[1:] in anchors, target
        elif not re.match(r"[a-z]+:", target):
            assert (document.parent / target.partition("#")[0]).exists(), target

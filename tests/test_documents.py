"""What the documents in docs/ and the README point to is there, and they build into a site."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html import unescape
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from runpy import run_path

import pytest

import ctx_compress_rag
from ctx_compress_rag.cli import main
from ctx_compress_rag.methods.registry import METHODS

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


def test_papers_go_by_their_names() -> None:
    """Of the legend: titles, authors and numbers of papers are on one page alone."""
    folders = ("ctx_compress_rag", "integrations", "examples", "tests", "docs")
    files = [ROOT / "README.md", *(file for folder in folders for file in (ROOT / folder).rglob("*"))]
    read = [file for file in files if file.suffix in {".py", ".yaml", ".md"}]
    numbered = [file for file in read if re.search(r"\bpapers? 0\d\d\b", file.read_text(encoding="utf-8"), re.I)]
    assert len(read) > 250 and numbered == []
    linked = [file for file in read if "arxiv.org/abs/" in file.read_text(encoding="utf-8")]
    assert set(linked) == {ROOT / "docs" / "papers.md", Path(__file__)}


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


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    home = unescape(re.sub("<[^>]*>", "", (tmp_path / "index.html").read_text(encoding="utf-8")))
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(examples) == 2 and all(example in home for example in examples)
    core = (tmp_path / "api" / "core" / "index.html").read_text(encoding="utf-8")
    assert all(f'id="ctx_compress_rag.errors.{name}"' in core for name in ctx_compress_rag.__all__ if "Error" in name)
    assert 'id="ctx_compress_rag.bundle.bundle.Bundle.push_to_hub"' in core


def test_the_picture_is_what_its_script_writes() -> None:
    script = run_path(str(ROOT / "docs" / "picture.py"))
    assert script["PICTURE"].read_text(encoding="utf-8") == script["picture"]()


def test_the_table_of_memory_is_what_its_script_counts() -> None:
    script = run_path(str(ROOT / "docs" / "memory.py"))
    assert script["table"]() in (ROOT / "docs" / "larger_decoders.md").read_text(encoding="utf-8")


def test_the_api_lists_the_settings_of_every_method() -> None:
    """`docs/training.md` promises the fields of every recipe."""
    page = (ROOT / "docs" / "api" / "training.md").read_text(encoding="utf-8").splitlines()
    shipped = {name: method.config.__module__ for name, method in METHODS.items()}
    shipped = {name: module for name, module in shipped.items() if module.startswith("ctx_compress_rag.")}
    assert len(shipped) == 6 and all(f"::: {module}" in page for module in shipped.values())


def test_the_command_line_page_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| `([a-z-]+)` \|", page, re.M)
    assert main(["--help"]) == 0
    offered = re.findall(r"^[^\w-]+([a-z][a-z-]+)(?:  |\s*$)", capsys.readouterr().out, re.M)
    assert sorted(named) == sorted(offered)

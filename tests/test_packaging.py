"""What an installed copy holds, needs and imports."""

import ast
import importlib
import importlib.metadata
import itertools
import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import ctx_compress_rag
from ctx_compress_rag.errors import MissingExtraError, needs
from ctx_compress_rag.training.run import FOLDERS, load_recipe

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "ctx_compress_rag"
FILES = sorted(PACKAGE.rglob("*.py"))
INTEGRATIONS = ROOT / "integrations"
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = SETTINGS["project"]
PARTNERS = {
    file.parent: tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    for file in sorted(INTEGRATIONS.glob("*/pyproject.toml"))
}
"""The frameworks' distributions."""
OWNERS = {"llama_cpp": ["llama-cpp-python"]} | importlib.metadata.packages_distributions()  # installed apart
EXTRAS = PROJECT["optional-dependencies"]
ORDER = [
    "errors", "strict", "process_bound", "drafts", "prompt", "soft_context", "text", "models", "data",
    "methods", "bundle", "published", "store", "decoding", "marking", "frameworks", "evaluation", "indexing",
    "training", "server", "adaptation", "cli",
]  # fmt: skip
"""Each room may import from those before it."""


def modules_under(root: Path, package: str) -> list[str]:
    files = sorted((root / package).rglob("*.py"))
    names = [".".join(file.relative_to(root).with_suffix("").parts) for file in files]
    return [name.removesuffix(".__init__") for name in names]


CORE_MODULES = modules_under(ROOT, "ctx_compress_rag")
PARTNER_MODULES = {folder: modules_under(folder, ".") for folder in PARTNERS}


def run_python(code: str, cwd: Path, path: Path | str | None = None, *options: str) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path:
        env["PYTHONPATH"] = str(path)
    command = [sys.executable, *options, "-c", code]
    return subprocess.run(command, cwd=cwd, env=env, check=True, capture_output=True, text=True).stdout


def test_the_import_is_light(tmp_path: Path) -> None:
    code = "import ctx_compress_rag, json, sys; print(json.dumps([ctx_compress_rag.__file__, *sys.modules]))"
    file, *loaded = json.loads(run_python(code, tmp_path))
    assert Path(file) == PACKAGE / "__init__.py"
    heavy = {"torch", "transformers", "chromadb", "numpy", "pydantic", "langchain_core", "llama_index", "matplotlib"}
    assert not heavy & set(loaded)


def test_public_names_lead_to_what_they_say() -> None:
    for name in ctx_compress_rag.__all__:
        value = getattr(ctx_compress_rag, name)
        assert name == "__version__" or value.__name__ == name
    assert set(dir(ctx_compress_rag)) >= {"Bundle", "SoftContextStore", "Decoder"}
    with pytest.raises(AttributeError, match="no attribute 'Bundel'"):
        _ = ctx_compress_rag.Bundel


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def imports_of(tree: ast.AST, at_import_time: bool = False) -> Iterator[str]:
    """Full names of absolute imports, but for those of types alone; `at_import_time` leaves out functions, too."""
    later = (ast.FunctionDef, ast.AsyncFunctionDef) if at_import_time else ()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif not (isinstance(node, later) or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")):
            yield from imports_of(node, at_import_time)


def test_a_room_imports_only_from_those_before_it() -> None:
    for file in FILES:
        room = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room != "__init__":  # public names, imported on first use
            names = imports_of(parsed(file))
            rooms = {name.split(".")[1] for name in names if name.startswith("ctx_compress_rag.")}
            assert rooms - {"__version__"} <= {*ORDER[: ORDER.index(room) + 1]}, file


def test_nothing_imports_the_laboratory_or_the_guest() -> None:
    """Adaptation is imported by who adapts, and by `training`'s table of stages when a recipe has one of its own."""
    for file in [*FILES, *INTEGRATIONS.rglob("*.py")]:
        names = [*imports_of(parsed(file))]
        assert not {"benchmarks", "tests"} & {name.split(".")[0] for name in names}, file
        guest = [name for name in names if name.startswith("ctx_compress_rag.adaptation")]
        assert not guest or file.is_relative_to(PACKAGE / "adaptation"), file


def test_every_module_imports() -> None:
    for module in itertools.chain(CORE_MODULES, *PARTNER_MODULES.values()):
        assert importlib.import_module(module).__name__ == module


def foreign_distributions(file: Path, at_import_time: bool) -> set[str]:
    names = {name.split(".")[0] for name in imports_of(parsed(file), at_import_time)}
    foreign = names - {"ctx_compress_rag", *sys.stdlib_module_names}
    return {canonicalize_name(OWNERS.get(name, [name])[0]) for name in foreign}


def declared(*groups: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(line).name) for group in groups for line in group}


def test_core_modules_import_only_what_is_declared() -> None:
    core = declared(PROJECT["dependencies"])
    extras = ("train", "gguf", "llama-cpp", "sentences", "index", "json", "vllm", "serve")
    optional = declared(*(EXTRAS[name] for name in extras))
    for file in FILES:
        # The server's own room; no other imports it before it is asked for.
        serving = declared(EXTRAS["serve"]) if file.parent.name == "server" else set()
        assert foreign_distributions(file, at_import_time=True) <= core | serving, file
        assert foreign_distributions(file, at_import_time=False) <= core | optional, file


def test_a_framework_s_package_imports_only_what_it_declares() -> None:
    for folder, project in PARTNERS.items():
        allowed = {*declared(project["dependencies"]), PROJECT["name"]}
        allowed |= {"llama-index"} if "llama-index-core" in allowed else {"langchain-ctx-compress"}
        for file in folder.rglob("*.py"):
            names = {name.split(".")[0] for name in imports_of(parsed(file))}
            assert {canonicalize_name(name) for name in names - sys.stdlib_module_names} <= allowed, file


def test_one_version_of_all_that_is_released() -> None:
    """The frameworks' packages use what is private here."""
    version = f"=={ctx_compress_rag.__version__}"
    asked = [Requirement(line) for name in ("langchain", "llama-index") for line in EXTRAS[name]]
    assert {each.name for each in asked} == {project["name"] for project in PARTNERS.values()}
    for folder, project in PARTNERS.items():
        core = Requirement(project["dependencies"][0])
        assert (folder.name, f"=={project['version']}", core.name) == (project["name"], version, PROJECT["name"])
        asked.append(core)
        assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert {str(each.specifier) for each in asked} == {version}


def requirements_of(*groups: str) -> Iterator[Requirement]:
    """What is installed of others, with all extras, for these groups."""
    lines = [*PROJECT["dependencies"], *itertools.chain(*EXTRAS.values())]
    lines += itertools.chain(*(project["dependencies"] for project in PARTNERS.values()))
    lines += [line for group in groups for line in SETTINGS["dependency-groups"][group] if isinstance(line, str)]
    ours = {PROJECT["name"], *(project["name"] for project in PARTNERS.values())}
    yield from (each for each in map(Requirement, lines) if each.name not in ours)


def pins(file: str) -> dict[str, str]:
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    pinned = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pinned}


def test_every_requirement_has_a_pin_that_fits_it() -> None:
    pinned = pins("constraints.txt")
    for requirement in requirements_of("test", "dev"):
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), requirement


def test_the_lowest_versions_are_those_that_are_tested() -> None:
    """`make test-lowest` runs with exactly the lower bounds of all that it installs, but for torch's."""
    pinned = pins("constraints-lowest.txt")
    for requirement in requirements_of("test"):
        name = canonicalize_name(requirement.name)
        if name not in ("torch", "llama-cpp-python", "markitdown"):
            (bound,) = (each for each in requirement.specifier if each.operator == ">=")
            assert Version(bound.version) == Version(pinned[name]), requirement


@pytest.mark.parametrize("package", ["torch", "transformers", "peft", "chromadb"])
def test_private_names_are_in_one_file_and_bounded(package: str) -> None:
    """An attribute with a leading underscore of a package's own module."""
    (requirement,) = (Requirement(line) for line in PROJECT["dependencies"] if Requirement(line).name == package)
    assert any(bound.operator == "<" for bound in requirement.specifier)
    private = rf"(from {package}[\w.]* import (\w+, )*_[a-z]|\b{package}(\.\w+)*\._[a-z]|from {package}[\w.]*\._[a-z])"
    files = {file.name for file in FILES if re.search(private, file.read_text(encoding="utf-8"))}
    assert files <= {f"{package}_internals.py", "chroma_internals.py"}


def test_a_missing_package_is_named_with_its_extra() -> None:
    with (
        pytest.raises(MissingExtraError, match=r"no_such_package .*pip install 'ctx-compress-rag\[index\]'"),
        needs("index"),
    ):
        import no_such_package  # noqa: F401


@pytest.mark.parametrize(
    "name", [str(file.relative_to(folder)) for folder in FOLDERS for file in sorted(folder.rglob("*.yaml"))]
)
def test_shipped_recipes_are_valid(name: str) -> None:
    [file] = [folder / name for folder in FOLDERS if (folder / name).exists()]
    assert load_recipe(file) == load_recipe(name) == load_recipe(name.removesuffix(".yaml"))


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Path]:
    """The wheel of each folder with a pyproject.toml, unpacked."""
    unpacked = {}
    for source in (ROOT, *PARTNERS):
        folder = tmp_path_factory.mktemp("wheel")
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
        subprocess.run(command, cwd=source, check=True, capture_output=True)
        (file,) = folder.glob("*.whl")
        assert file.stat().st_size < 24e6
        with zipfile.ZipFile(file) as archive:
            archive.extractall(folder / "unpacked")
        unpacked[source] = folder / "unpacked"
    return unpacked


def files_under(folder: Path) -> set[str]:
    files = (file for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    return {str(file.relative_to(folder)) for file in files}


def test_the_wheels_hold_every_file_of_their_packages(wheels: dict[Path, Path]) -> None:
    for source, wheel in wheels.items():
        project = PARTNERS.get(source, PROJECT)
        metadata = f"{project['name'].replace('-', '_')}-{ctx_compress_rag.__version__}.dist-info/"
        held = files_under(wheel)
        wanted = {f"ctx_compress_rag/{file}" for file in files_under(PACKAGE)}
        if source != ROOT:
            wanted = files_under(source) - {"pyproject.toml", "README.md", "LICENSE"}
        assert {name for name in held if not name.startswith(metadata)} == wanted
        assert any(name.endswith("/py.typed") for name in wanted)
        assert f"{metadata}licenses/LICENSE" in held


def test_a_wheel_alone_brings_no_framework_s_folder(wheels: dict[Path, Path], tmp_path: Path) -> None:
    """Other programs tell by `find_spec("llama_index")` whether LlamaIndex is there. -S: no other package is."""
    code = "import ctx_compress_rag; from importlib.util import find_spec; print(find_spec('llama_index'))"
    assert run_python(code, tmp_path, wheels[ROOT], "-S") == "None\n"


@pytest.mark.slow
def test_installed_wheels_import_and_have_the_command(wheels: dict[Path, Path], tmp_path: Path) -> None:
    modules = ["ctx_compress_rag", *(min(names, key=len) for names in PARTNER_MODULES.values())]
    code = f"""
import importlib, importlib.metadata, json
modules = [importlib.import_module(name) for name in {modules}]
import llama_index.core
(script,) = importlib.metadata.distribution("ctx-compress-rag").entry_points.select(name="ctx-compress")
modules.append(importlib.import_module(script.load().__module__))
print(json.dumps([importlib.metadata.version("ctx-compress-rag"), *(module.__file__ for module in modules)]))
"""
    path = os.pathsep.join(map(str, wheels.values()))
    version, *files = json.loads(run_python(code, tmp_path, path).splitlines()[-1])
    assert version == ctx_compress_rag.__version__
    for file, folder in zip(files, [*wheels.values(), wheels[ROOT]], strict=True):
        assert Path(file).is_relative_to(folder), file


def test_the_package_s_page_leads_into_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CTX_COMPRESS_REPOSITORY", "https://example.org/o/r/")
    hook: Any = runpy.run_path(str(ROOT / "hatch_build.py"))["ReleaseHook"]
    metadata: dict[str, Any] = {"version": "1.2.3"}
    hook(str(ROOT), {}).update(metadata)
    text = metadata["readme"]["text"]
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert targets and all(target.startswith(("https://", "#")) for target in targets)
    assert "![" in text and re.findall(r"!\[[^\]]*\]\((.*?)\)", text) == [
        "https://example.org/o/r/raw/v1.2.3/docs/picture.svg"
    ]
    assert "https://example.org/o/r/blob/v1.2.3/docs/store.md" in targets
    assert metadata["urls"]["Security"] == "https://example.org/o/r/security/advisories/new"

"""What an installed copy holds, needs and imports."""

import ast
import importlib
import importlib.metadata
import itertools
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import ctx_compress_rag
from ctx_compress_rag.errors import MissingExtraError, needs
from ctx_compress_rag.training.recipe import FOLDERS, load_recipe

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "ctx_compress_rag"
FILES = sorted(PACKAGE.rglob("*.py"))
INTEGRATIONS = ROOT / "integrations"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LANGCHAIN = "langchain_ctx_compress"
LLAMA_INDEX = ("llama_index.postprocessor.ctx_compress", "llama_index.llms.ctx_compress")
OWNERS = {"llama_cpp": ["llama-cpp-python"]} | importlib.metadata.packages_distributions()  # installed apart
EXTRAS = PROJECT["optional-dependencies"]
ORDER = [
    "errors", "strict", "process_bound", "prompt", "soft_context", "text", "models", "data",
    "methods", "bundle", "published", "store", "decoding", "marking", "frameworks", "evaluation", "indexing",
    "training", "server", "adaptation", "cli",
]  # fmt: skip
"""Each room may import from those before it."""


def modules_under(root: Path, package: str) -> list[str]:
    files = sorted((root / package).rglob("*.py"))
    names = [".".join(file.relative_to(root).with_suffix("").parts) for file in files]
    return [name.removesuffix(".__init__") for name in names]


CORE_MODULES = modules_under(ROOT, "ctx_compress_rag")
INTEGRATED = sorted(folder.name for folder in INTEGRATIONS.iterdir() if folder.name != "__pycache__")
INTEGRATION_MODULES = [module for package in INTEGRATED for module in modules_under(INTEGRATIONS, package)]


def run_python(code: str, cwd: Path, path: Path | str | None = None) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path:
        env["PYTHONPATH"] = str(path)
    command = [sys.executable, "-c", code]
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
            names = imports_of(ast.parse(file.read_text(encoding="utf-8")))
            rooms = {name.split(".")[1] for name in names if name.startswith("ctx_compress_rag.")}
            assert rooms - {"__version__"} <= {*ORDER[: ORDER.index(room) + 1]}, file


def test_nothing_imports_the_laboratory_or_the_guest() -> None:
    """Adaptation is imported by who adapts, and by `training`'s table of stages when a recipe has one of its own."""
    for file in [*FILES, *INTEGRATIONS.rglob("*.py")]:
        names = [*imports_of(ast.parse(file.read_text(encoding="utf-8")))]
        assert not {"benchmarks", "tests"} & {name.split(".")[0] for name in names}, file
        guest = [name for name in names if name.startswith("ctx_compress_rag.adaptation")]
        assert not guest or file.is_relative_to(PACKAGE / "adaptation"), file


def test_every_module_imports() -> None:
    for module in CORE_MODULES + INTEGRATION_MODULES:
        assert importlib.import_module(module).__name__ == module


def foreign_distributions(file: Path, at_import_time: bool) -> set[str]:
    names = {name.split(".")[0] for name in imports_of(ast.parse(file.read_text(encoding="utf-8")), at_import_time)}
    foreign = names - {"ctx_compress_rag", *sys.stdlib_module_names}
    return {canonicalize_name(OWNERS.get(name, [name])[0]) for name in foreign}


def declared(*groups: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(line).name) for group in groups for line in group}


def test_core_modules_import_only_what_is_declared() -> None:
    core = declared(PROJECT["dependencies"])
    extras = ("train", "gguf", "llama-cpp", "sentences", "index", "serve")
    optional = declared(*(EXTRAS[name] for name in extras))
    for file in FILES:
        # The server's own room; no other imports it before it is asked for.
        serving = declared(EXTRAS["serve"]) if file.parent.name == "server" else set()
        assert foreign_distributions(file, at_import_time=True) <= core | serving, file
        assert foreign_distributions(file, at_import_time=False) <= core | optional, file


def test_every_requirement_has_a_pin_that_fits_it() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    for line in [*PROJECT["dependencies"], *(line for group in EXTRAS.values() for line in group)]:
        requirement = Requirement(line)
        if requirement.name != PROJECT["name"]:
            assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), line


def test_the_lowest_versions_are_those_that_are_tested() -> None:
    """`make test-lowest` runs with exactly the lower bounds of all that it installs, but for torch's."""
    lines = (ROOT / "constraints-lowest.txt").read_text(encoding="utf-8").splitlines()
    pins = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    installed = (EXTRAS[name] for name in ("langchain", "llama-index", "train", "gguf", "sentences", "serve", "test"))
    requirements = [Requirement(line) for line in [*PROJECT["dependencies"], *itertools.chain(*installed)]]
    for requirement in requirements:
        if requirement.name not in (PROJECT["name"], "torch"):
            (bound,) = (each for each in requirement.specifier if each.operator == ">=")
            assert Version(bound.version) == Version(pins[canonicalize_name(requirement.name)]), requirement


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
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (file,) = folder.glob("*.whl")
    return file


def test_the_wheel_holds_every_file_of_its_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    wanted = {
        str(file.relative_to(root))
        for root, package in [(ROOT, "ctx_compress_rag"), *((INTEGRATIONS, each) for each in INTEGRATED)]
        for file in (root / package).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert {"ctx_compress_rag/py.typed", "ctx_compress_rag/training/recipes/ram/ram.yaml"} <= wanted
    metadata = f"ctx_compress_rag-{ctx_compress_rag.__version__}.dist-info/"
    assert {name for name in names if not name.startswith(metadata)} == wanted
    assert {f"{metadata}licenses/LICENSE", f"{metadata}licenses/NOTICE"} <= names
    assert wheel.stat().st_size < 24e6


def test_an_installed_wheel_imports_and_has_its_command(wheel: Path, tmp_path: Path) -> None:
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    code = f"""
import importlib, importlib.metadata, json
modules = [importlib.import_module(name) for name in {["ctx_compress_rag", LANGCHAIN, *LLAMA_INDEX]}]
import llama_index.core
(script,) = importlib.metadata.distribution("ctx-compress-rag").entry_points.select(name="ctx-compress")
modules.append(importlib.import_module(script.load().__module__))
print(json.dumps([importlib.metadata.version("ctx-compress-rag"), *(module.__file__ for module in modules)]))
"""
    version, *files = json.loads(run_python(code, tmp_path, path=installed).splitlines()[-1])
    assert version == ctx_compress_rag.__version__
    assert all(Path(file).is_relative_to(installed) for file in files), files

"""A package of methods, known by its entry point, without an import by the user."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_MODULE = """
from typing import Literal
from ctx_compress_rag.methods.base.config import MethodConfig
from ctx_compress_rag.methods.base.method import Method, register

class ToyConfig(MethodConfig):
    name: Literal["toy"] = "toy"
    gain: float = 1.0

register(Method(config=ToyConfig, compressor=None, reader=None, paper="A toy"))
"""
_USER = """
from ctx_compress_rag.bundle.config import BundleConfig
config = BundleConfig(name="b", method={"name": "toy", "gain": 2.5}, base_ratio=4, ratios=[4], max_tokens=64)
print(type(config.method).__name__, config.method.gain)
"""


def test_an_installed_package_of_methods_is_found(tmp_path: Path) -> None:
    done = _run(tmp_path, _MODULE, "-c", _USER)
    assert done.stdout == "ToyConfig 2.5\n", done.stderr


def test_a_package_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    """Every command fails then, whichever method it uses."""
    done = _run(
        tmp_path, "import no_such_module", "-m", "ctx_compress_rag.cli", "export", "smollm2-135m", str(tmp_path / "out")
    )
    assert done.returncode == 2
    assert "'toy' of the package toy-methods cannot be loaded (ModuleNotFoundError: No module named" in done.stderr
    assert "Traceback" not in done.stderr


def _run(folder: Path, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python where a package with this module is installed in `folder`."""
    (folder / "toy_methods.py").write_text(module)
    about = folder / "toy_methods-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-methods\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[ctx_compress_rag.methods]\ntoy = toy_methods\n")
    path = os.pathsep.join([str(folder), *sys.path])
    return subprocess.run(
        [sys.executable, *arguments], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )

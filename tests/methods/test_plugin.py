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
from ctx_compress_rag.config import BundleConfig
config = BundleConfig(name="b", method={"name": "toy", "gain": 2.5}, base_ratio=4, ratios=[4], max_tokens=64)
print(type(config.method).__name__, config.method.gain)
"""


def test_an_installed_package_of_methods_is_found(tmp_path: Path) -> None:
    (tmp_path / "toy_methods.py").write_text(_MODULE)
    about = tmp_path / "toy_methods-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-methods\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[ctx_compress_rag.methods]\ntoy = toy_methods\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", _USER], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.stdout == "ToyConfig 2.5\n", done.stderr

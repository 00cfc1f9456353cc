"""Write JSON files so that a killed process leaves none half written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write or replace a JSON file. Raise OSError if it cannot be written."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    part.replace(file)

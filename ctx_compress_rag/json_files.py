"""JSON files that are never half written, whenever a process is killed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ctx_compress_rag.errors import ConfigError


def read_json(file: Path, instead: str) -> dict[str, Any]:
    """Read a JSON file.

    Args:
        file: the path.
        instead: what to do if it is damaged, for the message.

    Raises:
        ConfigError: it is damaged.
        OSError: it cannot be read.
    """
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        raise ConfigError(f"{file} is damaged: {instead}") from None


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write or replace a JSON file; raises OSError if it cannot be written."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    part.replace(file)

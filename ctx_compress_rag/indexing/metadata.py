"""The metadata of a file or row: front matter, and the other fields of a row."""

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

import yaml

from ctx_compress_rag.store.passage import Scalar, is_storable

_TAKEN = ("source", "root", "chroma:document")  # by the index and by Chroma
_MOST = 20_000  # characters of front matter, because parsing takes time
_FRONT_MATTER = re.compile(rf"(---|\+\+\+)[ \t]*\n(.{{0,{_MOST}}}?)^(?:\1|\.\.\.)[ \t]*(?:\n|\Z)", re.M | re.S)
_LINE = re.compile(r"^([\w-]+)[ \t]*[:=][ \t]+(\S.*)$", re.M)
_FIRST_HEADING = re.compile(r"\s*#[ \t]+(.*?)[ \t#]*$", re.M)


def split_front_matter(text: str) -> tuple[str, dict[str, Scalar]]:
    """Return a Markdown text without its front matter (YAML or TOML), and the fields of that, as metadata.

    Its title and description become the text's first heading, which begins the first passage, whatever comes below.
    Anything but a mapping of names to values stays in the text.
    """
    if not (found := _FRONT_MATTER.match(text)):
        return text, {}
    try:
        fields = (tomllib.loads if found[1] == "+++" else _yaml)(found[2])
    except (ValueError, RecursionError, yaml.YAMLError):  # often a title with a colon
        fields = dict(_LINE.findall(found[2]))
    if not fields or not isinstance(fields, dict) or not all(isinstance(name, str) for name in fields):
        return text, {}
    text = text[found.end() :]
    heads = [" ".join(str(fields.pop(name, None) or "").split()) for name in ("title", "description")]
    if (first := _FIRST_HEADING.match(text)) and first[1] == heads[0]:
        heads[0] = ""
    heading = ": ".join(filter(None, heads))
    return (f"# {heading}\n\n{text}" if heading else text), metadata_of(fields)


def metadata_of(fields: Mapping[str, Any]) -> dict[str, Scalar]:
    """Return fields as Chroma holds them: lists and mappings as JSON, `source` and `root` with `_` after the name."""
    return {
        _text(f"{name}_" if name in _TAKEN else name): value if is_storable(value) else _text(_json(value))
        for name, value in fields.items()
        if value is not None
    }


def _yaml(text: str) -> Any:
    if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
        raise ValueError("aliases of aliases make values without end")
    return yaml.safe_load(text)


def _json(value: Any) -> str:
    if isinstance(value, list | dict):
        return json.dumps(value, default=str, skipkeys=True, ensure_ascii=False)
    return str(value)


def _text(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()

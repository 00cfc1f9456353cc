"""Say what is wrong with a request's body: the field, its value, and what to send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ctx_compress_rag.errors import shown
from ctx_compress_rag.server.faults import RequestError

_NO_OBJECT = ("model_attributes_type", "model_type", "dict_type", "dict_attributes_type")


def malformed(faults: Sequence[Any]) -> RequestError:
    """A refusal that names the first of pydantic's errors in a body."""
    found = faults[0]
    places = [str(place) for place in found["loc"] if place not in ("body", "(text)", "(list)")]
    if places[:1] == ["response_format"]:
        del places[1:2]  # its type, which pydantic puts into the path
    if found["type"] == "json_invalid":
        return RequestError(400, f"the body is not JSON ({found['ctx']['error']}): send a JSON object")
    if not places:
        return RequestError(
            400, "the body is not a JSON object: send one, with the header Content-Type: application/json"
        )
    return RequestError(400, _said(".".join(places), found), param=places[0])


def _said(where: str, found: Any) -> str:
    value, context = shown(found["input"]), found.get("ctx", {})
    match found["type"]:
        case "missing":
            return f"{where} is missing: send it"
        case "extra_forbidden":
            return f"{where} is not supported here: leave it out"
        case "literal_error":
            return f"{where}={value} is not supported here: send {context['expected']}"
        case "union_tag_invalid":
            return f"{where}={value} is not supported here: send one of {context['expected_tags']}"
        case "union_tag_not_found":
            return f"{where}={value} has no {context['discriminator']}: send one"
        case "too_short":
            return f"{where} is empty: send {context['min_length']} or more"
        case "too_long" if context["max_length"] == 0:
            return f"{where}={value} is not supported here: leave it out"
        case "too_long":
            return f"{where} has more than {context['max_length']} items: send fewer"
        case "string_type" if "(text)" in found["loc"]:
            return f"{where}={value} is not text: send a string or a list"
        case kind if kind in _NO_OBJECT:
            return f"{where}={value} is not a JSON object: send one"
    return f"{where}={value}: {found['msg'].removeprefix('Value error, ')}"

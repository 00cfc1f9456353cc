"""Find the JSON schemas of answers that LlamaIndex parses."""

import json
from collections.abc import Mapping
from typing import Any

from llama_index.core.output_parsers import PydanticOutputParser, SelectionOutputParser
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.prompt_type import PromptType
from llama_index.core.question_gen.output_parser import SubQuestionOutputParser

# A small decoder may never end a string or a list by itself, and both have to fit into `max_tokens`.
_MOST_QUESTIONS = 5
_SENTENCE = {"type": "string", "minLength": 1, "maxLength": 120}


def schema_of(prompt: BasePromptTemplate, given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the JSON schema of the answer that a prompt's parser reads; None if the parser reads text.

    Choices and tools come from the template's arguments (`given`), so that an answer cannot name others.
    """
    match prompt.output_parser:
        case SelectionOutputParser():
            return _selection(prompt.metadata.get("prompt_type"), given)
        case SubQuestionOutputParser():
            return _questions(given.get("tools_str"))
        case PydanticOutputParser() as parser:
            schema: dict[str, Any] = parser.output_cls.model_json_schema()
            return schema
    return None


def _selection(kind: object, given: Mapping[str, Any]) -> dict[str, Any]:
    number: dict[str, Any] = {"type": "integer", "minimum": 1}
    choices = given.get("num_choices")
    if isinstance(choices, int):
        number["maximum"] = choices
    most = given.get("max_outputs") or choices if kind == PromptType.MULTI_SELECT else 1
    return _list_of({"choice": number, "reason": _SENTENCE}, most or 1)


def _questions(tools: object) -> dict[str, Any]:
    names = list(json.loads(tools)) if isinstance(tools, str) else []
    name: dict[str, Any] = {"enum": names} if names else {"type": "string"}
    items = _list_of({"sub_question": _SENTENCE, "tool_name": name}, _MOST_QUESTIONS)
    return _object({"items": items})


def _list_of(fields: dict[str, Any], most: int) -> dict[str, Any]:
    return {"type": "array", "items": _object(fields), "minItems": 1, "maxItems": most}


def _object(fields: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": list(fields)}

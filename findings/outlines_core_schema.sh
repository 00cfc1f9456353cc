#!/usr/bin/env bash
# outlines-core 0.2.14, from a JSON Schema to the regular expression that an answer must match. Guesses: bounds of
# numbers hold, or raise an error as keywords that it cannot do; a `required` field must be there; a pattern may match
# within a string, and an object may have more fields, as the standard says. Seen: bounds, multipleOf and uniqueItems
# are dropped without a word, and so is `required` for a field not among `properties`; a pattern must match the whole
# string; more fields, fields in another order and numbers with exponents are not allowed.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q outlines-core==0.2.14 jsonschema==4.26.0
"$folder/venv/bin/python" - <<'PYTHON'
import json
import re

from jsonschema import Draft202012Validator
from outlines_core.json_schema import build_regex_from_schema

field = {"type": "object", "properties": {"a": {"type": "integer"}}}
cases = {
    "minimum": ({"type": "integer", "minimum": 3}, "2"),
    "exclusiveMaximum": ({"type": "number", "exclusiveMaximum": 1}, "7.5"),
    "multipleOf": ({"type": "integer", "multipleOf": 5}, "11"),
    "uniqueItems": ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1,1]"),
    "required": ({"type": "object", "required": ["z"]}, "{}"),
    "pattern": ({"type": "string", "pattern": "ab"}, '"xaby"'),
    "more fields": (field, '{"a":1,"b":2}'),
    "order of fields": (field | {"properties": {"a": {}, "b": {}}, "required": ["a", "b"]}, '{"b":2,"a":1}'),
    "no exponents": ({"type": "number"}, "1e5"),
}
seen = {}
for name, (schema, answer) in cases.items():
    allowed = bool(re.fullmatch(build_regex_from_schema(json.dumps(schema)), answer))
    seen[name] = (allowed, Draft202012Validator(schema).is_valid(json.loads(answer)))
    print(f"{name}: {answer} allowed {seen[name][0]}, valid {seen[name][1]}")
wrong = ["minimum", "exclusiveMaximum", "multipleOf", "uniqueItems", "required"]
assert all(pair == (name in wrong, name not in wrong) for name, pair in seen.items())
PYTHON
# Output of 2026-11-30:
# minimum: 2 allowed True, valid False
# exclusiveMaximum: 7.5 allowed True, valid False
# multipleOf: 11 allowed True, valid False
# uniqueItems: [1,1] allowed True, valid False
# required: {} allowed True, valid False
# pattern: "xaby" allowed False, valid True
# more fields: {"a":1,"b":2} allowed False, valid True
# order of fields: {"b":2,"a":1} allowed False, valid True
# no exponents: 1e5 allowed False, valid True

#!/usr/bin/env bash
# xgrammar 0.2.9, JSON Schemas. Guesses: whatever the schema, an answer is JSON; a field that is `required` must be
# there; an escape such as \n is one character of a string's length; what it cannot do raises an error. Seen: a pattern
# with a quote allows the quote as it is, which is no JSON, and refuses the escaped one; a required field that is not
# among `properties` is forbidden, so that {} remains; strings with a length may have no escapes; `if` and bounds beside
# $ref are dropped without a word.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q xgrammar==0.2.9 torch==2.13.0 numpy==2.3.5 jsonschema==4.26.0
"$folder/venv/bin/python" - <<'PYTHON'
import json

import xgrammar
from jsonschema import Draft202012Validator

END = 256
tokens = xgrammar.TokenizerInfo(
    [bytes([byte]) for byte in range(END)] + [b"</s>"], vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[END]
)
compiler = xgrammar.GrammarCompiler(tokens)
integer = {"type": "integer"}
cases = [
    ({"type": "string", "pattern": '^a"b$'}, '"a"b"'),
    ({"type": "string", "pattern": '^a"b$'}, r'"a\"b"'),
    ({"type": "object", "required": ["z"]}, '{"z":1}'),
    ({"type": "object", "required": ["z"]}, "{}"),
    ({"type": "string", "maxLength": 3}, r'"a\nb"'),
    (integer | {"if": integer, "then": {"minimum": 3}}, "1"),
    ({"$defs": {"number": integer}, "$ref": "#/$defs/number", "maximum": 5}, "6"),
]


def allowed(schema, answer):
    matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(schema)))
    return matcher.accept_string(answer) and matcher.accept_token(END)


def valid(schema, answer):
    try:
        return Draft202012Validator(schema).is_valid(json.loads(answer))
    except json.JSONDecodeError:
        return False


for schema, answer in cases:
    seen = allowed(schema, answer), valid(schema, answer)
    print(f"{json.dumps(schema)}: {answer} allowed {seen[0]}, valid {seen[1]}")
    assert seen[0] != seen[1]
PYTHON
# Output of 2026-11-30:
# {"type": "string", "pattern": "^a\"b$"}: "a"b" allowed True, valid False
# {"type": "string", "pattern": "^a\"b$"}: "a\"b" allowed False, valid True
# {"type": "object", "required": ["z"]}: {"z":1} allowed False, valid True
# {"type": "object", "required": ["z"]}: {} allowed True, valid False
# {"type": "string", "maxLength": 3}: "a\nb" allowed False, valid True
# {"type": "integer", "if": {"type": "integer"}, "then": {"minimum": 3}}: 1 allowed True, valid False
# {"$defs": {"number": {"type": "integer"}}, "$ref": "#/$defs/number", "maximum": 5}: 6 allowed True, valid False

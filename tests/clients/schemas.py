"""A set of JSON schemas, as published in tutorials and as tools have them: what the model writes under each must be
valid by the `jsonschema` package, or the schema is refused with a reason.

    python schemas.py ADDRESS   against a server that runs, such as http://127.0.0.1:11435
"""

import json
import sys
import urllib.error
import urllib.request

import jsonschema

ADDRESS = sys.argv[1]

STRING = {"type": "string", "maxLength": 12}
PERSON = {
    "type": "object",
    "properties": {"name": STRING, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}

SCHEMAS = {
    "person": PERSON,
    "nested": {"type": "object", "properties": {"who": PERSON, "ok": {"type": "boolean"}}, "required": ["who", "ok"], "additionalProperties": False},
    "list": {"type": "array", "items": PERSON, "minItems": 1, "maxItems": 2},
    "tuple": {"type": "array", "prefixItems": [{"type": "integer", "minimum": 0, "maximum": 9}, {"enum": ["a", "b"]}], "items": False, "minItems": 2},
    "enum": {"enum": ["yes", "no", 3, None, {"a": [1]}]},
    "const": {"const": {"kind": "fixed", "n": 1.5}},
    "any of": {"anyOf": [{"type": "integer", "minimum": 10, "maximum": 99}, {"enum": ["none"]}]},
    "all of": {"allOf": [{"type": "integer"}, {"minimum": 5}, {"maximum": 8}]},
    "definitions": {"$defs": {"n": {"type": "integer", "minimum": 0, "maximum": 5}}, "type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 2, "maxItems": 3},
    "recursive": {"$defs": {"node": {"type": "object", "properties": {"v": {"enum": [1, 2]}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}, "required": ["v", "next"], "additionalProperties": False}}, "$ref": "#/$defs/node"},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "number": {"type": "number", "minimum": -1.5, "maximum": 2.25},
    "multiple": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
    "types": {"type": ["boolean", "null"]},
    "optional": {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "boolean"}, "c": {"type": "boolean"}}, "additionalProperties": False},
    "extra": {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": {"type": "boolean"}, "maxProperties": 3},
    "string lengths": {"type": "string", "minLength": 3, "maxLength": 5},
    "unicode": {"enum": ["é\"\\\n", "日本"]},
    "one of": {"oneOf": [{"type": "object", "properties": {"cat": {"type": "boolean"}}, "required": ["cat"], "additionalProperties": False}, {"type": "object", "properties": {"dog": {"type": "boolean"}}, "required": ["dog"], "additionalProperties": False}]},
    "not": {"not": {"type": "integer"}},
    "contains": {"type": "array", "contains": {"const": 1}},
}


def ask(schema, seed):
    body = {
        "messages": [{"role": "user", "content": "Tell me of a dragon"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        "seed": seed, "temperature": [0, 1, 2][seed % 3], "max_tokens": 400,
    }
    request = urllib.request.Request(f"{ADDRESS}/v1/chat/completions", json.dumps(body).encode())
    try:
        choice = json.load(urllib.request.urlopen(request))["choices"][0]
        return choice["finish_reason"], choice["message"]["content"]
    except urllib.error.HTTPError as error:
        return "refused", json.load(error)["error"]["message"]


valid = cut = 0
refused = {}
for name, schema in SCHEMAS.items():
    for seed in range(6):
        finish, text = ask(schema, seed)
        if finish == "refused":
            refused[name] = text
        elif finish == "stop":
            value = json.loads(text)
            jsonschema.validate(value, schema, format_checker=jsonschema.FormatChecker())
            valid += 1
        else:
            cut += 1
for name, reason in refused.items():
    print(f"refused: {name}: {reason}")
assert len(refused) <= 3, "most of these schemas are followed"
assert cut <= valid / 10, (cut, valid)
print(f"schemas: {valid} answers valid, {cut} cut at their limit, {len(refused)} of {len(SCHEMAS)} schemas refused")

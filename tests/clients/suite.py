"""JSON Schema's own test suite as structured output: what a model writes under each of its schemas must be valid by the
`jsonschema` package, or the schema is refused by the keyword that stands in the way.

    python suite.py ADDRESS FOLDER [--tokens N] [--seeds N]

FOLDER holds the suite's files of one draft, such as `json/tests/draft2020-12` of jsonschema's source distribution on PyPI; schemas of
an older draft say so in `$schema`.
Prints how many schemas are followed, how many runs end within so many tokens, what is refused and why, and every answer
that is not valid; exit status 1 if there is one.
"""

import argparse
import collections
import concurrent.futures
import decimal
import fractions
import json
import math
import pathlib
import re
import sys
import urllib.error
import urllib.request

import jsonschema

parser = argparse.ArgumentParser()
parser.add_argument("address")
parser.add_argument("folder", type=pathlib.Path)
parser.add_argument("--tokens", type=int, default=1024)
parser.add_argument("--seeds", type=int, default=1)
args = parser.parse_args()


# The drafts before the one that schemas are of without a word, by their folders.
OLDER = {"draft6": jsonschema.Draft6Validator, "draft7": jsonschema.Draft7Validator, "draft2019-09": jsonschema.Draft201909Validator}
JUDGE = OLDER.get(args.folder.name, jsonschema.Draft202012Validator)


def ask(schema, seed):
    """Why it ended and the text, or "refused" and the reason. "closed" is an end to which it was brought."""
    body = {
        "messages": [{"role": "user", "content": "Tell me of a dragon"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        "seed": seed, "temperature": [0, 1][seed % 2], "max_tokens": args.tokens,
    }
    request = urllib.request.Request(f"{args.address}/v1/chat/completions", json.dumps(body).encode())
    try:
        choice = json.load(urllib.request.urlopen(request))["choices"][0]
        finish = "closed" if choice.get("closed_early") else choice["finish_reason"]
        return finish, choice["message"]["content"]
    except urllib.error.HTTPError as error:
        assert error.code == 400, (error.code, schema)
        return "refused", json.load(error)["error"]["message"]


# The judge reads integers of any length.
sys.set_int_max_str_digits(0)


def number(text):
    """A number with a fraction or an exponent. What no float holds is an integer."""
    value = float(text)
    return value if math.isfinite(value) else int(decimal.Decimal(text))


def multiple_of(validator, divisor, value, schema):
    """The judge's rule in whole fractions: its own fails where a float must hold an integer that is too long for one."""
    exact = lambda n: fractions.Fraction(n if isinstance(n, int) else repr(n))
    if validator.is_type(value, "number") and exact(value) % exact(divisor):
        yield jsonschema.ValidationError(f"{value!r} is not a multiple of {divisor}")


def check(schema, text):
    """Why an answer is not valid; None if it is."""
    judge = JUDGE
    try:
        value = json.loads(text, parse_float=number)
        try:
            judge(schema).validate(value)
        except OverflowError:
            jsonschema.validators.extend(judge, {"multipleOf": multiple_of})(schema).validate(value)
    except (jsonschema.ValidationError, ValueError) as error:
        return str(error).splitlines()[0]


# It is held to what it cannot take otherwise.
LONG = {"type": "integer", "multipleOf": 0.5, "minimum": 0}
assert check(LONG, "9" * 5000) is None and check({**LONG, "multipleOf": 7.5}, "1" + "0" * 400)
assert check(LONG, "1e400") is None and check(LONG, "-1e400") and check(LONG, "12.25")


# Schemas of other files and servers are not there for anyone; `false` and its like leave nothing to write.
REMOTE = re.compile(r'"\$(ref|schema|dynamicRef)": "(http|urn|tag|file|/)')
schemas = {}
for path in sorted(args.folder.glob("*.json")):
    for group in json.loads(path.read_text()):
        schema = group["schema"]
        some = any(test["valid"] for test in group["tests"])
        if isinstance(schema, dict):
            bare = {key: value for key, value in schema.items() if key != "$schema"}
            if args.folder.name in OLDER:
                bare["$schema"] = JUDGE.META_SCHEMA["$schema"]
            if some and not REMOTE.search(json.dumps({**bare, "$schema": ""})):
                schemas[f"{path.stem}: {group['description']}"] = bare

refused, cut, wrong, valid, closed = collections.Counter(), [], [], 0, 0
with concurrent.futures.ThreadPoolExecutor(4) as pool:
    runs = {(name, seed): pool.submit(ask, schema, seed) for name, schema in schemas.items() for seed in range(args.seeds)}
    for (name, seed), run in runs.items():
        finish, text = run.result()
        closed += finish == "closed"
        if finish == "refused":
            refused[re.sub(r"[0-9]+", "N", text)[:120]] += seed == 0
        elif finish not in ("stop", "closed"):
            cut.append(name)
        elif problem := check(schemas[name], text):
            wrong.append(f"{name}: {problem}: {text[:80]}")
        else:
            valid += 1

for reason, count in refused.most_common():
    print(f"refused {count}: {reason}")
for line in wrong:
    print(f"not valid: {line}")
for name, count in collections.Counter(cut).most_common():
    print(f"cut at {args.tokens} tokens: {name}")
followed = len(schemas) - sum(refused.values())
runs = valid + len(cut) + len(wrong)
print(f"{followed} of {len(schemas)} schemas followed ({100 * followed / len(schemas):.1f}%), {valid + len(wrong)} of {runs} runs ended "
      f"({100 * (valid + len(wrong)) / max(runs, 1):.1f}%), {closed} of them brought to their end, {len(wrong)} not valid")
sys.exit(bool(wrong))

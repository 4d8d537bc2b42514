"""JSON Schema's own test suite as structured output: what a model writes under each of its schemas must be valid by the
`jsonschema` package, or the schema is refused by the keyword that stands in the way.

    python suite.py ADDRESS FOLDER [--tokens N] [--seeds N]

FOLDER holds the suite's files of one draft, such as `json/tests/draft2020-12` of jsonschema's source distribution on PyPI.
Prints how many schemas are followed, how many runs end within so many tokens, what is refused and why, and every answer
that is not valid; exit status 1 if there is one.
"""

import argparse
import collections
import concurrent.futures
import json
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


def check(schema, text):
    """Why an answer is not valid; None if it is."""
    try:
        jsonschema.validators.validator_for(schema)(schema).validate(json.loads(text))
    except (jsonschema.ValidationError, ValueError) as error:
        return str(error).splitlines()[0]
    except OverflowError:
        # The judge itself fails where it divides an integer that no float holds.
        if not any(len(number) > 300 for number in re.findall("[0-9]+", text)):
            raise
        unjudged.append(text)


# Schemas of other files and servers are not there for anyone; `false` and its like leave nothing to write.
REMOTE = re.compile(r'"\$(ref|schema|dynamicRef)": "(http|urn|tag|file|/)')
schemas = {}
for path in sorted(args.folder.glob("*.json")):
    for group in json.loads(path.read_text()):
        schema = group["schema"]
        some = any(test["valid"] for test in group["tests"])
        if isinstance(schema, dict):
            bare = {key: value for key, value in schema.items() if key != "$schema"}
            if some and not REMOTE.search(json.dumps(bare)):
                schemas[f"{path.stem}: {group['description']}"] = bare

refused, cut, wrong, unjudged, valid, closed = collections.Counter(), [], [], [], 0, 0
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
      f"({100 * (valid + len(wrong)) / max(runs, 1):.1f}%), {closed} of them brought to their end, {len(wrong)} not valid, "
      f"{len(unjudged)} with integers that the judge cannot take")
sys.exit(bool(wrong))

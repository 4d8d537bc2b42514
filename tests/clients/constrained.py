"""What a JSON schema costs: tokens per second of many streams with and without one.

    python constrained.py ADDRESS [--streams 16,32] [--tokens 128] [--rounds 3] [--temperature 1]

Both kinds of answers are of the same prompts, seeds and settings and take turns, so that what else the machine does meets them alike.
The schema allows long texts, so that nearly every answer has as many tokens as the others; what is counted is what the server says
that it wrote. Prints a row for each number of streams: medians, and the ratio of the two.
"""

import argparse
import concurrent.futures
import json
import statistics
import time
import urllib.request

parser = argparse.ArgumentParser()
parser.add_argument("address")
parser.add_argument("--streams", default="16,32")
parser.add_argument("--tokens", type=int, default=128)
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--temperature", type=float, default=1)
args = parser.parse_args()

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "story": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "story", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "story", "schema": SCHEMA}}
FORMS = {"free": {"ignore_eos": True}, "schema": {"response_format": FORMAT}}


def answer(form, seed):
    """Tokens written."""
    body = {
        "messages": [{"role": "user", "content": f"Tell me story number {seed}"}], "max_tokens": args.tokens, "seed": seed,
        "temperature": args.temperature, **FORMS[form],
    }
    request = urllib.request.Request(
        f"{args.address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))["usage"]["completion_tokens"]


seeds = iter(range(1, 1 << 30))
for streams in map(int, args.streams.split(",")):
    speeds, lengths = {form: [] for form in FORMS}, {form: [] for form in FORMS}
    for number in range(args.rounds + 1):
        own = [next(seeds) for _ in range(3 * streams)]
        for form in FORMS:
            began = time.monotonic()
            with concurrent.futures.ThreadPoolExecutor(streams) as pool:
                written = list(pool.map(lambda seed: answer(form, seed), own))
            # The first round warms both up.
            if number:
                speeds[form].append(sum(written) / (time.monotonic() - began))
                lengths[form] += written
    free, schema = (statistics.median(speeds[form]) for form in FORMS)
    length = {form: statistics.mean(lengths[form]) for form in FORMS}
    ratios = sorted(schema / free for free, schema in zip(*speeds.values()))
    print(f"{streams:4} streams: free {free:8.1f} tok/s ({length['free']:.0f} a text), schema {schema:8.1f} ({length['schema']:.0f}), "
          f"{schema / free:.3f} of it (rounds {ratios[0]:.3f} to {ratios[-1]:.3f})", flush=True)

"""What a JSON schema costs: tokens per second of many streams with and without one.

    python constrained.py ADDRESS [--streams 16,32] [--tokens 128] [--rounds 3] [--temperature 1] [--schema FILE] [--pid PID]

Both kinds of answers are of the same prompts, seeds and settings and take turns, so that what else the machine does meets them alike.
The schema allows long texts, so that nearly every answer has as many tokens as the others; so shall another one from a file. What is
counted is what the server says that it wrote. Prints a row for each number of streams: medians, and the ratio of the two. With the server's process id it tells its
CPU time per token too, which others on the machine change less than they change seconds.
"""

import argparse
import concurrent.futures
import json
import os
import statistics
import time
import urllib.request

parser = argparse.ArgumentParser()
parser.add_argument("address")
parser.add_argument("--streams", default="16,32")
parser.add_argument("--tokens", type=int, default=128)
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--temperature", type=float, default=1)
parser.add_argument("--schema", type=argparse.FileType())
parser.add_argument("--pid", type=int)
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
if args.schema:
    SCHEMA = json.load(args.schema)
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


def used():
    """Seconds of CPU time that the server has used."""
    if args.pid is None:
        return 0
    with open(f"/proc/{args.pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


seeds = iter(range(1, 1 << 30))
for streams in map(int, args.streams.split(",")):
    speeds, lengths, costs = ({form: [] for form in FORMS} for _ in range(3))
    for number in range(args.rounds + 1):
        own = [next(seeds) for _ in range(3 * streams)]
        for form in FORMS:
            began, before = time.monotonic(), used()
            with concurrent.futures.ThreadPoolExecutor(streams) as pool:
                written = list(pool.map(lambda seed: answer(form, seed), own))
            # The first round warms both up.
            if number:
                speeds[form].append(sum(written) / (time.monotonic() - began))
                lengths[form] += written
                costs[form].append(1e6 * (used() - before) / sum(written))
    free, schema = (statistics.median(speeds[form]) for form in FORMS)
    length = {form: statistics.mean(lengths[form]) for form in FORMS}
    ratios = sorted(schema / free for free, schema in zip(*speeds.values()))
    print(f"{streams:4} streams: free {free:8.1f} tok/s ({length['free']:.0f} a text), schema {schema:8.1f} ({length['schema']:.0f}), "
          f"{schema / free:.3f} of it (rounds {ratios[0]:.3f} to {ratios[-1]:.3f})", flush=True)
    if args.pid is not None:
        free, schema = (statistics.median(costs[form]) for form in FORMS)
        ratios = sorted(schema / free for free, schema in zip(*costs.values()))
        print(f"     CPU time of a token: free {free:.0f} us, schema {schema:.0f} us, {schema / free:.3f} of it "
              f"(rounds {ratios[0]:.3f} to {ratios[-1]:.3f})", flush=True)

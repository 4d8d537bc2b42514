"""What a JSON schema costs: tokens per second of many streams with and without one.

    python constrained.py ADDRESS [--streams 16,32] [--tokens 128] [--rounds 3] [--temperature 1] [--schema FILE] [--pid PID]
                          [--forms free,bias,any,schema] [--texts 6]

Both kinds of answers have the same seeds and settings, and prompts of their own, none of which the cache has; they take turns, so that
what else the machine does meets them alike. Texts have from half of `--tokens` to all of them, so that requests come and go one by one in
both, as they do in a server; a stream writes `--texts` after each other: with few, the last ones to end are long alone.
The schema allows long texts, so that nearly every answer has as many tokens as a free one; so shall another one from a file. What is
counted is what the server says that it wrote. Prints medians for each number of streams, and ratios. With the server's process id it tells
its CPU time per token too, which others on the machine change less than they change seconds. Where the time goes is told by the server's
own measures, the time to the first token and between two, and by two more forms: `bias`, free answers whose logits are adjusted, and
`any`, a regular expression that allows every text.
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
parser.add_argument("--texts", type=int, default=6)
parser.add_argument("--temperature", type=float, default=1)
parser.add_argument("--schema", type=argparse.FileType())
parser.add_argument("--pid", type=int)
parser.add_argument("--forms", default="free,schema", help="the first one is what the others are compared with")
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
ALL = {
    "free": {"ignore_eos": True},
    "bias": {"ignore_eos": True, "logit_bias": {"100": -1, "200": -1}},
    "any": {"structured_outputs": {"regex": "(.|\\n)*"}},
    "schema": {"response_format": FORMAT},
}
FORMS = {form: ALL[form] for form in args.forms.split(",")}


def answer(form, seed):
    """Tokens written."""
    less = seed * 2654435761 % (1 << 32) * (args.tokens // 2) >> 32
    body = {
        "messages": [{"role": "user", "content": f"A {form} story, number {seed}"}], "max_tokens": args.tokens - less, "seed": seed,
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


def told():
    """What the server has measured: the seconds and the number of first tokens, and of those behind them."""
    with urllib.request.urlopen(f"{args.address}/metrics") as answer:
        lines = [line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if not line.startswith("#")]
    of = lambda name: sum(float(value) for key, value in lines if key.startswith(f"delft_{name}{{"))
    return [of(f"time_{what}_seconds_{part}") for what in ("to_first_token", "per_token") for part in ("sum", "count")]


def beside(name, values):
    """The median of each form, and of the ratio to the first form with its least and greatest round."""
    first = next(iter(FORMS))
    for form in FORMS:
        ratios = sorted(own / other for own, other in zip(values[form], values[first]))
        ratio = f", {statistics.median(ratios):.3f} of {first} (rounds {ratios[0]:.3f} to {ratios[-1]:.3f})" if form != first else ""
        print(f"       {name} {form:6} {statistics.median(values[form]):9.2f}{ratio}", flush=True)


seeds = iter(range(1, 1 << 30))
for streams in map(int, args.streams.split(",")):
    speeds, costs, firsts, gaps, lengths = ({form: [] for form in FORMS} for _ in range(5))
    for number in range(args.rounds + 1):
        own = [next(seeds) for _ in range(args.texts * streams)]
        for form in FORMS:
            before, spent = told(), used()
            began = time.monotonic()
            with concurrent.futures.ThreadPoolExecutor(streams) as pool:
                written = list(pool.map(lambda seed: answer(form, seed), own))
            seconds = time.monotonic() - began
            first, answers, between, others = (now - then for now, then in zip(told(), before))
            # The first round warms both up.
            if number:
                speeds[form].append(sum(written) / seconds)
                lengths[form] += written
                costs[form].append(1e6 * (used() - spent) / sum(written))
                firsts[form].append(1e3 * first / max(answers, 1))
                gaps[form].append(1e3 * between / max(others, 1))
    print(f"{streams:4} streams, tokens of a text: " + ", ".join(f"{form} {statistics.mean(lengths[form]):.1f}" for form in FORMS))
    beside("tok/s", speeds)
    beside("ms to the first token", firsts)
    beside("ms between two", gaps)
    if args.pid is not None:
        beside("us of CPU time a token", costs)

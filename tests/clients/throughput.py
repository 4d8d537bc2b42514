"""Tokens per second of a server that answers some streams at once, by the interface of OpenAI's completions.

    python throughput.py NAME=ADDRESS.. [--streams 4,16] [--prompt 256] [--tokens 128] [--rounds 3]

Servers take turns in every round, so that what else the machine does meets them alike. Every stream has a prompt of its own,
of random letters; what is counted is what each server says that it wrote, from the first request to the last answer.
Prints a row for each number of streams: medians, and their ratios to the last server's.
"""

import argparse
import concurrent.futures
import json
import random
import statistics
import string
import time
import urllib.request

parser = argparse.ArgumentParser()
parser.add_argument("servers", nargs="+")
parser.add_argument("--streams", default="4,16")
parser.add_argument("--prompt", type=int, default=256, help="letters of a prompt, about twice its tokens")
parser.add_argument("--tokens", type=int, default=128)
parser.add_argument("--rounds", type=int, default=3)
args = parser.parse_args()
servers = dict(server.split("=", 1) for server in args.servers)


def models(address):
    return json.load(urllib.request.urlopen(f"{address}/v1/models"))["data"]


names = {server: models(address)[0]["id"] for server, address in servers.items()}


def stream(server, seed):
    """Tokens written, and seconds until the first of them."""
    letters = random.Random(seed)
    prompt = "".join(letters.choice(string.ascii_lowercase) for _ in range(args.prompt))
    body = {
        "model": names[server], "prompt": prompt, "max_tokens": args.tokens, "seed": seed, "stream": True,
        "stream_options": {"include_usage": True}, "temperature": 1,
    }
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    began, first, written = time.monotonic(), None, 0
    with urllib.request.urlopen(urllib.request.Request(f"{servers[server]}/v1/completions", data, headers)) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                first = first or time.monotonic() - began
                usage = json.loads(line[len(b"data: "):]).get("usage")
                written = usage["completion_tokens"] if usage else written
    return written, first


seeds = iter(range(1, 1 << 30))
for streams in map(int, args.streams.split(",")):
    speeds, waits = {server: [] for server in servers}, {server: [] for server in servers}
    for number in range(args.rounds + 1):
        for server in servers:
            own = [next(seeds) for _ in range(streams)]
            began = time.monotonic()
            with concurrent.futures.ThreadPoolExecutor(streams) as pool:
                answers = list(pool.map(lambda seed: stream(server, seed), own))
            seconds = time.monotonic() - began
            # The first round warms both up.
            if number:
                speeds[server].append(sum(written for written, _ in answers) / seconds)
                waits[server].append(statistics.median(first for _, first in answers))
    last = statistics.median(speeds[list(servers)[-1]])
    for server in servers:
        speed = statistics.median(speeds[server])
        wait = statistics.median(waits[server])
        print(f"{streams:4} streams  {server:12} {speed:9.1f} tok/s  {speed / last:5.2f}  first token after {wait:.3f} s", flush=True)

#!/usr/bin/env python3
"""Compare Delft's speed with llama.cpp's and OpenVINO GenAI's on the same GGUF files, and print a Markdown table.

The programs take turns (A B C A B C ...), so that a noisy machine disturbs all alike; figures are medians over the rounds,
ratios medians of each round's own ratio to Delft. Peak memory is the operating system's figure for the peers and
Delft's own report for Delft. `roof` is Delft's share of the bytes per second that it could read in the same minute.

    peers.py --delft PATH [--llama-bench PATH] [--openvino PYTHON] [--rounds 6] [--threads 1 2] [--json OUT] FILE...

PYTHON is an interpreter that has the package `openvino-genai`.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median


def run(command):
    """Standard output, peak resident bytes and processor seconds of a command; its errors end the program."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = subprocess.Popen([str(part) for part in command], stdout=out, stderr=err)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0), err.seek(0)
        if child.returncode:
            sys.stderr.write(err.read().decode(errors="replace")[-4000:])
            raise SystemExit(f"exit status {child.returncode}: {' '.join(map(str, command))[:200]}")
        unit = 1 if sys.platform == "darwin" else 1024  # Linux counts kilobytes
        return out.read().decode(), usage.ru_maxrss * unit, usage.ru_utime + usage.ru_stime


def llama(args, file, threads):
    text, rss, _ = run([args.llama_bench, "-m", file, "-p", args.prompt, "-n", args.generate, "-d", args.depth, "-t", threads,
                        "-r", 1, "-ngl", 0, "-o", "json", *args.llama_arg])
    found = {"peak_rss_bytes": rss}
    for row in json.loads(text):
        found["pp_tok_s" if row["n_gen"] == 0 else "tg_tok_s"] = row["avg_ts"]
    return found


# What OpenVINO's interpreter runs: a prompt of `depth` + `prompt` tokens and what follows it. Time to the first token is the
# prompt's, so at a depth its speed is that of the whole prompt.
OPENVINO = """
import json, sys
import numpy, openvino, openvino_genai
file, prompt, generate, threads = sys.argv[1], *map(int, sys.argv[2:])
pipe = openvino_genai.LLMPipeline(file, "CPU", INFERENCE_NUM_THREADS=threads)
config = openvino_genai.GenerationConfig()
config.max_new_tokens = config.min_new_tokens = generate + 1
config.ignore_eos = True
random = numpy.random.default_rng(1)
for _ in range(2):  # the first compiles
    ids = random.integers(1000, 20000, (1, prompt), dtype=numpy.int64)
    inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(numpy.ones_like(ids)))
    metrics = pipe.generate(inputs, config).perf_metrics
    assert metrics.get_num_generated_tokens() == generate + 1
print(json.dumps({"pp_tok_s": 1e3 * prompt / metrics.get_ttft().mean, "tg_tok_s": 1e3 / metrics.get_tpot().mean}))
"""


def openvino(args, file, threads):
    text, rss, _ = run([args.openvino, "-c", OPENVINO, file, args.depth + args.prompt, args.generate, threads])
    return {"peak_rss_bytes": rss, **json.loads(text.splitlines()[-1])}


def delft(args, file, threads):
    text, *_ = run([args.delft, "bench", "-m", file, "-p", args.prompt, "-n", args.generate, "-d", args.depth, "-r", 1,
                   "--threads", threads, "--json", *args.delft_arg])
    found = json.loads(text)
    missing = [key for key in ("pp_tok_s", "tg_tok_s", "tg_of_roof", "peak_rss_bytes", "load_s") if key not in found]
    if missing:
        raise SystemExit(f"delft bench --json: no {', '.join(missing)} in {text.strip()[:400]}")
    return found


def measure(args, file, threads):
    """The rows of one file: a peer each."""
    peers = {name: call for name, call, given in (("llama.cpp", llama, args.llama_bench), ("OpenVINO", openvino, args.openvino)) if given}
    rounds = []
    for turn in range(args.rounds):
        rounds.append({name: call(args, file, threads) for name, call in [*peers.items(), ("delft", delft)]})
        shown = ", ".join(f"{name} {r['pp_tok_s']:.1f} / {r['tg_tok_s']:.1f}" for name, r in rounds[-1].items())
        print(f"{file.name} {threads} threads, round {turn + 1}: {shown}", file=sys.stderr, flush=True)
    rows = []
    for name in peers:
        row = {"file": file.name, "bytes": file.stat().st_size, "threads": threads, "rounds": args.rounds, "peer": name,
               "depth": args.depth, "load_average": os.getloadavg()[0]}
        for key in ("pp_tok_s", "tg_tok_s", "peak_rss_bytes"):
            row[f"peer_{key}"] = median(r[name][key] for r in rounds)
            row[f"delft_{key}"] = median(r["delft"][key] for r in rounds)
            row[f"ratio_{key}"] = median(r["delft"][key] / r[name][key] for r in rounds)
        for key in ("load_s", "tg_of_roof"):
            row[f"delft_{key}"] = median(r["delft"][key] for r in rounds)
        rows.append(row)
    return rows


def table(args, rows):
    p, g, mb = f"pp{args.prompt}", f"tg{args.generate}", 1e6
    lines = [f"| file | MB | threads | peer | {p} peer | {p} delft | ratio | {g} peer | {g} delft | ratio | roof "
             "| peak MB peer | peak MB delft | load s delft |", "|---|---:|---:|---|" + "---:|" * 10]
    for r in rows:
        lines.append(
            f"| {r['file']} | {r['bytes'] / mb:.0f} | {r['threads']} | {r['peer']} "
            f"| {r['peer_pp_tok_s']:.1f} | {r['delft_pp_tok_s']:.1f} | {r['ratio_pp_tok_s']:.2f} "
            f"| {r['peer_tg_tok_s']:.1f} | {r['delft_tg_tok_s']:.1f} | {r['ratio_tg_tok_s']:.2f} | {r['delft_tg_of_roof']:.2f} "
            f"| {r['peer_peak_rss_bytes'] / mb:.0f} | {r['delft_peak_rss_bytes'] / mb:.0f} | {r['delft_load_s']:.2f} |")
    return "\n".join(lines)


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--delft", type=Path, required=True)
    args.add_argument("--llama-bench", type=Path)
    args.add_argument("--openvino", type=Path, metavar="PYTHON")
    args.add_argument("--rounds", type=int, default=6)
    args.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    args.add_argument("-p", "--prompt", type=int, default=512)
    args.add_argument("-n", "--generate", type=int, default=128)
    args.add_argument("-d", "--depth", type=int, default=0)
    args.add_argument("--llama-arg", action="append", default=[], help="passed on to llama-bench, e.g. --llama-arg=-fa --llama-arg=1")
    args.add_argument("--delft-arg", action="append", default=[], help="passed on to delft bench")
    args.add_argument("--json", type=Path, help="also write the rows here")
    args.add_argument("files", type=Path, nargs="+", metavar="FILE")
    args = args.parse_args()
    if args.rounds < 1 or args.prompt < 1 or args.generate < 1:
        raise SystemExit("rounds, prompt and generate must be at least 1")
    if not (args.llama_bench or args.openvino):
        raise SystemExit("no peer: --llama-bench PATH, --openvino PYTHON or both")

    rows = [row for file in args.files for threads in args.threads for row in measure(args, file, threads)]
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(args, rows))


if __name__ == "__main__":
    main()

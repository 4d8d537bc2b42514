#!/usr/bin/env python3
"""Compare Delft's speed with llama.cpp's on the same GGUF files, and print a Markdown table.

The two take turns (A B A B ...), so that a noisy machine disturbs both alike; figures are medians over the rounds,
ratios medians of each round's own ratio. Peak memory is the operating system's figure for llama.cpp and
Delft's own report for Delft; load time is Delft's alone, since llama-bench does not report one.

    peers.py --llama-bench PATH --delft PATH [--rounds 5] [--threads 1 2] [--json OUT] FILE...
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
    """Standard output and peak resident bytes of a command; its errors end the program."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = subprocess.Popen([str(part) for part in command], stdout=out, stderr=err)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0), err.seek(0)
        if child.returncode:
            sys.stderr.write(err.read().decode(errors="replace")[-4000:])
            raise SystemExit(f"exit status {child.returncode}: {' '.join(map(str, command))}")
        unit = 1 if sys.platform == "darwin" else 1024  # Linux counts kilobytes
        return out.read().decode(), usage.ru_maxrss * unit


def llama(args, file, threads):
    text, rss = run([args.llama_bench, "-m", file, "-p", args.prompt, "-n", args.generate, "-t", threads, "-r", 1,
                     "-ngl", 0, "-o", "json", *args.llama_arg])
    found = {"peak_rss_bytes": rss}
    for row in json.loads(text):
        found["pp_tok_s" if row["n_gen"] == 0 else "tg_tok_s"] = row["avg_ts"]
    return found


def delft(args, file, threads):
    text, _ = run([args.delft, "bench", "-m", file, "-p", args.prompt, "-n", args.generate, "--threads", threads,
                   "--json", *args.delft_arg])
    found = json.loads(text)
    missing = [key for key in ("pp_tok_s", "tg_tok_s", "peak_rss_bytes", "load_s") if key not in found]
    if missing:
        raise SystemExit(f"delft bench --json: no {', '.join(missing)} in {text.strip()[:400]}")
    return found


def measure(args, file, threads):
    """One row of the table."""
    rounds = []
    for turn in range(args.rounds):
        rounds.append((llama(args, file, threads), delft(args, file, threads)))
        a, b = rounds[-1]
        print(f"{file.name} {threads} threads, round {turn + 1}: llama.cpp {a['pp_tok_s']:.1f} / {a['tg_tok_s']:.1f}, "
              f"delft {b['pp_tok_s']:.1f} / {b['tg_tok_s']:.1f}", file=sys.stderr)
    row = {"file": file.name, "bytes": file.stat().st_size, "threads": threads, "rounds": args.rounds,
           "load_average": os.getloadavg()[0]}
    for key in ("pp_tok_s", "tg_tok_s", "peak_rss_bytes"):
        row[f"llama_{key}"] = median(a[key] for a, _ in rounds)
        row[f"delft_{key}"] = median(b[key] for _, b in rounds)
        row[f"ratio_{key}"] = median(b[key] / a[key] for a, b in rounds)
    row["delft_load_s"] = median(b["load_s"] for _, b in rounds)
    return row


def table(args, rows):
    p, g, mb = f"pp{args.prompt}", f"tg{args.generate}", 1e6
    lines = [f"| file | MB | threads | {p} llama.cpp | {p} delft | ratio | {g} llama.cpp | {g} delft | ratio "
             "| peak MB llama.cpp | peak MB delft | load s delft |", "|---|" + "---:|" * 11]
    for r in rows:
        lines.append(
            f"| {r['file']} | {r['bytes'] / mb:.0f} | {r['threads']} | {r['llama_pp_tok_s']:.1f} | {r['delft_pp_tok_s']:.1f} "
            f"| {r['ratio_pp_tok_s']:.2f} | {r['llama_tg_tok_s']:.1f} | {r['delft_tg_tok_s']:.1f} | {r['ratio_tg_tok_s']:.2f} "
            f"| {r['llama_peak_rss_bytes'] / mb:.0f} | {r['delft_peak_rss_bytes'] / mb:.0f} | {r['delft_load_s']:.2f} |")
    return "\n".join(lines)


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--llama-bench", type=Path, required=True)
    args.add_argument("--delft", type=Path, required=True)
    args.add_argument("--rounds", type=int, default=5)
    args.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    args.add_argument("-p", "--prompt", type=int, default=512)
    args.add_argument("-n", "--generate", type=int, default=128)
    args.add_argument("--llama-arg", action="append", default=[], help="passed on to llama-bench, e.g. --llama-arg=-fa --llama-arg=1")
    args.add_argument("--delft-arg", action="append", default=[], help="passed on to delft bench")
    args.add_argument("--json", type=Path, help="also write the rows here")
    args.add_argument("files", type=Path, nargs="+", metavar="FILE")
    args = args.parse_args()
    if args.rounds < 1 or args.prompt < 1 or args.generate < 1:
        raise SystemExit("rounds, prompt and generate must be at least 1")

    rows = [measure(args, file, threads) for file in args.files for threads in args.threads]
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(args, rows))


if __name__ == "__main__":
    main()

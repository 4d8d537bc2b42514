#!/usr/bin/env python3
"""Compare the speed and the memory of `delft tune` with PyTorch's, on a CPU or a GPU, and print a Markdown table.

Both train LoRA factors at every matrix of the blocks of a model of the same shape: sequences of --length tokens, --tokens an update,
AdamW. PyTorch goes through Transformers and PEFT, in each type of --types, with random weights; Delft reads a GGUF file of that shape
(`random_gguf.py qwen3-0.6b bf16 FILE words`). With --device cuda PyTorch's model is compiled (`torch.compile`) and its factors are
float32, as PEFT makes them. The programs take turns (A B C A B C ...), so that a noisy machine disturbs all
alike; figures are medians over the rounds, ratios medians of each round's own. Loading and a first, small update are left out of
PyTorch's time, loading not of Delft's. Peak memory is the operating system's figure for each process, in which pages of a mapped file
count; on a GPU what each has allocated there, PyTorch's without what its allocator keeps in reserve. A round begins only if one as long as the longest so far ends within --minutes, and a PyTorch process makes no further update
after --seconds, so that a type which a processor has no instructions for (bfloat16 without AVX-512 or AMX) costs one update.

    train_peers.py --delft PATH [--device cpu] [--minutes 9] [--seconds 60] [--rounds 3] [--types float32,bfloat16] [--threads 2]
        [--tokens 512] [--length 256] [--rank 16] [--updates 3] MODEL.gguf

Needs torch, transformers, peft and gguf. `cpu` is processor seconds for a thousand tokens: on a machine that others use it says more
than the clock. Delft's has its loading in it, too. For a GPU: `--device cuda --types bfloat16 --tokens 4096 --length 1024 --updates 40`.
"""
import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from peers import run

# What PyTorch's process runs.
PYTORCH = """
import json, sys, time
from pathlib import Path
import torch, transformers
from peft import LoraConfig, get_peft_model
file, kind, device = sys.argv[1:4]
threads, tokens, length, rank, updates, seconds = map(int, sys.argv[4:])
torch.set_num_threads(threads)
torch.manual_seed(1)
path = Path(file).resolve()
config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
torch.set_default_dtype(getattr(torch, kind))
with torch.device(device):
    model = transformers.AutoModelForCausalLM.from_config(config)
names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
model = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names, task_type="CAUSAL_LM"))
gpu = device != "cpu"
if gpu:
    model = torch.compile(model)
optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
def update(sequences, length):
    ids = torch.randint(0, config.vocab_size, (sequences, length), device=device)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step(), optimiser.zero_grad()
# Compiled for the one shape; the second update finds all compiled.
for _ in range(2 if gpu else 1):
    update(*(tokens // length, length) if gpu else (1, 16))
if gpu:
    torch.cuda.synchronize()
began, made = (time.perf_counter(), time.process_time()), 0
while made < updates and (made == 0 or time.perf_counter() - began[0] < seconds):
    update(tokens // length, length)
    made += 1
if gpu:
    torch.cuda.synchronize()
wall, cpu = time.perf_counter() - began[0], time.process_time() - began[1]
peak = {"device_peak_bytes": torch.cuda.max_memory_allocated()} if gpu else {}
print(json.dumps({"tok_s": made * tokens / wall, "cpu": cpu, "tokens": made * tokens, **peak}))
"""


def measured(command):
    """The last line of a command's output as JSON, with its peak bytes and processor seconds where it does not say them itself."""
    text, resident, cpu = run(command)
    found = json.loads(text.splitlines()[-1])
    return {"cpu": cpu, **found, "peak": found.get("device_peak_bytes") or resident}


def pytorch(args, kind):
    sizes = [args.threads, args.tokens, args.length, args.rank, args.updates, args.seconds]
    return measured([sys.executable, "-c", PYTORCH, args.model, kind, args.device, *sizes])


def delft(args, folder, turn):
    text = folder / "words.txt"
    if not text.exists():
        # Words of random_gguf.py's vocabulary, a token each.
        words = random.Random(1)
        text.write_text(" ".join(f"w{words.randrange(100_000)}" for _ in range(4 * args.tokens * args.updates)))
    # --batch-tokens is filled by whole pieces of --context tokens.
    found = measured([args.delft, "tune", args.model, "--data", text, "--raw", "--context", args.length, "--batch-tokens", args.tokens,
                      "--steps", args.updates, "--rank", args.rank, "--threads", args.threads, "--device", args.device, "--held-out", "none",
                      "--checkpoint-every", args.updates + 1, "--json", "--out", folder / f"run{turn}"])
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delft", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("model", type=Path)
    parser.add_argument("--types", type=lambda text: text.split(","), default=["float32", "bfloat16"])
    for name, usual in [("minutes", 9), ("seconds", 60), ("rounds", 3), ("threads", 2), ("tokens", 512), ("length", 256), ("rank", 16), ("updates", 3)]:
        parser.add_argument(f"--{name}", type=int, default=usual)
    args = parser.parse_args()
    rounds, began, longest = [], time.perf_counter(), 0
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(args.rounds):
            first = time.perf_counter()
            if first - began + longest > 60 * args.minutes:
                print(f"{turn} of {args.rounds} rounds within {args.minutes} minutes", file=sys.stderr)
                break
            found = {kind: pytorch(args, kind) for kind in args.types}
            found["delft"] = delft(args, Path(folder), turn)
            rounds.append(found)
            longest = max(longest, time.perf_counter() - first)
            shown = ", ".join(f"{name} {r['tok_s']:.1f} tok/s, {r['cpu']:.0f} s for {r['tokens']}, {r['peak'] / 1e6:.0f} MB" for name, r in found.items())
            print(f"round {turn + 1}: {shown}", file=sys.stderr, flush=True)
    print("| program | tok/s | Delft's ratio | cpu s / 1000 tokens | Delft's ratio | peak MB | Delft's ratio |\n|---|---:|---:|---:|---:|---:|---:|")
    cpu = lambda found: 1e3 * found["cpu"] / found["tokens"]
    for name in rounds[0]:
        middle = lambda f: median(f(r) for r in rounds)
        print(f"| {name} | {middle(lambda r: r[name]['tok_s']):.1f} | {middle(lambda r: r['delft']['tok_s'] / r[name]['tok_s']):.2f} "
              f"| {middle(lambda r: cpu(r[name])):.1f} | {middle(lambda r: cpu(r[name]) / cpu(r['delft'])):.2f} "
              f"| {middle(lambda r: r[name]['peak'] / 1e6):.0f} | {middle(lambda r: r['delft']['peak'] / r[name]['peak']):.2f} |")


if __name__ == "__main__":
    main()

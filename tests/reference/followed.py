#!/usr/bin/env python3
"""Compare a run of `delft tune` with PEFT's and PyTorch's, update by update.

`delft tune` makes the updates first. Then PyTorch makes the same ones, in float32 through Transformers and PEFT: from the
factors that Delft began with (those behind one update, whose rate is zero), on the same tokens in the same order (Philox's, as
`crates/train/src/pack.rs` has it), with torch's AdamW, clipping and schedule. Prints how far each update's loss and norm are
apart, and both speeds; ends with an error where a loss is further off than `--bound`, relative to it, or the mean of the last tenth
of them than `--final`. PyTorch computes in float32, so that `--device cuda --precision bf16 --bound 0.1` tells what 16 bits cost, unless
`--torch-type bfloat16` asks for PEFT's own run in 16 bits: a base in bf16 with factors in float32, as PEFT has them by itself.
Where PyTorch is not on the machine with the GPU, `--only-delft FOLDER` makes Delft's runs there, and `--made FOLDER` reads them here.

    followed.py --delft PATH MODEL.gguf TEXTS.jsonl [--steps 200] [--bound 1e-4] [--final 0.01] [--json OUT]

MODEL is a GGUF file whose matrices are f32 or of 16 bits, since quantised products round activations on the CPU. Each line of
TEXTS is {"text": ..}. Needs torch, transformers, peft, safetensors, gguf.
"""
import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path

MASK = 0xFFFFFFFF
WEIGHTS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def philox(counter, key):
    """Ten rounds of Philox4x32 (Salmon et al. 2011)."""
    (a, b, c, d), (k, l) = counter, key
    for _ in range(10):
        first, second = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = second >> 32 ^ b ^ k, second & MASK, first >> 32 ^ d ^ l, first & MASK
        k, l = (k + 0x9E3779B9) & MASK, (l + 0xBB67AE85) & MASK
    return a, b, c, d


def shuffled(count, seed, stream):
    """The numbers below `count` in the order of an epoch."""
    order = list(range(count))
    for i in range(count - 1, 0, -1):
        a, b, *_ = philox((i & MASK, i >> 32, stream, 0), (seed & MASK, seed >> 32))
        j = (a << 32 | b) * (i + 1) >> 64
        order[i], order[j] = order[j], order[i]
    return order


def batches(examples, seed, budget, updates):
    """The examples of each update: as many of an epoch's as fit, none of two epochs."""
    found, epoch = [], 0
    while len(found) < updates:
        run, tokens = [], 0
        for i in shuffled(len(examples), seed, epoch):
            if tokens + len(examples[i]) > budget:
                found.append(run)
                run, tokens = [], 0
            run.append(examples[i])
            tokens += len(examples[i])
        found.append(run)
        epoch += 1
    return found[:updates]


def delft(args, folder, *more):
    """Tunes; the seconds that it took."""
    command = [args.delft, "tune", args.model, "--data", args.texts, "--out", folder, "--steps", args.steps]
    command += ["--batch-tokens", args.batch_tokens, "--context", args.context, "--rank", args.rank, "--lr", args.lr]
    command += ["--seed", args.seed, "--held-out", "none", "--weight-decay", args.decay, "--warmup", args.warmup]
    command += ["--alpha", 2 * args.rank, "--schedule", "cosine", "--clip", 1, "--device", args.device, *more]
    if args.precision:
        command += ["--precision", args.precision]
    if args.threads:
        command += ["--threads", args.threads]
    began = time.time()
    subprocess.run([str(part) for part in command], check=True)
    return time.time() - began


def losses(folder):
    """The lines of a run's log that are of updates."""
    lines = [json.loads(line) for line in (folder / "loss.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def tokens_of(args):
    """The tokens of each line, cut as Delft cuts texts: pieces of a context that share a token."""
    examples = []
    for line in Path(args.texts).read_text().splitlines():
        command = [args.delft, "tokenize", "--model", args.model, "--json", "--prompt", json.loads(line)["text"]]
        out = subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True)
        examples.append(json.loads(out.stdout)["tokens"])
    return examples


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delft", required=True)
    parser.add_argument("model")
    parser.add_argument("texts")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--batch-tokens", type=int, default=512)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--decay", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision")
    parser.add_argument("--torch-type", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--bound", type=float, default=1e-4)
    parser.add_argument("--final", type=float, default=0.01)
    parser.add_argument("--only-delft", type=Path, metavar="FOLDER")
    parser.add_argument("--made", type=Path, metavar="FOLDER")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    holder = tempfile.TemporaryDirectory()
    aside, seconds = args.made or args.only_delft or Path(holder.name), 0.0
    if not args.made:
        seconds = delft(args, aside / "run")
        # The first update of those that warm up has a rate of zero.
        delft(argparse.Namespace(**{**vars(args), "steps": 1}), aside / "begun")
    if args.only_delft:
        return
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file
    own, begun = losses(aside / "run"), load_file(aside / "begun" / "adapter_model.safetensors")

    if args.threads:
        torch.set_num_threads(args.threads)
    path = Path(args.model).resolve()
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=getattr(torch, args.torch_type))
    config = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules=WEIGHTS, task_type="CAUSAL_LM")
    model = get_peft_model(model, config)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    for name, parameter in trained.items():
        assert parameter.dtype == torch.float32
        parameter.data.copy_(begun[name.replace(".default", "")])
    assert len(trained) == len(begun)
    optimiser = torch.optim.AdamW(trained.values(), lr=args.lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=args.decay)
    schedule = transformers.get_cosine_schedule_with_warmup(optimiser, args.warmup, args.steps)

    examples, end = tokens_of(args), model.config.eos_token_id
    examples = [tokens if tokens[-1] == end else tokens + [end] for tokens in examples]
    pieces = [t[i : i + args.context] for t in examples for i in range(0, len(t) - 1, args.context - 1)]
    worst, apart, read = (0, 0.0), [], 0
    began = time.time()
    for step, batch in enumerate(batches(pieces, args.seed, args.batch_tokens, args.steps)):
        total, count = 0.0, 0
        for tokens in batch:
            tokens = torch.tensor(tokens)
            logits = model(input_ids=tokens[None], use_cache=False).logits[0]
            loss = torch.nn.functional.cross_entropy(logits[:-1].float(), tokens[1:], reduction="sum")
            loss.backward()
            total, count, read = total + loss.item(), count + len(tokens) - 1, read + len(tokens)
        for parameter in trained.values():
            parameter.grad /= count
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), 1.0).item()
        optimiser.step(), schedule.step(), optimiser.zero_grad()
        mean, line = total / count, own[step]
        off = abs(line["loss"] / mean - 1)
        worst = max(worst, (off, step + 1))
        apart.append({"step": step + 1, "delft": line["loss"], "pytorch": mean, "norms": [line["norm"], norm]})
        if (step + 1) % 20 == 0 or step == 0:
            print(f"{step + 1:4}  {line['loss']:.6f}  {mean:.6f}  {off:.1e}   norms {line['norm']:.5f} {norm:.5f}", flush=True)
    theirs = time.time() - began
    print(f"{args.steps} updates: losses {worst[0]:.1e} apart at most (update {worst[1]}), "
          f"{own[0]['loss']:.4f} to {own[-1]['loss']:.4f}")
    print(f"delft tune {seconds:.1f} s, all of it; PyTorch's loop {theirs:.1f} s, {read / theirs:.0f} tokens/s")
    last = apart[-max(1, args.steps // 10):]
    final = sum(line["delft"] for line in last) / sum(line["pytorch"] for line in last) - 1
    print(f"the mean of the last {len(last)} losses is {final:+.1e} apart")
    if args.json:
        args.json.write_text(json.dumps(apart, indent=1))
    if worst[0] > args.bound:
        raise SystemExit(f"losses are further apart than {args.bound}")
    if abs(final) > args.final:
        raise SystemExit(f"the last losses are further apart than {args.final}")


if __name__ == "__main__":
    main()

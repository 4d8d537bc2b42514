#!/usr/bin/env python3
"""Greedy tokens of Delft beside Transformers', both in f32, for random prompts on the small checkpoints in models/.

    python3 tests/reference/greedy.py target/release/delft --device cuda [--prompts 64] [--tokens 24]

The same tokens are wanted. Where one differs, the two best logits of Transformers must be nearer to each other than TIE of
their range, and the rest of that prompt is not compared; how often that was so is printed. Needs torch and transformers.
"""

import argparse
import json
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import transformers

MODELS = Path(__file__).parent / "models"
CASES = ["llama3", "qwen3", "mistral", "qwen2"]
TIE = 1e-4


def delft(program, device, case, prompt, tokens):
    """The tokens that the program generates after a prompt."""
    command = [program, "logits", "-m", str(MODELS / case), "--device", device, "--cache-type", "f32", "--json"]
    command += ["--tokens", ",".join(map(str, prompt)), "--generate", str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")
    return json.loads(done.stdout)["generated"]


@torch.no_grad()
def compare(model, prompt, found):
    """Whether tokens are the model's greedy ones; None where they part at a tie."""
    ids = list(prompt)
    for i, token in enumerate(found):
        logits = model(torch.tensor([ids])).logits[0, -1]
        if int(logits.argmax()) != token:
            margin = (logits.max() - logits[token]) / (logits.max() - logits.min())
            print(f"token {i} after {prompt}: {token} for {int(logits.argmax())}, {margin:.1e} of the range apart")
            return None if margin < TIE else False
        ids.append(token)
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=24)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    rng = random.Random(1)
    results = []
    for case in CASES:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            MODELS / case, dtype=torch.float32, attn_implementation="eager").eval()
        count = args.prompts // len(CASES)
        prompts = [[rng.randrange(3, model.config.vocab_size) for _ in range(rng.randint(1, 90))] for _ in range(count)]
        run = lambda prompt: delft(args.program, args.device, case, prompt, args.tokens)
        # The first alone: it compiles what the others find.
        found = [run(prompts[0])]
        with ThreadPoolExecutor(4) as pool:
            found += pool.map(run, prompts[1:])
        if any(len(tokens) != args.tokens for tokens in found):
            raise SystemExit(f"{case}: fewer tokens than asked for")
        results += [compare(model, prompt, tokens) for prompt, tokens in zip(prompts, found)]
    equal, ties = results.count(True), results.count(None)
    print(f"{equal} of {len(results)} prompts with equal tokens, {ties} that part at a tie")
    sys.exit(0 if results and equal + ties == len(results) else 1)


if __name__ == "__main__":
    main()

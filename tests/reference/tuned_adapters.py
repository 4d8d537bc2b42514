#!/usr/bin/env python3
"""Adapters that `delft tune` makes, in PEFT and in mlx-lm: the same logits as in Delft.

    tuned_adapters.py --delft target/debug/delft [--only NAME ...]

Delft tunes a GGUF twin of a checkpoint of models/ for a few updates. PEFT loads the folder as it is beside the checkpoint itself,
whose q and k some twins store in another order; mlx-lm loads what `delft convert --adapter` makes of it. Logits of random tokens are
compared with those of Delft on the twin and on the checkpoint. Prints how far they are apart, and how far the adapter moves them, and
ends with an error where that is above a thousandth of their range, or where the adapter moves nothing. Needs torch, transformers,
peft, mlx (its CPU backend is enough), mlx-lm and numpy.
"""
import argparse
import json
import tempfile
import zlib
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
import transformers
from mlx_lm.tuner.utils import load_adapters
from peft import PeftModel

from mlx_adapters import HERE, model, run, told

# Name, checkpoint, its twin, flags of `delft tune`, whether mlx-lm can have the adapter and the checkpoint.
CASES = [
    ("plain", "llama3", "model.f32.gguf", [], True),
    ("rslora", "llama3", "model.f32.gguf", ["--rslora", "--alpha", 3], True),
    ("dora", "llama3", "model.f32.gguf", ["--dora"], True),
    ("last-block", "llama3", "model.f32.gguf", ["--layers", 1], False),
    ("some-sites", "llama3", "model.f32.gguf", ["--sites", "q_proj,v_proj,down_proj"], True),
    ("biases", "qwen2", "model.f16.gguf", [], True),
    ("norms-of-heads", "qwen3", "model.bf16.gguf", ["--dora"], True),
    ("gemma3", "gemma3", "model.f32.gguf", [], False),
    ("fused", "phi3", "model.f32.gguf", [], False),
    ("fused-dora", "phi3", "model.f32.gguf", ["--dora"], False),
    ("transposed", "gpt2", "model.f32.gguf", [], False),
    ("experts", "qwen3-moe-all", "model.f32.gguf", [], False),
]
TEXTS = ["a zebra sings in the dark", "the fox and the hen went home", "no rain fell on the hill", "she told him all of it"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delft", required=True)
    parser.add_argument("--only", nargs="*")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    holder, wrong = tempfile.TemporaryDirectory(), False
    aside = Path(holder.name)
    texts = aside / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    for name, base, twin, flags, mlx in CASES:
        if args.only and name not in args.only:
            continue
        checkpoint, folder = HERE / "models" / base, aside / name
        run(args.delft, "tune", "-m", checkpoint / twin, "--data", texts, "--out", folder, "--held-out", "none", "--steps", 6, "--lr", "2e-2",
            "--rank", 4, "--device", "cpu", "--json", *flags)
        bare = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        tokens = torch.randint(3, bare.config.get_text_config().vocab_size, (24,), generator=generator)
        with torch.no_grad():
            before = bare(input_ids=tokens[None], use_cache=False).logits[0].numpy()
            wanted = PeftModel.from_pretrained(bare, folder).eval()(input_ids=tokens[None], use_cache=False).logits[0].numpy()
        moved = np.abs(wanted - before).max() / np.ptp(wanted)
        print(f"{name}: the adapter moves logits by {moved:.2f} of the range{'' if moved > 0.02 else '  WRONG'}", flush=True)
        wrong |= bool(moved <= 0.02)
        for what, place, more in [("the twin", checkpoint / twin, []), ("the checkpoint", checkpoint, ["--any-base"])]:
            found = run(args.delft, "logits", "-m", place, "--adapter", folder, "--cache-type", "f32", "--device", "cpu", "--json", "--all",
                        "--tokens", ",".join(map(str, tokens.tolist())), *more)
            wrong |= told(f"{name}: Delft on {what} beside PEFT", np.array(json.loads(found)["logits"]).reshape(wanted.shape), wanted)
        if mlx:
            out = aside / f"{name}-mlx"
            run(args.delft, "convert", checkpoint, "--adapter", folder, "--any-base", "-o", out)
            adapted = load_adapters(model(base, aside), str(out))
            adapted.set_dtype(mx.float32)
            wrong |= told(f"{name}: mlx-lm beside PEFT", adapted(mx.array(tokens.numpy())[None])[0], wanted)
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()

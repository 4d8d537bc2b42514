#!/usr/bin/env python3
"""Adapters that `delft tune` makes, in PEFT and in mlx-lm: the same logits as in Delft.

    tuned_adapters.py --delft target/debug/delft [--only NAME ...]

Delft tunes a GGUF twin of a checkpoint of models/ for a few updates, or the checkpoint itself with a vocabulary of letters. PEFT
loads the folder as it is beside the checkpoint, whose q and k some twins store in another order; mlx-lm loads what
`delft convert --adapter` makes of it. Logits of random tokens are compared with those of Delft on the twin and on the checkpoint, and
where the checkpoint was tuned with those of what `delft fuse` writes. Prints how far they are apart, and how far the adapter moves
them, and ends with an error where that is above a thousandth of their range, or where the adapter moves nothing. Needs torch,
transformers, tokenizers, peft, safetensors, mlx (its CPU backend is enough), mlx-lm and numpy.
"""
import argparse
import json
import shutil
import string
import tempfile
import zlib
from pathlib import Path

import mlx.core as mx
import numpy as np
import tokenizers
import torch
import transformers
from mlx_lm.tuner.utils import load_adapters
from peft import PeftModel
from safetensors.torch import load_file, save_file

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
    # Nets whose queries, keys and values are one matrix in Delft.
    ("doubled-nets", "olmo_hybrid", "", [], False),
    ("doubled-nets-dora", "olmo_hybrid", "", ["--dora"], False),
    ("nets-by-element", "kimi_linear", "", [], False),
    ("nets-by-element-dora", "kimi_linear", "", ["--dora"], False),
    ("bounded-nets", "bailing_hybrid", "", [], False),
    # The first Mamba's state spaces; experts beside them, and experts without gates.
    ("rates-by-element", "mamba", "", [], False),
    ("rates-by-element-dora", "falcon-mamba", "", ["--dora"], False),
    ("mixed-spaces", "jamba", "", ["--sites", "experts,x_proj"], False),
    ("ups-alone", "nemotron-h-moe", "", ["--sites", "experts"], False),
    # Tables that are trained whole: of one matrix, of a head alone, with a factor behind it; and what updates draw.
    ("tables", "llama3", "", ["--whole", "embeddings,head"], False),
    ("head", "llama3", "model.f32.gguf", ["--whole", "head"], False),
    ("scaled-table", "gemma3", "model.f32.gguf", ["--whole", "embeddings", "--sites", "q_proj"], False),
    ("tables-apart", "qwen3-untied", "", ["--whole", "embed_tokens,lm_head", "--dropout", 0.2, "--neftune", 5, "--rslora"], False),
]
TEXTS = ["a zebra sings in the dark", "the fox and the hen went home", "no rain fell on the hill", "she told him all of it"]


def lettered(checkpoint, folder):
    """A copy of a checkpoint, with a vocabulary of letters."""
    shutil.copytree(checkpoint, folder)
    letters = ["<unk>", "<s>", "</s>", "\u0120", *string.ascii_lowercase]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(letters[:3])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def widened(checkpoint, folder):
    """A copy of a checkpoint in f32, which loses nothing of what is merged into it."""
    shutil.copytree(checkpoint, folder)
    stored = load_file(folder / "model.safetensors")
    save_file({name: tensor.float() for name, tensor in stored.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


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
        tuned = checkpoint / twin if twin else lettered(checkpoint, aside / f"{name}-letters")
        tune = ["tune", "-m", tuned, "--data", texts, "--held-out", "none", "--lr", "2e-2", "--rank", 4, "--device", "cpu", "--json", *flags]
        run(args.delft, *tune, "--out", folder, "--steps", 6)
        bare = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        tokens = torch.randint(3, bare.config.get_text_config().vocab_size, (24,), generator=generator)
        with torch.no_grad():
            before = bare(input_ids=tokens[None], use_cache=False).logits[0].numpy()
            wanted = PeftModel.from_pretrained(bare, folder).eval()(input_ids=tokens[None], use_cache=False).logits[0].numpy()
        moved = np.abs(wanted - before).max() / np.ptp(wanted)
        print(f"{name}: the adapter moves logits by {moved:.2f} of the range{'' if moved > 0.02 else '  WRONG'}", flush=True)
        wrong |= bool(moved <= 0.02)
        used = [("the twin", tuned, ["--adapter", folder]), ("the checkpoint", checkpoint, ["--adapter", folder, "--any-base"])]
        if not twin:
            merged = aside / f"{name}-merged"
            run(args.delft, "fuse", "-m", widened(tuned, aside / f"{name}-wide"), "--adapter", folder, "--any-base", "-o", merged)
            used.append(("what is merged", merged, []))
        for what, place, more in used:
            found = run(args.delft, "logits", "-m", place, "--cache-type", "f32", "--device", "cpu", "--json", "--all",
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

#!/usr/bin/env python3
"""Write what Transformers caches for the prompts of some of the model fixtures: keys behind their rotation, and values, in float64.

    cached.py

Reads `models/CASE`, writes `cached/CASE.safetensors`: `keys.N` and `values.N`, [positions, heads, head_dim] f32, of every layer N.
Needs torch, transformers, safetensors.
"""
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
# Rotations of every kind: llama3 scaling, norms of each head in front, two bases, longrope over a part, adjacent pairs over a part.
CASES = ["llama3", "qwen3", "gemma3", "phi3", "glm4", "mistral"]


def main():
    out = HERE / "cached"
    out.mkdir(exist_ok=True)
    for case in CASES:
        folder = HERE / "models" / case
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
        tokens = load_file(folder / "expected.safetensors")["input_ids"][None]
        # Without the configuration, so that layers with a window keep every position, too.
        cache = transformers.DynamicCache()
        with torch.no_grad():
            model(tokens, past_key_values=cache, use_cache=True)
        kept = {}
        for n, layer in enumerate(cache.layers):
            for name, tensor in (("keys", layer.keys), ("values", layer.values)):
                kept[f"{name}.{n}"] = tensor[0].transpose(0, 1).float().contiguous()
        path = out / f"{case}.safetensors"
        save_file(kept, path)
        path.chmod(0o644)
        print(case, {name: tuple(tensor.shape) for name, tensor in kept.items() if name.endswith(".0")}, path.stat().st_size)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Write `operations.safetensors`: what Transformers and PyTorch compute for single operations, from seeded inputs.

    operations.py [--out FILE]

Needs torch, transformers, safetensors. The arithmetic is float64; results are rounded to float32.
"""
import argparse
import types
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers.activations import ACT2FN
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss

HEADS, KV_HEADS, HEAD_DIM, TOKENS, WINDOW = 4, 2, 8, 11, 4
SCALE, CAP, EPS = 0.35, 1.5, 1e-5

# Names in Delft, and in Transformers.
ACTIVATIONS = {
    "silu": "silu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "gelu_erf": "gelu",
    "quick_gelu": "quick_gelu",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
    "relu": "relu",
}


def normal(seed, *shape):
    """Seeded numbers that float32 holds, as float64."""
    return torch.tensor(np.random.default_rng(seed).standard_normal(shape).astype(np.float32)).double()


def attention(family, **options):
    """Queries, keys, values and what a family's plain attention makes of them, causal within WINDOW positions."""
    q, k, v = normal(1, TOKENS, HEADS, HEAD_DIM), normal(2, TOKENS, KV_HEADS, HEAD_DIM), normal(3, TOKENS, KV_HEADS, HEAD_DIM)
    rows, columns = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)[None, :]
    seen = (columns <= rows) & (columns > rows - WINDOW)
    mask = torch.where(seen, 0.0, -torch.inf).double()
    module = types.SimpleNamespace(num_key_value_groups=HEADS // KV_HEADS, training=False, sinks=normal(4, HEADS))
    batch = lambda x: x.transpose(0, 1)[None]
    y, _ = family.eager_attention_forward(module, batch(q), batch(k), batch(v), mask[None, None], scaling=SCALE, **options)
    return y[0].reshape(TOKENS, -1)


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--out", type=Path, default=Path(__file__).with_name("operations.safetensors"))
    out = arguments.parse_args().out
    x = torch.linspace(-9, 9, 37, dtype=torch.float64).float().double()
    tensors = {"x": x}
    tensors |= {"exp": torch.exp(x), "square": torch.square(x), "softplus": torch.nn.functional.softplus(x), "hard_tanh": torch.nn.functional.hardtanh(x)}
    for name, theirs in ACTIVATIONS.items():
        tensors[name] = ACT2FN[theirs](x)
    rows, weight, bias = 8 + 0.5 * normal(5, 3, 24), normal(6, 24), normal(7, 24)
    rows = rows.float().double()
    tensors |= {"layer_norm.x": rows, "layer_norm.weight": weight, "layer_norm.bias": bias}
    norm = torch.nn.functional.layer_norm
    tensors["layer_norm.plain"] = norm(rows, [24], weight, None, EPS)
    tensors["layer_norm.biased"] = norm(rows, [24], weight, bias, EPS)
    tensors |= {
        "attention.q": normal(1, TOKENS, HEADS * HEAD_DIM),
        "attention.k": normal(2, TOKENS, KV_HEADS * HEAD_DIM),
        "attention.v": normal(3, TOKENS, KV_HEADS * HEAD_DIM),
        "attention.sinks": normal(4, HEADS),
        "attention.with_cap": attention(modeling_gemma2, softcap=CAP),
        "attention.with_sinks": attention(modeling_gpt_oss),
    }
    constants = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "window": WINDOW, "scale": SCALE, "cap": CAP, "eps": EPS}
    save_file({name: tensor.float().contiguous() for name, tensor in tensors.items()}, out, {k: str(v) for k, v in constants.items()})
    print(f"{out}: {out.stat().st_size} bytes, {len(tensors)} tensors")


if __name__ == "__main__":
    main()

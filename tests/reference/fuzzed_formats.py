#!/usr/bin/env python3
"""Random small models quantised as other programs do it, and the logits that Delft computes with each.

    fuzzed_formats.py --delft target/debug/delft [--draws N] [--seed S] [--only SCHEME ..] [--devices sim cpu] [--keep DIR]

Needs torch, transformers, safetensors, mlx. Sizes, groups, bits, zeros and orders of inputs are drawn from the seed; codes and scales are packed here by the
formulas that AutoGPTQ, AutoAWQ, compressed-tensors and MLX publish (quantised.py compares the same numbers with their own code). Transformers computes the
weights that these stand for in float64. On a simulated GPU logits may be BOUND of their range away; a CPU rounds what such matrices are multiplied with to
eight bits, so that ROUNDED is its bound. Prints a line for each folder that differs or is refused, and one for each scheme; ends with an error if there was any.
"""
import argparse
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

import fuzzed_models
import models
from fuzzed_models import BOUND, Draw
from models import Case

ROUNDED = 0.06
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def packed(codes, bits):
    """Codes [rows, n] as a stream of bits in i32 words, row by row."""
    rows, count = codes.shape
    spread = (codes[..., None].astype(np.uint8) >> np.arange(bits, dtype=np.uint8)) & 1
    spread = np.pad(spread.reshape(rows, count * bits), [(0, 0), (0, -count * bits % 32)])
    return torch.from_numpy(np.packbits(spread, axis=1, bitorder="little").view(np.int32).copy())


class Matrix:
    """What is drawn for one matrix of numbers `w`: codes, scales and zeros of groups of `group` inputs, and the groups' order."""

    def __init__(self, r, w, bits, group, symmetric, ordered, dtype, least=0):
        self.out, self.cols = w.shape
        self.group = self.cols if group in (None, -1) else group
        groups = -(-self.cols // self.group)
        place = np.arange(self.cols) // self.group
        if ordered:
            r.stream.shuffle(place)
        self.place, top = place, 2 ** bits - 1
        wide = np.stack([np.abs(w[:, place == g]).max(axis=1) for g in range(groups)], axis=1)
        self.scales = torch.from_numpy(wide / (top / 2)).to(dtype)
        middle = 2 ** (bits - 1)
        zeros = r.stream.integers(max(least, middle - 2), middle + 2, (self.out, groups))
        self.zeros = np.full((self.out, groups), middle) if symmetric else np.clip(zeros, least, top)
        scale = self.scales.double().numpy()[:, place]
        self.codes = np.clip(np.round(w / scale) + self.zeros[:, place], 0, top).astype(np.int64)
        self.numbers = (self.codes - self.zeros[:, place]) * scale

    def decoded(self, rounded=None):
        numbers = torch.from_numpy(self.numbers)
        return numbers if rounded is None else numbers.to(torch.float32).to(rounded).double()


def gptq(r):
    bits, dtype = r.of(2, 3, 4, 4, 8), torch.float16
    symmetric, ordered, group = r.flag(), r.flag(), r.of(16, 32, 64, 128, -1)
    second = r.flag()
    settings = dict(quant_method="gptq", bits=bits, group_size=group, sym=symmetric, desc_act=ordered, damp_percent=0.1,
                    checkpoint_format="gptq_v2" if second else "gptq")

    def one(w):
        m = Matrix(r, w, bits, group, symmetric, ordered, dtype, least=1)
        parts = {"qweight": packed(m.codes.T.reshape(m.cols, m.out).T, bits).T, "scales": m.scales.T,
                 "qzeros": packed((m.zeros - (0 if second else 1)).T, bits)}
        if ordered or r.flag():
            parts["g_idx"] = torch.from_numpy(m.place.astype(np.int32))
        plain = not ordered and m.group % 32 == 0 and (symmetric or bits < 8)
        return parts, m.decoded(None if plain else dtype)
    return settings, one


def awq(r):
    group = r.of(32, 64, 128)
    settings = dict(quant_method="awq", bits=4, group_size=group, zero_point=True, version="gemm", modules_to_not_convert=None)

    def turned(x):
        return x.reshape(x.shape[0], -1, 8)[..., AWQ_ORDER].reshape(x.shape)

    def one(w):
        m = Matrix(r, w, 4, group, False, False, torch.float16)
        return {"qweight": packed(turned(m.codes.T), 4), "qzeros": packed(turned(m.zeros.T), 4), "scales": m.scales.T}, m.decoded()
    return settings, one


def compressed(r, form, weights):
    weights = dict(dynamic=False, observer="minmax", observer_kwargs={}, strategy="group", type="int", block_structure=None) | weights
    return dict(quant_method="compressed-tensors", format=form, quantization_status="compressed", ignore=["lm_head"], global_compression_ratio=None,
                kv_cache_scheme=None, config_groups={"group_0": dict(targets=["Linear"], weights=weights, input_activations=None, output_activations=None)})


def pack_quantized(r):
    bits, symmetric, ordered, dtype = r.of(4, 4, 8), r.flag(), r.flag(), r.of(torch.bfloat16, torch.float16)
    group = r.of(16, 32, 64, 128, None)
    settings = compressed(r, "pack-quantized", dict(num_bits=bits, group_size=group, symmetric=symmetric, actorder="group" if ordered and group else None,
                                                    strategy="group" if group else "channel"))

    def one(w):
        m = Matrix(r, w, bits, group, symmetric, ordered and group, dtype)
        parts = {"weight_packed": packed(m.codes, bits), "weight_scale": m.scales, "weight_shape": torch.tensor(w.shape)}
        if not symmetric:
            parts["weight_zero_point"] = packed(m.zeros.T, bits).T
        if ordered and group:
            parts["weight_g_idx"] = torch.from_numpy(m.place.astype(np.int32))
        plain = not (ordered and group) and m.group % 32 == 0 and (symmetric or bits < 8)
        return parts, m.decoded(None if plain else dtype)
    return settings, one


def int_quantized(r):
    dtype = r.of(torch.bfloat16, torch.float16)

    def one(w):
        m = Matrix(r, w, 8, None, True, False, dtype)
        return {"weight": torch.from_numpy((m.codes - 128).astype(np.int8)), "weight_scale": m.scales}, m.decoded()
    return compressed(r, "int-quantized", dict(num_bits=8, group_size=None, symmetric=True, strategy="channel")), one


def eight_bit_floats(r):
    block, name = r.of((128, 128), (64, 32), "rows", "whole"), r.of("weight_scale_inv", "weight_scale")
    kind = r.of("fp8", "compressed", "modelopt") if isinstance(block, str) else "fp8"
    settings = dict(quant_method="fp8", activation_scheme="dynamic", fmt="e4m3")
    if not isinstance(block, str):
        settings["weight_block_size"] = list(block)
    if kind == "compressed":
        settings, name = compressed(r, r.of("float-quantized", "naive-quantized"), dict(num_bits=8, type="float", strategy="channel", symmetric=True)), "weight_scale"
    if kind == "modelopt":
        settings, name = dict(quant_method="modelopt", quant_algo="FP8", ignore=["lm_head"], producer=dict(name="modelopt", version="0.29.0")), "weight_scale"

    def one(w):
        tall, wide = w.shape if block == "whole" else (1, w.shape[1]) if block == "rows" else block
        across, down = -(-w.shape[1] // wide), -(-w.shape[0] // tall)
        whole = np.pad(np.abs(w), [(0, down * tall - w.shape[0]), (0, across * wide - w.shape[1])])
        scales = torch.from_numpy(whole.reshape(down, tall, across, wide).max(axis=(1, 3)) / 448).float()
        spread = scales.double().numpy().repeat(tall, 0).repeat(wide, 1)[:w.shape[0], :w.shape[1]]
        codes = torch.from_numpy(w / spread).to(torch.float32).to(torch.float8_e4m3fn)
        numbers = (codes.float() * torch.from_numpy(spread).float()).bfloat16().double()
        stored = scales.reshape(()) if block == "whole" else scales
        return {"weight": codes, name: stored}, numbers
    return settings, one


def four_bit_floats(r):
    import mlx.core as mx

    def one(w):
        codes, exponents = mx.quantize(mx.array(w.astype(np.float32)), group_size=32, bits=4, mode="mxfp4")
        numbers = mx.dequantize(codes, exponents, group_size=32, bits=4, mode="mxfp4", dtype=mx.float32)
        parts = {"weight_packed": torch.from_numpy(np.array(codes).view(np.uint8).copy()), "weight_scale": torch.from_numpy(np.array(exponents))}
        return parts, torch.from_numpy(np.array(numbers)).double()
    return compressed(r, "mxfp4-pack-quantized", dict(num_bits=4, group_size=32, symmetric=True, type="float")), one


def mlx(r):
    import mlx.core as mx
    bits, group, dtype = r.of(2, 3, 4, 5, 6, 8), r.of(32, 64, 128), r.of("bfloat16", "float16")
    floats = r.of(False, False, True)
    whole = dict(group_size=32, bits=4, mode="mxfp4") if floats else dict(group_size=group, bits=bits) | r.of({}, dict(mode="affine"))
    settings, single = dict(whole), {}

    def one(w, stem):
        own = whole
        if ".experts." not in stem and r.of(False, False, True):
            own = dict(group_size=r.of(32, 64), bits=r.of(4, 8))
            single[stem] = settings[stem] = own
        numbers = mx.array(w.astype(np.float32)).astype(getattr(mx, dtype))
        if own.get("mode") == "mxfp4":
            codes, scales = mx.quantize(numbers, **own)
            decoded = mx.dequantize(codes, scales, dtype=mx.float32, **own)
            return {"weight": torch.from_numpy(np.array(codes)), "scales": torch.from_numpy(np.array(scales))}, torch.from_numpy(np.array(decoded)).double()
        own = {key: own[key] for key in ("group_size", "bits")}
        codes, scales, offsets = mx.quantize(numbers, **own)
        decoded = mx.dequantize(codes, scales.astype(mx.float32), offsets.astype(mx.float32), **own)
        stored = lambda x: torch.from_numpy(np.array(x.astype(mx.float32))).to(getattr(torch, dtype))
        return {"weight": torch.from_numpy(np.array(codes)), "scales": stored(scales), "biases": stored(offsets)}, torch.from_numpy(np.array(decoded)).double()
    return settings, one


SCHEMES = {"gptq": gptq, "awq": awq, "pack-quantized": pack_quantized, "int-quantized": int_quantized, "fp8": eight_bit_floats, "mxfp4": four_bit_floats,
           "mlx": mlx}


def dense(r, name):
    """A case whose matrices have whole groups."""
    family = r.of("llama", "qwen2", "qwen3", "qwen3_moe", "gemma2", "phi3", "mixtral", "glm4_moe")
    heads, kv, dim = r.of((2, 1, 64), (4, 2, 32), (3, 1, 128), (6, 3, 64))
    config = dict(hidden_size=r.of(128, 256) if heads % 3 else 384, num_attention_heads=heads, num_key_value_heads=kv, head_dim=dim, intermediate_size=r.of(128, 256),
                  num_hidden_layers=2, vocab_size=r.of(97, 128, 160), tie_word_embeddings=family == "gemma2" or r.flag(), max_position_embeddings=256,
                  pad_token_id=0, rope_parameters=dict(rope_type="default", rope_theta=10000.0))
    if family == "phi3":
        config["hidden_size"] = heads * dim
        del config["head_dim"]
    if family in ("qwen3_moe", "mixtral", "glm4_moe"):
        config |= dict(num_experts_per_tok=1) | ({} if family == "mixtral" else dict(moe_intermediate_size=128))
        config["n_routed_experts" if family == "glm4_moe" else "num_local_experts" if family == "mixtral" else "num_experts"] = 2
    if family == "glm4_moe":
        config |= dict(n_group=1, topk_group=1, n_shared_experts=1)
    return Case(name, family, "float32", "", config)


def is_quantised(name, x):
    """A matrix of the blocks, but for routers."""
    return x.ndim == 2 and ".layers." in name and not name.endswith((".mlp.gate.weight", "block_sparse_moe.gate.weight"))


@torch.no_grad()
def truth(folder, tokens):
    """Transformers' logits of a folder in float64, and how clearly experts were chosen."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager").eval()
    clear = []
    models.watch_routers(model, clear)
    with models.widened():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].numpy(), min(clear, default=1.0)


def check(args, scheme, number, scratch):
    """Lines on what differs, and what was drawn."""
    r = Draw(args.seed, scheme, number)
    settings, one = SCHEMES[scheme](r)
    case = dense(r, f"{scheme}-{number}")
    plain, folder = scratch / "plain", scratch / case.name
    models.write_checkpoint(case, models.make_weights(case), plain)
    weights = load_file(plain / "model.safetensors")
    stored, decoded = {}, {}
    for name, x in weights.items():
        stored[name] = decoded[name] = x
        if is_quantised(name, x):
            stem = name.removesuffix(".weight")
            parts, numbers = one(x.double().numpy(), stem) if scheme == "mlx" else one(x.double().numpy())
            del stored[name]
            stored |= {f"{stem}.{part}": value for part, value in parts.items()}
            decoded[name] = numbers
    save_file({name: x.contiguous() for name, x in decoded.items()}, plain / "model.safetensors", {"format": "pt"})
    folder.mkdir()
    config = json.loads((plain / "config.json").read_text())
    models.write_json(folder / "config.json", config | {"quantization" if scheme == "mlx" else "quantization_config": settings})
    save_file({name: x.contiguous() for name, x in stored.items()}, folder / "model.safetensors", {"format": "pt"})
    lines = []
    for device in args.devices:
        tokens = [int(token) for token in r.stream.integers(3, case.config["vocab_size"], 12)]
        found, why = fuzzed_models.run(args.delft, folder, tokens, device)
        if found is None:
            lines.append(f"{device}: {why}")
            continue
        logits, clear = truth(plain, tokens)
        far = np.abs(logits - found).max() / (logits.max() - logits.min())
        # A CPU's rounding may choose other experts.
        if clear < (1e-4 if device == "sim" else 0.3):
            continue
        if not far <= (BOUND if device == "sim" else ROUNDED):
            lines.append(f"{device}: {far:.2g} of the range apart")
    shutil.rmtree(plain)
    return lines, f"{case.family} {json.dumps(case.config)} {json.dumps(settings)}", folder


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delft", required=True)
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--first", type=int, default=0, help="the number of the first draw")
    parser.add_argument("--seed", default="delft")
    parser.add_argument("--only", nargs="*", choices=SCHEMES)
    parser.add_argument("--devices", nargs="*", default=["sim", "cpu"])
    parser.add_argument("--keep", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    wrong = 0
    for scheme in args.only or SCHEMES:
        apart = 0
        for number in range(args.first, args.first + args.draws):
            with tempfile.TemporaryDirectory() as scratch:
                lines, drawn, folder = check(args, scheme, number, Path(scratch))
                apart += bool(lines)
                for line in lines:
                    print(f"{scheme}-{number}: {line}\n    {drawn}", flush=True)
                if lines and args.keep:
                    shutil.copytree(folder, args.keep / folder.name, dirs_exist_ok=True)
        print(f"{scheme}: {apart} of {args.draws} differ", flush=True)
        wrong += apart
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()

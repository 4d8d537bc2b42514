#!/usr/bin/env python3
"""Random small models quantised as other programs do it, and the logits that Delft computes with each.

    fuzzed_formats.py --delft target/debug/delft [--draws N] [--seed S] [--only SCHEME ..] [--devices sim cpu] [--keep DIR]

Needs torch, transformers, safetensors, mlx. Sizes, groups, bits, zeros and orders of inputs are drawn from the seed; codes and scales are packed here by the
formulas that AutoGPTQ, AutoAWQ, compressed-tensors and MLX publish (quantised.py compares the same numbers with their own code). Transformers computes the
weights that these stand for in float64. On a simulated GPU logits may be BOUND of their range away; a CPU rounds what such matrices are multiplied with to
eight bits, so that ROUNDED is its bound. Prints a line for each folder that differs or is refused, and one for each scheme; ends with an error if there was any.
"""
import argparse
import inspect
import json
import re
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


def gptq_codes(r, settings, second):
    """A function that packs a matrix by such settings."""
    bits, symmetric, ordered, group = (settings[key] for key in ("bits", "sym", "desc_act", "group_size"))

    def one(w):
        m = Matrix(r, w, bits, group, symmetric, ordered, torch.float16)
        parts = {"qweight": packed(m.codes.T.reshape(m.cols, m.out).T, bits).T, "scales": m.scales.T,
                 "qzeros": packed(((m.zeros - (0 if second else 1)) % 2 ** bits).T, bits)}
        if ordered or r.flag():
            parts["g_idx"] = torch.from_numpy(m.place.astype(np.int32))
        if r.flag():
            # As AutoGPTQ has it of every matrix.
            parts["bias"] = torch.zeros(m.out, dtype=torch.float16)
        plain = not ordered and m.group % 32 == 0 and (symmetric or bits < 8)
        return parts, m.decoded(None if plain else torch.float16)
    return one


def gptq_settings(r):
    return dict(bits=r.of(2, 3, 4, 4, 8), group_size=r.of(16, 32, 64, 128, -1), sym=r.flag(), desc_act=r.flag())


def gptq(r):
    whole, second = gptq_settings(r), r.flag()
    settings = dict(quant_method="gptq", damp_percent=0.1, checkpoint_format="gptq_v2" if second else "gptq") | whole
    if not r.flag():
        return settings, gptq_codes(r, whole, second)
    # Another setting for some matrices, and none for others.
    own = whole | dict(bits=r.of(2, 4, 8), group_size=r.of(32, 64, -1), desc_act=r.flag())
    settings["dynamic"] = {r"+:.*\.down_proj": {key: own[key] for key in ("bits", "group_size", "desc_act")}, r"-:.*\.o_proj": {}}
    plain, other = gptq_codes(r, whole, second), gptq_codes(r, own, second)

    def one(w, stem):
        if stem.endswith(".o_proj"):
            return {"weight": torch.from_numpy(w).float()}, torch.from_numpy(w)
        return (other if stem.endswith(".down_proj") else plain)(w)
    return settings, one


def auto_round(r):
    whole = dict(bits=r.of(2, 4, 4, 8), group_size=r.of(32, 64, 128), sym=r.flag())
    form = "auto_round:auto_gptq" if whole["sym"] or r.flag() else r.of("auto_round", "auto_round:gptqmodel")
    settings = dict(quant_method="auto-round", packing_format=form, data_type="int", autoround_version="0.9.0", iters=200, batch_size=8) | whole
    own = whole | dict(bits=r.of(4, 8))
    settings["extra_config"] = {"model.layers.0.mlp.down_proj": dict(bits=own["bits"]), "model.layers.1.self_attn.q_proj": dict(bits=16, data_type="float")}
    second = form != "auto_round:auto_gptq"
    plain, other = (gptq_codes(r, one | dict(desc_act=False), second) for one in (whole, own))

    def one(w, stem):
        if stem == "model.layers.1.self_attn.q_proj":
            return {"weight": torch.from_numpy(w).float()}, torch.from_numpy(w)
        return (other if stem == "model.layers.0.mlp.down_proj" else plain)(w)
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


def compressed_integers(r, form, bits):
    """Settings of weights, and a function that stores a matrix by them."""
    symmetric, ordered, dtype = r.flag(), r.flag(), r.of(torch.bfloat16, torch.float16)
    group, zero_bytes = r.of(16, 32, 64, 128, None), r.flag()
    ordered = ordered and group is not None
    weights = dict(num_bits=bits, type="int", group_size=group, symmetric=symmetric, strategy="group" if group else "channel",
                   actorder=r.of("group", "dynamic", True) if ordered else r.of(None, "weight", "static", False))
    codes = bits if form == "pack-quantized" else 8

    def one(w):
        m = Matrix(r, w, bits, group, symmetric, ordered, dtype)
        low = 2 ** (bits - 1)
        whole = lambda x: torch.from_numpy((x - low).astype(np.int8))
        if form == "pack-quantized":
            parts = {"weight_packed": packed(m.codes, bits), "weight_shape": torch.tensor(w.shape)}
        else:
            parts = {"weight": whole(m.codes)}
        if not symmetric:
            parts["weight_zero_point"] = whole(m.zeros) if zero_bytes or form != "pack-quantized" else packed(m.zeros.T, bits).T
        if ordered:
            parts["weight_g_idx"] = torch.from_numpy(m.place.astype(np.int32))
        plain = not ordered and m.group % 32 == 0 and (symmetric or codes < 8)
        return parts | {"weight_scale": m.scales}, m.decoded(None if plain else dtype)
    return weights, one


def pack_quantized(r):
    weights, one = compressed_integers(r, "pack-quantized", r.of(2, 3, 4, 4, 8))
    return compressed(r, "pack-quantized", weights), one


def int_quantized(r):
    form = r.of("int-quantized", "naive-quantized")
    weights, one = compressed_integers(r, form, r.of(4, 8, 8))
    return compressed(r, form, weights), one


def mixed_precision(r):
    """Groups of compressed-tensors that have formats of their own, and one that says nothing of weights."""
    forms = [("pack-quantized", 4), ("pack-quantized", 8), ("int-quantized", 8)]
    r.stream.shuffle(forms)
    made = [(form, *compressed_integers(r, form, bits)) for form, bits in forms[:2]]
    settings = compressed(r, "mixed-precision", {})
    targets = [[r"re:.*self_attn\..*"], [r"re:.*mlp.*", r"re:.*block_sparse_moe.*"]]
    settings["config_groups"] = {f"group_{i}": dict(targets=targets[i], format=form, weights=weights) for i, (form, weights, _) in enumerate(made)}
    settings["config_groups"]["attention"] = dict(targets=["LlamaAttention"], weights=None, input_activations=dict(num_bits=8, type="float"))
    return settings, lambda w, stem: made[0 if ".self_attn." in stem else 1][2](w)


def eight_bit_floats(r):
    block, name = r.of((128, 128), (64, 32), (1, 64), "rows", "whole"), r.of("weight_scale_inv", "weight_scale")
    kind = r.of("fp8", "compressed", "modelopt") if isinstance(block, str) else "fp8"
    settings = dict(quant_method="fp8", activation_scheme="dynamic", fmt="e4m3")
    if block == (1, 64):
        kind = "compressed"
    elif not isinstance(block, str):
        settings["weight_block_size"], kind = list(block), r.of("fp8", "compressed")
    if kind == "compressed":
        weights = dict(num_bits=8, type="float", strategy="channel", symmetric=True)
        if block == (1, 64):
            weights |= dict(strategy="group", group_size=64)
        elif not isinstance(block, str):
            weights |= dict(strategy="block", block_structure=r.of(list(block), f"{block[0]}x{block[1]}"))
        settings, name = compressed(r, r.of("float-quantized", "naive-quantized"), weights), "weight_scale"
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
    floats = r.of(None, None, dict(group_size=32, bits=4, mode="mxfp4"), dict(group_size=32, bits=8, mode="mxfp8"))
    whole = floats or dict(group_size=group, bits=bits) | r.of({}, dict(mode="affine"))
    settings, single = dict(whole), {}

    def one(w, stem):
        own = whole
        if ".experts." not in stem and r.of(False, False, True):
            own = r.of(False, True, dict(group_size=r.of(32, 64), bits=r.of(4, 8)), dict(group_size=32, bits=8, mode="mxfp8"))
            single[stem] = settings[stem] = own
        own = whole if own is True else own
        numbers = mx.array(w.astype(np.float32)).astype(getattr(mx, dtype))
        if own is False:
            kept = torch.from_numpy(np.array(numbers.astype(mx.float32))).to(getattr(torch, dtype))
            return {"weight": kept}, kept.double()
        if own.get("mode") in ("mxfp4", "mxfp8"):
            codes, scales = mx.quantize(numbers, **own)
            decoded = mx.dequantize(codes, scales, dtype=mx.float32, **own)
            return {"weight": torch.from_numpy(np.array(codes)), "scales": torch.from_numpy(np.array(scales))}, torch.from_numpy(np.array(decoded)).double()
        own = {key: own[key] for key in ("group_size", "bits")}
        codes, scales, offsets = mx.quantize(numbers, **own)
        decoded = mx.dequantize(codes, scales.astype(mx.float32), offsets.astype(mx.float32), **own)
        stored = lambda x: torch.from_numpy(np.array(x.astype(mx.float32))).to(getattr(torch, dtype))
        return {"weight": torch.from_numpy(np.array(codes)), "scales": stored(scales), "biases": stored(offsets)}, torch.from_numpy(np.array(decoded)).double()
    return settings, one


SCHEMES = {"gptq": gptq, "auto-round": auto_round, "awq": awq, "pack-quantized": pack_quantized, "int-quantized": int_quantized,
           "mixed-precision": mixed_precision, "fp8": eight_bit_floats, "mxfp4": four_bit_floats, "mlx": mlx}


SIZES = dict(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128, num_hidden_layers=2, max_position_embeddings=256, pad_token_id=0)
LATENT = SIZES | dict(num_key_value_heads=4, q_lora_rank=128, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64)
MIXED = dict(num_experts_per_tok=1, moe_intermediate_size=128)
# Families whose matrices are joined, cut, turned or made of others when they are read.
OTHERS = {
    "falcon": dict(hidden_size=256, num_attention_heads=4, num_kv_heads=2, new_decoder_architecture=True, num_hidden_layers=2, alibi=False, bias=False),
    "bloom": dict(hidden_size=256, num_attention_heads=4), "mpt": dict(hidden_size=256, num_attention_heads=4, max_seq_len=256),
    "opt": dict(hidden_size=256, num_attention_heads=4, ffn_dim=128, word_embed_proj_dim=256, num_hidden_layers=2, max_position_embeddings=256),
    "gpt_neox": dict(hidden_size=256, num_attention_heads=4, intermediate_size=128), "gptj": dict(n_embd=256, n_head=4, n_layer=2, n_inner=128, rotary_dim=16),
    "codegen": dict(n_embd=256, n_head=4, n_layer=2, n_inner=128, rotary_dim=16), "starcoder2": SIZES, "stablelm": SIZES, "phi": SIZES, "cohere": SIZES,
    "persimmon": dict(hidden_size=256, num_attention_heads=4, intermediate_size=128), "olmo2": SIZES, "granite": SIZES, "nemotron": SIZES, "exaone4": SIZES,
    "glm4": SIZES | dict(head_dim=64), "ernie4_5": SIZES | dict(head_dim=64), "smollm3": SIZES, "arcee": SIZES, "hunyuan_v1_dense": SIZES | dict(head_dim=64),
    "minicpm3": LATENT, "deepseek_v2": LATENT | MIXED | dict(n_routed_experts=2, n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1),
    "deepseek_v3": LATENT | MIXED | dict(n_routed_experts=2, n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1),
    "qwen2_moe": SIZES | MIXED | dict(num_experts=2, shared_expert_intermediate_size=128), "olmoe": SIZES | dict(num_experts=2, num_experts_per_tok=1),
    "qwen3_next": SIZES | MIXED | dict(num_experts=2, shared_expert_intermediate_size=128, head_dim=64, linear_num_key_heads=2, linear_num_value_heads=4,
                                       linear_key_head_dim=32, linear_value_head_dim=32, layer_types=["linear_attention", "full_attention"]),
    "lfm2": SIZES | dict(layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False),
    "falcon_h1": SIZES | dict(mamba_d_ssm=256, mamba_n_heads=4, mamba_d_head=64, mamba_n_groups=1, mamba_d_state=32),
    "mamba2": dict(hidden_size=128, expand=2, num_heads=4, head_dim=64, n_groups=1, state_size=32, num_hidden_layers=2, pad_token_id=0),
    "jamba": SIZES | dict(num_experts=2, num_experts_per_tok=1, mamba_d_state=16, mamba_dt_rank=32, attn_layer_period=2, attn_layer_offset=1),
    "dots1": SIZES | MIXED | dict(head_dim=64, n_routed_experts=2, n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1, sliding_window=None),
}


def dense(r, name):
    """A case whose matrices have whole groups."""
    family = r.of("llama", "qwen2", "qwen3", "qwen3_moe", "gemma2", "phi3", "mixtral", "glm4_moe", *OTHERS)
    if family in OTHERS:
        own = models.model_classes(family)[0]()
        drop = tuple(key for key in ("rms_norm_eps", "max_position_embeddings") if not hasattr(own, key) or key in own.attribute_map)
        return Case(name, family, "float32", "", dict(vocab_size=r.of(97, 128, 160), **OTHERS[family]), drop=drop)
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
    kept = (".mlp.gate.weight", "block_sparse_moe.gate.weight", "router.weight", "shared_expert_gate.weight", "A_log", "x_proj.weight", "dt_proj.weight")
    return x.ndim == 2 and re.search(r"\.\d+\.", name) and name.endswith(".weight") and not name.endswith(kept)


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
            named = "stem" in inspect.signature(one).parameters
            parts, numbers = one(x.double().numpy(), stem) if named else one(x.double().numpy())
            del stored[name]
            # A bias of zeros does not take the place of the model's own.
            stored |= {f"{stem}.{part}": value for part, value in parts.items() if f"{stem}.{part}" not in weights or part == "weight"}
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

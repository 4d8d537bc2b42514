"""Quantised matrices as other programs store them in safetensors, and the numbers that those programs read in them.

    quantised.py OUT --packages FOLDER

FOLDER holds the unpacked wheels of auto_gptq, compressed_tensors and the sources of autoawq and gptqmodel, which need not be installed.
Writes OUT (crates/formats/tests/data/quantised.safetensors): for each case its tensors, `CASE.NAME`, and `CASE.expected`, f32
[out, in] (in f16 and bf16 where the program rounds). Codes, zeros and scales are random: every pattern is fair game.
"""

import argparse
import importlib.util
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
from safetensors.torch import save_file

OUT, IN = 32, 128


def load(path: Path, name: str):
    """A module by its file alone, without the package around it."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """i32 of any 32-bit patterns."""
    return tensor.to(torch.int64).to(torch.uint32).view(torch.int32)


def words(*shape: int) -> torch.Tensor:
    return bits(torch.randint(0, 2**32, shape, dtype=torch.int64))


def scales(*shape: int, dtype=torch.float16) -> torch.Tensor:
    return (torch.rand(shape) * 0.02 + 0.001).to(dtype)


def gptq(module, width: int, group: int, symmetric: bool, ordered: bool, version: int = 1) -> dict:
    """Weights as the product of the identity, by AutoGPTQ's portable path; it knows version 1 alone."""
    layer = module.QuantLinear(width, group, IN, OUT, False, weight_dtype=torch.float16)
    groups = -(-IN // layer.group_size)
    layer.qweight = words(IN * width // 32, OUT)
    codes = torch.randint(0, 2**width - 1, (groups, OUT))
    if symmetric:
        codes = torch.full((groups, OUT), 2 ** (width - 1) - 1)
    flat = [int(sum(int(c) << (width * i) for i, c in enumerate(row))) for row in codes]
    packed = [[row >> (32 * i) & 0xFFFFFFFF for i in range(OUT * width // 32)] for row in flat]
    layer.qzeros = bits(torch.tensor(packed, dtype=torch.int64))
    layer.scales = scales(groups, OUT)
    if ordered:
        layer.g_idx = torch.randperm(IN).to(torch.int32) // layer.group_size
    # In f32, so that products of the identity are exact.
    layer.scales = layer.scales.float()
    expected = layer(torch.eye(IN)).T
    case = {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales.half()}
    if ordered:
        case["g_idx"] = layer.g_idx
        expected = expected.half().float()
    if version == 2:
        raised = sum(int(1) << (width * i) for i in range(32 // width))
        case["qzeros"] = bits((layer.qzeros.view(torch.uint32).to(torch.int64) + raised) & 0xFFFFFFFF)
    return case | {"expected": expected}


def awq(module) -> dict:
    case = {"qweight": words(IN, OUT // 8), "qzeros": words(IN // 64, OUT // 8), "scales": scales(IN // 64, OUT)}
    expected = module.dequantize_gemm(case["qweight"], case["qzeros"], case["scales"].float(), 4, 64).T
    return case | {"expected": expected}


def packed(helpers, width: int, group: int, dtype, symmetric: bool) -> dict:
    low, high = -(2 ** (width - 1)), 2 ** (width - 1)
    codes = torch.randint(low, high, (OUT, IN), dtype=torch.int8)
    factors = scales(OUT, IN // group, dtype=dtype)
    case = {"weight_packed": helpers.pack_to_int32(codes, width), "weight_scale": factors}
    zeros = torch.zeros(OUT, IN // group, dtype=torch.int8)
    if not symmetric:
        zeros = torch.randint(low, high, zeros.shape, dtype=torch.int8)
        case["weight_zero_point"] = helpers.pack_to_int32(zeros, width, packed_dim=0)
    back = helpers.unpack_from_int32(case["weight_packed"], width, torch.Size((OUT, IN))).float()
    repeated = [x.float().repeat_interleave(group, 1) for x in (zeros, factors)]
    return case | {"expected": (back - repeated[0]) * repeated[1]}


def fp8(blocks) -> dict:
    weights = torch.randint(0, 256, (OUT, IN), dtype=torch.uint8)
    weights[(weights & 127) == 127] = 0
    weights = weights.view(torch.float8_e4m3fn)
    factors = torch.rand(blocks) * 0.02 + 0.001
    rows, cols = -(-OUT // blocks[0]) if blocks else OUT, -(-IN // blocks[1]) if blocks else IN
    whole = factors.reshape(blocks or (1, 1)).repeat_interleave(rows, 0).repeat_interleave(cols, 1)
    expected = (weights.float() * whole[:OUT, :IN]).bfloat16().float()
    return {"weight": weights, "weight_scale": factors, "expected": expected}


def mxfp4() -> dict:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.randint(0, 256, (2, OUT, IN // 32, 16), dtype=torch.uint8)
    exponents = torch.randint(110, 135, (2, OUT, IN // 32), dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, exponents, dtype=torch.float32).transpose(1, 2)
    return {"blocks": blocks, "scales": exponents, "expected": expected.contiguous()}


def packed_mxfp4() -> dict:
    """As `mxfp4`, in the shape of compressed-tensors, whose arithmetic expects it."""
    from compressed_tensors.compressors.mx_utils import decompress_mx_scale
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

    torch.manual_seed(23)  # of its own: this case was made after the others
    codes = torch.randint(0, 256, (OUT, IN // 2), dtype=torch.uint8)
    exponents = torch.randint(110, 135, (OUT, IN // 32), dtype=torch.uint8)
    factors = decompress_mx_scale(exponents).float().repeat_interleave(32, 1)
    expected = unpack_fp4_from_uint8(codes, OUT, IN, torch.float32) * factors
    return {"weight_packed": codes, "weight_scale": exponents, "expected": expected}


def mlx_floats(bits: int, *shape: int) -> dict:
    """Blocks of 32 that MLX made of random numbers."""
    settings = dict(group_size=32, bits=bits, mode=f"mxfp{bits}")
    codes, exponents = mx.quantize(mx.array(torch.randn(*shape).numpy()), **settings)
    expected = mx.dequantize(codes, exponents, dtype=mx.float32, **settings)
    tensor = lambda x: torch.from_numpy(np.array(x))
    return {"codes": tensor(codes), "scales": tensor(exponents), "expected": tensor(expected)}


def wrapped_zeros(packing, offset) -> dict:
    """Version 1 with zeros of all codes, which GPTQModel raises by one in their bits: the largest stored one is 0."""
    layer = {"qweight": words(IN * 4 // 32, OUT), "qzeros": words(IN // 64, OUT * 4 // 32), "scales": scales(IN // 64, OUT)}
    raised = offset(layer["qzeros"], 4, delta=1)
    lanes = torch.arange(0, 32, 4)
    codes = (layer["qweight"][:, None, :] >> lanes[None, :, None]).reshape(IN, OUT) & 15
    zeros = packing.unpack_cols(raised, 4)
    repeated = [x.float().repeat_interleave(64, 0) for x in (zeros, layer["scales"])]
    return layer | {"expected": ((codes.float() - repeated[0]) * repeated[1]).T}


def compressed(format: str, shape=(OUT, IN), zeros=None, numbers=torch.bfloat16, **weights) -> dict:
    """Random weights that compressed-tensors rounds by random scales and zeros, packs, and unpacks again."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    rows, cols = shape
    parts = {"tensor": (1,), "channel": (rows, 1), "group": (rows, cols // (args.group_size or cols))}
    if args.block_structure:
        parts["block"] = tuple(-(-n // size) for n, size in zip(shape, args.block_structure))
    state = {"weight": torch.randn(shape).to(numbers), "weight_scale": scales(*parts[args.strategy], dtype=numbers) * 10}
    if args.type == "int":
        state["weight_scale"] = state["weight_scale"] * 2.0 ** (7 - args.num_bits)
    if not args.symmetric:
        low = -(2 ** (args.num_bits - 1))
        state["weight_zero_point"] = torch.randint(low, -low, parts[args.strategy], dtype=torch.int8)
    compressor = BaseCompressor.get_value_from_registry(format)
    packed = compressor.compress(dict(state), scheme)
    # In f32, so that what is read is exact.
    exact = {name: x.float() if x.is_floating_point() and x.element_size() == 2 else x for name, x in packed.items()}
    expected = compressor.decompress(exact, scheme)["weight"].float()
    if zeros == "bytes":
        # As it stored zeros of packed codes before it packed them, too.
        packed["weight_zero_point"] = state["weight_zero_point"]
    if args.type == "float":
        expected = expected.bfloat16()
    elif not args.symmetric and args.num_bits == 8:
        expected = expected.to(numbers)
    return packed | {"expected": expected}


def later_cases(packages: Path) -> dict:
    """Cases that were made after the others, with random numbers of their own."""
    torch.manual_seed(26)
    packing = gptq_packing(next(packages.glob("gptqmodel*")) / "gptqmodel/utils/model_dequant.py")
    group = dict(strategy="group", type="int")
    return {
        "mlx-mxfp8": mlx_floats(8, OUT, IN),
        "mlx-mxfp8-stack": mlx_floats(8, 2, OUT, IN),
        "gptq4-wrapped": wrapped_zeros(packing, packing._shift_gptq_qzeros),
        "packed3": compressed("pack-quantized", num_bits=3, group_size=64, symmetric=True, **group),
        "packed4-zero-bytes": compressed("pack-quantized", zeros="bytes", num_bits=4, group_size=32, symmetric=False, **group),
        "packed8-asymmetric": compressed("pack-quantized", num_bits=8, group_size=32, symmetric=False, **group),
        "packed4-channel": compressed("pack-quantized", numbers=torch.float16, num_bits=4, symmetric=False, strategy="channel", type="int"),
        "bytes-asymmetric": compressed("int-quantized", num_bits=8, symmetric=False, strategy="channel", type="int"),
        "bytes-groups": compressed("int-quantized", num_bits=4, group_size=32, symmetric=True, **group),
        "bytes-whole": compressed("naive-quantized", num_bits=8, symmetric=True, strategy="tensor", type="int"),
        "floats-groups": compressed("float-quantized", num_bits=8, group_size=64, symmetric=True, strategy="group", type="float"),
        "floats-blocks": compressed("naive-quantized", num_bits=8, block_structure=[24, 48], symmetric=True, strategy="block", type="float"),
        "packed-mxfp8": compressed("mxfp8-quantized", num_bits=8, group_size=32, symmetric=True, strategy="group", type="float", scale_dtype=torch.uint8),
    }


def gptq_packing(path: Path):
    """The functions of GPTQModel's `path` that unpack zeros, without the package, which needs a GPU's libraries."""
    import ast
    import types

    wanted = ("unpack_cols", "pack_cols", "_shift_gptq_qzeros")
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if getattr(node, "name", "") in wanted]
    module = types.ModuleType("gptq_packing")
    module.torch, module.PLANAR_BITS = torch, ()
    exec(compile("from __future__ import annotations\n" + ast.unparse(tree), str(path), "exec"), module.__dict__)
    return module


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--packages", type=Path, required=True)
    args = parser.parse_args()
    torch.manual_seed(22)
    linear = load(args.packages / "auto_gptq/nn_modules/qlinear/qlinear_cuda.py", "qlinear_cuda")
    unpack = load(next(args.packages.glob("autoawq*")) / "awq/utils/packing_utils.py", "packing_utils")
    sys.path.insert(0, str(args.packages))
    from compressed_tensors.compressors.pack_quantized import helpers

    cases = {
        "gptq4": gptq(linear, 4, 64, False, False),
        "gptq4-symmetric": gptq(linear, 4, 32, True, False),
        "gptq4-ordered": gptq(linear, 4, 32, False, True),
        "gptq4-second": gptq(linear, 4, 64, False, False, version=2),
        "gptq3": gptq(linear, 3, -1, False, False),
        "gptq8-symmetric": gptq(linear, 8, 64, True, False),
        "gptq2": gptq(linear, 2, 32, False, False),
        "awq": awq(unpack),
        "packed4": packed(helpers, 4, 64, torch.bfloat16, True),
        "packed4-asymmetric": packed(helpers, 4, 32, torch.bfloat16, False),
        "packed8-rows": packed(helpers, 8, IN, torch.float16, True),
        "fp8-blocks": fp8((3, 2)),
        "fp8-rows": fp8((OUT, 1)),
        "fp8-whole": fp8(()),
        "mxfp4": mxfp4(),
        "mlx-mxfp4": mlx_floats(4, OUT, IN),
        "packed-mxfp4": packed_mxfp4(),
    } | later_cases(args.packages)
    tensors = {f"{case}.{name}": x.contiguous() for case, all in cases.items() for name, x in all.items()}
    tensors = {name: x.float() if name.endswith("expected") else x for name, x in tensors.items()}
    save_file(tensors, args.out)


if __name__ == "__main__":
    main()

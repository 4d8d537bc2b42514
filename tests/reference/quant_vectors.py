"""Quantised blocks and GGUF files made by the `gguf` package (Python code that is independent of Delft's).

    python tests/reference/quant_vectors.py crates/formats/tests/data

Writes, all little-endian and deterministic:
    quant/source.f32          1024 weights: normal, heavy tail, tiny, constant, zero, alternating, ramp
    quant/NAME.encoded        what gguf's quantize() makes of source.f32 (the types it can quantise)
    quant/NAME.blocks         random block bytes with finite scales: every code and scale pattern is fair game
    quant/NAME.decoded.f32    what gguf's dequantize() makes of NAME.blocks
    gguf/sample.gguf          every metadata type, several tensor types, alignment 64
    gguf/split-0000N-of-00003.gguf  five tensors in three files
"""

import sys
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as Type, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize

# Type -> byte offsets of the f16 fields inside a block.
HALVES = {
    Type.Q4_0: [0], Type.Q4_1: [0, 2], Type.Q5_0: [0], Type.Q5_1: [0, 2], Type.Q8_0: [0],
    Type.Q2_K: [80, 82], Type.Q3_K: [108], Type.Q4_K: [0, 2], Type.Q5_K: [0, 2], Type.Q6_K: [208],
    Type.IQ4_NL: [0], Type.IQ4_XS: [0], Type.MXFP4: [], Type.TQ1_0: [52], Type.TQ2_0: [64],
}
ENCODED = [Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.MXFP4, Type.TQ1_0, Type.TQ2_0]


def source(rng: np.random.Generator) -> np.ndarray:
    parts = [
        rng.normal(0, 0.02, 256),
        rng.standard_t(3, 256) * 0.05,
        rng.normal(0, 1e-6, 128),
        np.full(64, -0.75),
        np.zeros(64),
        np.where(np.arange(64) % 2 == 0, 3.0, -3.0),
        np.linspace(-1, 2, 192),
    ]
    return np.concatenate(parts).astype("<f4")


def random_blocks(rng: np.random.Generator, kind: Type, count: int) -> np.ndarray:
    blocks = rng.integers(0, 256, (count, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    for at in HALVES[kind]:
        scales = rng.normal(0, 0.1, count).astype("<f2")
        scales[0] = np.array(5e-6, "<f2")  # a subnormal half
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(count, 2)
    return blocks


def write_quant(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(20)
    weights = source(rng)
    (out / "source.f32").write_bytes(weights.tobytes())
    for kind in ENCODED:
        (out / f"{kind.name.lower()}.encoded").write_bytes(quantize(weights, kind).tobytes())
    for kind in HALVES:
        blocks = random_blocks(rng, kind, 1024 // GGML_QUANT_SIZES[kind][0])
        (out / f"{kind.name.lower()}.blocks").write_bytes(blocks.tobytes())
        decoded = dequantize(blocks, kind).astype("<f4")
        (out / f"{kind.name.lower()}.decoded.f32").write_bytes(decoded.tobytes())


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(out / "sample.gguf", "sample")
    writer.add_custom_alignment(64)
    writer.add_uint8("t.u8", 200)
    writer.add_int8("t.i8", -100)
    writer.add_uint16("t.u16", 60000)
    writer.add_int16("t.i16", -30000)
    writer.add_uint32("t.u32", 4000000000)
    writer.add_int32("t.i32", -2000000000)
    writer.add_float32("t.f32", 0.15625)
    writer.add_bool("t.bool", True)
    writer.add_string("t.string", "Delft \u00e9\u4e16")
    writer.add_uint64("t.u64", 2**63 + 1)
    writer.add_int64("t.i64", -(2**62))
    writer.add_float64("t.f64", 1e-300)
    writer.add_array("t.strings", ["a", "", "\u2581b"])
    writer.add_array("t.floats", [0.5, -1.5])
    writer.add_array("t.ints", [1, -2, 3])
    writer.add_array("t.bools", [True, False])
    writer.add_array("t.nested", [[1, 2], [3]])
    writer.add_key_value("t.u16s", [7, 65535], GGUFValueType.ARRAY, GGUFValueType.UINT16)
    ramp = np.arange(2 * 3 * 4, dtype="<f4").reshape(2, 3, 4)
    writer.add_tensor("f32", ramp)
    writer.add_tensor("f16", (ramp / 8).astype("<f2"))
    writer.add_tensor("i32", np.array([5, -6, 7], "<i4"))
    blocks = quantize(np.linspace(-1, 1, 192, dtype="<f4").reshape(3, 64), Type.Q8_0)
    writer.add_tensor("q8_0", blocks, raw_dtype=Type.Q8_0)
    finish(writer)

    writer = GGUFWriter(out / "split.gguf", "sample", split_max_tensors=2)
    for i in range(5):
        writer.add_tensor(f"t{i}", np.full((2, 3), i, "<f4"))
    finish(writer)


def main() -> None:
    out = Path(sys.argv[1])
    write_quant(out / "quant")
    write_gguf(out / "gguf")


if __name__ == "__main__":
    main()

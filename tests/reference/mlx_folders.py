#!/usr/bin/env python3
"""What MLX reads in the folders that `delft quantize .. mlx4` writes, beside what the originals hold.

    mlx_folders.py OUT --delft target/debug/delft

Needs mlx (its CPU backend is enough) and numpy. Quantises model fixtures with every number of bits and every size of groups, has MLX dequantise each matrix, and compares with
the original: the error may be no larger than that of MLX's own quantisation, but for a tenth. Prints a line for each folder, and
ends with an error if one is off.
"""
import argparse
import json
import subprocess
from pathlib import Path

import mlx.core as mx

MODELS = Path(__file__).parent / "models"
FORMS = [(f"mlx{bits}", group, "affine") for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64)] + [("mlx-mxfp4", 32, "mxfp4")]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--delft", required=True)
    args = parser.parse_args()
    failed = False
    for case in ("qwen3", "mixtral", "llama-256"):
        original = mx.load(str(MODELS / case / "model.safetensors"))
        for kind, group, mode in FORMS:
            out = args.out / f"{case}-{kind}-{group}"
            subprocess.run([args.delft, "quantize", MODELS / case, kind, "--group-size", str(group), "-o", out], check=True, capture_output=True)
            settings = json.loads((out / "config.json").read_text())["quantization"]
            assert settings.get("mode", "affine") == mode and settings["group_size"] == group, settings
            index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
            stored = mx.load(str(out / "model.safetensors"))
            assert set(index) == set(stored)
            ours, theirs, matrices = 0.0, 0.0, 0
            for name, x in original.items():
                stem = name.removesuffix(".weight")
                if f"{stem}.scales" not in stored:
                    assert mx.array_equal(stored[name], x), name
                    continue
                options = dict(group_size=group, bits=settings["bits"], mode=mode)
                # Scales and offsets widened, so that both are what they stand for.
                wide = lambda part: part if part is None or part.dtype == mx.uint8 else part.astype(mx.float32)
                decoded = lambda codes, *parts: mx.dequantize(codes, *map(wide, parts), **options).astype(mx.float32)
                own = decoded(stored[name], stored[f"{stem}.scales"], stored.get(f"{stem}.biases"))
                usual = decoded(*mx.quantize(x, **options))
                x = x.astype(mx.float32)
                ours += ((own - x) ** 2).sum().item()
                theirs += ((usual - x) ** 2).sum().item()
                matrices += 1
            right = matrices == 0 or ours <= 1.1 * theirs
            failed |= not right
            print(f"{out.name}: {matrices} matrices, squared error {ours:.4f}, of MLX's own {theirs:.4f}{'' if right else '  WRONG'}", flush=True)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()

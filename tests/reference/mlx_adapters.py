#!/usr/bin/env python3
"""Adapters between Delft and mlx-lm, both ways: the same logits in either program.

    mlx_adapters.py --delft target/debug/delft

Adapters of PEFT become folders of mlx-lm by `delft convert --adapter`; mlx-lm loads them, and its logits are compared with those
that PEFT computed (`adapters/*/expected.safetensors`). Then mlx-lm makes adapters of random factors and saves them; Delft's logits
with them are compared with mlx-lm's own. Prints the greatest difference of each, and ends with an error where one is above a
thousandth of the logits' range. Needs mlx (its CPU backend is enough), mlx-lm and numpy.
"""
import argparse
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters
from mlx_lm.utils import load_model

HERE = Path(__file__).parent
NEAR = 1e-3
# Cases of adapters.py whose ranks and scales are the same everywhere.
PEFT = [("lora", "llama3"), ("dora", "llama-bias"), ("untied", "qwen3-untied")]
MLX = [("lora", "llama3", ["self_attn.q_proj", "mlp.down_proj"]), ("dora", "qwen3", ["self_attn.v_proj", "mlp.up_proj"])]


def model(base, aside):
    """The checkpoint in mlx-lm, in float32, with its configuration as Transformers 4 wrote it, which mlx-lm reads."""
    folder = aside / base
    if not folder.exists():
        shutil.copytree(HERE / "models" / base, folder)
        older = folder / "config.v4.json"
        if older.exists():
            older.replace(folder / "config.json")
    loaded, _ = load_model(folder)
    loaded.set_dtype(mx.float32)
    return loaded


def run(*command):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"exit status {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def told(name, found, wanted):
    """Prints how far logits are apart; whether that is too far."""
    off = np.abs(np.array(found) - np.array(wanted)).max() / np.ptp(np.array(wanted))
    print(f"{name}: {off:.1e} of the range{'' if off < NEAR else '  WRONG'}", flush=True)
    return off >= NEAR


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delft", required=True)
    delft, wrong = parser.parse_args().delft, False
    holder = tempfile.TemporaryDirectory()
    aside = Path(holder.name)
    for case, base in PEFT:
        out = aside / f"from-{case}"
        run(delft, "convert", HERE / "models" / base, "--adapter", HERE / "adapters" / case, "-o", out)
        expected = mx.load(str(HERE / "adapters" / case / "expected.safetensors"))
        adapted = load_adapters(model(base, aside), str(out))
        # bf16 factors beside a model that was widened.
        adapted.set_dtype(mx.float32)
        wrong |= told(f"{case} of PEFT in mlx-lm", adapted(expected["input_ids"][None])[0], expected["logits"])
    for kind, base, keys in MLX:
        own, parameters = model(base, aside), {"rank": 4, "scale": 2.5, "dropout": 0.0, "keys": keys}
        linear_to_lora_layers(own, -1, parameters, use_dora=kind == "dora")
        noise = np.random.default_rng(7)
        # Exact in bf16, in which Delft keeps factors beside a matrix of 16 bits.
        random = lambda x: mx.array(0.2 * noise.standard_normal(x.shape)).astype(mx.bfloat16).astype(mx.float32)
        fill = lambda name, x: random(x) if "lora_" in name else x
        own.update(tree_map_with_path(fill, own.parameters()))
        leaves = ("lora_a", "lora_b", "m")
        factors = {name: x for name, x in tree_flatten(own.parameters()) if name.rsplit(".", 1)[-1] in leaves}
        folder = aside / f"of-mlx-{kind}"
        folder.mkdir()
        mx.save_safetensors(str(folder / "adapters.safetensors"), factors)
        settings = {"fine_tune_type": kind, "num_layers": -1, "lora_parameters": parameters}
        (folder / "adapter_config.json").write_text(json.dumps(settings))
        ids = mx.load(str(HERE / "models" / base / "expected.safetensors"))["input_ids"]
        tokens = ",".join(map(str, ids.tolist()))
        text = run(delft, "logits", HERE / "models" / base, "--adapter", folder, "--tokens", tokens, "--all", "--cache-type", "f32", "--json")
        wrong |= told(f"{kind} of mlx-lm in Delft", np.array(json.loads(text)["logits"]).reshape(len(ids), -1), own(ids[None])[0])
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()

"""Writes a PEFT adapter with random factors for a shape of `random_gguf.py`, at every matrix of its blocks: for speed, not for sense.
Needs numpy alone.

    python3 tests/reference/random_adapter.py llama-8b 16 FOLDER

Of dense models alone; a number behind the shape is how many layers there are instead of all.
"""

import json
import struct
import sys
from pathlib import Path

import numpy as np

from random_gguf import SHAPES


def main():
    name, rank, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    name, _, some = name.partition(":")
    _, layers, width, heads, kv, head, ff, *rest = SHAPES[name]
    if len(rest) > 4:
        sys.exit(f"{name} has more than attention and a feed-forward")
    q, k = heads * head, kv * head
    sizes = {"self_attn.q_proj": (width, q), "self_attn.k_proj": (width, k), "self_attn.v_proj": (width, k), "self_attn.o_proj": (q, width),
             "mlp.gate_proj": (width, ff), "mlp.up_proj": (width, ff), "mlp.down_proj": (ff, width)}
    rng, header, data, end = np.random.default_rng(2), {}, [], 0
    for layer in range(int(some or layers)):
        for module, (inputs, outputs) in sizes.items():
            for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                values = rng.standard_normal(shape, dtype=np.float32) * (0.5 / shape[1] ** 0.5)
                # The upper half of a float is its bf16, cut off.
                values = (values.view(np.uint32) >> 16).astype(np.uint16)
                key = f"base_model.model.model.layers.{layer}.{module}.lora_{part}.weight"
                header[key] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + values.nbytes]}
                data.append(values)
                end += values.nbytes
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(header).encode()
    with open(folder / "adapter_model.safetensors", "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for values in data:
            out.write(values.tobytes())
    targets = sorted(module.split(".")[1] for module in sizes)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": targets, "base_model_name_or_path": name}
    (folder / "adapter_config.json").write_text(json.dumps(config))


main()

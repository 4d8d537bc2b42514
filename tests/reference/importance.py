#!/usr/bin/env python3
"""Write the importance matrices of some of the model fixtures: what Transformers multiplies with, squared and summed, in float64.

    importance.py

Reads `models/CASE` and its prompt, writes `importance/CASE.gguf` in the form of llama.cpp's `llama-imatrix` (`NAME.in_sum2`, `NAME.counts`) by the
`gguf` package, and of one case `CASE.dat`, the older form. Needs torch, transformers, safetensors, gguf.
"""
import struct
from pathlib import Path

import gguf
import torch
import transformers
from safetensors.torch import load_file

HERE = Path(__file__).parent
# Dense with norms of heads, q, k and v in one matrix, and mixtures: alone, and with an expert that all share.
CASES = {"qwen3": gguf.MODEL_ARCH.QWEN3, "phi3": gguf.MODEL_ARCH.PHI3, "mixtral": gguf.MODEL_ARCH.LLAMA, "qwen2-moe": gguf.MODEL_ARCH.QWEN2MOE}
OLDER = "qwen3"
STACKS = {"gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "down_proj": ("ffn_down_exps",)}


def sums(model, tokens, names):
    """By the tensor's name in GGUF: sums of squares [matrices, columns], rows [matrices]."""
    seen = {}

    def add(name, matrix, matrices, x):
        squares, rows = seen.setdefault(name, (torch.zeros(matrices, x.shape[-1], dtype=torch.float64), torch.zeros(matrices)))
        squares[matrix] += x.double().flatten(0, -2).square().sum(0)
        rows[matrix] += x.flatten(0, -2).shape[0]

    # Which matrix of which tensor a piece of memory is.
    where = {}
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) or path.endswith(".gate"):
            name = names.get_name(path)
            if name and name.startswith("blk."):
                where[module.weight.data_ptr()] = ([name], 0, 1)
        if path.endswith(".experts"):
            layer = path.split(".")[2]
            for part, tensors in STACKS.items():
                stack = getattr(module, part)
                for expert in range(len(stack)):
                    where[stack[expert].data_ptr()] = ([f"blk.{layer}.{name}" for name in tensors], expert, len(stack))
    linear = torch.nn.functional.linear

    def watched(x, weight, bias=None):
        for name in where.get(weight.data_ptr(), ([], 0, 0))[0]:
            add(f"{name}.weight", *where[weight.data_ptr()][1:], x)
        return linear(x, weight, bias)

    torch.nn.functional.linear = watched
    try:
        with torch.no_grad():
            model(tokens)
    finally:
        torch.nn.functional.linear = linear
    return dict(sorted(seen.items()))


def main():
    out = HERE / "importance"
    out.mkdir(exist_ok=True)
    for case, architecture in CASES.items():
        folder = HERE / "models" / case
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager",
                                                                  experts_implementation="eager").eval()
        tokens = load_file(folder / "expected.safetensors")["input_ids"][None]
        found = sums(model, tokens, gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers))
        writer = gguf.GGUFWriter(out / f"{case}.gguf", "")
        # A file of an importance matrix has no architecture.
        writer.kv_data[0].clear()
        writer.add_string("general.type", "imatrix")
        writer.add_array("imatrix.datasets", ["prompt.txt"])
        writer.add_uint32("imatrix.chunk_count", 1)
        writer.add_uint32("imatrix.chunk_size", tokens.numel())
        for name, (squares, rows) in found.items():
            writer.add_tensor(f"{name}.in_sum2", squares.float().numpy())
            writer.add_tensor(f"{name}.counts", rows.float()[:, None].numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        if case == OLDER:
            data = struct.pack("<i", len(found))
            for name, (squares, rows) in found.items():
                # Means by rows, times the number of windows: one.
                means = (squares / rows[:, None]).float().flatten()
                data += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", 1, means.numel()) + means.numpy().tobytes()
            (out / f"{case}.dat").write_bytes(data + struct.pack("<i", 1) + struct.pack("<i", 10) + b"prompt.txt")
        print(case, {name: tuple(squares.shape) for name, (squares, _) in found.items() if name.startswith("blk.0.")})


if __name__ == "__main__":
    main()

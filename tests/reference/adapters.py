#!/usr/bin/env python3
"""Write the reference fixtures for adapters: what PEFT computes from the tiny checkpoints of models.py with adapters on them.

For every case this makes adapters/NAME with the adapter as PEFT saves it and `expected.safetensors`: a prompt, its logits with and
without the adapter, and those of three more tokens. The arithmetic is float64 (see `widened` in models.py). Cases with `mlx` are
also written as mlx-lm stores them, and cases with `gguf` as llama.cpp does: both from the same numbers, by the published layouts.

    adapters.py [--only NAME ...]

Needs torch, transformers, peft, safetensors; the GGUF twins also gguf.
"""
import argparse
import json
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from models import widened

HERE = Path(__file__).parent
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]


@dataclass
class Case:
    name: str
    base: str  # a folder of models/
    config: dict  # of LoraConfig
    why: str
    mlx: bool = False
    gguf: str | None = None  # llama.cpp's name of the architecture
    apart: bool = False  # also with experts one by one, as PEFT had them before parameters
    exact: bool = True  # factors that bf16 holds


CASES = [
    Case("lora", "llama3", dict(r=4, lora_alpha=6, target_modules=ATTENTION + MLP),
         "all matrices of a tied f32 model", mlx=True, gguf="llama"),
    Case("rslora", "llama3", dict(r=3, lora_alpha=2, use_rslora=True, target_modules=["q_proj", "down_proj", "v_proj"],
                                  rank_pattern={"v_proj": 5}, alpha_pattern={"layers.1.mlp.down_proj": 7}),
         "the root of the rank, and patterns"),
    Case("dora", "llama-bias", dict(r=4, lora_alpha=8, use_dora=True, target_modules=ATTENTION + MLP),
         "DoRA beside biases", mlx=True),
    Case("tables", "llama3", dict(r=4, lora_alpha=8, target_modules=["embed_tokens", "lm_head", "k_proj"]),
         "the table of embeddings and the head that shares it"),
    Case("untied", "qwen3-untied", dict(r=2, lora_alpha=4, target_modules=["embed_tokens", "lm_head", "o_proj", "up_proj"]),
         "a head of its own, bf16"),
    Case("fused", "phi3", dict(r=4, lora_alpha=4, target_modules=["qkv_proj", "gate_up_proj", "down_proj"]),
         "fused matrices, bf16"),
    Case("transposed", "gpt2", dict(r=4, lora_alpha=4, fan_in_fan_out=True, target_modules=["c_attn", "c_fc", "attn.c_proj"],
                                    rank_pattern={r"h\.[01]\.attn\..*": 3}, alpha_pattern={"(c_fc|c_attn)": 7}),
         "GPT-2, whose files hold matrices [in, out]; patterns that are regular expressions"),
    Case("three", "llama2", dict(r=3, lora_alpha=5, use_dora=True, target_modules=ATTENTION + MLP + ["lm_head"]),
         "DoRA of a model that three ranks can share"),
    Case("hybrid", "qwen3.5-shared", dict(r=2, lora_alpha=3, use_dora=True, target_modules="all-linear"),
         "gated delta nets, and attention whose queries and gates lie by turns in one matrix"),
    Case("next", "qwen3-next", dict(r=2, lora_alpha=3, target_modules=["q_proj", "in_proj_qkvz", "in_proj_ba"]),
         "gated delta nets whose matrices lie by heads in two"),
    Case("neox", "gpt-neox", dict(r=2, lora_alpha=3, target_modules=["query_key_value"]),
         "queries, keys and values that lie by heads in one matrix"),
    Case("pieces", "olmo_hybrid", dict(r=2, lora_alpha=3, use_dora=True, target_modules=["q_proj", "k_proj", "v_proj", "b_proj"],
                                       rank_pattern={"v_proj": 3}, alpha_pattern={"k_proj": 5}),
         "queries, keys and values that are one matrix in Delft, of several ranks and scales"),
    Case("pieces-some", "kimi_linear", dict(r=3, lora_alpha=5, target_modules=["q_proj", "v_proj", "f_a_proj", "g_b_proj"]),
         "two of them, and a gate's two matrices", exact=False),
    Case("experts", "mixtral", dict(r=3, lora_alpha=5, target_modules=["q_proj"],
                                    target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
         "factors of every expert, of parameters with three axes", mlx=True, gguf="llama", apart=True),
    Case("experts-ranks", "gemma4-moe", dict(r=2, lora_alpha=3, use_rslora=True, target_modules=[],
                                             target_parameters=["experts.gate_up_proj", "experts.down_proj"],
                                             rank_pattern={"experts.down_proj": 3}, alpha_pattern={"experts.gate_up_proj": 4}),
         "patterns, a parameter as wide as it is high, factors of experts"),
    Case("experts-turned", "gpt-oss", dict(r=2, lora_alpha=3, target_modules=["v_proj"],
                                           target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
         "parameters [experts, in, out], gates and ups by turns, biases"),
    Case("experts-weighed", "llama4", dict(r=2, lora_alpha=3, target_modules=[],
                                           target_parameters=["feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"]),
         "parameters [experts, in, out] that PEFT takes for [experts, out, in]"),
    Case("anew", "llama3", dict(r=3, lora_alpha=5, target_modules=["q_proj", "down_proj"], modules_to_save=["embed_tokens", "lm_head"]),
         "a table of embeddings and a head, which were one matrix"),
    Case("tokens", "llama3", dict(r=2, lora_alpha=3, target_modules=["v_proj"], trainable_token_indices=[3, 90, 14]),
         "rows of a table that is the head, too"),
    Case("biased", "llama-bias", dict(r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"], bias="all", lora_bias=True),
         "biases of the model, and of factors"),
    Case("floats", "qwen3", dict(r=8, lora_alpha=16, use_rslora=True, target_modules=ATTENTION + MLP),
         "factors of f32 beside matrices of bf16", exact=False),
]

# Canonical order of GGUF's names.
GGUF = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}


def seeded(case):
    generator = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))
    return lambda *shape: torch.randn(*shape, generator=generator)


def fill(model, noise, exact):
    """Random factors, where `exact` is set those that bf16 holds, and magnitudes near the norms that they begin with."""
    for name, parameter in model.named_parameters():
        if "lora_magnitude_vector" in name:
            parameter.data = (parameter.data * (1 + 0.2 * noise(*parameter.shape))).bfloat16().double()
        elif "lora_" in name:
            factor = 0.3 * noise(*parameter.shape)
            parameter.data = (factor.bfloat16() if exact else factor).double()
        elif parameter.requires_grad:
            # A copy of the base's, or a bias of it. What changes is exact in bf16.
            change = (0.3 * parameter.data.abs().mean().clamp(min=0.1) * noise(*parameter.shape)).bfloat16()
            parameter.data = (parameter.data.float() + change.float()).double()


def forward(model, tokens):
    with widened(), torch.no_grad():
        return model(input_ids=tokens[None], use_cache=False).logits[0]


def write(case):
    folder = HERE / "adapters" / case.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    noise = seeded(case)
    base = transformers.AutoModelForCausalLM.from_pretrained(HERE / "models" / case.base, dtype=torch.float64,
                                                             attn_implementation="eager", experts_implementation="eager").eval()
    vocab = base.config.vocab_size
    tokens = (noise(16) * 1e6).long().abs() % (vocab - 3) + 3
    with widened():
        plain = forward(base, tokens)
        model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **case.config), autocast_adapter_dtype=False).eval()
        fill(model, noise, case.exact)
        adapted = forward(model, tokens)
    assert (adapted - plain).abs().max() > 0.5, case.name
    model.to(torch.float32).save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    config["base_model_name_or_path"] = case.base
    config["target_modules"] = sorted(config["target_modules"] or [])
    if config.get("target_parameters"):
        config["target_parameters"] = sorted(config["target_parameters"])
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    save_file({"input_ids": tokens, "plain": plain.float().contiguous(), "logits": adapted.float().contiguous()},
              folder / "expected.safetensors")
    stored = load_file(folder / "adapter_model.safetensors")
    if case.apart:
        apart(case, folder / "apart", stored, model.config)
    if case.mlx:
        mlx(case, folder / "mlx", stored, model.config)
    if case.gguf:
        gguf(case, folder / "adapter.gguf", stored, model.config)
    print(case.name, f"{(adapted - plain).abs().max():.3f}", sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()))


def stacks(stored, config):
    """The factors of experts among those of PEFT, as `blocks.experts(gate, up, down)`, `[experts, rank, in]` and `[experts, out, rank]`;
    and all others, by their own names."""
    experts, found, rest = config.num_local_experts, {}, {}
    for name, a in stored.items():
        if ".experts." not in name:
            rest[name] = a
        elif name.endswith(".lora_A.weight"):
            b = stored[name.replace("lora_A", "lora_B")]
            block = name.split(".mlp.experts.")[0].removeprefix("base_model.model.")
            a = a.reshape(experts, -1, a.shape[1])
            b = b.reshape(b.shape[0], -1, experts).permute(2, 0, 1)
            parts = [("down", b)] if a.shape[2] == config.intermediate_size else [("gate", b.chunk(2, 1)[0]), ("up", b.chunk(2, 1)[1])]
            found.update({(block, part): (a.clone(), b.contiguous()) for part, b in parts})
    return found, rest


def apart(case, folder, stored, config):
    """As PEFT keeps them where every expert is a module of its own, as Mixtral's were in Transformers 4."""
    folder.mkdir()
    found, out = stacks(stored, config)
    for (block, part), (a, b) in found.items():
        for expert in range(len(a)):
            name = f"base_model.model.{block}.block_sparse_moe.experts.{expert}.{dict(gate='w1', up='w3', down='w2')[part]}"
            out[f"{name}.lora_A.weight"], out[f"{name}.lora_B.weight"] = a[expert].clone(), b[expert].clone()
    save_file(out, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder.parent / "adapter_config.json").read_text())
    settings |= {"target_modules": ["q_proj", "w1", "w2", "w3"], "target_parameters": None}
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def mlx(case, folder, stored, config):
    """As mlx-lm's LoRALinear, DoRALinear and LoRASwitchLinear keep them: `x @ lora_a @ lora_b`, magnitudes under `m`."""
    folder.mkdir()
    out = {}
    if case.apart:
        found, stored = stacks(stored, config)
        for (block, part), (a, b) in found.items():
            name = f"{block}.block_sparse_moe.switch_mlp.{part}_proj"
            out[f"{name}.lora_a"], out[f"{name}.lora_b"] = a, b
    for name, tensor in stored.items():
        name = name.removeprefix("base_model.model.")
        if name.endswith(".lora_A.weight"):
            out[name.removesuffix("A.weight") + "a"] = tensor.T.contiguous()
        elif name.endswith(".lora_B.weight"):
            out[name.removesuffix("B.weight") + "b"] = tensor.T.contiguous()
        else:
            out[name.removesuffix(".lora_magnitude_vector") + ".m"] = tensor.contiguous()
    save_file(out, folder / "adapters.safetensors")
    rank, alpha = case.config["r"], case.config["lora_alpha"]
    config = {"fine_tune_type": "dora" if case.config.get("use_dora") else "lora", "num_layers": 2, "model": case.base,
              "lora_parameters": {"rank": rank, "scale": alpha / rank, "dropout": 0.0}}
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def permuted(rows, heads):
    """Rows of q or k in the order of llama.cpp's conversion: pairs that rotate together lie beside each other."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def gguf(case, path, stored, config):
    import gguf as library
    writer = library.GGUFWriter(path, case.gguf)
    writer.add_type(library.GGUFType.ADAPTER)
    writer.add_string(library.Keys.Adapter.TYPE, "lora")
    writer.add_float32(library.Keys.Adapter.LORA_ALPHA, float(case.config["lora_alpha"]))
    if case.apart:
        found, stored = stacks(stored, config)
        for (block, part), (a, b) in found.items():
            name = f"blk.{block.split('.')[-1]}.ffn_{part}_exps.weight"
            writer.add_tensor(f"{name}.lora_a", a.numpy().astype(np.float32))
            writer.add_tensor(f"{name}.lora_b", b.numpy().astype(np.float32))
    for name, tensor in stored.items():
        parts = name.removeprefix("base_model.model.model.layers.").split(".")
        matrix, half = ".".join(parts[1:3]), parts[3]
        rows = tensor.numpy().astype(np.float32)
        if half == "lora_B" and matrix == "self_attn.q_proj":
            rows = permuted(rows, config.num_attention_heads)
        if half == "lora_B" and matrix == "self_attn.k_proj":
            rows = permuted(rows, config.num_key_value_heads)
        writer.add_tensor(f"blk.{parts[0]}.{GGUF[matrix]}.weight.{half.lower()}", np.ascontiguousarray(rows))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*")
    only = parser.parse_args().only
    for case in CASES:
        if only is None or case.name in only:
            write(case)


if __name__ == "__main__":
    main()

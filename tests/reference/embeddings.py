#!/usr/bin/env python3
"""Write the reference fixtures for embeddings: tiny random decoders with the modules of sentence-transformers behind them, and the
embeddings that Transformers and those modules make of some token sequences, in float64.

    embeddings.py [--out DIR] [--only NAME ...]

Needs torch, transformers, sentence-transformers, safetensors; the GGUF twin also gguf.
"""
import argparse
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from sentence_transformers import models as modules

LENGTHS = (1, 5, 40, 9, 130)  # tokens of each text
COMMON = dict(vocab_size=128, num_hidden_layers=2, max_position_embeddings=256, rms_norm_eps=1e-6, hidden_size=48,
              num_attention_heads=6, num_key_value_heads=2, intermediate_size=64, bos_token_id=1, eos_token_id=2)


@dataclass
class Case:
    name: str
    config: type
    model: type  # the class that is saved
    pooling: str
    normalised: bool
    more: dict
    gguf: int | None = None  # also a GGUF twin with this pooling_type


CASES = [
    # As Qwen3-Embedding: names without `model.`, no head.
    Case("last", transformers.Qwen3Config, transformers.Qwen3Model, "lasttoken", True,
         dict(head_dim=8, tie_word_embeddings=True), gguf=3),
    # As E5-Mistral: an untied model whose head is not there, here with a window.
    Case("mean", transformers.MistralConfig, transformers.MistralModel, "mean", False,
         dict(tie_word_embeddings=False, sliding_window=24)),
    # A model that also generates, with a head.
    Case("first", transformers.LlamaConfig, transformers.LlamaForCausalLM, "cls", True, dict(tie_word_embeddings=False)),
]

GGUF_NAMES = {
    "embed_tokens": "token_embd", "norm": "output_norm", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf(case, path, model):
    """The twin as llama.cpp's conversion writes it: Qwen3 keeps the order of rows."""
    import gguf as library
    config = model.config
    writer = library.GGUFWriter(path, "qwen3")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_pooling_type(library.PoolingType(case.gguf))
    for name, tensor in model.state_dict().items():
        stem = name.removesuffix(".weight")
        parts = stem.split(".")
        block = f"blk.{parts[1]}." if parts[0] == "layers" else ""
        writer.add_tensor(block + GGUF_NAMES[".".join(parts[2:]) if block else stem] + ".weight", tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write(case, out):
    folder = out / case.name
    shutil.rmtree(folder, ignore_errors=True)
    torch.manual_seed(len(case.name))
    config = case.config(**COMMON, **case.more)
    config._attn_implementation = "eager"
    model = case.model(config).eval()
    for parameter in model.parameters():
        # Large enough that texts come apart.
        parameter.data = torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 0.1) + (parameter.dim() == 1)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    pooling = modules.Pooling(COMMON["hidden_size"], pooling_mode=case.pooling)
    (folder / "1_Pooling").mkdir()
    pooling.save(str(folder / "1_Pooling"))
    listed = [("", "Transformer"), ("1_Pooling", "Pooling")] + [("2_Normalize", "Normalize")] * case.normalised
    listed = [dict(idx=i, name=str(i), path=path, type=f"sentence_transformers.models.{kind}")
              for i, (path, kind) in enumerate(listed)]
    (folder / "modules.json").write_text(json.dumps(listed, indent=2) + "\n")

    decoder = model.get_decoder() if hasattr(model, "lm_head") else model
    decoder.double()
    truth = {}
    for i, length in enumerate(LENGTHS):
        tokens = torch.randint(3, COMMON["vocab_size"], (1, length))
        with torch.no_grad():
            states = decoder(tokens).last_hidden_state
        features = dict(token_embeddings=states, attention_mask=torch.ones_like(tokens))
        features = pooling(features)
        if case.normalised:
            features = modules.Normalize()(features)
        truth[f"tokens.{i}"] = tokens[0]
        truth[f"embedding.{i}"] = features["sentence_embedding"][0].float().contiguous()
    save_file(truth, folder / "expected.safetensors")
    if case.gguf is not None:
        gguf(case, folder / "model.f32.gguf", model)
    print(case.name, sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()), "bytes")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "embeddings")
    parser.add_argument("--only", nargs="*")
    args = parser.parse_args()
    for case in CASES:
        if args.only is None or case.name in args.only:
            write(case, args.out)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Write the reference fixtures of families that Transformers has no code for: their published mathematics, in float64.

    published.py [--out DIR] [--only NAME ..]

Needs numpy, torch, safetensors, and gguf for GGUF files (models.py, of which names of tensors and what makes prompts are taken, imports transformers). Every family below is one decoder
whose parts differ: `FAMILIES` has its published names of weights and its `config.json`, the settings what is computed. Tensors of `expected.safetensors` are
those of models.py. What decoding caches is not modelled: every token of the continuation is computed from the whole text, as causal models allow.
"""
import argparse
import json
import math
import shutil
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from models import MARGIN, ROUTED, SPECIAL, STEPS, margin, random_weight, write_json

PROMPT = 24  # tokens; fewer where experts are chosen
NEVER = -1e30


def rms(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def layer(x, weight, eps):
    return F.layer_norm(x, x.shape[-1:], weight, None, eps)


def rotated(x, base, adjacent):
    """Rows of heads [rows, heads, width] turned by their positions."""
    width = x.shape[-1]
    angles = torch.arange(len(x), dtype=torch.float64)[:, None] * base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = (x[..., 0::2], x[..., 1::2]) if adjacent else x.chunk(2, -1)
    turned = (a * cos - b * sin, a * sin + b * cos)
    return torch.stack(turned, -1).flatten(-2) if adjacent else torch.cat(turned, -1)


def slopes(heads):
    """Of `heads` slopes, the powers of the greatest power of two, and every other one of twice as many."""
    whole = 2 ** int(math.log2(heads))
    first = [2 ** (-8 * (i + 1) / whole) for i in range(whole)]
    return torch.tensor(first + [2 ** (-8 * (2 * i + 1) / (2 * whole)) for i in range(heads - whole)], dtype=torch.float64)


def attended(q, k, v, scale, window=None, slope=None, cap=None):
    """Causal attention of [rows, heads, width] to [rows, groups, width]: [rows, heads * width of values]."""
    rows, heads = q.shape[:2]
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    back = torch.arange(rows)[:, None] - torch.arange(rows)
    if slope is not None:
        scores = scores - slope[:, None, None] * back
    seen = (back >= 0) & (back < (window or rows))
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen, NEVER).softmax(-1), v).flatten(1)


class Model:
    """A decoder of a family's settings over weights by their published names."""

    def __init__(self, config, weights, names, **settings):
        self.config, self.weights, self.names = config, {name: x.double() for name, x in weights.items()}, names
        self.norm, self.eps = settings.pop("norm", rms), settings.pop("eps", config.get("rms_norm_eps"))
        self.settings, self.clear = settings, 1e9

    def get(self, name, i=None):
        return self.weights[self.names[name].format(i) + ".weight"]

    def layers(self):
        return self.config.get("num_hidden_layers", self.config.get("n_layer"))

    def heads(self, x, i):
        """What attention gives, in front of its last product."""
        s = self.settings
        get = lambda name: self.get(name, i)
        if "kv_lora_rank" in self.config:
            return self.latent(x, i)
        width = s["width"]
        q, k, v = (x @ (get(part) if callable(part) or part in self.names else s["parts"](self, i)[part]).T for part in ("q", "k", "v"))
        q, k, v = (y.view(len(x), -1, width) for y in (q, k, v))
        turns, window = s.get("turns", lambda i: True)(i), s.get("window", lambda i: None)(i)
        if turns and "base" in s:
            q, k = (rotated(y, s["base"], s.get("adjacent", False)) for y in (q, k))
        if "q_norm" in self.names:
            q, k = rms(q, get("q_norm"), self.eps), rms(k, get("k_norm"), self.eps)
        return attended(q, k, v, s.get("scale", width ** -0.5), window, slopes(q.shape[1]) if s.get("slopes") else None, s.get("cap"))

    def latent(self, x, i):
        c, heads = self.config, self.config["num_attention_heads"]
        plain, turned, value, rank = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"], c["kv_lora_rank"]
        q = (x @ self.get("q", i).T).view(len(x), heads, plain + turned)
        row = x @ self.get("kv_a", i).T
        both = (rms(row[:, :rank], self.get("kv_a_norm", i), 1e-6) @ self.get("kv_b", i).T).view(len(x), heads, plain + value)
        turn = lambda y: rotated(y, self.settings["base"], True)
        q = torch.cat([q[..., :plain], turn(q[..., plain:])], -1)
        shared = turn(row[:, None, rank:]).expand(-1, heads, -1)
        return attended(q, torch.cat([both[..., :plain], shared], -1), both[..., plain:], (plain + turned) ** -0.5)

    def feed_forward(self, x, i, read):
        """The feed-forward of normed rows; an early router reads `read`."""
        get = lambda name: self.get(name, i)
        act = self.settings.get("act", F.silu)
        if "router" in self.names:
            y = self.mixture(x, i, read if self.settings.get("early") else x)
            return (y + (act(x @ get("gate").T) * (x @ get("up").T)) @ get("down").T) / 2 ** 0.5 if "gate" in self.names else y
        if "gate_up" in self.names:
            gate, up = (x @ get("gate_up").T).chunk(2, -1)
            return (act(gate) * up) @ get("down").T
        if "gate" not in self.names:
            return act(x @ get("up").T) @ get("down").T
        return (act(x @ get("gate").T) * (x @ get("up").T)) @ get("down").T

    def mixture(self, x, i, read):
        s, used = self.settings, self.settings["used"]
        scores = read @ self.get("router", i).T
        best = scores.sort(-1, descending=True)
        if used < scores.shape[-1]:
            self.clear = min(self.clear, (best.values[:, used - 1] - best.values[:, used]).min().item())
        odds = s["odds"](best.values[:, :used])
        y = torch.zeros_like(x)
        for row in range(len(x)):
            for share, e in zip(odds[row], best.indices[row, :used].tolist()):
                gate, up, down = (self.weights[self.names[part].format(i, e) + ".weight"] for part in ("expert_gate", "expert_up", "expert_down"))
                y[row] += share * (down @ (s["act"](gate @ x[row]) * (up @ x[row])))
        return y

    def block(self, x, i):
        norm = lambda name, y: self.norm(y, self.get(name, i), self.eps)
        behind = lambda name, y: norm(name, y) if name in self.names else y
        y = x + behind("after_attention", self.heads(norm("attention_norm", x), i) @ self.get("o", i).T)
        return y + behind("after_mlp", self.feed_forward(norm("mlp_norm", y), i, x))

    def forward(self, ids):
        """Embeddings, hidden states behind each block, normed rows and logits."""
        seen, rounds = {"embeddings": self.get("embed")[ids]}, self.settings.get("rounds", 1)
        x = seen["embeddings"] = seen["embeddings"] * self.settings.get("embedding", 1.0)
        for step in range(rounds * self.layers()):
            x = seen[f"hidden.{step}"] = self.block(x, step % self.layers())
            if (step + 1) % self.layers() == 0 and (step + 1 < rounds * self.layers()) and self.settings.get("between", True):
                x = self.norm(x, self.get("norm"), self.eps)
        seen["norm"] = self.norm(x, self.get("norm"), self.eps)
        seen["logits"] = seen["norm"] @ (self.get("embed") if self.config.get("tie_word_embeddings") else self.get("head")).T * self.settings.get("logits", 1.0)
        if "most" in self.settings:
            seen["logits"] = self.settings["most"] * torch.tanh(seen["logits"] / self.settings["most"])
        return seen

    def record(self, ids):
        """As record of models.py."""
        seen, tokens, rows = self.forward(ids), [], []
        last = seen["logits"][-1]
        for _ in range(STEPS):
            tokens.append(last.argmax())
            last = self.forward(torch.cat([ids, torch.stack(tokens)]))["logits"][-1]
            rows.append(last)
        seen["decode.tokens"], seen["decode.logits"] = torch.stack(tokens), torch.stack(rows)
        return seen


LLAMA = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head", "attention_norm": "model.layers.{}.input_layernorm",
         "mlp_norm": "model.layers.{}.post_attention_layernorm", **{part: f"model.layers.{{}}.self_attn.{part}_proj" for part in "qkvo"}}
GATED = {part: f"model.layers.{{}}.mlp.{part}_proj" for part in ("gate", "up", "down")}
COMMON = dict(vocab_size=128, hidden_size=48, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64, num_hidden_layers=2, max_position_embeddings=256,
              rms_norm_eps=1e-5, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, dtype="bfloat16", rope_theta=10000.0)


def shapes(config, names):
    """The shape of each weight, by its name here."""
    hidden, heads, ff = config["hidden_size"], config["num_attention_heads"], config["intermediate_size"]
    groups, width = config.get("num_key_value_heads", 1), config.get("head_dim") or hidden // heads
    plain, turned, value, rank = (config.get(key, 0) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank"))
    whole = rank > 0
    return {"embed": (config["vocab_size"], hidden), "head": (config["vocab_size"], hidden), "q": (heads * (plain + turned if whole else width), hidden),
            "k": (groups * width, hidden), "v": (groups * width, hidden), "kv": (2 * groups * width, hidden), "o": (hidden, heads * (value if whole else width)),
            "kv_a": (rank + turned, hidden), "kv_a_norm": (rank,), "kv_b": (heads * (plain + value), rank), "q_norm": (width,), "k_norm": (width,),
            "gate": (ff, hidden), "up": (ff, hidden), "gate_up": (2 * ff, hidden), "down": (hidden, ff), "router": (config.get("moe_num_primary_experts", 1), hidden),
            "expert_gate": (config.get("moe_ffn_hidden_size", 1), hidden), "expert_up": (config.get("moe_ffn_hidden_size", 1), hidden),
            "expert_down": (hidden, config.get("moe_ffn_hidden_size", 1))}


def refact(config):
    """Sizes under GPT-2's names; a feed-forward of two thirds of four times the width, in steps of 256."""
    own = {"hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer", "max_position_embeddings": "n_positions", "rms_norm_eps": "layer_norm_epsilon"}
    return {own.get(key, key): value for key, value in config.items() if key not in ("intermediate_size", "num_key_value_heads", "rope_theta")}


def grok(config, weights, path, own):
    """A GGUF file of Grok, with all experts of a block in one tensor."""
    import gguf
    writer, count = gguf.GGUFWriter(path, "grok"), config["moe_num_primary_experts"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config["moe_ffn_hidden_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_expert_count(count)
    writer.add_expert_used_count(2)
    for key, value in own.items():
        writer.add_float32(f"grok.{key}", value)
    for name, x in weights.items():
        stem, _, expert = name.removesuffix(".weight").partition("_exps.")
        if not expert:
            writer.add_tensor(name, x.float().numpy())
        elif expert == "0":
            writer.add_tensor(f"{stem}_exps.weight", torch.stack([weights[f"{stem}_exps.{e}.weight"] for e in range(count)]).float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def chosen(scores):
    return scores.sigmoid() / scores.sigmoid().sum(-1, keepdim=True)


def kv_parts(model, i):
    k, v = model.get("kv", i).chunk(2)
    return {"k": k, "v": v}


GPT = {"embed": "transformer.wte", "norm": "ln_f", "head": "lm_head", "attention_norm": "transformer.h.{}.ln_1", "mlp_norm": "transformer.h.{}.ln_2", "q": "transformer.h.{}.attn.q",
       "kv": "transformer.h.{}.attn.kv", "o": "transformer.h.{}.attn.c_proj", "gate_up": "transformer.h.{}.mlp.gate_up_proj", "down": "transformer.h.{}.mlp.c_proj"}
GROK = {"embed": "token_embd", "norm": "output_norm", "head": "output", "attention_norm": "blk.{}.attn_norm", "after_attention": "blk.{}.attn_output_norm", "mlp_norm": "blk.{}.ffn_norm",
        "after_mlp": "blk.{}.layer_output_norm", "o": "blk.{}.attn_output", "router": "blk.{}.ffn_gate_inp", **{part: f"blk.{{}}.attn_{part}" for part in "qkv"},
        **{f"expert_{part}": f"blk.{{}}.ffn_{part}_exps.{{}}" for part in ("gate", "up", "down")}}
MOE = "model.layers.{}.block_sparse_moe."
# Each fixture: config.json beyond COMMON, names of weights, settings, how config.json is written, or a GGUF file.
FAMILIES = {
    "nanbeige": (dict(architectures=["NanbeigeForCausalLM"], model_type="nanbeige", head_dim=16, num_loops=2, skip_loop_final_norm=False, total_ut_steps=2, early_exit_threshold=1.0,
                      loop_loss_weights=[]), LLAMA | GATED, dict(width=16, base=10000.0, rounds=2), None),
    "nanbeige-plain": (dict(architectures=["NanbeigeForCausalLM"], model_type="nanbeige", num_loops=2, skip_loop_final_norm=True, tie_word_embeddings=True), LLAMA | GATED,
                       dict(width=12, base=10000.0, rounds=2, between=False), None),
    "ouro": (dict(architectures=["OuroForCausalLM"], model_type="ouro", num_key_value_heads=4, head_dim=12, total_ut_steps=2, early_exit_threshold=1.0),
             LLAMA | GATED | {"after_attention": "model.layers.{}.input_layernorm_2", "after_mlp": "model.layers.{}.post_attention_layernorm_2"},
             dict(width=12, base=10000.0, rounds=2), None),
    "smallthinker": (dict(architectures=["SmallThinkerForCausalLM"], model_type="smallthinker", head_dim=16, num_hidden_layers=5, moe_num_primary_experts=5, moe_num_active_primary_experts=2,
                          moe_ffn_hidden_size=24, moe_primary_router_apply_softmax=False, rope_layout=[0, 1, 1, 1, 0], sliding_window_layout=[0, 1, 1, 1, 0], sliding_window_size=8,
                          tie_word_embeddings=True),
                     LLAMA | {"router": MOE + "primary_router", **{f"expert_{part}": MOE + f"experts.{{}}.{part}" for part in ("gate", "up", "down")}},
                     dict(width=16, base=10000.0, used=2, early=True, odds=chosen, act=F.relu, turns=lambda i: i % 4 > 0, window=lambda i: 8 if i % 4 else None),
                     lambda config: {key: value for key, value in config.items() if key != "intermediate_size"}),
    "smallthinker-softmax": (dict(architectures=["SmallThinkerForCausalLM"], model_type="smallthinker", head_dim=16, moe_num_primary_experts=4, moe_num_active_primary_experts=3,
                                  moe_ffn_hidden_size=24, moe_primary_router_apply_softmax=True, rope_layout=[1, 1], sliding_window_layout=[0, 0], sliding_window_size=8),
                             LLAMA | {"router": MOE + "primary_router", **{f"expert_{part}": MOE + f"experts.{{}}.{part}" for part in ("gate", "up", "down")}},
                             dict(width=16, base=10000.0, used=3, early=True, odds=lambda scores: scores.softmax(-1), act=F.relu),
                             lambda config: {key: value for key, value in config.items() if key != "intermediate_size"}),
    "maincoder": (dict(architectures=["MaincoderForCausalLM"], model_type="maincoder", head_dim=16, use_qk_norm=True, tie_word_embeddings=True),
                  LLAMA | {part: f"model.layers.{{}}.feed_forward.{part}_proj" for part in ("gate", "up", "down")}
                  | {f"{part}_norm": f"model.layers.{{}}.self_attn.{part}_norm" for part in "qk"}, dict(width=16, base=10000.0, adjacent=True),
                  lambda config: {"intermediate_size_mlp" if key == "intermediate_size" else key: value for key, value in config.items()}),
    "plm": (dict(architectures=["PLMForCausalLM"], model_type="plm", num_key_value_heads=4, kv_lora_rank=24, q_lora_rank=None, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
                 hidden_act="relu2", tie_word_embeddings=True, rope_interleave=True),
            LLAMA | {"kv_a": "model.layers.{}.self_attn.kv_a_proj_with_mqa", "kv_a_norm": "model.layers.{}.self_attn.kv_a_layernorm", "kv_b": "model.layers.{}.self_attn.kv_b_proj",
                     "up": "model.layers.{}.mlp.up_proj", "down": "model.layers.{}.mlp.down_proj"}, dict(base=10000.0, act=lambda x: F.relu(x) ** 2), None),
    "grok": (dict(head_dim=12, moe_num_primary_experts=4, moe_ffn_hidden_size=24), GROK,
             dict(width=12, base=10000.0, used=2, odds=lambda scores: scores.softmax(-1), act=partial(F.gelu, approximate="tanh"), scale=0.25, cap=3.0, embedding=78.38367176906169,
                  logits=0.5773502691896257), partial(grok, own={"attention.output_scale": 0.25, "attn_logit_softcapping": 3.0})),
    "grok-2": (dict(head_dim=12, num_key_value_heads=1, moe_num_primary_experts=4, moe_ffn_hidden_size=24),
               GROK | {"after_mlp": "blk.{}.post_ffw_norm", **{part: f"blk.{{}}.ffn_{part}" for part in ("gate", "up", "down")}},
               dict(width=12, base=1000.0, used=2, odds=lambda scores: scores.softmax(-1), act=partial(F.gelu, approximate="tanh"), scale=12 ** -0.5, cap=30.0, embedding=8.0, logits=0.9, most=12.0),
               partial(grok, own={"attention.output_scale": 12 ** -0.5, "attn_logit_softcapping": 30.0, "router_logit_softcapping": 30.0, "embedding_scale": 8.0, "logit_scale": 0.9,
                                  "final_logit_softcapping": 12.0})),
    "refact": (dict(architectures=["GPTRefactForCausalLM"], model_type="gpt_refact", num_attention_heads=6, num_key_value_heads=1, intermediate_size=256, multi_query=True), GPT,
               dict(width=8, slopes=True, norm=layer, parts=kv_parts, eps=1e-5), refact),
}


def make(name, folder):
    """A fixture; how clear its choices are."""
    own, names, settings, written = FAMILIES[name]
    config, prompt = COMMON | own, 10 if "router" in names else PROMPT
    names = {part: stem for part, stem in names.items() if "kv_lora_rank" not in config or part not in ("k", "v")}
    names = {part: stem for part, stem in names.items() if part != "head" or not config["tie_word_embeddings"]}
    sizes, weights = shapes(config, names), {}
    for part, stem in names.items():
        layers = range(config["num_hidden_layers"]) if "{}" in stem else [None]
        experts = range(config["moe_num_primary_experts"]) if part.startswith("expert") else [None]
        for stored in (stem.format(*(n for n in (i, e) if n is not None)) + ".weight" for i in layers for e in experts):
            x = torch.from_numpy(random_weight(name, stored, sizes.get(part, (config["hidden_size"],))))
            weights[stored] = (4 * x if part == "router" else x).to(torch.bfloat16)
    model = Model(config, weights, names, **settings)
    for seed in range(1000):
        stream = np.random.Generator(np.random.PCG64([zlib.crc32(name.encode()), seed]))
        ids = torch.from_numpy(stream.integers(SPECIAL + 1, config["vocab_size"], prompt))
        model.clear = 1e9
        model.forward(ids)
        if model.clear < ROUTED:
            continue
        seen = model.record(ids)
        tokens = set(seen["decode.tokens"].tolist())
        if margin(seen) >= MARGIN and model.clear >= ROUTED and len(tokens) >= 4 and min(tokens) > SPECIAL:
            break
    else:
        raise SystemExit(f"{name}: no prompt gives clear greedy choices")
    if names["embed"] == "token_embd":
        written(config | {"rope_theta": settings["base"]}, weights, folder / "model.f32.gguf")
    else:
        write_json(folder / "config.json", dict(sorted((written(config) if written else config).items())))
        save_file({stored: x.contiguous() for stored, x in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    tensors = {"input_ids": ids, "first_row": torch.tensor([0])} | {key: (x if key == "decode.tokens" else x.float()).contiguous() for key, x in seen.items()}
    save_file(tensors, folder / "expected.safetensors", {"fixture": json.dumps({"arithmetic": "float64", "torch": torch.__version__, "greedy_margin": f"{margin(seen):.3g}"})})
    return margin(seen)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "models")
    parser.add_argument("--only", nargs="*", choices=FAMILIES)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.only or FAMILIES:
        folder = args.out / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with torch.no_grad():
            clear = make(name, folder)
        print(f"{name}: {sum(path.stat().st_size for path in folder.iterdir()) / 1024:.0f} KiB, margin {clear:.3g}", flush=True)


if __name__ == "__main__":
    main()

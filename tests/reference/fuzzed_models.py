#!/usr/bin/env python3
"""Random small models of every family, as Transformers saves them, and the logits that Delft computes with each.

    fuzzed_models.py --delft target/debug/delft [--draws N] [--seed S] [--only FAMILY ..] [--devices cpu sim] [--gguf] [--keep DIR]

Needs torch, transformers, safetensors. Sizes, options, rotations, dialects of config.json, what it leaves to its class, names of models with towers and
prompts are drawn from the seed. Delft reads a prompt and
goes on greedily; Transformers computes the same tokens in float64 (models.py, `widened`). Every logit of the prompt may be BOUND of the range of logits away,
and every token that follows must be as likely as the likeliest within that. With --gguf the model that `delft convert` makes of the folder is held to the same.
A refusal counts as a difference, unless REFUSED names it. Prints a line for each model that differs, with what was drawn, and one for each family; ends with an
error if there was any. --keep leaves the folders of those that differ below DIR.
"""
import argparse
import json
import shutil
import subprocess
import tempfile
import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

import models
from models import Case

BOUND = 1e-4  # of the range of a model's logits
FOLLOWED = 4  # tokens that Delft chooses behind the prompt
NEAR = 1e-4  # a router's scores nearer than this may choose other experts in float32
# What Delft may refuse, by a part of its line: GGUF has no words for some settings, and GPUs take no odd widths.
REFUSED = ("settings that GGUF can say", "architecture whose GGUF files are read", "a rotation that GGUF can say", "expected columns in multiples of 8")


class Draw:
    """Choices from a seed."""

    def __init__(self, *seed):
        self.stream = np.random.Generator(np.random.PCG64([zlib.crc32(str(part).encode()) for part in seed]))

    def of(self, *choices):
        return choices[self.stream.integers(len(choices))]

    def flag(self):
        return bool(self.stream.integers(2))

    def between(self, low, high):
        return round(float(self.stream.uniform(low, high)), 3)


def shape(r, own=True, dims=(8, 16, 24, 40, 64, 80, 96, 128, 192, 256), every_head=False):
    """Sizes of a decoder; `own`: heads may have a size of their own."""
    kv = r.of(1, 1, 2, 3, 4)
    heads = kv if every_head else kv * r.of(1, 2, 3, 5, 7)
    dim = r.of(*dims)
    if own and r.flag():
        hidden = r.of(24, 40, 48, 56, 72, 100, 136)
    else:
        dim = min(dim, 64 if heads > 8 else 128)
        own, hidden = False, heads * dim
    sizes = dict(hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv, intermediate_size=r.of(24, 40, 52, 64, 100),
                 num_hidden_layers=r.of(1, 2, 3, 5), vocab_size=r.of(67, 97, 128, 131, 259, 1001), tie_word_embeddings=r.flag(),
                 max_position_embeddings=256, pad_token_id=0, rms_norm_eps=r.of(1e-5, 1e-6))
    return sizes | (dict(head_dim=dim) if own else {}), dim


def rotation(r, dim, kinds=("default", "default", "linear", "dynamic", "llama3", "yarn", "longrope"), parts=(1.0,)):
    """rope_parameters, and max_position_embeddings where the kind is one that goes by it."""
    part = r.of(*[part for part in parts if dim * part >= 2 and int(dim * part) % 2 == 0])
    kind, original = r.of(*kinds), r.of(8, 16, 32, 64)
    rope = dict(rope_type=kind, rope_theta=r.of(100.0, 10000.0, 500000.0, 1e6))
    more = dict(rope_parameters=rope)
    if len(parts) > 1:
        rope["partial_rotary_factor"] = part
    if kind in ("linear", "dynamic", "llama3", "yarn"):
        rope["factor"] = r.of(2.0, 4.0, 7.5)
    if kind == "dynamic":
        more["max_position_embeddings"] = original
    if kind == "llama3":
        rope |= dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=original)
    if kind == "yarn":
        rope |= dict(original_max_position_embeddings=original) | r.of({}, dict(beta_fast=16.0, beta_slow=2.0), dict(truncate=False))
        rope |= r.of({}, dict(attention_factor=1.25), dict(mscale=1.5, mscale_all_dim=0.75))
    if kind == "longrope":
        pairs = int(dim * part) // 2
        rope |= dict(original_max_position_embeddings=original, short_factor=[r.between(1, 2) for _ in range(pairs)],
                     long_factor=[r.between(1, 9) for _ in range(pairs)]) | r.of({}, dict(factor=4.0), dict(attention_factor=1.3))
        more["original_max_position_embeddings"] = original
    return more


def window(r):
    return r.of(None, 2, 8, 16, 40)


def kinds(r, sizes, *names):
    return [r.of(*names) for _ in range(sizes["num_hidden_layers"])]


def experts(r, count="num_experts"):
    """Sizes of a mixture: one expert, all experts, and what lies between."""
    many = r.of(1, 2, 3, 5, 8)
    return {count: many, "num_experts_per_tok": r.of(1, many, max(1, many // 2))}


def llama(r):
    sizes, dim = shape(r)
    return sizes | rotation(r, dim) | dict(attention_bias=r.flag(), mlp_bias=r.flag())


def mistral(r):
    sizes, dim = shape(r)
    return sizes | rotation(r, dim) | dict(sliding_window=window(r))


def qwen2(r):
    sizes, dim = shape(r)
    return sizes | rotation(r, dim) | dict(use_sliding_window=r.flag(), sliding_window=r.of(2, 8, 40), max_window_layers=r.of(0, 1, 2))


def qwen3(r):
    return qwen2(r) | dict(attention_bias=r.flag())


def phi3(r):
    sizes, dim = shape(r, own=False)
    return sizes | rotation(r, dim, ("default", "longrope"), (1.0, 0.5, 0.75)) | dict(sliding_window=window(r))


def gemma(r):
    sizes, dim = shape(r)
    return sizes | dict(head_dim=dim, tie_word_embeddings=True, attention_bias=r.flag()) | rotation(r, dim, ("default",))


def gemma2(r):
    config = gemma(r)
    return config | dict(query_pre_attn_scalar=r.of(config["head_dim"], 24, 144), sliding_window=r.of(2, 8, 40), layer_types=r.of(
        None, kinds(r, config, "sliding_attention", "full_attention"))) | r.of(dict(attn_logit_softcapping=None, final_logit_softcapping=None),
        dict(attn_logit_softcapping=r.between(1, 50), final_logit_softcapping=r.between(3, 30)))


def gemma3(r):
    config = gemma2(r)
    scaled = r.of(dict(rope_type="default"), dict(rope_type="linear", factor=8.0))
    return config | dict(attn_logit_softcapping=None, num_hidden_layers=r.of(1, 3, 7), layer_types=None, rope_parameters=dict(
        full_attention=dict(rope_theta=1000000.0, **scaled), sliding_attention=dict(rope_theta=10000.0, rope_type="default")))


def mixtral(r):
    return mistral(r) | experts(r, "num_local_experts")


def qwen2_moe(r):
    config = qwen2(r)
    return config | experts(r) | dict(moe_intermediate_size=r.of(16, 24, 40), shared_expert_intermediate_size=r.of(16, 56), norm_topk_prob=r.flag(),
                                      decoder_sparse_step=r.of(1, 1, 2), mlp_only_layers=r.of([], [], [0]), qkv_bias=True)


def qwen3_moe(r):
    config = qwen2_moe(r) | dict(attention_bias=r.flag())
    del config["shared_expert_intermediate_size"], config["qkv_bias"]
    return config


def phimoe(r):
    sizes, dim = shape(r)
    return sizes | rotation(r, dim, ("default",)) | experts(r, "num_local_experts") | dict(
        num_local_experts=r.of(2, 3, 5), num_experts_per_tok=2, router_jitter_noise=r.of(0.01, 0.1), attention_bias=r.flag(), lm_head_bias=True,
        tie_word_embeddings=False, sliding_window=window(r))


def delta(r, config):
    keys = r.of(1, 2, 3)
    return dict(layer_types=kinds(r, config, "linear_attention", "linear_attention", "full_attention"), linear_num_key_heads=keys,
                linear_num_value_heads=keys * r.of(1, 2, 3), linear_key_head_dim=r.of(8, 12, 16, 40), linear_value_head_dim=r.of(8, 16, 24, 40),
                linear_conv_kernel_dim=r.of(2, 3, 4))


def qwen3_5(r):
    sizes, dim = shape(r, dims=(8, 16, 24, 32, 64, 96))
    return sizes | dict(head_dim=dim) | rotation(r, dim, ("default",), (1.0, 0.5, 0.25)) | delta(r, sizes) | dict(attention_bias=r.flag())


def qwen3_next(r):
    config = qwen3_5(r)
    return config | experts(r) | dict(moe_intermediate_size=r.of(16, 24), shared_expert_intermediate_size=r.of(16, 40), norm_topk_prob=r.flag(),
                                      decoder_sparse_step=r.of(1, 2), mlp_only_layers=r.of([], [0]), attention_bias=r.flag())


def qwen3_5_moe(r):
    config = qwen3_5(r) | experts(r) | dict(moe_intermediate_size=r.of(16, 24), shared_expert_intermediate_size=r.of(16, 40))
    del config["intermediate_size"]
    return config


def gpt_oss(r):
    sizes, dim = shape(r)
    return sizes | dict(head_dim=dim, sliding_window=r.of(2, 8, 40), layer_types=kinds(r, sizes, "sliding_attention", "full_attention")) | rotation(
        r, dim, ("default", "yarn")) | experts(r, "num_local_experts")


def smollm3(r):
    sizes, dim = shape(r)
    layers = sizes["num_hidden_layers"]
    return sizes | rotation(r, dim) | dict(attention_bias=r.flag(), mlp_bias=r.flag(), use_sliding_window=r.flag(), sliding_window=r.of(2, 8)) | r.of(
        {}, dict(no_rope_layer_interval=2), dict(no_rope_layers=[r.of(0, 1) for _ in range(layers)]))


def llama4(r):
    sizes, dim = shape(r)
    layers = sizes["num_hidden_layers"]
    return sizes | dict(head_dim=dim) | rotation(r, dim, ("default", "llama3", "yarn")) | experts(r, "num_local_experts") | dict(
        intermediate_size_mlp=r.of(24, 48), interleave_moe_layer_step=r.of(1, 2), use_qk_norm=r.flag(), attention_chunk_size=r.of(8, 12, 8192),
        attn_temperature_tuning=r.flag(), floor_scale=r.of(4, 8192), attn_scale=r.of(0.1, 0.4), attention_bias=False) | r.of(
        {}, dict(no_rope_layers=[r.of(0, 1) for _ in range(layers)]))


def granite(r):
    return llama(r) | dict(embedding_multiplier=r.between(0.5, 2), attention_multiplier=r.between(0.1, 0.4), residual_multiplier=r.between(0.2, 1),
                           logits_scaling=r.between(0.5, 4))


def granitemoe(r):
    config = granite(r) | experts(r, "num_local_experts")
    del config["mlp_bias"]
    return config


def granitemoeshared(r):
    return granitemoe(r) | dict(shared_intermediate_size=r.of(16, 40))


def granitemoehybrid(r):
    config = granite(r)
    del config["mlp_bias"]
    mixed = r.of(dict(num_local_experts=0, num_experts_per_tok=0), experts(r, "num_local_experts"))
    kinds = [r.of("full_attention", "linear_attention", "linear_attention") for _ in range(config["num_hidden_layers"])]
    return config | mixed | state_spaces(r, 2 * config["hidden_size"]) | dict(
        shared_intermediate_size=r.of(16, 40, 56), position_embedding_type=r.of("rope", "rope", None),
        layer_types=r.of(kinds, kinds, ["full_attention"] * len(kinds)))


def state_spaces(r, inner):
    """Sizes of state spaces whose heads are `inner` wide together."""
    heads = r.of(*(n for n in range(1, 40) if inner % n == 0))
    groups = r.of(*(n for n in range(1, heads + 1) if heads % n == 0))
    return dict(mamba_n_heads=heads, mamba_d_head=inner // heads, mamba_n_groups=groups, mamba_d_state=r.of(3, 12, 16, 32, 64, 128, 256),
                mamba_d_conv=r.of(2, 3, 4), mamba_conv_bias=r.flag(), mamba_proj_bias=r.flag(), mamba_chunk_size=r.of(8, 256))


def bamba(r):
    sizes, dim = shape(r, dims=(8, 16, 24, 40, 64))
    config = sizes | rotation(r, dim, ("default", "linear")) | dict(attention_bias=r.flag(), mlp_bias=r.flag())
    layers = config["num_hidden_layers"]
    return config | state_spaces(r, 2 * config["hidden_size"]) | dict(attn_layer_indices=[i for i in range(layers) if r.flag()])


def falcon_h1(r):
    config, inner = llama(r), r.of(24, 48, 64, 128, 192)
    by = lambda: r.of(1.0, r.between(0.3, 2))
    return config | state_spaces(r, inner) | dict(
        mamba_d_ssm=inner, mamba_rms_norm=r.flag(), mamba_norm_before_gate=r.flag(), embedding_multiplier=by(), lm_head_multiplier=by(),
        attention_in_multiplier=by(), key_multiplier=by(), attention_out_multiplier=by(), ssm_in_multiplier=by(), ssm_out_multiplier=by(),
        ssm_multipliers=r.of([1.0] * 5, [r.between(0.3, 2) for _ in range(5)]), mlp_multipliers=r.of([1.0] * 2, [r.between(0.3, 2) for _ in range(2)]))


def nemotron_h(r):
    sizes, dim = shape(r)
    sizes |= dict(head_dim=sizes.get("head_dim", dim))
    names = dict(mamba_n_heads="mamba_num_heads", mamba_d_head="mamba_head_dim", mamba_n_groups="n_groups", mamba_d_state="ssm_state_size",
                 mamba_d_conv="conv_kernel", mamba_conv_bias="use_conv_bias", mamba_proj_bias="use_bias", mamba_chunk_size="chunk_size")
    mixture = dict(n_routed_experts=4, num_experts_per_tok=r.of(1, 2, 4), n_group=r.of(1, 2), topk_group=1, moe_intermediate_size=r.of(16, 40),
                   moe_shared_expert_intermediate_size=r.of(16, 56), routed_scaling_factor=r.between(0.5, 2), norm_topk_prob=r.flag())
    mixture["topk_group"] = max(mixture["topk_group"], mixture["num_experts_per_tok"] * mixture["n_group"] // 4)
    kinds = [r.of("linear_attention", "full_attention", "mlp", "moe") for _ in range(r.of(1, 2, 4, 6))]
    config = normed(sizes, layer_norm_epsilon=1e-5)
    config.pop("num_hidden_layers", None)
    return config | {names[key]: value for key, value in state_spaces(r, r.of(24, 48, 64, 128)).items()} | mixture | dict(
        layers_block_type=kinds, mlp_bias=r.flag(), tie_word_embeddings=False)  # which Transformers never ties


def olmo2(r):
    sizes, dim = shape(r, own=False)
    return sizes | rotation(r, dim) | dict(attention_bias=r.flag())


def olmo3(r):
    config = olmo2(r) | dict(sliding_window=r.of(2, 8, 40))
    config["layer_types"] = kinds(r, config, "sliding_attention", "full_attention")
    config["rope_parameters"] = dict(full_attention=r.of(dict(rope_type="default", rope_theta=10000.0), dict(
        rope_type="yarn", rope_theta=10000.0, factor=4.0, attention_factor=1.2, original_max_position_embeddings=32)),
        sliding_attention=dict(rope_theta=10000.0, rope_type="default"))
    return config | dict(max_position_embeddings=256)


def glm(r):
    sizes, dim = shape(r)
    return sizes | dict(head_dim=dim, attention_bias=r.flag()) | rotation(r, dim, ("default", "linear", "yarn"), (1.0, 0.5, 0.25))


def routed(r, groups=True):
    many = r.of(4, 8) if groups else r.of(2, 3, 5)
    grouped = r.of(dict(n_group=1, topk_group=1), dict(n_group=2, topk_group=1), dict(n_group=2, topk_group=2)) if groups else dict(n_group=1, topk_group=1)
    return dict(n_routed_experts=many, num_experts_per_tok=r.of(1, 2), n_shared_experts=r.of(1, 2), moe_intermediate_size=r.of(16, 24),
                norm_topk_prob=r.flag(), routed_scaling_factor=r.of(1.0, 1.5, 2.5), first_k_dense_replace=r.of(0, 1)) | grouped


def glm4_moe(r):
    return glm(r) | routed(r) | dict(use_qk_norm=r.flag())


def dots1(r):
    sizes, dim = shape(r)
    return sizes | dict(head_dim=dim) | rotation(r, dim) | routed(r) | dict(sliding_window=None, attention_bias=r.flag())


def afmoe(r):
    sizes, dim = shape(r)
    many = r.of(2, 3, 5, 8)
    return sizes | dict(head_dim=dim, num_experts=many, num_experts_per_tok=r.of(1, many, max(1, many // 2)), num_shared_experts=r.of(1, 2),
                        moe_intermediate_size=r.of(16, 24), num_dense_layers=r.of(0, 1, 2), route_scale=r.of(1.0, 2.826), mup_enabled=True,
                        sliding_window=r.of(2, 8, 40)) | rotation(r, dim) | r.of({}, dict(global_attn_every_n_layers=2), dict(
                            layer_types=kinds(r, sizes, "sliding_attention", "full_attention")))


def latent(r):
    heads, dim = r.of(1, 2, 3, 5), r.of(8, 16, 24)
    sizes = dict(hidden_size=heads * r.of(8, 16, 24), num_attention_heads=heads, num_key_value_heads=heads, intermediate_size=r.of(24, 40, 64),
                 num_hidden_layers=r.of(1, 2, 3), vocab_size=r.of(67, 97, 128, 259, 1001), tie_word_embeddings=r.flag(), pad_token_id=0,
                 max_position_embeddings=256, rms_norm_eps=r.of(1e-5, 1e-6), attention_bias=r.flag(), q_lora_rank=r.of(None, 16, 24),
                 kv_lora_rank=r.of(8, 24, 40), qk_nope_head_dim=r.of(8, 16, 40), qk_rope_head_dim=dim, v_head_dim=r.of(8, 12, 24, 64))
    turned = rotation(r, dim, ("default", "yarn", "llama3"))
    if turned["rope_parameters"]["rope_type"] == "yarn":
        for key in ("attention_factor", "mscale", "mscale_all_dim"):
            turned["rope_parameters"].pop(key, None)
        turned["rope_parameters"] |= r.of(dict(mscale=0.707, mscale_all_dim=0.707), dict(mscale=1.0, mscale_all_dim=1.0), {})
    return sizes | turned


def deepseek_v2(r):
    return latent(r) | routed(r) | dict(topk_method=r.of("greedy", "group_limited_greedy"), mlp_bias=False)


def deepseek_v3(r):
    return latent(r) | routed(r) | dict(rope_interleave=r.of(True, True, False), num_mtp_layers=r.of(0, 1))


def glm4_moe_lite(r):
    config = latent(r) | routed(r)
    del config["first_k_dense_replace"]
    return config | r.of({}, dict(mlp_layer_types=kinds(r, config, "dense", "sparse")))


def youtu(r):
    return latent(r) | dict(rope_interleave=r.flag())


def minicpm3(r):
    return latent(r) | dict(scale_emb=r.of(1, 2, 12), scale_depth=r.of(1.4, 0.7), dim_model_base=r.of(8, 32, 256), mlp_bias=r.flag())


def ernie4_5_moe(r):
    sizes, dim = shape(r, own=False)
    many = r.of(1, 2, 5)
    return sizes | rotation(r, dim, ("default", "linear")) | dict(
        use_bias=False, moe_intermediate_size=r.of(16, 24), moe_num_experts=many, moe_k=r.of(1, many), moe_num_shared_experts=r.of(0, 1, 2),
        moe_layer_start_index=r.of(0, 1), moe_layer_interval=r.of(1, 2), moe_layer_end_index=r.of(-1, 1))


def lfm2_moe(r):
    config = lfm2(r) | experts(r) | dict(moe_intermediate_size=r.of(16, 24), num_dense_layers=r.of(0, 1, 2), norm_topk_prob=r.flag(),
                                         use_expert_bias=r.flag(), routed_scaling_factor=r.of(1.0, 1.5))
    for key in ("block_auto_adjust_ff_dim", "block_multiple_of", "block_ffn_dim_multiplier"):
        del config[key]
    return config


def minimax_m2(r):
    sizes, dim = shape(r)
    return sizes | dict(head_dim=dim) | rotation(r, dim, ("default", "yarn"), (1.0, 0.5)) | experts(r, "num_local_experts")


def gptj(r):
    heads, dim = r.of(1, 3, 5), r.of(8, 16, 40)
    return dict(n_embd=heads * dim, n_head=heads, n_layer=r.of(1, 3), n_inner=r.of(None, 56), n_positions=256, rotary_dim=r.of(4, 8, dim),
                vocab_size=r.of(97, 127, 259), activation_function=r.of("gelu_new", "gelu", "relu"))


def gpt_neo(r):
    heads, layers = r.of(1, 3, 5), r.of(1, 2, 4)
    return dict(hidden_size=heads * r.of(8, 16, 40), num_heads=heads, num_layers=layers, intermediate_size=r.of(None, 56), vocab_size=r.of(97, 127, 259),
                max_position_embeddings=256, window_size=r.of(2, 8, 40), activation_function=r.of("gelu_new", "gelu", "relu"),
                attention_types=[[[r.of("global", "local")], layers]] if r.flag() or layers % 2 else [[["global", "local"], layers // 2]],
                tie_word_embeddings=r.flag())


def gpt_bigcode(r):
    config = gpt2(r) | dict(multi_query=True, activation_function=r.of("gelu_pytorch_tanh", "gelu", "relu"))
    del config["scale_attn_by_inverse_layer_idx"]
    return config | dict(scale_attn_weights=r.flag())


def opt(r):
    heads = r.of(1, 3, 5)
    hidden = heads * r.of(8, 16, 40)
    return dict(hidden_size=hidden, num_attention_heads=heads, ffn_dim=r.of(24, 56), num_hidden_layers=r.of(1, 2, 3), word_embed_proj_dim=hidden,
                vocab_size=r.of(97, 128, 259), max_position_embeddings=256, activation_function=r.of("relu", "gelu"), tie_word_embeddings=r.flag(),
                pad_token_id=0) | r.of({}, dict(word_embed_proj_dim=24), dict(do_layer_norm_before=False), dict(word_embed_proj_dim=40, do_layer_norm_before=False))


def falcon(r):
    kv, newer = r.of(1, 2, 3), r.flag()
    heads, dim, single = kv * r.of(1, 2, 3), r.of(8, 16, 40, 64), r.flag()
    kv = kv if newer or single else heads  # Transformers shares keys in no other way
    return dict(hidden_size=heads * dim, num_attention_heads=heads, num_kv_heads=kv, new_decoder_architecture=newer, multi_query=single, alibi=False,
                parallel_attn=newer or r.flag(), bias=r.flag(), num_hidden_layers=r.of(1, 2, 3), vocab_size=r.of(97, 128, 259), pad_token_id=0,
                tie_word_embeddings=r.flag(), ffn_hidden_size=r.of(None, 56), max_position_embeddings=256,
                num_ln_in_parallel_attn=r.of(None, 1, 2) if newer else None) | r.of(rotation(r, dim, ("default", "linear")), dict(alibi=not newer))


def olmo(r):
    sizes, dim = shape(r, own=False)
    del sizes["rms_norm_eps"]
    return sizes | rotation(r, dim) | dict(attention_bias=r.flag(), clip_qkv=r.of(None, 0.75))


def ministral(r):
    sizes, dim = shape(r)
    return sizes | rotation(r, dim) | dict(head_dim=dim, sliding_window=r.of(2, 8, 40), layer_types=kinds(r, sizes, "sliding_attention", "full_attention"))


def ministral3(r):
    sizes, dim = shape(r)
    config = sizes | dict(head_dim=dim) | rotation(r, dim, ("yarn",))
    config["rope_parameters"] |= dict(llama_4_scaling_beta=r.of(0.1, 0.4))
    return config


def exaone4(r):
    config = llama(r)
    del config["mlp_bias"], config["attention_bias"]
    return config | r.of(dict(sliding_window=None, layer_types=["full_attention"] * config["num_hidden_layers"]), dict(
        sliding_window=8, layer_types=kinds(r, config, "sliding_attention", "full_attention")))


def ernie4_5(r):
    sizes, dim = shape(r)
    return sizes | dict(head_dim=dim, use_bias=r.flag()) | rotation(r, dim, ("default", "linear"))


def seed_oss(r):
    sizes, dim = shape(r)
    return sizes | dict(head_dim=dim) | rotation(r, dim) | dict(attention_bias=r.flag(), attention_out_bias=r.flag(), mlp_bias=r.flag())


def olmoe(r):
    sizes, dim = shape(r, own=False)
    return sizes | rotation(r, dim) | experts(r) | dict(norm_topk_prob=r.flag(), attention_bias=r.flag())


def qwen3_vl(r):
    sizes, dim = shape(r, dims=(16, 32, 64, 128))
    return sizes | dict(hidden_size=48, head_dim=dim, attention_bias=r.flag(), rope_parameters=dict(
        rope_type="default", rope_theta=10000.0, mrope_section=[dim // 4, dim // 8, dim // 8], mrope_interleaved=True))


def qwen2_5_vl(r):
    return dict(hidden_size=32, num_attention_heads=2, num_key_value_heads=r.of(1, 2), intermediate_size=r.of(24, 52), num_hidden_layers=r.of(1, 2, 3),
                vocab_size=r.of(97, 128, 259), tie_word_embeddings=r.flag(), rope_parameters=dict(
                    rope_type="default", rope_theta=10000.0, mrope_section=[4, 2, 2]))


def qwen2_vl(r):
    return qwen2_5_vl(r)


def qwen3_vl_moe(r):
    return qwen3_vl(r) | experts(r) | dict(moe_intermediate_size=r.of(16, 24))


def qwen2_5_omni(r):
    return qwen2_5_vl(r) | dict(hidden_size=48, num_attention_heads=3, num_key_value_heads=r.of(1, 3))


def qwen3_omni_moe(r):
    return qwen3_vl_moe(r)


def normed(config, **eps):
    """With the norms' number under another key."""
    del config["rms_norm_eps"]
    return config | eps


def cohere(r):
    sizes, dim = shape(r, own=False)
    return normed(sizes, layer_norm_eps=1e-5) | rotation(r, dim, ("default", "linear", "yarn")) | dict(
        logit_scale=r.of(0.0625, 0.5, 1.0), attention_bias=r.flag(), tie_word_embeddings=True, use_qk_norm=r.flag())


def apertus(r):
    sizes, dim = shape(r)
    return sizes | rotation(r, dim) | dict(attention_bias=r.flag())


def gemma4(r):
    sizes, dim = shape(r, dims=(8, 16, 24, 32, 64))
    wide, names = r.of(16, 32, 64), ("sliding_attention", "full_attention")
    listed = kinds(r, sizes, *names)[:-1] + ["full_attention"]
    same = r.flag()
    unlike = dict(num_global_key_value_heads=r.of(*(n for n in (1, sizes["num_key_value_heads"])))) if same else {}
    shared = 0
    for count in range(1, sizes["num_hidden_layers"]):
        shared = count if set(listed[:-count]) == set(listed) and r.flag() else shared
    mixture = r.of({}, dict(enable_moe_block=True, moe_intermediate_size=r.of(16, 24)) | experts(r))
    if mixture:
        mixture["top_k_experts"] = mixture.pop("num_experts_per_tok")
    return sizes | dict(
        head_dim=dim, global_head_dim=wide, attention_k_eq_v=same, sliding_window=r.of(2, 8, 40), layer_types=listed, num_kv_shared_layers=shared,
        use_double_wide_mlp=r.flag(), hidden_size_per_layer_input=r.of(0, 8, 24), vocab_size_per_layer_input=sizes["vocab_size"],
        final_logit_softcapping=r.of(None, r.between(3, 30)), tie_word_embeddings=True, attention_bias=False, rope_parameters=r.of(None, dict(
            full_attention=dict(rope_theta=r.of(1000.0, 1e6), rope_type="proportional", partial_rotary_factor=r.of(0.25, 0.5, 1.0)),
            sliding_attention=dict(rope_theta=r.of(100.0, 10000.0), rope_type="default")))) | unlike | mixture


def mamba(r):
    return dict(hidden_size=r.of(16, 24, 40, 64), expand=r.of(1, 2, 2, 3), state_size=r.of(3, 8, 12, 16, 32), time_step_rank=r.of("auto", 3, 8),
                conv_kernel=r.of(2, 3, 4), use_bias=r.flag(), use_conv_bias=r.flag(), num_hidden_layers=r.of(1, 2, 3),
                vocab_size=r.of(67, 97, 128, 259), tie_word_embeddings=r.flag(), pad_token_id=0, layer_norm_epsilon=r.of(1e-5, 1e-6))


def falcon_mamba(r):
    return mamba(r) | dict(mixer_rms_eps=r.of(1e-6, 1e-6, 1e-3))


def jamba(r):
    sizes, _ = shape(r, own=False)
    attends, mixed = r.of(1, 2, 3), r.of(1, 2)
    config = sizes | experts(r)
    return config | dict(num_experts=r.of(1, config["num_experts"]), attn_layer_period=attends, attn_layer_offset=r.of(*range(attends)),
                         expert_layer_period=mixed, expert_layer_offset=r.of(*range(mixed)), mamba_d_state=r.of(3, 8, 12, 16, 32),
                         mamba_d_conv=r.of(2, 3, 4), mamba_expand=r.of(1, 2, 2, 3), mamba_dt_rank=r.of("auto", 3, 8), mamba_conv_bias=r.flag(),
                         mamba_proj_bias=r.flag())


def mamba2(r):
    heads, dim = r.of(1, 2, 3, 6, 8), r.of(8, 12, 16, 40, 64)
    expand = r.of(1, 2, 2, 3)
    if heads * dim % expand:
        expand = 1
    groups = r.of(*(n for n in range(1, heads + 1) if heads % n == 0))
    return dict(hidden_size=heads * dim // expand, expand=expand, num_heads=heads, head_dim=dim, n_groups=groups, state_size=r.of(3, 12, 16, 64, 128),
                conv_kernel=r.of(2, 3, 4), use_bias=r.flag(), use_conv_bias=r.flag(), chunk_size=r.of(8, 256), num_hidden_layers=r.of(1, 2, 3),
                vocab_size=r.of(67, 97, 128, 259), tie_word_embeddings=r.flag(), pad_token_id=0, layer_norm_epsilon=r.of(1e-5, 1e-6),
                time_step_limit=r.of([0.0, float("inf")], [0.0, 0.1], [0.01, 0.5]))


def cohere2(r):
    config = cohere(r)
    del config["use_qk_norm"]
    return config | dict(sliding_window=r.of(2, 8, 40), layer_types=kinds(r, config, "sliding_attention", "full_attention"))


def starcoder2(r):
    sizes, dim = shape(r, own=False)
    return normed(sizes, norm_epsilon=1e-5) | rotation(r, dim) | dict(use_bias=r.flag(), sliding_window=window(r))


def stablelm(r):
    sizes, dim = shape(r, own=False)
    return normed(sizes, layer_norm_eps=1e-5) | rotation(r, dim, ("default", "linear", "dynamic"), (1.0, 0.5, 0.25)) | dict(
        use_qkv_bias=r.flag(), use_parallel_residual=r.flag(), qk_layernorm=r.flag())


def phi(r):
    sizes, dim = shape(r, own=False)
    return normed(sizes, layer_norm_eps=1e-5) | rotation(r, dim, ("default", "linear", "dynamic"), (1.0, 0.5, 0.25)) | dict(tie_word_embeddings=False, qk_layernorm=r.flag())


def gpt_neox(r):
    sizes, dim = shape(r, own=False, every_head=True)
    del sizes["num_key_value_heads"]
    return normed(sizes, layer_norm_eps=1e-5) | rotation(r, dim, ("default", "linear", "dynamic"), (1.0, 0.5, 0.25)) | dict(
        use_parallel_residual=r.flag(), hidden_act=r.of("gelu", "gelu_new", "gelu_fast"), attention_bias=r.flag())


def nemotron(r):
    sizes, dim = shape(r)
    return normed(sizes, norm_eps=1e-5) | dict(head_dim=dim) | rotation(r, dim, ("default",), (1.0, 0.5, 0.25)) | dict(
        attention_bias=r.flag(), mlp_bias=r.flag())


def hunyuan(r):
    sizes, dim = shape(r)
    config = sizes | dict(head_dim=dim, eod_token_id=2, attention_bias=r.flag()) | rotation(r, dim, ("default",))
    if r.flag():
        config["rope_parameters"] = dict(rope_type="dynamic", rope_theta=10000.0, alpha=r.of(8.0, 1000.0), factor=1.0, beta_fast=32, beta_slow=1,
                                         mscale=1.0, mscale_all_dim=1.0)
    return config


def hunyuan_v1_moe(r):
    config, many = hunyuan(r), r.of(2, 3, 5)
    return config | dict(num_experts=many, moe_topk=r.of(1, many))


def lfm2(r):
    sizes, dim = shape(r)
    return normed(sizes, norm_eps=1e-5) | rotation(r, dim, ("default",)) | dict(
        conv_L_cache=r.of(2, 3, 4), conv_bias=False, block_auto_adjust_ff_dim=r.flag(), block_multiple_of=r.of(8, 32), block_ffn_dim_multiplier=r.of(1.0, 1.3),
        layer_types=kinds(r, sizes, "conv", "full_attention"))


def gpt2(r):
    heads = r.of(1, 3, 5)
    return dict(n_embd=heads * r.of(8, 16, 40), n_head=heads, n_layer=r.of(1, 3), n_inner=r.of(None, 56), n_positions=256, vocab_size=r.of(97, 127, 259),
                tie_word_embeddings=r.flag(), activation_function=r.of("gelu_new", "gelu", "relu"), scale_attn_by_inverse_layer_idx=r.flag(),
                scale_attn_weights=True)


def gemma3n(r):
    config = gemma(r)
    layers, names = config["num_hidden_layers"], ("sliding_attention", "full_attention")
    listed = kinds(r, config, *names)
    shared = 0
    for count in range(1, layers):
        shared = count if set(listed[:-count]) == set(listed) and r.flag() else shared
    if config["hidden_size"] % config["num_attention_heads"]:
        config["hidden_size"] = config["num_attention_heads"] * r.of(8, 16)
    return config | dict(
        intermediate_size=r.of(64, [r.of(40, 64, 100) for _ in range(layers)]), hidden_size_per_layer_input=r.of(8, 24),
        vocab_size_per_layer_input=config["vocab_size"] - r.of(0, 8), num_kv_shared_layers=shared, laurel_rank=r.of(8, 16), altup_num_inputs=r.of(2, 3, 4),
        altup_correct_scale=r.flag(), activation_sparsity_pattern=[r.of(0.0, 0.3, 0.6) for _ in range(layers)], sliding_window=r.of(2, 8, 40),
        final_logit_softcapping=r.of(None, r.between(3, 30)), layer_types=listed, rope_parameters=dict(
            full_attention=dict(rope_theta=1000000.0, rope_type="default"), sliding_attention=dict(rope_theta=10000.0, rope_type="default")))


def iquestcoder(r):
    config = llama(r)
    return config | dict(head_dim=config.get("head_dim", config["hidden_size"] // config["num_attention_heads"]))


def cwm(r):
    config = iquestcoder(r)
    del config["attention_bias"]
    return config | dict(sliding_window=r.of(2, 8, 40), layer_types=r.of(None, kinds(r, config, "sliding_attention", "full_attention")))


def helium(r):
    sizes, dim = shape(r, own=False)
    return sizes | dict(head_dim=dim) | rotation(r, dim) | dict(attention_bias=r.flag(), mlp_bias=r.flag())


def hyperclovax(r):
    config = granite(r)
    config["hidden_size"] = config["num_attention_heads"] * r.of(8, 16)
    return config | dict(use_post_norm=r.flag(), attention_multiplier=r.of(None, 0.2),
                         head_dim=config.get("head_dim", config["hidden_size"] // config["num_attention_heads"]))


def vaultgemma(r):
    return gemma2(r)


def nanochat(r):
    sizes, dim = shape(r, own=False)
    return sizes | rotation(r, dim, ("default", "linear")) | dict(attention_bias=r.flag(), final_logit_softcapping=r.of(None, r.between(3, 30)))


def jais2(r):
    sizes, dim = shape(r)
    return normed(sizes, layer_norm_eps=1e-5) | rotation(r, dim) | dict(attention_bias=r.flag(), mlp_bias=r.flag())


def mellum(r):
    sizes, dim = shape(r)
    return sizes | experts(r) | dict(
        head_dim=dim, moe_intermediate_size=r.of(16, 24), norm_topk_prob=r.flag(), attention_bias=r.flag(), sliding_window=r.of(2, 8, 40),
        layer_types=r.of(None, kinds(r, sizes, "sliding_attention", "full_attention")), mlp_layer_types=r.of(None, kinds(r, sizes, "dense", "sparse")),
        rope_parameters=r.of(None, dict(full_attention=dict(rope_theta=r.of(1000.0, 1e6), rope_type="yarn", factor=4.0, original_max_position_embeddings=32),
                                        sliding_attention=dict(rope_theta=10000.0, rope_type="default"))))


def exaone_moe(r):
    config = exaone4(r) | routed(r)
    config["num_experts"], config["num_shared_experts"] = config.pop("n_routed_experts"), config.pop("n_shared_experts")
    return config | r.of({}, dict(mlp_layer_types=kinds(r, config, "dense", "sparse")))


def solar_open(r):
    sizes, dim = shape(r)
    config = sizes | dict(head_dim=dim, attention_bias=r.flag()) | rotation(r, dim) | routed(r)
    del config["intermediate_size"], config["first_k_dense_replace"]
    return config


def sarvam_moe(r):
    sizes, dim = shape(r)
    return sizes | dict(head_dim=dim, attention_bias=r.flag(), use_qk_norm=r.flag()) | rotation(r, dim, ("default", "linear", "yarn"), (1.0, 0.5)) | routed(r)


def sarvam_mla(r):
    return latent(r) | routed(r)


def mistral4(r):
    config = latent(r) | routed(r, groups=False)
    original = r.of(8, 16, 64)
    return config | dict(rope_parameters=dict(
        type="yarn", rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=original, beta_fast=32.0, beta_slow=1.0, mscale=1.0,
        mscale_all_dim=1.0, llama_4_scaling_beta=r.of(0.1, 0.4)))


def axk1(r):
    config = latent(r) | routed(r) | dict(q_lora_rank=r.of(16, 24))
    del config["first_k_dense_replace"]
    return config | r.of({}, dict(mlp_layer_types=kinds(r, config, "dense", "sparse")))


def cohere2_moe(r):
    sizes, dim = shape(r)
    many = r.of(2, 3, 5)
    config = sizes if r.flag() else sizes | dict(layer_norm_eps=1e-5, rms_norm_eps=None)
    return config | dict(head_dim=dim) | rotation(r, dim, ("default", "linear", "yarn")) | dict(
        logit_scale=r.of(0.0625, 0.5), attention_bias=r.flag(), num_experts=many, num_experts_per_tok=r.of(1, many), num_shared_experts=r.of(0, 1, 2),
        shared_expert_combination_strategy=r.of("average", "sum"), expert_selection_fn=r.of("softmax", "sigmoid"), norm_topk_prob=r.flag(),
        prefix_dense_intermediate_size=r.of(None, 56), sliding_window=r.of(2, 8, 40)) | r.of(
            dict(first_k_dense_replace=r.of(0, 1)), dict(layer_types=kinds(r, sizes, "sliding_attention", "full_attention"),
                                                         mlp_layer_types=kinds(r, sizes, "dense", "sparse")))


def granite_swa(r):
    config = granite(r)
    return config | dict(sliding_window=r.of(2, 8, 40), layer_types=r.of(None, kinds(r, config, "sliding_attention", "full_attention"))) | r.of(
        {}, dict(layer_rope_theta=[r.of(0, 100.0, 10000.0) for _ in range(config["num_hidden_layers"])]))


def granitemoe_swa(r):
    config = granite_swa(r) | experts(r, "num_local_experts") | dict(shared_intermediate_size=r.of(0, 16, 40))
    del config["mlp_bias"]
    return config


def flex_olmo(r):
    return olmoe(r)


def hy_v3(r):
    sizes, dim = shape(r)
    many = r.of(2, 3, 5)
    return sizes | dict(head_dim=dim, attention_bias=r.flag()) | rotation(r, dim) | dict(
        num_experts=many, num_experts_per_tok=r.of(1, many), num_shared_experts=r.of(1, 2), moe_intermediate_size=r.of(16, 24),
        router_scaling_factor=r.of(1.0, 2.826)) | r.of({}, dict(mlp_layer_types=kinds(r, sizes, "dense", "sparse")))


def lfm3(r):
    sizes, dim = shape(r)
    return normed(sizes, norm_eps=1e-5) | dict(
        head_dim=dim, conv_L_cache=r.of(2, 3, 7), sliding_window=r.of(2, 8, 40), use_sandwich_norm=r.flag(), use_attention_gate=r.flag(),
        layer_types=r.of(None, kinds(r, sizes, "conv", "full_attention", "sliding_attention")), rope_parameters=r.of(None, dict(
            full_attention=dict(rope_theta=1e6, rope_type="proportional", partial_rotary_factor=r.of(0.5, 1.0)),
            sliding_attention=dict(rope_theta=10000.0, rope_type="default"))))


def olmo_hybrid(r):
    sizes, dim = shape(r, own=False, every_head=True)
    layers = kinds(r, sizes, "linear_attention", "full_attention")
    listed = len(set(layers)) > 1
    sizes |= {} if listed else dict(num_hidden_layers=4)
    return sizes | dict(attention_bias=r.flag(), linear_allow_neg_eigval=r.flag(), linear_conv_kernel_dim=r.of(2, 4), linear_key_head_dim=r.of(8, 12, 32),
                        linear_value_head_dim=r.of(8, 24, 64), layer_types=layers if listed else None) | r.of(
        rotation(r, dim), dict(rope_parameters=dict(rope_type="default", rope_theta=None)))


def laguna(r):
    sizes, dim = shape(r)
    heads = sizes["num_key_value_heads"]
    of = lambda parts: dict(rope_type="default", rope_theta=r.of(100.0, 10000.0), partial_rotary_factor=r.of(*parts))
    return sizes | experts(r) | dict(
        head_dim=dim, moe_intermediate_size=r.of(16, 24), shared_expert_intermediate_size=r.of(16, 40), gating=r.of(True, "per-head", "per-element"),
        attention_bias=r.flag(), moe_routed_scaling_factor=r.of(1.0, 2.5), sliding_window=r.of(2, 8, 40),
        num_attention_heads_per_layer=r.of(None, [heads * r.of(1, 2, 3) for _ in range(sizes["num_hidden_layers"])]),
        layer_types=r.of(None, kinds(r, sizes, "sliding_attention", "full_attention")), mlp_layer_types=r.of(None, kinds(r, sizes, "dense", "sparse")),
        rope_parameters=r.of(None, dict(full_attention=of((0.5, 1.0)), sliding_attention=of((1.0, 0.5)))))


def mimo_v2_flash(r):
    sizes, _ = shape(r)
    dim = r.of(24, 48, 192)
    heads = 2 * sizes["num_key_value_heads"] * r.of(1, 2, 3)
    of = lambda: dict(rope_type="default", rope_theta=r.of(100.0, 10000.0), partial_rotary_factor=r.of(0.334, 0.5, 1.0))
    config = sizes | routed(r) | dict(
        num_attention_heads=heads, head_dim=dim, v_head_dim=r.of(8, 16, 24), attention_bias=r.flag(), attention_value_scale=r.of(None, 0.707, 2.0),
        sliding_window=r.of(2, 8, 40), layer_types=r.of(None, kinds(r, sizes, "sliding_attention", "full_attention")),
        mlp_layer_types=r.of(None, kinds(r, sizes, "dense", "sparse")), rope_parameters=r.of(None, dict(full_attention=of(), sliding_attention=of())))
    del config["n_shared_experts"], config["first_k_dense_replace"]
    return config


def delta_attention(r):
    config = latent(r) | routed(r)
    del config["first_k_dense_replace"], config["attention_bias"]
    config["tie_word_embeddings"] = False  # these classes tie no weights
    config["num_experts"] = config.pop("n_routed_experts")
    return config | dict(layer_types=r.of(None, kinds(r, config, "linear_attention", "full_attention")),
                         mlp_layer_types=r.of(None, kinds(r, config, "dense", "sparse")))


def kimi_linear(r):
    config = delta_attention(r)
    del config["rope_parameters"]
    return config | dict(linear_head_dim=r.of(8, 16, 32, 40), linear_num_heads=r.of(1, 2, 3), linear_conv_kernel_dim=r.of(2, 4))


def bailing_hybrid(r):
    # Transformers 5.24 reads what it writes of the nets' heads as those of attention: both are of one size here.
    config = delta_attention(r)
    return config | dict(head_dim=config["qk_rope_head_dim"], layer_group_size=r.of(1, 2, 3), short_conv_kernel_size=r.of(2, 4), kda_safe_gate=r.flag(),
                         kda_lower_bound=r.of(-5.0, -2.0))


def ernie4_5_vl_moe(r):
    sizes, dim = shape(r, dims=(16, 24, 64))
    many = r.of(2, 3, 5)
    third = dim // 2 // 3
    return sizes | dict(head_dim=dim, use_bias=r.flag(), moe_intermediate_size=[r.of(16, 24), r.of(8, 16)], moe_num_experts=many, moe_k=r.of(1, many),
                        moe_num_shared_experts=r.of(0, 1, 2), mlp_layer_types=r.of(None, kinds(r, sizes, "dense", "sparse")),
                        rope_parameters=dict(rope_type="default", rope_theta=r.of(100.0, 500000.0), mrope_section=[third, third, dim // 2 - 2 * third]))


def axes(dim, part=1.0):
    """Pairs of a rotation by axis."""
    pairs = int(dim * part) // 2
    return [pairs - pairs // 4 * 2, pairs // 4, pairs // 4]


def glm4v(r):
    heads, dim, part = 3, 16, r.of(1.0, 0.5)
    return dict(hidden_size=48, num_attention_heads=heads, num_key_value_heads=1, intermediate_size=r.of(24, 52), num_hidden_layers=r.of(1, 2, 3), head_dim=dim,
                vocab_size=r.of(97, 128, 259), tie_word_embeddings=r.flag(), pad_token_id=0, rope_parameters=dict(
                    rope_type="default", rope_theta=10000.0, partial_rotary_factor=part, mrope_section=axes(dim, part)))


def glm_ocr(r):
    return glm4v(r)


def glm4v_moe(r):
    return glm4v(r) | routed(r) | dict(attention_bias=r.flag())


def paddleocr_vl(r):
    config = glm4v(r)
    del config["rope_parameters"]["partial_rotary_factor"]
    config["rope_parameters"]["mrope_section"] = axes(16)
    return config | dict(use_bias=r.flag())


def hunyuan_vl(r):
    config = paddleocr_vl(r)
    del config["use_bias"]
    return config | dict(attention_bias=r.flag(), eod_token_id=2)


def smolvlm(r):
    sizes, dim = shape(r)
    return sizes | dict(hidden_size=48) | dict(head_dim=dim) | rotation(r, dim)


def bloom(r):
    heads = r.of(1, 3, 5, 6, 12)
    return dict(hidden_size=heads * r.of(8, 16, 40), n_head=heads, n_layer=r.of(1, 2, 3), vocab_size=r.of(97, 128, 259), tie_word_embeddings=r.flag(),
                layer_norm_epsilon=r.of(1e-5, 1e-6), apply_residual_connection_post_layernorm=r.of(False, False, True))


def mpt(r):
    heads = r.of(1, 3, 4, 6, 12)
    return dict(d_model=heads * r.of(8, 16, 40), n_heads=heads, n_layers=r.of(1, 2, 3), max_seq_len=r.of(64, 256, 1024), vocab_size=r.of(97, 128, 259),
                tie_word_embeddings=r.flag(), attn_config=dict(
                    clip_qkv=r.of(None, None, 0.75, 2.0), softmax_scale=r.of(None, None, 0.3)))


def bitnet(r):
    sizes, dim = shape(r, own=False)  # whose inner norm has the width of the model
    return sizes | rotation(r, dim) | dict(hidden_act=r.of("relu2", "relu2", "silu"), attention_bias=r.flag())


def codegen(r):
    heads, dim = r.of(4, 8, 12), r.of(8, 16, 40)
    return dict(n_embd=heads * dim, n_head=heads, n_layer=r.of(1, 2), n_inner=r.of(None, 56), n_positions=256, rotary_dim=r.of(4, 8, dim),
                vocab_size=r.of(97, 127, 259), activation_function=r.of("gelu_new", "gelu", "relu"))


def dbrx(r):
    kv, many = r.of(1, 2, 3), r.of(1, 2, 3, 5)
    heads = kv * r.of(1, 2, 3)
    hidden = heads * r.of(8, 16, 40)
    return dict(d_model=hidden, n_heads=heads, n_layers=r.of(1, 2, 3), max_seq_len=256, vocab_size=r.of(97, 128, 259), tie_word_embeddings=False,
                attn_config=dict(clip_qkv=r.of(None, 1.0, 8.0), kv_n_heads=kv, rope_theta=r.of(100.0, 10000.0)), ffn_config=dict(
                    hidden_size=hidden, ffn_hidden_size=r.of(24, 40, 56), moe_num_experts=many, moe_top_k=r.of(1, many, max(1, many // 2)),
                    moe_normalize_expert_weights=r.of(1, 1, None)))


def deepseek_v32(r):
    config = latent(r) | routed(r) | dict(q_lora_rank=r.of(16, 24), index_topk=r.of(2, 8, 24, 64, 2048), index_n_heads=r.of(1, 2, 4, 8),
                                          index_head_dim=r.of(24, 32, 64))
    return config


def glm_moe_dsa(r):
    config = deepseek_v32(r)
    shared = ["full"] + kinds(r, config, "full", "shared")[1:]
    return config | r.of({}, dict(indexer_types=shared)) | r.of({}, dict(mlp_layer_types=kinds(r, config, "dense", "sparse")))


def xglm(r):
    heads = r.of(1, 3, 5)
    return dict(d_model=heads * r.of(8, 16, 40), attention_heads=heads, ffn_dim=r.of(24, 56), num_layers=r.of(1, 2, 3), vocab_size=r.of(97, 128, 259),
                max_position_embeddings=600, pad_token_id=r.of(0, 1), scale_embedding=r.flag(), tie_word_embeddings=r.flag(),
                activation_function=r.of("gelu", "relu"))


def persimmon(r):
    sizes, dim = shape(r, own=False, every_head=True)
    del sizes["num_key_value_heads"]
    return normed(sizes, layer_norm_eps=1e-5) | rotation(r, dim, ("default", "linear", "dynamic"), (1.0, 0.5, 0.25)) | dict(
        qk_layernorm=r.flag(), hidden_act=r.of("relu2", "gelu"))


def openai_gpt(r):
    heads = r.of(1, 3, 5)
    return dict(n_embd=heads * r.of(8, 16, 40), n_head=heads, n_layer=r.of(1, 2, 3), n_positions=256, vocab_size=r.of(97, 128, 259),
                tie_word_embeddings=r.flag(), afn=r.of("gelu", "gelu", "relu", "silu"))


def biogpt(r):
    heads = r.of(1, 3, 5)
    return dict(hidden_size=heads * r.of(8, 16, 40), num_attention_heads=heads, intermediate_size=r.of(24, 56), num_hidden_layers=r.of(1, 2, 3),
                vocab_size=r.of(97, 128, 259), max_position_embeddings=600, scale_embedding=r.flag(), tie_word_embeddings=r.flag(), pad_token_id=r.of(0, 1),
                hidden_act=r.of("gelu", "relu"))


def zamba2(r):
    heads, layers = r.of(1, 2, 3, 4), r.of(2, 3, 5)
    hidden = heads * r.of(8, 12, 16)
    kinds = [r.of("linear_attention", "linear_attention", "hybrid") for _ in range(layers)]
    kinds[r.stream.integers(layers)] = "hybrid"
    inner = 2 * hidden
    mamba = r.of(*(n for n in (1, 2, 3, 4, 6, 8) if inner % n == 0))
    groups = r.of(*(n for n in range(1, mamba + 1) if mamba % n == 0))
    return dict(hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=r.of(*(n for n in (1, 2, heads) if heads % n == 0)),
                intermediate_size=r.of(24, 48), num_hidden_layers=layers, layers_block_type=kinds, num_mem_blocks=r.of(1, 2), adapter_rank=r.of(4, 8),
                use_shared_attention_adapter=r.flag(), use_mem_rope=r.flag(), n_mamba_heads=mamba, mamba_ngroups=groups, mamba_d_state=r.of(8, 12, 16, 64),
                mamba_d_conv=r.of(2, 4), chunk_size=r.of(8, 256), use_conv_bias=r.flag(), add_bias_linear=r.flag(), use_long_context=r.flag(), pad_token_id=0,
                vocab_size=r.of(97, 128, 259), max_position_embeddings=256, tie_word_embeddings=r.of(True, True, False), rms_norm_eps=r.of(1e-5, 1e-6),
                rope_parameters=dict(rope_type="default", rope_theta=r.of(100.0, 10000.0)))


def minimax(r):
    sizes, dim = shape(r)
    by = lambda: r.of(1, r.between(0.3, 2))
    return sizes | dict(head_dim=dim) | rotation(r, dim, ("default", "linear", "yarn")) | experts(r, "num_local_experts") | dict(
        block_size=r.of(4, 16, 256), layer_types=r.of(None, kinds(r, sizes, "linear_attention", "full_attention")), full_attn_alpha_factor=by(),
        full_attn_beta_factor=by(), linear_attn_alpha_factor=by(), linear_attn_beta_factor=by(), mlp_alpha_factor=by(), mlp_beta_factor=by())


def plain_llama(r, every_head=False, **more):
    sizes, dim = shape(r, own=False, every_head=every_head)
    return sizes | dict(rope_parameters=dict(rope_type="default", rope_theta=10000.0)) | more


def exaone(r):
    config = llama(r) | dict(attention_bias=False, mlp_bias=False)
    return config | dict(head_dim=config.get("head_dim", config["hidden_size"] // config["num_attention_heads"]))


def minicpm(r):
    config = plain_llama(r, attention_bias=False, mlp_bias=False)
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    return config | dict(embedding_multiplier=r.of(1.0, 2.0, 12.0), attention_multiplier=(hidden / config["num_attention_heads"]) ** -0.5,
                         residual_multiplier=r.of(1.4, 0.7) / layers ** 0.5, logits_scaling=hidden / r.of(8, 32, 256))


def internlm2(r):
    return llama(r) | dict(attention_bias=False, mlp_bias=False, head_dim=None) | plain_llama(r)


def internlm3(r):
    return plain_llama(r, use_sliding_window=False)


def qwen(r):
    return plain_llama(r, every_head=True, use_sliding_window=False, tie_word_embeddings=False)


def baichuan(r):
    return plain_llama(r, every_head=True, tie_word_embeddings=False)


def baichuan2(r):
    return baichuan(r) | dict(vocab_size=r.of(64, 128, 260)) | r.of({}, {}, dict(slopes=True, num_hidden_layers=40, intermediate_size=16))


def chatglm(r):
    sizes, dim = shape(r, dims=(8, 16, 24, 64))
    return sizes | dict(head_dim=dim, attention_bias=True, tie_word_embeddings=False, rope_parameters=dict(
        rope_type="default", rope_theta=r.of(10000.0, 500000.0), partial_rotary_factor=0.5))


def deepseek(r):
    width = r.of(16, 24)
    return plain_llama(r, num_hidden_layers=r.of(2, 3)) | experts(r) | dict(
        moe_intermediate_size=width, shared_expert_intermediate_size=width * r.of(1, 2), norm_topk_prob=r.flag(), mlp_only_layers=[0])


def orion(r):
    return plain_llama(r) | dict(rms_norm_eps=1e-5, layer_norm_eps=1e-5, rope_parameters=dict(
        rope_type="default", rope_theta=10000.0, partial_rotary_factor=1.0), tie_word_embeddings=False)


def xverse(r):
    return plain_llama(r, every_head=True, tie_word_embeddings=False)


def internlm(r):
    return xverse(r) | dict(attention_bias=True)


def openelm(r):
    dim, blocks = r.of(16, 24, 64), []
    for _ in range(r.of(1, 2, 4)):
        kv = r.of(1, 2, 3)
        blocks.append((kv * r.of(1, 2, 3), kv, 8 * r.of(3, 5, 8)))
    heads, kv, width = (max(part) for part in zip(*blocks))
    return dict(hidden_size=r.of(40, 48, 72), num_attention_heads=heads, num_key_value_heads=kv, intermediate_size=width, num_hidden_layers=len(blocks), head_dim=dim,
                vocab_size=r.of(97, 128, 259), tie_word_embeddings=True, rms_norm_eps=1e-6, rope_parameters=dict(rope_type="default", rope_theta=10000.0), sizes=blocks)


def jais(r):
    return orion(r) | dict(num_key_value_heads=None, use_qkv_bias=True, slopes=True) | (lambda config: dict(
        num_key_value_heads=config["num_attention_heads"], hidden_size=config["hidden_size"], num_attention_heads=config["num_attention_heads"]))(plain_llama(r, every_head=True))


def bailing_moe(r):
    config = plain_llama(r, attention_bias=False) | experts(r, "num_local_experts")
    config["shared_intermediate_size"] = config["intermediate_size"] * r.of(1, 2)
    return config | dict(attention_multiplier=(config["hidden_size"] / config["num_attention_heads"]) ** -0.5)


def bailing_moe_v2(r):
    sizes, dim = shape(r)
    return sizes | dict(head_dim=dim, attention_bias=r.flag(), use_qk_norm=True, rope_parameters=dict(
        rope_type="default", rope_theta=10000.0, partial_rotary_factor=r.of(0.5, 1.0))) | routed(r) | dict(norm_topk_prob=True)


def nemotron_nas(r):
    heads = r.of(2, 4, 6)
    blocks = [(r.of(None, -1, *(n for n in (1, 2, heads) if heads % n == 0)), r.of(0, 256, 512)) for _ in range(r.of(1, 2, 4))]
    blocks[0] = (1, blocks[0][1])
    return dict(hidden_size=heads * r.of(8, 16), num_attention_heads=heads, num_key_value_heads=heads, intermediate_size=256, num_hidden_layers=len(blocks),
                vocab_size=r.of(97, 128, 259), tie_word_embeddings=r.flag(), rms_norm_eps=r.of(1e-5, 1e-6), max_position_embeddings=256, blocks=blocks,
                rope_parameters=dict(rope_type="default", rope_theta=10000.0))


def muse_glimmer(r):
    sizes, dim = shape(r)
    config = sizes | dict(head_dim=dim, sliding_window=r.of(2, 8, 40), qk_scale_factor=r.of(1.0, 3.0), output_multiplier=r.of(0.5, 1.0),
                          final_logit_softcapping=r.of(8.0, 30.0)) | rotation(r, dim, ("default",))
    return config | r.of({}, dict(layer_types=kinds(r, config, "sliding_attention", "full_attention")))


def step3p5(r):
    sizes, dim = shape(r)
    kv, layers, many = sizes["num_key_value_heads"], sizes["num_hidden_layers"], r.of(2, 3, 5)
    ropes = [rotation(r, dim, (kind, "llama3"), (1.0, 0.5))["rope_parameters"] for kind in ("default", "llama3")]
    limits = [[r.of(0.0, 0.0, 0.5, 2.0) for _ in range(layers)] for _ in range(2)]
    return sizes | dict(head_dim=dim, sliding_window=r.of(2, 8, 40), num_sliding_attention_heads=kv * r.of(1, 2, 3), n_routed_experts=many,
                        num_experts_per_tok=r.of(1, many - 1), moe_intermediate_size=r.of(16, 24), share_expert_dim=r.of(16, 40),
                        moe_router_scaling_factor=r.of(1.0, 3.0), mlp_layer_types=kinds(r, sizes, "dense", "sparse"), swiglu_limits=limits[0],
                        swiglu_limits_shared=limits[1], layer_types=kinds(r, sizes, "sliding_attention", "full_attention"),
                        rope_parameters=dict(zip(("sliding_attention", "full_attention"), ropes)))


def flint(r):
    sizes, dim = shape(r)
    config = sizes | dict(head_dim=dim, sliding_window=r.of(2, 8, 40), moe_intermediate_size=r.of(16, 24), shared_expert_intermediate_size=r.of(16, 40),
                          attention_bias=r.flag(), mlp_only_layers=r.of([], [0])) | rotation(r, dim) | experts(r)
    return config | dict(layer_types=kinds(r, config, "sliding_attention", "full_attention"))


def lara_mini(r):
    sizes, dim = shape(r)
    config = sizes | dict(head_dim=dim, sliding_window=r.of(2, 8, 40), moe_intermediate_size=r.of(16, 24), shared_expert_intermediate_size=r.of(16, 40))
    config |= rotation(r, dim, ("default", "yarn")) | experts(r) | delta(r, sizes)
    return config | dict(layer_types=kinds(r, config, "linear_attention", "sliding_attention", "full_attention"))


def aria_text(r):
    config, many = llama(r), r.of(2, 3, 5)
    return config | dict(mlp_bias=False, moe_num_experts=many, moe_topk=r.of(1, many), moe_num_shared_experts=r.of(1, 2))


def gpt_neox_japanese(r):
    config = gpt_neox(r)
    for key in ("use_parallel_residual", "attention_bias", "intermediate_size"):
        del config[key]
    return config | dict(intermediate_multiple_size=r.of(1, 2, 4))


def modern_bert_decoder(r):
    heads = r.of(1, 3, 4)
    config = dict(hidden_size=heads * r.of(8, 16, 40), num_attention_heads=heads, intermediate_size=r.of(24, 52), num_hidden_layers=r.of(1, 3, 4),
                  vocab_size=r.of(97, 128, 259), local_attention=r.of(4, 16, 80), attention_bias=r.flag(), mlp_bias=r.flag(), decoder_bias=r.flag(),
                  classifier_bias=r.flag(), norm_bias=r.flag(), norm_eps=r.of(1e-5, 1e-6), tie_word_embeddings=r.flag(), pad_token_id=0, cls_token_id=1, sep_token_id=2,
                  rope_parameters={kind: dict(rope_type="default", rope_theta=r.of(100.0, 10000.0)) for kind in ("full_attention", "sliding_attention")})
    return config | r.of({}, dict(layer_types=kinds(r, config, "sliding_attention", "full_attention")))


# Families that Transformers has no class for, as others that compute the same, and their names in models.DISGUISES.
DISGUISED = {"exaone": "llama", "minicpm": "granite", "internlm2": "llama", "internlm3": "qwen2", "qwen": "qwen2", "baichuan": "llama", "baichuan2": "llama",
             "chatglm": "glm", "deepseek": "qwen2_moe", "orion": "stablelm", "xverse": "llama", "internlm": "llama", "openelm": "qwen3", "jais": "stablelm",
             "bailing_moe": "granitemoeshared", "bailing_moe_v2": "glm4_moe", "nemotron-nas": "llama"}
FAMILIES = {name: globals().get(name.replace("-", "_"), llama) for name in (*models.FAMILIES, *DISGUISED)} | {"hunyuan_v1_dense": hunyuan, "glm4": glm, "modernbert-decoder": modern_bert_decoder}


def saved(config):
    """config.json as it was saved."""
    return config


def older(config):
    """config.json as Transformers 4 wrote it, but for layers of kinds that no other key tells."""
    if "rope_parameters" not in config or config["model_type"] in (
            "modernbert-decoder", "lfm3", "mellum", "mistral4", "laguna", "mimo_v2_flash", "olmo_hybrid", "bailing_hybrid", "kimi_linear", "ernie4_5_vl_moe_text"):
        return config  # which it did not have
    if config["model_type"] == "gemma4_text":
        # As published: Transformers 5 has these sizes by layer.
        own = config.pop("per_layer_config", {})
        return config | {"global_head_dim": 512} | {
            {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}[key]: value
            for settings in own.values() for key, value in settings.items()}
    written = models.older_dialect(config, {})
    listed = config.get("layer_types") and config["model_type"] not in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "smollm3")
    written |= {"layer_types": config["layer_types"]} if listed else {}
    if config["model_type"] == "olmo3":
        del written["rope_local_base_freq"]
    return written


def noted(config):
    """With keys that say nothing."""
    return config | {"_name_or_path": "somewhere", "attn_implementation": None, "torch_dtype": config.get("dtype"), "quantization_config": None,
                     "rope_scaling": None, "use_cache": True, "pretraining_tp": 1, "auto_map": {"AutoConfig": "configuration.Config"},
                     "sliding_window": config.get("sliding_window")}


# What published folders never leave to the class of their configuration.
STATED = ("model_type", "architectures", "dtype", "vocab_size", "bos_token_id", "eos_token_id", "max_position_embeddings",
          "num_hidden_layers", "n_layer", "num_layers", "layers_block_type")
MOST = 2_000_000  # numbers of a model


def bare(config, kept):
    """config.json with the keys `kept` alone."""
    return {key: value for key, value in config.items() if key in kept or key in STATED}


def thinned(r, case):
    """The case without some settings, and the keys that are left: its class has values for the others, which config.json does not have either."""
    config, kept = dict(case.config), set(case.config) | set(models.COMMON) - set(case.drop)
    defaults = models.model_classes(case.family)[0]()
    for key in list(config):
        if r.flag() or key in STATED:
            continue
        without = {name: value for name, value in config.items() if name != key}
        if key in models.COMMON:
            without[key] = getattr(defaults, key, None)  # make_config would add its own
        try:
            with torch.device("meta"):
                model = models.build(replace(case, config=without), torch.float32)
        except Exception:
            continue
        if sum(p.numel() for p in model.parameters()) <= MOST:
            config = without
            kept.discard(key)
    return replace(case, config=config), kept


LEARNED = ("gpt2", "gpt_bigcode", "gpt_neo", "opt", "gptj", "codegen", "openai-gpt")  # positions from a table
WRAPPED = ("gemma3", "gemma4", "llama4", "mistral", "ministral3", "qwen3_5", "qwen3_5_moe", "cohere2", "llama", "qwen2", "qwen3", "qwen3_moe", "glm4",
           "glm4_moe", "deepseek_v3", "gpt_oss", "smollm3")


def wrapped(r, folder):
    """The folder as that of a model with a tower for images has it, whose weights are beside it."""
    config = json.loads((folder / "config.json").read_text())
    config.pop("architectures", None)
    outer = {"architectures": ["SomethingForConditionalGeneration"], "model_type": "something_with_images", "image_token_id": 5,
             "vision_config": {"hidden_size": 4, "patch_size": 2, "model_type": "siglip"}, "text_config": config,
             "dtype": config.get("dtype", config.get("torch_dtype")), "transformers_version": "4.57.0"}
    if "tie_word_embeddings" in config and r.flag():
        outer["tie_word_embeddings"] = config["tie_word_embeddings"]
    models.write_json(folder / "config.json", outer)
    front = r.of("language_model.", "model.language_model.")
    for path in folder.glob("*.safetensors"):
        held = load_file(path)
        renamed = {front + (name.removeprefix("model.") if front.startswith("model") and not name.startswith("lm_head") else name): x
                   for name, x in held.items()}
        if front.startswith("model"):
            renamed = {name.removeprefix(front) if name.endswith("lm_head.weight") else name: x for name, x in renamed.items()}
        save_file(renamed | {"vision_tower.patch_embed.weight": torch.ones(4, 4)}, path, {"format": "pt"})


ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2", "quick_gelu", "tanh", "sigmoid")


def acted(r, family, config):
    """The configuration with another function in feed-forwards, where its class has a key for it."""
    defaults = models.model_classes(family)[0]()
    keys = [key for key in ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act") if isinstance(getattr(defaults, key, None), str)]
    return config | ({r.of(*keys): r.of(*ACTIVATIONS)} if keys and r.of(False, False, False, True) else {})


UNBOUND = ("bloom", "mpt", "codegen", "dbrx", "openai-gpt")  # whose context has another key, or is not stated


def draw(family, seed, number):
    """A case of models.py, the length of its prompt, and how config.json is written."""
    r = Draw(seed, family, number)
    while True:
        config = FAMILIES[family](r)
        own = {key: config.pop(key) for key in ("sizes", "blocks", "slopes") if key in config}
        disguise = family if family in DISGUISED else None
        tower = family if family in models.TOWERS and family in models.DISGUISES else None
        if not disguise:
            config = acted(Draw(seed, family, number, "function"), family, config)
        drop = tuple(key for key in ("rms_norm_eps", "max_position_embeddings") if key not in config and (
            key == "rms_norm_eps" or family in UNBOUND)) if family not in models.TOWERS else ()
        case = Case(f"{family}-{number}", DISGUISED.get(family, family), r.of("float32", "float32", "bfloat16", "float16"), "", config, drop=drop,
                    images=family in models.TOWERS, disguise=disguise or tower, **own)
        try:
            models.build(case, torch.float32)
        except Exception:  # Transformers refuses these sizes together
            continue
        longer = () if family in LEARNED else (300, 530)  # beyond a block of the cache, and beyond a part of a prompt
        length, write = r.of(1, 3, 21, 33, 70, *longer), r.of(saved, older, noted, saved if family in models.TOWERS else bare)
        if disguise:
            # Their keys are their authors', and so is what lies beyond what was trained.
            return case, min(length, 70), saved
        if family not in models.TOWERS:
            case = replace(case, shard=r.of(None, None, "30KB"))
        if write is bare:
            case, kept = thinned(r, case)
            return case, length, partial(bare, kept=kept)
        return case, length, write


def run(delft, path, tokens, device):
    """Delft's logits of the prompt, and what it goes on with; or what it says."""
    context = len(tokens) + FOLLOWED
    command = [delft, "logits", path, "--tokens", ",".join(map(str, tokens)), "--all", "--generate", str(FOLLOWED), "--json", "--device", device,
               "--cache-type", "f32", "--ctx", str(context), "-t", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return None, (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
    found = json.loads(done.stdout)
    return np.array(found["logits"], np.float64), found["generated"]


@torch.no_grad()
def truth(case, weights, tokens):
    """Transformers' logits in float64, and how clearly experts were chosen."""
    with models.widened(models.default_type(case.family)):
        model = models.with_weights(case, weights, torch.float64)
        clear = []
        hooks = models.watch_routers(model, clear)
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].numpy()
        for hook in hooks:
            hook.remove()
    # No number where an indexer's scores are all alike.
    return logits, min((apart if apart == apart else 0.0 for apart in clear), default=1.0)


def apart(case, weights, tokens, found, generated):
    """How far Delft's logits and choices are from Transformers', of the range of logits; none if experts were not chosen clearly."""
    logits, clear = truth(case, weights, tokens + generated)
    if clear < NEAR:
        return None
    span = logits.max() - logits.min()
    worst = np.abs(logits[:len(tokens)] - found).max()
    for row, token in zip(logits[len(tokens) - 1:], generated):
        worst = max(worst, row.max() - row[token])
    return worst / span


def runs(case, weights, tokens):
    """Whether Transformers computes a model."""
    try:
        truth(case, weights, tokens)
    except Exception:
        return False
    return True


def check(args, case, length, write, folder):
    """Lines on what differs, and the largest difference."""
    weights = models.make_weights(case)
    models.write_checkpoint(case, weights, folder)
    path = folder / "config.json"
    models.write_json(path, write(json.loads(path.read_text())))
    r = Draw(case.name, "form")
    if case.family in WRAPPED and not (case.shard or case.disguise) and r.of(False, False, True):
        wrapped(r, folder)
    lines, worst = [], 0.0
    places = [(device, folder) for device in args.devices]
    if args.gguf:
        file = folder / "model.gguf"
        done = subprocess.run([args.delft, "convert", folder, "-o", file, "--type", "f32", "--force"], capture_output=True, text=True)
        line = (done.stderr.strip().splitlines() or [""])[-1]
        if not done.returncode:
            places.append((args.devices[0], file))
        elif not any(part in line for part in REFUSED):
            lines.append(f"convert: {line}")
    for device, place in places:
        for again in range(5):
            r = Draw(case.name, "prompt", again)
            text = case.config.get("vocab_size", 128) - case.images  # the last token stands for an image
            tokens = [int(r.stream.integers(3, text)) for _ in range(length)]
            found, generated = run(args.delft, place, tokens, device)
            if found is not None and case.images and text in generated:
                continue
            if found is None:
                if not any(part in generated for part in REFUSED) and runs(case, weights, tokens):
                    lines.append(f"{device} {place.name}: {generated}")
                break
            try:
                far = apart(case, weights, tokens, found, generated)
            except (TypeError, RuntimeError, IndexError):  # Transformers stops, as Gemma 4 does where layers share keys and have no inputs of their own,
                break  # and others where what is left to a class does not fit the rest
            if far is not None:
                worst = max(worst, far)
                if not far <= BOUND:
                    lines.append(f"{device} {place.name}: {far:.2g} of the range apart")
                break
    return lines, worst


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delft", required=True)
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--first", type=int, default=0, help="the number of the first draw")
    parser.add_argument("--seed", default="delft")
    parser.add_argument("--only", nargs="*", choices=FAMILIES)
    parser.add_argument("--devices", nargs="*", default=["cpu"])
    parser.add_argument("--gguf", action="store_true")
    parser.add_argument("--keep", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    wrong = 0
    with tempfile.TemporaryDirectory() as scratch:
        for family in args.only or FAMILIES:
            largest = 0.0
            for number in range(args.first, args.first + args.draws):
                case, length, write = draw(family, args.seed, number)
                folder = Path(scratch) / case.name
                folder.mkdir()
                lines, worst = check(args, case, length, write, folder)
                largest = max(largest, worst)
                wrong += bool(lines)
                for line in lines:
                    print(f"{case.name}: {line}\n    {case.storage}, {length} tokens, {getattr(write, 'func', write).__name__}: {json.dumps(case.config)}", flush=True)
                if lines and args.keep:
                    shutil.copytree(folder, args.keep / case.name, dirs_exist_ok=True)
                shutil.rmtree(folder)
            print(f"{family}: at most {largest:.2g} of the range apart", flush=True)
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()

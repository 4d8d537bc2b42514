#!/usr/bin/env python3
"""Write the reference fixtures for whole models: tiny random checkpoints and what Transformers computes from them.

For every case below this makes a folder with a checkpoint as Transformers saves it and `expected.safetensors`: the
prompt, the activations after every layer, the logits, and ten greedy decode steps through Transformers' own cache.
The arithmetic is float64 throughout (see `widened`); README.md beside this file describes the tensors.

    models.py [--out DIR] [--only NAME ...]
    models.py --converter PATH/convert_hf_to_gguf.py [--quantize PATH/llama-quantize]      # and the GGUF twins

Needs torch, transformers, safetensors; the twins also gguf, sentencepiece and a llama.cpp checkout.
"""
import argparse
import contextlib
import copy
import inspect
import json
import shutil
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

PROMPT = 21  # tokens of a prompt, unless the case says otherwise
STEPS = 10  # greedy decode steps
SPECIAL = 2  # the highest special token; prompts and continuations hold none
ROUTED = 0.03  # least distance between a router's scores that decide, so that a rounded cache chooses the same experts
CHOSEN = 2  # times as far as an indexer's scores are apart, where they decide
MARGIN = 0.05  # least distance between the best and the second logit, so that float32 makes the same choices

TOWER = "vision_tower.encoder.layers.0.mlp.weight"  # a weight that belongs to no decoder

DECAYS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")  # numbers of lightning attention that follow from its sizes

LLAMA3_SCALING = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                      original_max_position_embeddings=32)


@dataclass
class Case:
    """One checkpoint. `config` holds what differs from `COMMON`; the rest says how the folder is written."""

    name: str
    family: str  # a key of FAMILIES
    storage: str  # dtype of model.safetensors; the weights are exact in it
    why: str
    config: dict
    prompt: int = PROMPT
    keep: int | None = None  # rows of activations and logits kept, counted from the end; None keeps all
    v4: dict | None = None  # also write config.v4.json, with these fields on top; a None value removes the field
    drop: tuple = ()  # fields removed from config.json
    prefix: str = ""  # put in front of every tensor name
    shard: str | None = None  # shard size, for a sharded checkpoint
    bf16: bool = False  # also record the logits of a run in true bf16 arithmetic
    gguf: tuple = ()  # types of the GGUF twins
    folder: bool = True  # False: only the GGUF twins are kept, not the checkpoint
    tower: bool = False  # config.json has the decoder's part under `text_config`, and weights of a tower are beside it
    stacked: bool = False  # all experts of a layer in two tensors, as the model holds them
    context: int | None = None  # positions for which a rotation is made that follows the context
    mlx: dict | None = None  # quantise matrices as mlx-lm does: bits and group_size, and under names of layers their own
    lm: dict | None = None  # a folder that mlx-lm itself writes, quantised so; empty: not quantised
    images: bool = False  # the class with a tower for images, of which the decoder alone is asked
    own: bool = False  # the same weights in Mistral's own files, below folder/
    add: dict | None = None  # fields added to config.json
    blocks: tuple = ()  # key/value heads and width of the feed-forward of each block, whose attention may be None or a product, -1
    ternary: str | None = None  # BitNet's layers: "online" or "offline"
    below: bool = False  # the checkpoint lies below folder/: products of its matrices are rounded
    sizes: tuple = ()  # query heads, key/value heads and width of the feed-forward of each of Qwen3's blocks
    slopes: bool = False  # Llama with slopes on scores in the place of rotations
    disguise: str | None = None  # the folder is of this model_type, which Transformers has no code of its own for: see DISGUISES


COMMON = dict(vocab_size=128, num_hidden_layers=2, max_position_embeddings=256, rms_norm_eps=1e-6,
              tie_word_embeddings=False, bos_token_id=1, eos_token_id=2)


def shape(hidden, heads, kv, inner, **more):
    return dict(hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv, intermediate_size=inner, **more)


def rope(theta, **scaling):
    return dict(rope_parameters=dict(rope_theta=theta, **(scaling or dict(rope_type="default"))))


EXPERTS_OF_NEMOTRON = ("n_routed_experts", "n_shared_experts", "moe_intermediate_size", "moe_shared_expert_intermediate_size", "num_experts_per_tok",
                       "routed_scaling_factor", "n_group", "topk_group", "norm_topk_prob", "moe_latent_size", "moe_shared_expert_overlap")


CASES = [
    Case("llama2", "llama", "float16", "multi-head attention with an odd head count, untied, odd vocabulary, f16 weights",
         shape(48, 3, 3, 96, vocab_size=131, rms_norm_eps=1e-5, **rope(10000.0)),
         v4=dict(rope_theta=None, num_key_value_heads=None)),
    Case("llama3", "llama", "float32", "6 query heads on 2, tied, llama3 rope scaling whose three bands are all in use",
         shape(48, 6, 2, 64, rms_norm_eps=1e-5, tie_word_embeddings=True, **rope(200.0, **LLAMA3_SCALING)),
         v4={}, gguf=("f32",)),
    Case("llama-linear", "llama", "bfloat16", "9 query heads on 3, untied, linear rope scaling, three shards",
         shape(72, 9, 3, 64, **rope(10000.0, rope_type="linear", factor=4.0)), v4={}, shard="60KB"),
    Case("llama-head-dim", "llama", "bfloat16", "head_dim 16 where hidden / heads is 10",
         shape(40, 4, 2, 80, head_dim=16, **rope(500000.0))),
    Case("llama-inferred", "llama", "bfloat16", "head_dim absent from config.json: the rows of q_proj decide it (16, not 8)",
         shape(32, 4, 2, 64, head_dim=16, **rope(10000.0)), drop=("head_dim",)),
    Case("llama-bias", "llama", "float32", "biases on every projection of attention and MLP, eps 1e-3, tied",
         shape(32, 4, 2, 64, rms_norm_eps=1e-3, attention_bias=True, mlp_bias=True, tie_word_embeddings=True,
               **rope(10000.0))),
    Case("llama-prefix", "llama", "bfloat16", "every tensor name starts with `language_model.`",
         shape(32, 4, 2, 64, **rope(10000.0)), prefix="language_model."),
    Case("llama-long", "llama", "bfloat16", "300 tokens: crosses a 256-token cache block",
         shape(32, 4, 2, 64, max_position_embeddings=512, **rope(10000.0)), prompt=300, keep=8),
    Case("mistral", "mistral", "bfloat16", "sliding window of 8 tokens, head_dim 16 where hidden / heads is 12",
         shape(48, 4, 2, 80, head_dim=16, sliding_window=8, **rope(10000.0)), v4={}),
    Case("mistral-full", "mistral", "float16", "sliding_window null",
         shape(40, 4, 2, 80, head_dim=16, sliding_window=None, rms_norm_eps=1e-5, **rope(1000000.0)), gguf=("f16",)),
    Case("mistral-long", "mistral", "bfloat16", "300 tokens with a window of 40: a ring wraps many times",
         shape(32, 4, 2, 64, max_position_embeddings=512, sliding_window=40, **rope(10000.0)), prompt=300, keep=8),
    Case("qwen2", "qwen2", "bfloat16", "biases on q, k and v, tied, 7 query heads on 1",
         shape(56, 7, 1, 96, tie_word_embeddings=True, **rope(1000000.0)), v4={}, gguf=("f16",)),
    Case("qwen2.5", "qwen2", "bfloat16", "untied; use_sliding_window is false, and the older dialect still names a window",
         shape(48, 6, 2, 96, use_sliding_window=False, sliding_window=8, max_window_layers=1, **rope(1000000.0)),
         v4=dict(sliding_window=8)),
    Case("qwen2-window", "qwen2", "bfloat16", "use_sliding_window true: the first layer sees everything, the second 8 tokens",
         shape(32, 4, 2, 64, use_sliding_window=True, sliding_window=8, max_window_layers=1, **rope(10000.0))),
    Case("qwen2-yarn", "qwen2", "bfloat16", "yarn rope scaling: the first pairs are kept, the last divided by 4, the rest between",
         shape(32, 2, 1, 64, **rope(10000.0, rope_type="yarn", factor=4.0, original_max_position_embeddings=2048)),
         v4={}, gguf=("f16",)),
    Case("qwen3", "qwen3", "bfloat16", "q_norm and k_norm, head_dim 16 where hidden / heads is not whole, tied",
         shape(64, 6, 2, 64, head_dim=16, tie_word_embeddings=True, **rope(1000000.0)), v4={}, gguf=("bf16", "q8_0")),
    Case("qwen3-untied", "qwen3", "bfloat16", "untied; also a run in bf16 arithmetic",
         shape(40, 3, 1, 80, head_dim=16, **rope(1000000.0)), bf16=True),
    Case("qwen3-untyped", "qwen3", "bfloat16", "neither model_type nor architectures: q_norm tells the architecture",
         shape(32, 4, 2, 64, head_dim=16, tie_word_embeddings=True, **rope(10000.0)), drop=("model_type", "architectures")),
    Case("phi3", "phi3", "bfloat16", "q, k and v in one matrix, gate and up in another; longrope past its first 16 positions; a window",
         shape(48, 6, 2, 64, sliding_window=12, pad_token_id=0, original_max_position_embeddings=16,
               **rope(10000.0, rope_type="longrope", original_max_position_embeddings=16,
                      short_factor=[1.0, 1.25, 1.5, 2.0], long_factor=[1.5, 3.0, 6.0, 12.0])), v4={}, gguf=("f32",)),
    Case("phi3-short", "phi3", "bfloat16", "longrope within its first 32 positions, half of each head rotated; loaded with a context of 32",
         shape(48, 6, 2, 64, sliding_window=None, pad_token_id=0, original_max_position_embeddings=32,
               **rope(10000.0, rope_type="longrope", original_max_position_embeddings=32, partial_rotary_factor=0.5,
                      short_factor=[1.25, 2.0], long_factor=[3.0, 12.0])), v4={}, gguf=("f32",)),
    Case("gemma2", "gemma2", "bfloat16", "norms of 1 + w in front and behind, soft caps, GELU gate, scaled embedding, every other layer within 8",
         shape(48, 4, 2, 64, num_hidden_layers=3, head_dim=16, query_pre_attn_scalar=16, sliding_window=8, pad_token_id=0,
               attn_logit_softcapping=2.0, final_logit_softcapping=6.0, tie_word_embeddings=True, **rope(10000.0)), gguf=("f32",)),
    Case("gemma2-scalar", "gemma2", "float32", "query_pre_attn_scalar 24 where head_dim is 16; no soft caps; biases of attention",
         shape(48, 4, 2, 64, head_dim=16, attention_bias=True, query_pre_attn_scalar=24, sliding_window=8, pad_token_id=0, attn_logit_softcapping=None,
               final_logit_softcapping=None, tie_word_embeddings=True, **rope(10000.0))),
    Case("gemma3", "gemma3", "bfloat16", "norms of each head; six layers within 8 by a base of their own, then one that sees all, stretched by 8",
         shape(48, 4, 2, 64, num_hidden_layers=7, head_dim=16, query_pre_attn_scalar=16, sliding_window=8, pad_token_id=0,
               tie_word_embeddings=True,
               rope_parameters=dict(full_attention=dict(rope_theta=100000.0, rope_type="linear", factor=8.0),
                                    sliding_attention=dict(rope_theta=10000.0, rope_type="default"))),
         v4=dict(sliding_window_pattern=6), gguf=("f32",)),
    Case("gemma3-vision", "gemma3", "bfloat16", "a checkpoint with images: the decoder under `text_config` and `language_model.`, a tower beside it",
         shape(48, 3, 1, 64, head_dim=16, query_pre_attn_scalar=24, sliding_window=8, pad_token_id=0, tie_word_embeddings=True,
               layer_types=["full_attention", "sliding_attention"],
               rope_parameters=dict(full_attention=dict(rope_theta=1000.0, rope_type="default"),
                                    sliding_attention=dict(rope_theta=100.0, rope_type="default"))),
         prefix="language_model.", tower=True),
    Case("gemma4", "gemma4", "bfloat16", "norms of values, scores that are not scaled; a third layer without a window, whose heads of 32 "
         "elements are rotated in part and whose keys are its values; factors behind layers",
         shape(48, 4, 2, 64, num_hidden_layers=3, head_dim=16, global_head_dim=32, num_global_key_value_heads=1, attention_k_eq_v=True,
               sliding_window=8, pad_token_id=0, hidden_size_per_layer_input=0, vocab_size_per_layer_input=128, final_logit_softcapping=6.0, tie_word_embeddings=True,
               layer_types=["sliding_attention", "sliding_attention", "full_attention"],
               rope_parameters=dict(full_attention=dict(rope_theta=1000.0, rope_type="proportional", partial_rotary_factor=0.25),
                                    sliding_attention=dict(rope_theta=100.0, rope_type="default"))), gguf=("f32",),
         drop=("per_layer_config",), add=dict(global_head_dim=32, num_global_key_value_heads=1)),  # as published
    Case("gemma4-small", "gemma4", "bfloat16", "inputs of 16 elements in every layer; the last three layers attend to keys and values of "
         "the second and third, and their feed-forwards are twice as wide",
         shape(32, 4, 1, 48, num_hidden_layers=6, head_dim=16, global_head_dim=32, sliding_window=8, pad_token_id=0,
               hidden_size_per_layer_input=16, vocab_size_per_layer_input=128, num_kv_shared_layers=3, use_double_wide_mlp=True,
               tie_word_embeddings=True, layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
               rope_parameters=dict(full_attention=dict(rope_theta=1000.0, rope_type="proportional", partial_rotary_factor=0.5),
                                    sliding_attention=dict(rope_theta=100.0, rope_type="default"))), gguf=("f32",),
         add=dict(global_head_dim=32)),
    Case("gemma4-moe", "gemma4", "bfloat16", "2 of 5 experts beside the feed-forward, chosen by what stands in front of both, each with a factor "
         "behind its odds; keys that are values",
         shape(48, 4, 2, 48, num_hidden_layers=3, head_dim=16, global_head_dim=32, num_global_key_value_heads=1, attention_k_eq_v=True,
               sliding_window=8, pad_token_id=0, hidden_size_per_layer_input=0, vocab_size_per_layer_input=128, final_logit_softcapping=6.0,
               tie_word_embeddings=True, enable_moe_block=True, num_experts=5, top_k_experts=2, moe_intermediate_size=24,
               layer_types=["sliding_attention", "sliding_attention", "full_attention"],
               rope_parameters=dict(full_attention=dict(rope_theta=1000.0, rope_type="proportional", partial_rotary_factor=0.25),
                                    sliding_attention=dict(rope_theta=100.0, rope_type="default"))), gguf=("f32",),
         drop=("per_layer_config",), add=dict(global_head_dim=32, num_global_key_value_heads=1)),
    Case("mixtral", "mixtral", "bfloat16", "2 of 4 experts, their odds made to sum to one",
         shape(64, 4, 2, 96, num_local_experts=4, num_experts_per_tok=2, rms_norm_eps=1e-5, **rope(10000.0)), gguf=("f32", "q8_0-split")),
    Case("mixtral-one", "mixtral", "float16", "1 expert, which every token takes",
         shape(32, 4, 2, 40, num_hidden_layers=1, num_local_experts=1, num_experts_per_tok=1, **rope(10000.0))),
    Case("qwen2-moe", "qwen2_moe", "bfloat16", "2 of 5 experts by odds among all, and one that all share behind a gate of its own",
         shape(48, 6, 2, 96, moe_intermediate_size=40, shared_expert_intermediate_size=56, num_experts=5, num_experts_per_tok=2,
               norm_topk_prob=False, **rope(10000.0)), gguf=("f32",)),
    Case("qwen2-moe-gelu", "qwen2_moe", "bfloat16", "GELU in the gates of a dense layer, of 2 of 3 experts and of the one that all share; a window of 4 in the first layer, which no list tells",
         shape(32, 4, 2, 48, hidden_act="gelu", moe_intermediate_size=24, shared_expert_intermediate_size=40, num_experts=3, num_experts_per_tok=2,
               norm_topk_prob=False, mlp_only_layers=[0], use_sliding_window=True, sliding_window=4, max_window_layers=1, **rope(10000.0)), prompt=9,
         drop=("layer_types",)),
    Case("qwen3-moe", "qwen3_moe", "bfloat16", "3 of 6 experts, the first layer without; norms of each head",
         shape(64, 6, 2, 64, num_hidden_layers=3, head_dim=16, moe_intermediate_size=32, num_experts=6, num_experts_per_tok=3,
               norm_topk_prob=True, mlp_only_layers=[0], tie_word_embeddings=True, **rope(1000000.0)), prompt=12),
    Case("qwen3-moe-all", "qwen3_moe", "float32", "all of 3 experts, by odds that are not made to sum to one",
         shape(32, 3, 1, 64, head_dim=16, moe_intermediate_size=48, num_experts=3, num_experts_per_tok=3,
               norm_topk_prob=False, **rope(10000.0)), gguf=("f32",)),
    Case("qwen3-moe-window", "qwen3_moe", "bfloat16", "a switch that has all layers see 8 tokens, whatever max_window_layers says; 1 of 2 experts",
         shape(32, 3, 1, 64, head_dim=16, moe_intermediate_size=24, num_experts=2, num_experts_per_tok=1, norm_topk_prob=True,
               use_sliding_window=True, sliding_window=8, max_window_layers=1, **rope(10000.0)), prompt=14),
    Case("qwen3-next", "qwen3_next", "bfloat16", "three gated delta nets and gated attention; 2 of 4 experts and a shared one; values of 24",
         shape(48, 4, 2, 64, num_hidden_layers=4, head_dim=32, moe_intermediate_size=24, shared_expert_intermediate_size=40,
               num_experts=4, num_experts_per_tok=2, linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=16,
               linear_value_head_dim=24, **rope(10000.0, rope_type="default", partial_rotary_factor=0.25)), prompt=9, gguf=("f32",)),
    Case("qwen3.5", "qwen3_5", "bfloat16", "a checkpoint with images: its decoder of gated delta nets, whose keys of 12 are wider than values",
         shape(40, 4, 1, 64, num_hidden_layers=3, head_dim=24, layer_types=["linear_attention", "full_attention", "linear_attention"],
               linear_num_key_heads=3, linear_num_value_heads=3, linear_key_head_dim=12, linear_value_head_dim=8,
               linear_conv_kernel_dim=3, tie_word_embeddings=True,
               **rope(10000.0, rope_type="default", partial_rotary_factor=0.5, mrope_section=[3, 2, 1], mrope_interleaved=True)),
         prefix="language_model.", tower=True),
    Case("qwen3.5-long", "qwen3_5", "bfloat16", "300 tokens: a state crosses a 256-token cache block; keys that GPUs stage",
         shape(32, 2, 1, 48, head_dim=16, max_position_embeddings=512, layer_types=["linear_attention", "full_attention"],
               linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=32, linear_value_head_dim=16,
               **rope(10000.0, rope_type="default", partial_rotary_factor=0.25)), prompt=300, keep=8),
    Case("qwen3.5-moe", "qwen3_5_moe", "bfloat16", "2 of 5 experts in stacks and a shared one, biases of attention",
         dict(hidden_size=32, num_attention_heads=2, num_key_value_heads=2, head_dim=16, moe_intermediate_size=24,
              shared_expert_intermediate_size=16, num_experts=5, num_experts_per_tok=2, attention_bias=True,
              layer_types=["full_attention", "linear_attention"], linear_num_key_heads=2, linear_num_value_heads=2,
              linear_key_head_dim=8, linear_value_head_dim=16,
              **rope(10000.0, rope_type="default", partial_rotary_factor=0.25)), prompt=9, stacked=True, gguf=("f32",)),
    Case("qwen3.5-shared", "qwen3_5", "bfloat16", "six heads of values share two of keys, which GGUF files have in another order",
         shape(32, 2, 1, 48, head_dim=16, layer_types=["linear_attention", "full_attention"], full_attention_interval=2,
               linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=16, linear_value_head_dim=16,
               **rope(10000.0, rope_type="default", partial_rotary_factor=0.25)), prompt=9, gguf=("f32", "q8_0")),
    Case("phimoe", "phimoe", "bfloat16", "2 of 4 experts, each by its odds among those near it; layer norms, biases everywhere",
         shape(64, 4, 2, 40, num_local_experts=4, num_experts_per_tok=2, router_jitter_noise=0.1, attention_bias=True, lm_head_bias=True,
               rms_norm_eps=1e-5, **rope(10000.0)), prompt=9),
    Case("gpt-oss", "gpt_oss", "bfloat16", "sinks, every other layer within 8, 2 of 4 experts with biases and a clamped gate, yarn",
         shape(64, 4, 2, 32, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8, rms_norm_eps=1e-5,
               **rope(10000.0, rope_type="yarn", factor=4.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
                      original_max_position_embeddings=64)), prompt=14, gguf=("f32",)),
    Case("llama4", "llama4", "bfloat16", "1 of 4 experts that read weighed rows, in every other block, beside one that all share; q and k of "
         "one length in rotated layers; the fourth layer is not rotated",
         dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=24, intermediate_size_mlp=48,
              num_hidden_layers=4, num_local_experts=4, num_experts_per_tok=1, interleave_moe_layer_step=2, pad_token_id=0,
              rms_norm_eps=1e-5, **rope(200.0, **LLAMA3_SCALING)), prompt=12, gguf=("f32",)),
    Case("llama4-chunks", "llama4", "bfloat16", "40 tokens in chunks of 12, and queries of the second layer, which is not rotated, that grow every 5",
         dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=24, intermediate_size_mlp=48,
              num_hidden_layers=3, no_rope_layer_interval=2, num_local_experts=4, num_experts_per_tok=1, interleave_moe_layer_step=2,
              attention_chunk_size=12, floor_scale=5, attn_scale=0.4, pad_token_id=0, rms_norm_eps=1e-5, **rope(200.0)), prompt=40, keep=20),
    Case("llama4-yarn", "llama4", "bfloat16", "yarn, whose magnitude norms of q and k behind it take away",
         dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=24, intermediate_size_mlp=48,
              num_hidden_layers=2, num_local_experts=2, num_experts_per_tok=1, interleave_moe_layer_step=2, pad_token_id=0, rms_norm_eps=1e-5,
              **rope(200.0, rope_type="yarn", factor=4.0, original_max_position_embeddings=16))),
    Case("smollm3", "smollm3", "bfloat16", "every fourth layer is not rotated, tied",
         shape(64, 4, 1, 64, num_hidden_layers=5, tie_word_embeddings=True, pad_token_id=0, **rope(10000.0)), gguf=("f32",)),
    Case("granite", "granite", "bfloat16", "multipliers of embeddings, scores, residuals and logits; tied",
         shape(48, 6, 2, 64, embedding_multiplier=0.6, attention_multiplier=0.2, residual_multiplier=0.7, logits_scaling=0.5,
               tie_word_embeddings=True, **rope(10000.0)), gguf=("f32",)),
    Case("olmo2", "olmo2", "bfloat16", "norms behind each sublayer and none in front, norms over whole rows of q and k",
         shape(64, 4, 2, 64, pad_token_id=0, **rope(10000.0)), gguf=("f32",)),
    Case("glm4", "glm4", "bfloat16", "half of each head rotated in adjacent pairs, norms in front and behind, biases on q, k and v",
         shape(48, 4, 2, 64, head_dim=16, pad_token_id=0, attention_bias=True, **rope(10000.0, rope_type="default", partial_rotary_factor=0.5)),
         gguf=("f32",)),
    Case("glm4-moe", "glm4_moe", "bfloat16", "3 of 8 experts by corrected odds, in the best 2 of 4 groups, beside two that all share; the first "
         "layer without; norms of each head, biases on q, k and v",
         shape(48, 4, 2, 64, num_hidden_layers=3, head_dim=16, pad_token_id=0, attention_bias=True, use_qk_norm=True,
               moe_intermediate_size=24, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=2, n_group=4, topk_group=2,
               routed_scaling_factor=1.5, **rope(10000.0, rope_type="default", partial_rotary_factor=0.5)), prompt=9),
    Case("glm4-moe-one", "glm4_moe", "float32", "2 of 5 experts by corrected odds that are not made to sum to one, in one group; no norms",
         shape(32, 4, 2, 48, head_dim=8, pad_token_id=0, use_qk_norm=False, moe_intermediate_size=16, n_routed_experts=5,
               num_experts_per_tok=2, norm_topk_prob=False, **rope(10000.0, rope_type="default", partial_rotary_factor=0.5)), prompt=9),
    Case("ministral", "ministral", "bfloat16", "windows by a list: the first layer within 8, the second sees everything",
         shape(40, 4, 2, 80, head_dim=16, sliding_window=8, layer_types=["sliding_attention", "full_attention"], **rope(10000.0))),
    Case("ministral3", "ministral3", "bfloat16", "yarn of magnitude 1 by 4 of 16 trained positions, every 16 of which queries grow; 5 heads on 1",
         shape(40, 5, 1, 56, head_dim=16, vocab_size=109, pad_token_id=0, max_position_embeddings=64,
               **rope(10000.0, rope_type="yarn", type="yarn", factor=4.0, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0,
                      original_max_position_embeddings=16, max_position_embeddings=64, llama_4_scaling_beta=0.4)),
         prompt=40, keep=20, gguf=("f32",), own=True),
    Case("granitemoe", "granitemoe", "bfloat16", "Granite's multipliers; 2 of 5 experts, each one's gate on top of its up in one tensor; tied",
         shape(48, 6, 2, 40, num_local_experts=5, num_experts_per_tok=2, embedding_multiplier=0.6, attention_multiplier=0.2,
               residual_multiplier=0.7, logits_scaling=0.5, tie_word_embeddings=True, **rope(10000.0)), prompt=9, gguf=("f32",)),
    Case("granitemoeshared", "granitemoeshared", "bfloat16", "all of 3 experts beside one that all tokens share, of another width",
         shape(32, 4, 1, 24, num_local_experts=3, num_experts_per_tok=3, shared_intermediate_size=40, embedding_multiplier=0.6,
               attention_multiplier=0.2, residual_multiplier=0.7, logits_scaling=0.5, **rope(10000.0)), prompt=9, gguf=("f32",)),
    Case("granite4", "granitemoehybrid", "bfloat16", "Granite's multipliers; attention in all layers, and a feed-forward whose gate lies on top of its up; tied",
         shape(48, 6, 2, 40, num_hidden_layers=2, num_local_experts=0, num_experts_per_tok=0, shared_intermediate_size=64, layer_types=["full_attention"] * 2,
               position_embedding_type="rope", mamba_n_heads=4, embedding_multiplier=0.6, attention_multiplier=0.2, residual_multiplier=0.7,
               logits_scaling=0.5, tie_word_embeddings=True, **rope(10000.0))),
    Case("granite4-moe", "granitemoehybrid", "float32", "2 of 3 experts beside one that all tokens share, and no positions; one key/value head",
         shape(32, 4, 1, 24, num_hidden_layers=2, num_local_experts=3, num_experts_per_tok=2, shared_intermediate_size=40,
               layer_types=["full_attention"] * 2, mamba_n_heads=4, embedding_multiplier=0.6, attention_multiplier=0.2, residual_multiplier=0.7,
               logits_scaling=0.5, **rope(10000.0)), prompt=9),
    Case("granite4-hybrid", "granitemoehybrid", "bfloat16", "three state spaces of 6 heads in two groups around attention without positions; "
         "300 tokens, in chunks of 16; tied",
         shape(48, 4, 2, 64, num_hidden_layers=4, max_position_embeddings=512, num_local_experts=0, num_experts_per_tok=0, shared_intermediate_size=64,
               layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"], position_embedding_type="nope",
               mamba_n_heads=6, mamba_n_groups=2, mamba_d_head=16, mamba_d_state=12, mamba_chunk_size=16, embedding_multiplier=0.6,
               attention_multiplier=0.2, residual_multiplier=0.7, logits_scaling=0.5, tie_word_embeddings=True, **rope(10000.0)),
         prompt=300, keep=8, gguf=("f32",), add=dict(layer_types=["mamba", "mamba", "attention", "mamba"])),
    Case("granite4-hybrid-moe", "granitemoehybrid", "float32", "2 of 3 experts beside one that all tokens share; attention with positions, then a state "
         "space of 5 heads with biases of its projections and none of its convolution, of three rows, which GPUs stage",
         shape(40, 5, 1, 24, num_hidden_layers=2, num_local_experts=3, num_experts_per_tok=2, shared_intermediate_size=40,
               layer_types=["full_attention", "linear_attention"], position_embedding_type="rope", mamba_n_heads=5, mamba_d_head=16,
               mamba_d_state=32, mamba_d_conv=3, mamba_conv_bias=False, mamba_proj_bias=True, embedding_multiplier=0.6, attention_multiplier=0.2,
               residual_multiplier=0.7, logits_scaling=0.5, **rope(10000.0)), prompt=20, keep=9),
    Case("falcon-h1", "falcon_h1", "float32", "attention and a state space of two groups side by side, and all of the numbers that parts are multiplied with, "
         "powers of two, since GGUF has them in its weights",
         shape(48, 4, 2, 64, head_dim=16, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=2, mamba_d_state=12, mamba_chunk_size=16,
               embedding_multiplier=2.0, lm_head_multiplier=0.5, attention_in_multiplier=2.0, key_multiplier=0.25, attention_out_multiplier=0.5,
               ssm_in_multiplier=4.0, ssm_out_multiplier=0.5, ssm_multipliers=[0.25, 0.5, 0.125, 4.0, 2.0], mlp_multipliers=[2.0, 0.5],
               **rope(10000.0)), prompt=40, keep=20, gguf=("f32",)),
    Case("falcon-h1-normed", "falcon_h1", "bfloat16", "a norm by groups in front of the gate, projections of the state space with biases; tied",
         shape(40, 2, 1, 48, mamba_d_ssm=96, mamba_n_heads=6, mamba_d_head=16, mamba_n_groups=3, mamba_d_state=32, mamba_chunk_size=16,
               mamba_rms_norm=True, mamba_norm_before_gate=True, mamba_proj_bias=True, ssm_in_multiplier=1.25,
               tie_word_embeddings=True, **rope(10000.0))),
    Case("bamba", "bamba", "bfloat16", "state spaces of one group around attention, by its layer's number, with half of each head rotated",
         shape(48, 4, 2, 64, num_hidden_layers=3, attn_layer_indices=[1], mamba_n_heads=6, mamba_d_head=16, mamba_d_state=16, mamba_chunk_size=16,
               **rope(10000.0, rope_type="default", partial_rotary_factor=0.5)), prompt=40, keep=20),
    Case("mamba", "mamba", "bfloat16", "state spaces alone whose elements decay by themselves, of 12 by 80; 290 tokens; the words of the authors beside Transformers'",
         dict(hidden_size=40, num_hidden_layers=3, expand=2, state_size=12, time_step_rank=8, layer_norm_epsilon=1e-5, pad_token_id=0),
         prompt=290, keep=8, gguf=("f32",), drop=("rms_norm_eps", "max_position_embeddings"),
         add=dict(d_model=40, d_inner=80, n_layer=3, ssm_cfg={}, rms_norm=True, fused_add_norm=True, pad_vocab_size_multiple=8)),
    Case("mamba-biased", "mamba", "float32", "three times the width, convolutions of three rows without biases, projections with them; tied",
         dict(hidden_size=64, num_hidden_layers=2, expand=3, state_size=32, time_step_rank=8, conv_kernel=3, use_bias=True, use_conv_bias=False, layer_norm_epsilon=1e-5,
              pad_token_id=0, tie_word_embeddings=True), prompt=8, drop=("rms_norm_eps", "max_position_embeddings")),
    Case("falcon-mamba", "falcon_mamba", "bfloat16", "B, C and the row that steps are made of normed; an inner width that the stated factor is not, as published",
         dict(hidden_size=48, num_hidden_layers=2, expand=16, intermediate_size=96, state_size=16, time_step_rank=8, layer_norm_epsilon=1e-5, pad_token_id=0),
         prompt=30, keep=20, gguf=("f32",), drop=("rms_norm_eps", "max_position_embeddings")),
    Case("jamba", "jamba", "bfloat16", "attention without positions in the second of every three layers, and 2 of 4 experts in every other feed-forward, chosen odds as they are",
         shape(48, 4, 2, 64, num_hidden_layers=3, attn_layer_period=3, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, num_experts=4,
               num_experts_per_tok=2, mamba_d_state=12, mamba_dt_rank=8, pad_token_id=0), prompt=7, gguf=("f32",)),
    Case("jamba-dense", "jamba", "float32", "no experts, a state space of 16 with biases of its projections and none of its convolution, of three rows; 300 tokens",
         shape(48, 4, 1, 48, num_hidden_layers=2, attn_layer_period=2, attn_layer_offset=1, num_experts=1, mamba_d_state=16, mamba_dt_rank=8, mamba_d_conv=3, mamba_expand=3,
               mamba_proj_bias=True, mamba_conv_bias=False, max_position_embeddings=512, pad_token_id=0), prompt=300, keep=8),
    Case("mamba2", "mamba2", "bfloat16", "state spaces alone, of 6 heads in two groups, behind norms; 300 tokens, in chunks of 16",
         dict(hidden_size=48, num_hidden_layers=3, expand=2, num_heads=6, head_dim=16, n_groups=2, state_size=12, chunk_size=16,
              layer_norm_epsilon=1e-5, pad_token_id=0), prompt=300, keep=8, gguf=("f32",), drop=("rms_norm_eps", "max_position_embeddings")),
    Case("mamba2-biased", "mamba2", "float32", "one group, convolutions of three rows without biases, projections with them; tied",
         dict(hidden_size=32, num_hidden_layers=2, expand=3, num_heads=6, head_dim=16, n_groups=1, state_size=32, conv_kernel=3, chunk_size=16,
              use_bias=True, use_conv_bias=False, layer_norm_epsilon=1e-5, pad_token_id=0, tie_word_embeddings=True), prompt=9,
         drop=("rms_norm_eps", "max_position_embeddings")),
    Case("mamba2-authors", "mamba2", "float32", "the authors' own folder: sizes in ssm_cfg, some left out, no model_type, 123 tokens in 128 rows; tied",
         dict(hidden_size=48, num_hidden_layers=2, expand=2, num_heads=4, head_dim=24, n_groups=1, state_size=128, chunk_size=256,
              layer_norm_epsilon=1e-5, pad_token_id=0, tie_word_embeddings=True), prompt=12,
         drop=("rms_norm_eps", "max_position_embeddings"), disguise="mamba_ssm"),
    Case("nemotron-h", "nemotron_h", "bfloat16", "layers that are one of state space (8 heads in 4 groups), feed-forward without a gate and attention without "
         "positions, by letters as published",
         shape(48, 4, 2, 64, layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"], head_dim=16, ssm_state_size=16,
               mamba_num_heads=8, mamba_head_dim=8, n_groups=4, chunk_size=16, pad_token_id=0),
         prompt=40, keep=20, gguf=("f32",), drop=("rms_norm_eps", "layers_block_type", "layer_types", *EXPERTS_OF_NEMOTRON),
         add=dict(hybrid_override_pattern="M-*M-", num_hidden_layers=5)),
    Case("nemotron-h-moe", "nemotron_h", "float32", "2 of 4 experts without gates, of corrected odds, beside one that all tokens share; biases of projections",
         shape(40, 4, 1, 64, layers_block_type=["moe", "full_attention", "linear_attention", "moe"], head_dim=8, ssm_state_size=32, mamba_num_heads=5,
               mamba_head_dim=16, n_groups=1, chunk_size=16, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
               moe_shared_expert_intermediate_size=32, routed_scaling_factor=1.5, use_bias=True, pad_token_id=0), prompt=9),
    Case("olmo3", "olmo3", "bfloat16", "OLMo 2 with windows of 8 in all layers but the fourth, which alone is stretched by yarn",
         shape(64, 4, 2, 64, num_hidden_layers=4, pad_token_id=0, sliding_window=8, max_position_embeddings=128,
               rope_parameters=dict(full_attention=dict(rope_theta=10000.0, rope_type="yarn", factor=4.0, beta_fast=32.0, beta_slow=1.0,
                                                        attention_factor=1.1386294361119891, original_max_position_embeddings=32),
                                    sliding_attention=dict(rope_theta=10000.0, rope_type="default"))),
         prompt=40, keep=20, gguf=("f32",)),
    Case("exaone4", "exaone4", "bfloat16", "norms behind sublayers and of each head; windows of 8, and a fourth layer that sees all and is not rotated",
         shape(48, 4, 2, 64, num_hidden_layers=4, head_dim=16, sliding_window=8, sliding_window_pattern=4, **rope(10000.0)), gguf=("f32",)),
    Case("exaone4-full", "exaone4", "bfloat16", "no windows, so that all layers are rotated; llama3 rope scaling; three heads on one, tied",
         shape(48, 3, 1, 64, sliding_window=None, layer_types=["full_attention"] * 2, tie_word_embeddings=True,
               **rope(200.0, **LLAMA3_SCALING)), gguf=("f32",)),
    Case("ernie4_5", "ernie4_5", "bfloat16", "heads rotated in adjacent pairs, biases everywhere; seven heads on one, tied",
         shape(56, 7, 1, 72, head_dim=16, use_bias=True, tie_word_embeddings=True, vocab_size=101, **rope(500000.0)), gguf=("f32",)),
    Case("seed_oss", "seed_oss", "bfloat16", "biases on q, k and v, and none on what attention gives; head_dim 16 where hidden / heads is 12",
         shape(48, 4, 2, 64, head_dim=16, pad_token_id=0, attention_bias=True, **rope(10000.0)), gguf=("f32",)),
    Case("glm", "glm", "bfloat16", "norms in front alone, half of each head rotated in adjacent pairs, biases on q, k and v",
         shape(48, 3, 1, 64, head_dim=16, pad_token_id=0, attention_bias=True, rms_norm_eps=1e-5, max_position_embeddings=48,
               **rope(10000.0, rope_type="default", partial_rotary_factor=0.5)), gguf=("f32",)),
    Case("dots1", "dots1", "bfloat16", "3 of 6 experts by corrected odds beside two that all share, the first layer without; norms of each head",
         shape(48, 4, 2, 64, num_hidden_layers=3, head_dim=16, moe_intermediate_size=24, n_routed_experts=6, num_experts_per_tok=3,
               n_shared_experts=2, n_group=1, topk_group=1, first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=2.5,
               sliding_window=None, **rope(10000.0)), prompt=9, gguf=("f32",)),
    Case("afmoe", "afmoe", "bfloat16", "norms in front and behind, a gate on what attention gives, windows of 8 and a rotation in all layers but the "
         "fourth; 2 of 5 experts by corrected odds beside two that all share, in the fourth alone; a multiplied embedding",
         shape(48, 4, 2, 64, num_hidden_layers=4, head_dim=16, moe_intermediate_size=24, num_experts=5, num_experts_per_tok=2, num_shared_experts=2,
               num_dense_layers=3, route_scale=1.5, sliding_window=8, mup_enabled=True, **rope(10000.0)), prompt=9, gguf=("f32",),
         add=dict(n_group=1, num_expert_groups=1, num_limited_groups=1, topk_group=1, route_norm=True, score_func="sigmoid")),
    Case("dots1-bias", "dots1", "float32", "biases of attention, of its output too; 1 of 2 experts in every layer, not made to sum to one",
         shape(32, 4, 1, 24, head_dim=8, attention_bias=True, moe_intermediate_size=16, n_routed_experts=2, num_experts_per_tok=1,
               n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=0, norm_topk_prob=False, routed_scaling_factor=1.5,
               sliding_window=None, **rope(10000.0)), prompt=9),
    Case("olmoe", "olmoe", "bfloat16", "norms in front, and over whole rows of q and k; 3 of 7 experts by odds among all",
         shape(64, 4, 2, 40, num_experts=7, num_experts_per_tok=3, norm_topk_prob=False, rms_norm_eps=1e-5, pad_token_id=0, **rope(10000.0)),
         prompt=9, gguf=("f32",)),
    Case("gemma", "gemma", "bfloat16", "norms of 1 + w in front alone, a GELU gate, a scaled embedding; one key/value head",
         shape(48, 3, 1, 64, head_dim=16, pad_token_id=0, tie_word_embeddings=True, **rope(10000.0)), gguf=("f32",)),
    Case("qwen3-vl", "qwen3_vl", "bfloat16", "a checkpoint with images, as Transformers saves it: Qwen3's decoder, whose positions in three axes a text "
         "has alike; its tower beside it",
         shape(48, 3, 1, 64, head_dim=16, tie_word_embeddings=True, **rope(10000.0, rope_type="default", mrope_section=[4, 2, 2],
                                                                           mrope_interleaved=True)), images=True),
    Case("qwen2-vl", "qwen2_vl", "bfloat16", "the same of the first of them; one key/value head, tied",
         shape(32, 2, 1, 48, tie_word_embeddings=True, **rope(10000.0, rope_type="default", mrope_section=[4, 2, 2])), images=True),
    Case("qwen2.5-vl", "qwen2_5_vl", "bfloat16", "the same of Qwen2's, whose axes lie in blocks",
         shape(32, 2, 1, 48, **rope(10000.0, rope_type="default", mrope_section=[4, 2, 2])), images=True),
    Case("cohere", "cohere", "bfloat16", "attention and feed-forward side by side behind one layer norm without bias, adjacent pairs, logits by 0.5",
         shape(48, 4, 2, 64, layer_norm_eps=1e-5, logit_scale=0.5, tie_word_embeddings=True, pad_token_id=0, **rope(10000.0)),
         drop=("rms_norm_eps",), gguf=("f32",)),
    Case("cohere2", "cohere2", "bfloat16", "the same with windows of 8 in three layers of four, the fourth not rotated",
         shape(48, 4, 2, 64, num_hidden_layers=4, layer_norm_eps=1e-5, logit_scale=0.5, sliding_window=8, tie_word_embeddings=True,
               pad_token_id=0, **rope(10000.0)),
         drop=("rms_norm_eps",), add=dict(rotary_pct=1.0), gguf=("f32",)),
    Case("starcoder2", "starcoder2", "bfloat16", "layer norms, a feed-forward without a gate, biases everywhere",
         shape(48, 4, 1, 80, norm_epsilon=1e-5, use_bias=True, sliding_window=None, tie_word_embeddings=True, **rope(10000.0)),
         drop=("rms_norm_eps",), gguf=("f32",)),
    Case("starcoder2-window", "starcoder2", "float16", "a window of 8, no biases",
         shape(32, 2, 2, 48, norm_epsilon=1e-5, use_bias=False, sliding_window=8, tie_word_embeddings=True, **rope(10000.0)),
         drop=("rms_norm_eps",)),
    Case("stablelm", "stablelm", "bfloat16", "layer norms, a quarter of each head rotated, biases on q, k and v",
         shape(64, 4, 2, 80, layer_norm_eps=1e-5, use_qkv_bias=True, **rope(10000.0, rope_type="default", partial_rotary_factor=0.25)),
         drop=("rms_norm_eps",), gguf=("f32",)),
    Case("stablelm-beside", "stablelm", "float16", "attention and feed-forward side by side behind one norm",
         shape(48, 3, 3, 64, layer_norm_eps=1e-5, use_parallel_residual=True, **rope(10000.0, rope_type="default", partial_rotary_factor=0.5)),
         drop=("rms_norm_eps",)),
    Case("phi", "phi", "float16", "attention and feed-forward side by side behind one norm, biases everywhere and on the head, half of each head rotated",
         shape(48, 3, 3, 192, layer_norm_eps=1e-5, **rope(10000.0, rope_type="default", partial_rotary_factor=0.5)),
         drop=("rms_norm_eps",), gguf=("f32",)),
    Case("gpt-neox", "gpt_neox", "float16", "attention and feed-forward side by side, each behind a norm; q, k and v of each head on top of each other",
         dict(hidden_size=64, num_attention_heads=4, intermediate_size=96, layer_norm_eps=1e-5, hidden_act="gelu",
              **rope(10000.0, rope_type="default", partial_rotary_factor=0.25)),
         drop=("rms_norm_eps",), add=dict(rotary_pct=0.25), gguf=("f32",)),
    Case("gpt-neox-in-turn", "gpt_neox", "bfloat16", "one after the other; a half of the pairs rotated, as if all were",
         dict(hidden_size=48, num_attention_heads=3, intermediate_size=64, layer_norm_eps=1e-5, use_parallel_residual=False,
              **rope(10000.0, rope_type="proportional", partial_rotary_factor=0.5)), drop=("rms_norm_eps",)),
    Case("nemotron", "nemotron", "bfloat16", "layer norms of 1 + w, the square of what is positive, half of each head rotated",
         shape(64, 4, 2, 80, norm_eps=1e-5, **rope(10000.0, rope_type="default", partial_rotary_factor=0.5)), drop=("rms_norm_eps",), gguf=("f32",)),
    Case("arcee", "arcee", "bfloat16", "a feed-forward without a gate, of the square of what is positive",
         shape(48, 4, 2, 64, rms_norm_eps=1e-5, **rope(10000.0)), gguf=("f32",)),
    Case("hunyuan", "hunyuan_v1_dense", "bfloat16", "norms of each head behind the rotation; tied",
         shape(48, 4, 2, 64, head_dim=16, pad_token_id=0, eod_token_id=2, tie_word_embeddings=True, rms_norm_eps=1e-5, **rope(10000.0)), gguf=("f32",)),
    Case("hunyuan-alpha", "hunyuan_v1_dense", "bfloat16", "a base that is stretched for all contexts",
         shape(32, 3, 1, 64, head_dim=16, pad_token_id=0, eod_token_id=2, rms_norm_eps=1e-5,
               **rope(200.0, rope_type="dynamic", alpha=8.0, factor=1.0, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0)), v4={}),
    Case("hunyuan-moe", "hunyuan_v1_moe", "bfloat16", "2 of 4 experts beside one that all tokens share; norms of each head behind the rotation; three heads on one",
         shape(48, 3, 1, 40, head_dim=16, pad_token_id=0, eod_token_id=2, num_experts=4, moe_topk=2, rms_norm_eps=1e-5, **rope(10000.0)), prompt=9),
    Case("minicpm", "granite", "bfloat16", "numbers that embeddings, sublayers and logits are multiplied with, as MiniCPM states them",
         shape(48, 6, 2, 64, embedding_multiplier=2.0, attention_multiplier=8 ** -0.5, residual_multiplier=1.4 / 2 ** 0.5, logits_scaling=48 / 32,
               **rope(10000.0)), disguise="minicpm", gguf=("f32",)),
    Case("internlm2", "llama", "bfloat16", "q, k and v in one matrix, by groups of heads",
         shape(48, 6, 2, 64, rms_norm_eps=1e-5, **rope(10000.0)), disguise="internlm2", gguf=("f32",)),
    Case("internlm3", "qwen2", "bfloat16", "biases by a key of its own, a base for a context of 128, six times that of 32 positions",
         shape(48, 4, 2, 64, max_position_embeddings=32, **rope(200.0, rope_type="dynamic", factor=6.0)), prompt=50, keep=8, context=128,
         disguise="internlm3"),
    Case("lfm2", "lfm2", "bfloat16", "convolutions of three rows between two gates, and attention with norms of each head in the second and fourth layer",
         shape(48, 4, 2, 80, num_hidden_layers=4, norm_eps=1e-5, conv_L_cache=3, block_auto_adjust_ff_dim=False, tie_word_embeddings=True,
               layer_types=["conv", "full_attention", "conv", "full_attention"], pad_token_id=0, **rope(10000.0)),
         drop=("rms_norm_eps",), gguf=("f32",)),
    Case("lfm2-adjusted", "lfm2", "float32", "a feed-forward of two thirds, rounded up; layers by the numbers of those that are attention; 300 tokens",
         shape(32, 3, 1, 100, head_dim=16, norm_eps=1e-5, conv_L_cache=4, block_multiple_of=32, block_ffn_dim_multiplier=1.0,
               tie_word_embeddings=True, full_attn_idxs=[1], pad_token_id=0, max_position_embeddings=512, **rope(10000.0)),
         drop=("rms_norm_eps", "layer_types"), prompt=300, keep=8),
    Case("qwen3-vl-moe", "qwen3_vl_moe", "bfloat16", "a checkpoint with images, whose decoder is Qwen3-MoE: 2 of 4 experts in stacks",
         shape(48, 3, 1, 64, head_dim=16, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2,
               **rope(10000.0, rope_type="default", mrope_section=[4, 2, 2], mrope_interleaved=True)), prompt=9, images=True),
    Case("gpt2", "gpt2", "float32", "learned positions, layer norms with biases, matrices [in, out], q, k and v in one; tied",
         dict(n_embd=48, n_head=3, n_inner=None, n_ctx=256, tie_word_embeddings=True, vocab_size=127), drop=("rms_norm_eps",), gguf=("f32",)),
    Case("gpt2-scaled", "gpt2", "float16", "scores divided by the layer's number, a feed-forward of a width of its own, exact GELU, untied",
         dict(n_embd=40, n_head=5, n_inner=72, activation_function="gelu", scale_attn_by_inverse_layer_idx=True, n_layer=3),
         drop=("rms_norm_eps",)),
    Case("llama3-beyond", "llama", "bfloat16", "llama3 rope scaling, three times beyond the first 32 positions",
         shape(48, 6, 2, 64, num_hidden_layers=1, **rope(200.0, **LLAMA3_SCALING)), prompt=90, keep=8, gguf=("f16",)),
    Case("llama-linear-beyond", "llama", "bfloat16", "linear rope scaling by 4, beyond the first 16 positions of 64",
         shape(32, 4, 2, 64, num_hidden_layers=1, max_position_embeddings=64, **rope(10000.0, rope_type="linear", factor=4.0)),
         prompt=50, keep=8, gguf=("f16",)),
    Case("llama-proportional", "llama", "bfloat16", "proportional rope: of eight pairs the first three turn, as they would if all did",
         shape(32, 2, 1, 64, num_hidden_layers=1, head_dim=16, **rope(1000.0, rope_type="proportional", partial_rotary_factor=0.4, factor=2.0))),
    Case("llama-dynamic-beyond", "llama", "bfloat16", "dynamic rope scaling: the base for a context of 128, four times that of 32 positions",
         shape(32, 4, 2, 64, num_hidden_layers=1, max_position_embeddings=32, **rope(200.0, rope_type="dynamic", factor=2.0)),
         prompt=90, keep=8, context=128, add=rope(200.0, rope_type="dynamic", factor=2.0, original_max_position_embeddings=16)),
    Case("qwen2-yarn-beyond", "qwen2", "bfloat16", "yarn rope scaling by 4, three times beyond the first 32 positions",
         shape(32, 2, 1, 64, num_hidden_layers=1, max_position_embeddings=128,
               **rope(10000.0, rope_type="yarn", factor=4.0, original_max_position_embeddings=32)), prompt=90, keep=8, gguf=("f16",),
         add=dict(original_max_position_embeddings=32, **rope(10000.0, rope_type="yarn", factor=4.0, original_max_position_embeddings=16))),
    Case("llama-40", "llama", "bfloat16", "heads of 40, five of them on one, vocabulary 109",
         shape(40, 5, 1, 56, head_dim=40, vocab_size=109, **rope(10000.0))),
    Case("llama-96", "llama", "bfloat16", "heads of 96, three on one, vocabulary 101",
         shape(48, 3, 1, 48, num_hidden_layers=1, head_dim=96, vocab_size=101, **rope(10000.0))),
    Case("llama-192", "llama", "bfloat16", "heads of 192",
         shape(32, 2, 2, 48, num_hidden_layers=1, head_dim=192, **rope(10000.0))),
    Case("llama-256", "llama", "bfloat16", "heads of 256, seven on one",
         shape(56, 7, 1, 48, num_hidden_layers=1, head_dim=256, **rope(10000.0))),
    Case("mlx", "llama", "bfloat16", "MLX's affine groups: 4 bits in groups of 64, two layers by settings of their own; tied",
         shape(64, 4, 2, 128, head_dim=16, tie_word_embeddings=True, **rope(10000.0)),
         mlx={"group_size": 64, "bits": 4, "model.layers.0.self_attn.o_proj": {"group_size": 32, "bits": 4},
              "model.layers.1.mlp.down_proj": {"group_size": 32, "bits": 8}}),
    Case("mlx-gpt2", "gpt2", "bfloat16", "matrices [out, in]",
         dict(n_embd=40, n_head=5, n_inner=None, n_ctx=256, n_layer=3, tie_word_embeddings=True), drop=("rms_norm_eps",), lm={}),
    Case("mlx-mixtral", "mixtral", "bfloat16", "experts in three stacks",
         shape(32, 4, 2, 48, num_local_experts=3, num_experts_per_tok=2, rms_norm_eps=1e-5, **rope(10000.0)), prompt=9, lm={}),
    Case("mlx-qwen2-moe", "qwen2_moe", "bfloat16", "experts in three stacks; 4 bits, the shared expert's gate and the router too",
         shape(32, 4, 1, 64, moe_intermediate_size=32, shared_expert_intermediate_size=32, num_experts=5, num_experts_per_tok=2,
               norm_topk_prob=False, **rope(10000.0)), prompt=9, lm=dict(group_size=32, bits=4)),
    Case("mlx-qwen3-moe", "qwen3_moe", "bfloat16", "the same, the first layer dense; 4 bits, routers of 8",
         shape(64, 3, 1, 64, num_hidden_layers=3, head_dim=16, moe_intermediate_size=32, num_experts=6, num_experts_per_tok=3,
               norm_topk_prob=True, mlp_only_layers=[0], **rope(1000000.0)), prompt=9, lm=dict(group_size=32, bits=4)),
    Case("mlx-qwen3-next", "qwen3_next", "bfloat16", "norms as they are used, taps [channels, kernel, 1]",
         shape(32, 2, 1, 64, head_dim=32, moe_intermediate_size=24, shared_expert_intermediate_size=40,
               layer_types=["linear_attention", "full_attention"], full_attention_interval=2,
               num_experts=4, num_experts_per_tok=2, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
               linear_value_head_dim=16, **rope(10000.0, rope_type="default", partial_rotary_factor=0.25)), prompt=9, lm={}),
    Case("mlx-qwen3.5", "qwen3_5", "bfloat16", "the same of a dense hybrid; 4 bits",
         shape(64, 4, 1, 64, head_dim=16, full_attention_interval=2, layer_types=["linear_attention", "full_attention"],
               linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
               **rope(10000.0, rope_type="default", partial_rotary_factor=0.25)), prompt=9, lm=dict(group_size=32, bits=4)),
    Case("mlx-qwen3.5-moe", "qwen3_5_moe", "bfloat16", "the same of a mixture; 4 bits, routers of 8",
         dict(hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32, moe_intermediate_size=32,
              shared_expert_intermediate_size=32, num_experts=5, num_experts_per_tok=2, full_attention_interval=2,
              layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2, linear_num_value_heads=2,
              linear_key_head_dim=8, linear_value_head_dim=16, tie_word_embeddings=False,
              **rope(10000.0, rope_type="default", partial_rotary_factor=0.25)), prompt=9, stacked=True, lm=dict(group_size=32, bits=4)),
    Case("mlx-phimoe", "phimoe", "bfloat16", "experts in three stacks",
         shape(64, 4, 2, 32, num_local_experts=4, num_experts_per_tok=2, router_jitter_noise=0.1, attention_bias=True, lm_head_bias=True,
               rms_norm_eps=1e-5, **rope(10000.0)), prompt=6, lm={}),
    Case("mlx-gpt-oss", "gpt_oss", "bfloat16", "MXFP4 experts in three stacks of rows, biases beside them; everything else in 8 bits",
         shape(64, 4, 2, 32, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8, rms_norm_eps=1e-5,
               **rope(10000.0)), prompt=14, lm=dict(group_size=32, bits=8)),
    Case("mlx-llama4", "llama4", "bfloat16", "experts in three stacks, gate and up apart; 8 bits",
         dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=32, intermediate_size_mlp=64,
              num_hidden_layers=4, num_local_experts=4, num_experts_per_tok=1, interleave_moe_layer_step=2, pad_token_id=0,
              rms_norm_eps=1e-5, **rope(200.0, **LLAMA3_SCALING)), prompt=12, lm=dict(group_size=32, bits=8)),
    Case("mlx-glm4-moe", "glm4_moe", "bfloat16", "experts in three stacks; 4 bits",
         shape(64, 4, 2, 64, head_dim=16, pad_token_id=0, attention_bias=True, use_qk_norm=True,
               moe_intermediate_size=32, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=1, n_group=1, topk_group=1,
               routed_scaling_factor=1.5, **rope(10000.0, rope_type="default", partial_rotary_factor=0.5)), prompt=9,
         lm=dict(group_size=32, bits=4)),
    Case("deepseek2-lite", "deepseek_v2", "bfloat16", "latent attention with keys of 24, of which 8 turn, and values of 16; 2 of 5 experts by odds among all beside "
         "two that all share, the first layer without; yarn by 4 of 16 trained positions, whose logarithm is in the scores",
         shape(48, 3, 3, 64, num_hidden_layers=3, q_lora_rank=None, kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
               moe_intermediate_size=24, n_routed_experts=5, num_experts_per_tok=2, n_shared_experts=2, first_k_dense_replace=1, topk_method="greedy",
               n_group=1, topk_group=1, routed_scaling_factor=1.0, max_position_embeddings=64,
               **rope(10000.0, rope_type="yarn", factor=4.0, beta_fast=32, beta_slow=1, mscale=0.707, mscale_all_dim=0.707,
                      original_max_position_embeddings=16)), prompt=24, keep=12, v4={}, gguf=("f32",)),
    Case("deepseek2", "deepseek_v2", "float32", "queries through a row of 16, biases; 2 of 6 experts in the 2 of 3 groups with the greatest scores",
         shape(32, 4, 4, 48, q_lora_rank=16, kv_lora_rank=32, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=16, attention_bias=True,
               moe_intermediate_size=16, n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=0,
               topk_method="group_limited_greedy", n_group=3, topk_group=2, routed_scaling_factor=3.0, **rope(10000.0)), prompt=9),
    Case("deepseek3", "deepseek_v3", "bfloat16", "3 of 8 experts by corrected odds in the best 2 of 4 groups, the first layer without; values of 48, wider than keys of 40",
         shape(64, 4, 4, 64, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=8, v_head_dim=48,
               moe_intermediate_size=32, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=1, first_k_dense_replace=1, n_group=4, topk_group=2,
               norm_topk_prob=True, routed_scaling_factor=2.5, num_mtp_layers=1, max_position_embeddings=64,
               **rope(10000.0, rope_type="yarn", factor=4.0, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0,
                      original_max_position_embeddings=16)), prompt=6, v4={}, gguf=("f32", "q8_0")),
    Case("moonlight", "deepseek_v3", "bfloat16", "the same form without a row for queries, in one group: 2 of 4 experts, two that all share",
         shape(32, 2, 2, 48, q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
               moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=2, first_k_dense_replace=1, n_group=1, topk_group=1,
               norm_topk_prob=True, routed_scaling_factor=2.446, num_mtp_layers=0, **rope(50000.0)), prompt=9),
    Case("glm4-moe-lite", "glm4_moe_lite", "bfloat16", "keys and values of 32 with norms of two eps, 2 of 4 experts, the layers without them by a list",
         shape(32, 5, 5, 48, num_hidden_layers=3, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=24, qk_rope_head_dim=8, v_head_dim=32,
               moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, mlp_layer_types=["dense", "sparse", "sparse"],
               n_group=1, topk_group=1, rms_norm_eps=1e-5, routed_scaling_factor=1.8, **rope(1000000.0)), prompt=9,
         add=dict(first_k_dense_replace=1), gguf=("f32",)),
    Case("youtu", "youtu", "bfloat16", "latent attention and no experts; rotated elements in halves; tied",
         shape(32, 3, 3, 64, q_lora_rank=16, kv_lora_rank=24, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, rope_interleave=False,
               tie_word_embeddings=True, **rope(10000.0)), gguf=()),
    Case("minicpm3", "minicpm3", "bfloat16", "latent attention whose rotated elements lie in halves, and numbers that embeddings, sublayers and logits are multiplied with; longrope",
         shape(48, 4, 4, 64, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, scale_emb=2, scale_depth=1.4,
               dim_model_base=32, max_position_embeddings=64, original_max_position_embeddings=16,
               **rope(10000.0, rope_type="longrope", original_max_position_embeddings=16, short_factor=[1.0, 1.25, 1.5, 2.0],
                      long_factor=[1.5, 3.0, 6.0, 12.0]))),
    Case("exaone", "llama", "bfloat16", "Llama with names of its own for weights and sizes; llama3 rope scaling",
         shape(48, 6, 2, 64, rms_norm_eps=1e-5, head_dim=8, **rope(200.0, **LLAMA3_SCALING)), disguise="exaone", gguf=("f32",)),
    Case("ernie4_5-moe", "ernie4_5_moe", "bfloat16", "2 of 5 experts by the softmax over all scores and a correction, beside two that all share; the first layer without; adjacent pairs, tied",
         shape(48, 4, 2, 64, num_hidden_layers=3, use_bias=False, moe_intermediate_size=24, moe_k=2, moe_num_experts=5, moe_num_shared_experts=2,
               moe_layer_start_index=1, tie_word_embeddings=True, **rope(500000.0)), prompt=9),
    Case("lfm2-moe", "lfm2_moe", "bfloat16", "a convolution and two layers of attention, the first without experts; 2 of 5 by corrected odds",
         shape(48, 4, 2, 64, num_hidden_layers=3, norm_eps=1e-5, conv_L_cache=3, moe_intermediate_size=24, num_dense_layers=1, num_experts=5, num_experts_per_tok=2,
               layer_types=["conv", "full_attention", "full_attention"], tie_word_embeddings=True, pad_token_id=0, routed_scaling_factor=1.0, **rope(10000.0)),
         drop=("rms_norm_eps",), prompt=9),
    Case("minimax-m2", "minimax_m2", "bfloat16", "norms over whole rows of q and k, half of each head rotated, 2 of 5 experts by corrected odds",
         shape(48, 4, 2, 24, head_dim=16, num_local_experts=5, num_experts_per_tok=2, **rope(10000.0, rope_type="default", partial_rotary_factor=0.5)), prompt=9),
    Case("gptj", "gptj", "float16", "attention and feed-forward side by side behind one norm, half of each head rotated in adjacent pairs, a bias on the head",
         dict(n_embd=48, n_head=3, n_layer=2, n_positions=256, n_inner=None, rotary_dim=8), drop=("rms_norm_eps",)),
    Case("gpt-neo", "gpt_neo", "bfloat16", "a window of 8 in the second layer, scores that are not scaled, learned positions; tied",
         dict(hidden_size=48, num_heads=4, num_layers=2, attention_types=[[["global", "local"], 1]], window_size=8, intermediate_size=80,
              tie_word_embeddings=True), drop=("rms_norm_eps",)),
    Case("gpt-bigcode", "gpt_bigcode", "bfloat16", "four query heads on one, learned positions",
         dict(n_embd=48, n_head=4, n_layer=2, n_positions=256, n_inner=None, multi_query=True, tie_word_embeddings=False, vocab_size=131), drop=("rms_norm_eps",), gguf=("f32",)),
    Case("opt", "opt", "float16", "learned positions behind two more in the table, a feed-forward of what is positive, tied",
         dict(hidden_size=48, num_attention_heads=3, ffn_dim=80, word_embed_proj_dim=48, tie_word_embeddings=True, pad_token_id=0), drop=("rms_norm_eps",)),
    Case("falcon", "falcon", "bfloat16", "three query heads on one, attention and feed-forward side by side behind one norm, tied",
         dict(hidden_size=48, num_attention_heads=3, new_decoder_architecture=False, multi_query=True, parallel_attn=True, bias=False, alibi=False,
              tie_word_embeddings=True, **rope(10000.0)), drop=("rms_norm_eps",), add=dict(num_kv_heads=1), gguf=("f32",)),
    Case("falcon-new", "falcon", "bfloat16", "four query heads on two by groups, each sublayer behind a norm of its own, biases",
         dict(hidden_size=48, num_attention_heads=4, num_kv_heads=2, new_decoder_architecture=True, ffn_hidden_size=80, bias=True, alibi=False,
              **rope(10000.0)), drop=("rms_norm_eps",)),
    Case("cohere-plus", "cohere", "bfloat16", "norms of heads of q and k, with weights of each; four query heads on two",
         shape(48, 4, 2, 64, logit_scale=0.25, use_qk_norm=True, tie_word_embeddings=True, pad_token_id=0, **rope(10000.0)), drop=("rms_norm_eps",), gguf=("f32",)),
    Case("stablelm-12b", "stablelm", "bfloat16", "norms of heads of q and k, with weights of each, behind which half is rotated; sublayers side by side",
         shape(48, 6, 2, 64, qk_layernorm=True, use_parallel_residual=True, **rope(10000.0, rope_type="default", partial_rotary_factor=0.5)),
         drop=("rms_norm_eps",)),
    Case("phi-normed", "phi", "float32", "norms of heads of q and k, of one weight and bias for all; one key/value head",
         shape(32, 4, 1, 64, qk_layernorm=True, **rope(10000.0, rope_type="default", partial_rotary_factor=0.5)), drop=("rms_norm_eps",)),
    Case("persimmon", "persimmon", "bfloat16", "norms of heads of q and k, half of which is rotated; q, k and v by turns of heads; squares of what is positive",
         dict(hidden_size=48, num_attention_heads=3, intermediate_size=80, **rope(25000.0, rope_type="default", partial_rotary_factor=0.5)), drop=("rms_norm_eps",)),
    Case("opt-sums", "opt", "float32", "sums that are normed in the place of what sublayers read, and embeddings narrower than the residual stream; tied",
         dict(hidden_size=48, num_attention_heads=3, ffn_dim=80, word_embed_proj_dim=24, do_layer_norm_before=False, tie_word_embeddings=True, pad_token_id=0),
         drop=("rms_norm_eps",)),
    Case("openai-gpt", "openai-gpt", "float16", "sums that are normed in the place of what sublayers read; matrices the other way round, untied",
         dict(n_embd=48, n_head=3, n_layer=2, n_positions=256, tie_word_embeddings=False), drop=("rms_norm_eps", "max_position_embeddings")),
    Case("biogpt", "biogpt", "float16", "learned positions behind two more in the table, a scaled embedding, untied; a number of norms that its class does not read",
         dict(hidden_size=48, num_attention_heads=3, intermediate_size=80, layer_norm_eps=0.1, pad_token_id=0), drop=("rms_norm_eps",)),
    Case("orion", "stablelm", "bfloat16", "Llama with layer norms",
         shape(48, 4, 2, 64, rms_norm_eps=1e-5, layer_norm_eps=1e-5, **rope(10000.0, rope_type="default", partial_rotary_factor=1.0)), disguise="orion", gguf=("f32",)),
    Case("xverse", "llama", "bfloat16", "Llama under a name of its own", shape(48, 4, 4, 64, **rope(10000.0)), disguise="xverse", gguf=("f32",)),
    Case("internlm", "llama", "bfloat16", "Llama under a name of its own, with biases of attention",
         shape(48, 4, 4, 64, attention_bias=True, **rope(10000.0)), disguise="internlm"),
    Case("zamba2", "zamba2", "bfloat16", "two blocks that take turns in front of three of five state spaces, matrices of each use added to q, k and v, rotated; tied",
         shape(48, 4, 4, 64, num_hidden_layers=5, layers_block_type=["linear_attention", "hybrid", "linear_attention", "hybrid", "hybrid"], num_mem_blocks=2,
               adapter_rank=8, use_shared_attention_adapter=True, use_mem_rope=True, n_mamba_heads=6, mamba_d_state=12, chunk_size=16, pad_token_id=0,
               tie_word_embeddings=True, **rope(10000.0)), prompt=20),
    Case("zamba2-plain", "zamba2", "float32", "a block of each layer's own, since Transformers shares none where the head is untied; nothing added to q, k and v, no positions; two groups; more than a chunk; biases",
         shape(32, 4, 2, 48, add_bias_linear=True, num_hidden_layers=3, layers_block_type=["linear_attention", "hybrid", "hybrid"], adapter_rank=8, n_mamba_heads=4, mamba_ngroups=2,
               mamba_d_state=16, chunk_size=16, pad_token_id=0), prompt=40, keep=20, add=dict(layers_block_type=["mamba", "hybrid", "hybrid"])),
    Case("minimax", "minimax", "bfloat16", "two layers of lightning attention around one of attention, 2 of 4 experts; factors on normed inputs and on what is added; "
         "more than a block of 16",
         shape(48, 4, 2, 40, num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"], block_size=16, num_local_experts=4,
               num_experts_per_tok=2, full_attn_alpha_factor=1.5, full_attn_beta_factor=0.75, linear_attn_alpha_factor=1.25, linear_attn_beta_factor=0.5,
               mlp_alpha_factor=0.8, mlp_beta_factor=1.1, **rope(10000.0)), prompt=40, keep=20),
    Case("openelm", "qwen3", "bfloat16", "blocks of 2, 4 and 6 query heads on 1, 2 and 2, and of widths of their own; q, k and v in one matrix, gate and up in another; tied",
         shape(48, 6, 2, 80, num_hidden_layers=3, head_dim=16, tie_word_embeddings=True, **rope(10000.0)), sizes=((2, 1, 32), (4, 2, 48), (6, 2, 80)),
         disguise="openelm", gguf=("f32",)),
    Case("jais", "stablelm", "float32", "GPT-2's names and matrices the other way round, slopes of three heads, scores divided by the size of a head, a gated feed-forward; factors on embeddings and logits; biases everywhere",
         shape(48, 3, 3, 72, use_qkv_bias=True, **rope(10000.0, rope_type="default", partial_rotary_factor=1.0)), disguise="jais", slopes=True, gguf=("f32",)),
    Case("falcon-rw", "falcon", "bfloat16", "slopes of 16 heads, most of which bf16 rounds, in the place of rotations; sublayers in turn, biases",
         dict(hidden_size=64, num_attention_heads=16, new_decoder_architecture=False, multi_query=False, parallel_attn=False, bias=True, alibi=True,
              **rope(10000.0)), drop=("rms_norm_eps",)),
    Case("xglm", "xglm", "float16", "positions as sines from the third on, a scaled embedding, biases everywhere, untied",
         dict(d_model=48, attention_heads=3, ffn_dim=80, num_layers=2, pad_token_id=0), drop=("rms_norm_eps",)),
    Case("apertus", "apertus", "bfloat16", "a function with numbers of each layer in a feed-forward without a gate; norms of each head; llama3 rope",
         shape(48, 4, 2, 80, pad_token_id=0, rms_norm_eps=1e-5,
               **rope(10000.0, rope_type="llama3", factor=4.0, original_max_position_embeddings=32, low_freq_factor=1.0, high_freq_factor=4.0)),
         gguf=("f32",)),
    Case("olmo", "olmo", "bfloat16", "layer norms without weights",
         shape(48, 4, 2, 64, pad_token_id=0, **rope(10000.0)), drop=("rms_norm_eps",), gguf=("f32",)),
    Case("gemma3n", "gemma3n", "bfloat16", "four streams that predict each other, a product of low rank beside attention, gates of which two elements of "
         "five pass in the first layer and two of three in the third; inputs of 16 elements in every layer; the last two of five layers attend to keys and values of "
         "the second and third; feed-forwards of two widths",
         shape(32, 4, 2, [48, 64, 48, 48, 64], num_hidden_layers=5, head_dim=16, sliding_window=8, pad_token_id=0, hidden_size_per_layer_input=16,
               vocab_size_per_layer_input=128, num_kv_shared_layers=2, laurel_rank=8, activation_sparsity_pattern=[0.6, 0.0, 0.35, 0.0, 0.0],
               final_logit_softcapping=6.0, tie_word_embeddings=True,
               layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
               rope_parameters=dict(full_attention=dict(rope_theta=1000.0, rope_type="default"),
                                    sliding_attention=dict(rope_theta=10000.0, rope_type="default"))), gguf=("f32",)),
    Case("iquestcoder", "iquestcoder", "bfloat16", "Llama by another name", shape(48, 4, 2, 64, head_dim=16, rms_norm_eps=1e-5, **rope(10000.0)), gguf=("f32",)),
    Case("cwm", "cwm", "bfloat16", "windows of 8 in all of four layers but the first, llama3 rope scaling",
         shape(48, 4, 2, 64, num_hidden_layers=4, head_dim=16, sliding_window=8, rms_norm_eps=1e-5, **rope(200.0, **LLAMA3_SCALING)), drop=("layer_types",)),
    Case("helium", "helium", "bfloat16", "heads rotated in adjacent pairs everywhere, eps 1e-8",
         shape(48, 3, 1, 64, head_dim=16, rms_norm_eps=1e-8, pad_token_id=0, **rope(10000.0))),
    Case("hyperclovax", "hyperclovax", "bfloat16", "norms in front and behind, multipliers of embeddings, scores, sublayers and logits",
         shape(48, 4, 2, 64, head_dim=16, embedding_multiplier=2.0, attention_multiplier=0.2, residual_multiplier=0.7, logits_scaling=0.6,
               pad_token_id=0, **rope(10000.0))),
    Case("vaultgemma", "vaultgemma", "bfloat16", "Gemma 2 with norms in front alone: soft caps, a window of 8 in the first and third layer",
         shape(48, 4, 2, 64, num_hidden_layers=3, head_dim=16, query_pre_attn_scalar=24, sliding_window=8, pad_token_id=0,
               attn_logit_softcapping=2.0, final_logit_softcapping=6.0, tie_word_embeddings=True, **rope(10000.0))),
    Case("nanochat", "nanochat", "bfloat16", "norms without weights, of embeddings too, norms of each head behind a rotation the other way round; a soft cap on logits",
         shape(48, 3, 1, 80, pad_token_id=0, final_logit_softcapping=6.0, **rope(10000.0))),
    Case("jais2", "jais2", "bfloat16", "layer norms, a feed-forward without a gate of the square of what is positive, biases everywhere",
         shape(48, 4, 2, 64, head_dim=16, layer_norm_eps=1e-5, **rope(10000.0)), drop=("rms_norm_eps",), gguf=("f32",)),
    Case("mellum", "mellum", "bfloat16", "windows of 8 in the first and third layer, which rotate by a base of their own; 2 of 5 experts in all layers but the first",
         shape(48, 4, 2, 64, num_hidden_layers=3, head_dim=16, sliding_window=8, moe_intermediate_size=24, num_experts=5, num_experts_per_tok=2, pad_token_id=0,
               layer_types=["sliding_attention", "full_attention", "sliding_attention"], mlp_layer_types=["dense", "sparse", "sparse"],
               rope_parameters=dict(full_attention=dict(rope_theta=1000.0, rope_type="yarn", factor=4.0, original_max_position_embeddings=64),
                                    sliding_attention=dict(rope_theta=10000.0, rope_type="default"))), prompt=9),
    Case("mellum-even", "mellum", "bfloat16", "experts in all layers, and one base for layers with a window and those without, of which one is the last of four",
         shape(32, 2, 1, 24, num_hidden_layers=4, head_dim=16, sliding_window=8, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, pad_token_id=0,
               layer_types=["sliding_attention"] * 3 + ["full_attention"], mlp_layer_types=["sparse"] * 4,
               rope_parameters=dict(full_attention=dict(rope_theta=10000.0, rope_type="yarn", factor=4.0, original_max_position_embeddings=64),
                                    sliding_attention=dict(rope_theta=10000.0, rope_type="default"))), prompt=9, gguf=("f32",)),
    Case("exaone_moe", "exaone_moe", "bfloat16", "windows of 8 in three layers of four, the fourth not rotated; norms of each head; 2 of 5 experts by corrected odds "
         "beside two that all share, in the fourth alone",
         shape(48, 4, 2, 64, num_hidden_layers=4, head_dim=16, sliding_window=8, moe_intermediate_size=24, num_experts=5, num_experts_per_tok=2,
               num_shared_experts=2, first_k_dense_replace=3, rms_norm_eps=1e-5, pad_token_id=0, **rope(10000.0)), prompt=9, gguf=("f32",)),
    Case("solar_open", "solar_open", "bfloat16", "3 of 6 experts by corrected odds in every layer, beside one that all share; all of each head rotated",
         dict(hidden_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=16, moe_intermediate_size=24, n_routed_experts=6, num_experts_per_tok=3,
              rms_norm_eps=1e-5, routed_scaling_factor=1.5, pad_token_id=0, **rope(10000.0, rope_type="default", partial_rotary_factor=1.0)), prompt=9,
         gguf=("f32",)),
    Case("sarvam_moe", "sarvam_moe", "bfloat16", "q, k and v in one matrix and names of its own; 2 of 5 experts by corrected odds beside one that all share, behind a dense layer",
         shape(48, 4, 2, 64, head_dim=16, moe_intermediate_size=24, n_routed_experts=5, num_experts_per_tok=2, pad_token_id=0, **rope(10000.0)), prompt=9),
    Case("sarvam_mla", "sarvam_mla", "bfloat16", "DeepSeek-V3's form without a row for queries, in one group, behind a dense layer",
         shape(48, 3, 3, 64, kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, q_lora_rank=None, moe_intermediate_size=24,
               n_routed_experts=5, num_experts_per_tok=2, pad_token_id=0, **rope(10000.0)), prompt=9),
    Case("mistral4", "mistral4", "bfloat16", "latent attention whose queries grow every 16 positions; yarn of magnitude 1; 2 of 5 experts by odds made to sum to one, "
         "beside one that all share, behind a dense layer",
         shape(48, 3, 3, 64, kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, q_lora_rank=16, moe_intermediate_size=24,
               n_routed_experts=5, num_experts_per_tok=2, first_k_dense_replace=1, pad_token_id=0, max_position_embeddings=64,
               **rope(10000.0, type="yarn", rope_type="yarn", factor=4.0, original_max_position_embeddings=16, max_position_embeddings=64, beta_fast=32.0, beta_slow=1.0,
                      mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.3)), prompt=40, keep=20),
    Case("mistral4-even", "mistral4", "bfloat16", "queries that do not grow, as llama.cpp's converter has it; experts in all layers",
         shape(32, 2, 2, 24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=16, q_lora_rank=16, moe_intermediate_size=24,
               n_routed_experts=4, num_experts_per_tok=2, first_k_dense_replace=0, pad_token_id=0, max_position_embeddings=64,
               **rope(10000.0, type="yarn", rope_type="yarn", factor=4.0, original_max_position_embeddings=16, max_position_embeddings=64, beta_fast=32.0, beta_slow=1.0,
                      mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.0)), prompt=9, gguf=("f32",)),
    Case("axk1", "axk1", "bfloat16", "DeepSeek-V3's form, in two groups, with a norm behind experts; a dense layer first",
         shape(48, 3, 3, 64, kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, q_lora_rank=16, moe_intermediate_size=24,
               n_routed_experts=6, num_experts_per_tok=2, n_group=2, topk_group=1, pad_token_id=0, **rope(10000.0)), prompt=9),
    Case("cohere2_moe", "cohere2_moe", "bfloat16", "attention and a mixture side by side behind one layer norm: 2 of 5 experts and one that all share, averaged; a dense first "
         "layer, rotated without a window; windows of 8 in the others but the last",
         shape(48, 4, 2, 24, num_hidden_layers=4, head_dim=16, sliding_window=8, layer_norm_eps=1e-5, logit_scale=0.5, num_experts=5, num_experts_per_tok=2,
               num_shared_experts=1, prefix_dense_intermediate_size=64, first_k_dense_replace=1, sliding_window_pattern=3, tie_word_embeddings=True, pad_token_id=0,
               rms_norm_eps=None, **rope(10000.0)), prompt=9, gguf=("f32",)),
    Case("cohere2_moe-rms", "cohere2_moe", "float32", "RMS norms, the logistic function of the chosen scores, a sum with two experts that all share",
         shape(32, 4, 1, 24, head_dim=8, sliding_window=8, rms_norm_eps=1e-5, num_experts=4, num_experts_per_tok=2, num_shared_experts=2,
               expert_selection_fn="sigmoid", shared_expert_combination_strategy="sum", logit_scale=1.0, pad_token_id=0, **rope(10000.0)), prompt=9),
    Case("granite_swa", "granite_swa", "bfloat16", "sinks; windows of 8 in all of four layers but the first; a base for each layer, and none for the third; multipliers",
         shape(48, 4, 2, 64, num_hidden_layers=4, sliding_window=8, layer_rope_theta=[10000.0, 100.0, 0, 1000.0], embedding_multiplier=0.6,
               attention_multiplier=0.2, residual_multiplier=0.7, logits_scaling=0.5, tie_word_embeddings=True, **rope(10000.0))),
    Case("granitemoe_swa", "granitemoe_swa", "bfloat16", "the same with 2 of 5 experts beside one that all share, and one base",
         shape(48, 4, 2, 40, num_hidden_layers=2, sliding_window=8, num_local_experts=5, num_experts_per_tok=2, shared_intermediate_size=24, embedding_multiplier=0.6,
               attention_multiplier=0.2, residual_multiplier=0.7, logits_scaling=0.5, **rope(10000.0)), prompt=9, gguf=("f32",)),
    Case("flex_olmo", "flex_olmo", "bfloat16", "norms behind sublayers, and over whole rows of q and k; 2 of 5 experts by odds among all",
         shape(64, 4, 2, 40, num_experts=5, num_experts_per_tok=2, pad_token_id=0, **rope(10000.0)), prompt=9),
    Case("hy_v3", "hy_v3", "bfloat16", "norms of each head; 2 of 5 experts by corrected odds beside one that all share, behind a dense layer; names of its own",
         shape(48, 4, 2, 64, head_dim=16, moe_intermediate_size=24, num_experts=5, num_experts_per_tok=2, router_scaling_factor=1.5, rms_norm_eps=1e-5, **rope(10000.0)),
         prompt=9, gguf=("f32",)),
    Case("glm4v", "glm4v", "bfloat16", "a checkpoint with images, whose decoder is GLM-4's of 2025: half of each head rotated in adjacent pairs, biases",
         shape(48, 3, 1, 64, pad_token_id=0, rms_norm_eps=1e-5, **rope(10000.0, rope_type="default", partial_rotary_factor=0.5, mrope_section=[2, 1, 1])), images=True),
    Case("glm4v_moe", "glm4v_moe", "bfloat16", "a checkpoint with images, whose decoder is GLM-4.5: 2 of 5 experts by corrected odds beside one that all share, behind a dense "
         "layer; biases",
         shape(48, 3, 1, 64, head_dim=16, pad_token_id=0, moe_intermediate_size=24, n_routed_experts=5, num_experts_per_tok=2, attention_bias=True,
               **rope(10000.0, rope_type="default", partial_rotary_factor=0.5, mrope_section=[2, 1, 1])), prompt=9, images=True),
    Case("glm_ocr", "glm_ocr", "bfloat16", "the same without biases, and all of each head rotated",
         shape(48, 3, 1, 64, pad_token_id=0, rms_norm_eps=1e-5, **rope(10000.0, rope_type="default", mrope_section=[4, 2, 2])), images=True),
    Case("paddleocr_vl", "paddleocr_vl", "bfloat16", "a checkpoint with images, whose decoder is ERNIE 4.5",
         shape(48, 3, 1, 64, head_dim=16, pad_token_id=0, use_bias=False, **rope(10000.0, rope_type="default", mrope_section=[4, 2, 2])), images=True),
    Case("hunyuan_vl", "hunyuan_vl", "bfloat16", "a checkpoint with images, whose decoder is Hunyuan's: norms of each head behind the rotation",
         shape(48, 3, 1, 64, head_dim=16, pad_token_id=0, eod_token_id=2, tie_word_embeddings=True, rms_norm_eps=1e-5,
               **rope(10000.0, rope_type="default", mrope_section=[4, 2, 2])), images=True),
    Case("lfm3", "lfm3", "bfloat16", "convolutions of three rows, a window of 8 in the third of four layers, the fourth with half of the pairs turned; norms behind sublayers, a "
         "gate of each head",
         shape(48, 4, 2, 80, num_hidden_layers=4, head_dim=16, norm_eps=1e-5, conv_L_cache=3, sliding_window=8, pad_token_id=0, tie_word_embeddings=True,
               layer_types=["conv", "conv", "sliding_attention", "full_attention"],
               rope_parameters=dict(full_attention=dict(rope_theta=1000.0, rope_type="proportional", partial_rotary_factor=0.5),
                                    sliding_attention=dict(rope_theta=10000.0, rope_type="default"))), drop=("rms_norm_eps",)),
    Case("olmo_hybrid", "olmo_hybrid", "bfloat16", "two delta nets of four heads, whose corrections are up to twice what is missed, normed in front; attention "
         "over norms of whole rows, not rotated, normed behind",
         shape(48, 4, 4, 64, num_hidden_layers=3, layer_types=["linear_attention", "linear_attention", "full_attention"], linear_key_head_dim=12, linear_value_head_dim=24, pad_token_id=0, rope_parameters=dict(rope_type="default", rope_theta=None))),
    Case("laguna", "laguna", "bfloat16", "a softplus gate of each head; windows of 8 in the second and third layer, of which the second has six heads; half of each head rotated "
         "in the first; 2 of 5 experts by corrected odds beside one that all share, behind a dense layer",
         shape(48, 4, 2, 64, num_hidden_layers=3, head_dim=16, num_attention_heads_per_layer=[4, 6, 4], sliding_window=8, moe_intermediate_size=24, num_experts=5,
               num_experts_per_tok=2, shared_expert_intermediate_size=40, moe_routed_scaling_factor=1.5, pad_token_id=0, mlp_layer_types=["dense", "dense", "sparse"],
               layer_types=["full_attention", "sliding_attention", "sliding_attention"],
               rope_parameters=dict(full_attention=dict(rope_theta=1000.0, rope_type="yarn", factor=4.0, original_max_position_embeddings=64, partial_rotary_factor=0.5),
                                    sliding_attention=dict(rope_theta=10000.0, rope_type="default", partial_rotary_factor=1.0))), prompt=9,
         gguf=("f32",)),
    Case("laguna-elements", "laguna", "float32", "a softplus gate of each element, no windows, biases",
         shape(32, 4, 1, 24, head_dim=8, gating="per-element", attention_bias=True, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2,
               shared_expert_intermediate_size=16, mlp_layer_types=["sparse", "sparse"]), prompt=9),
    Case("mimo_v2_flash", "mimo_v2_flash", "bfloat16", "values of 16 elements and keys of 24, of which 8 turn; windows of 8 in the second and third layer, with sinks, twice the "
         "key/value heads and a base of their own; 2 of 5 experts by corrected odds behind a dense layer",
         shape(48, 4, 1, 64, num_hidden_layers=3, head_dim=24, v_head_dim=16, sliding_window=8, moe_intermediate_size=24, n_routed_experts=5, num_experts_per_tok=2,
               rms_norm_eps=1e-5, pad_token_id=0,
               rope_parameters=dict(full_attention=dict(rope_theta=1000.0, rope_type="default", partial_rotary_factor=0.334),
                                    sliding_attention=dict(rope_theta=10000.0, rope_type="default", partial_rotary_factor=0.334))), prompt=9,
         gguf=("f32",)),
    Case("kimi_linear", "kimi_linear", "bfloat16", "two delta nets of three heads, each element of whose keys forgets at a rate of its own, then latent attention without a rotation; "
         "2 of 5 experts by corrected odds beside one that all share, behind a dense layer",
         shape(48, 4, 4, 64, num_hidden_layers=3, layer_types=["linear_attention", "linear_attention", "full_attention"], linear_head_dim=16, linear_num_heads=3,
               kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, moe_intermediate_size=24, num_experts=5, num_experts_per_tok=2,
               routed_scaling_factor=1.5, rms_norm_eps=1e-5, pad_token_id=0), prompt=9),
    Case("kimi_linear-heads", "kimi_linear", "bfloat16", "nets of as many heads as attention has, as llama.cpp takes them to be",
         shape(32, 2, 2, 24, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], linear_head_dim=8, linear_num_heads=2,
               kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=16, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2,
               routed_scaling_factor=1.5, rms_norm_eps=1e-5, pad_token_id=0), prompt=9, gguf=("f32",)),
    Case("bailing_hybrid", "bailing_hybrid", "bfloat16", "two such delta nets, whose rates have a bound, then latent attention with a gate of each head; 2 of 6 experts in two groups "
         "beside one that all share, behind a dense layer",
         shape(48, 4, 4, 64, num_hidden_layers=3, layer_group_size=3, head_dim=8, kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
               moe_intermediate_size=24, num_experts=6, num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1, pad_token_id=0,
               **rope(10000.0)), prompt=7),
    Case("ernie4_5_vl_moe", "ernie4_5_vl_moe", "bfloat16", "a checkpoint with images, whose decoder is ERNIE 4.5 with further experts for tokens of images: 2 of 5 for text, beside two that "
         "all share, behind a dense layer",
         shape(48, 3, 1, 64, head_dim=16, pad_token_id=0, moe_intermediate_size=[24, 16], moe_num_experts=5, moe_k=2, moe_num_shared_experts=2, rms_norm_eps=1e-5,
               **rope(10000.0, rope_type="default", mrope_section=[3, 3, 2])), prompt=9, images=True),
    Case("smolvlm", "smolvlm", "bfloat16", "a checkpoint with images, whose decoder is Llama, below text_model",
         shape(48, 3, 1, 64, pad_token_id=0, **rope(10000.0)), images=True),
    Case("bloom", "bloom", "bfloat16", "slopes of six heads in the place of positions; a layer norm over embeddings, biases everywhere, untied; q, k and v by turns of heads",
         dict(hidden_size=48, num_attention_heads=6), drop=("rms_norm_eps", "max_position_embeddings"), add=dict(seq_length=256), gguf=("f32",)),
    Case("bloom-long", "bloom", "float16", "300 tokens: slopes cross a 256-token cache block; an untied head",
         dict(hidden_size=32, num_attention_heads=2), prompt=300, keep=8, drop=("rms_norm_eps", "max_position_embeddings"), add=dict(seq_length=512)),
    Case("mpt", "mpt", "bfloat16", "slopes of three heads, bounds on q, k and v, layer norms and products without biases, untied",
         dict(hidden_size=48, num_attention_heads=3, max_seq_len=256, attn_config=dict(clip_qkv=0.75)),
         drop=("rms_norm_eps", "max_position_embeddings"), gguf=("f32",)),
    Case("mpt-scaled", "mpt", "float32", "slopes of four heads, and a factor of its own on scores",
         dict(hidden_size=32, num_attention_heads=4, max_seq_len=256, attn_config=dict(softmax_scale=0.5), tie_word_embeddings=True),
         drop=("rms_norm_eps", "max_position_embeddings")),
    Case("bitnet", "bitnet", "bfloat16", "norms behind attention and behind the gate, the square of what is positive; matrices of -1, 0 and 1 in 2 bits, rows rounded to 8 bits",
         shape(64, 4, 2, 96, rms_norm_eps=1e-5, tie_word_embeddings=True, **rope(10000.0)), ternary="offline"),
    Case("bitnet-blocks", "bitnet", "bfloat16", "matrices of -1, 0 and 1 in 2 bits, whose rows are whole blocks of 256",
         shape(256, 4, 1, 256, num_hidden_layers=1, vocab_size=64, rms_norm_eps=1e-5, tie_word_embeddings=True, **rope(10000.0)), prompt=4, ternary="offline", below=True),
    Case("bitnet-online", "bitnet", "bfloat16", "the same of numbers that are rounded to three at every use; widths that groups of 32 do not divide",
         shape(48, 3, 1, 72, rms_norm_eps=1e-5, **rope(10000.0)), ternary="online"),
    Case("bitnet-silu", "bitnet", "float32", "the same with SiLU in the place of the square, as GGUF has it, and its embedding as the head",
         shape(48, 4, 2, 64, hidden_act="silu", tie_word_embeddings=True, rms_norm_eps=1e-5, **rope(10000.0)), gguf=("f32",)),
    Case("bitnet-plain", "bitnet", "float32", "the same without anything rounded",
         shape(48, 4, 2, 64, rms_norm_eps=1e-5, **rope(10000.0))),
    Case("codegen", "codegen", "float16", "GPT-J with q, v and k of a quarter of the heads below each other, four times; a bias on the head",
         dict(n_embd=64, n_head=8, n_layer=2, n_positions=256, n_inner=96, rotary_dim=4), drop=("rms_norm_eps", "max_position_embeddings")),
    Case("dbrx", "dbrx", "bfloat16", "layer norms without biases, bounds on q, k and v, 2 of 4 experts whose matrices lie below each other, those behind turned; a base that counts and one that does not",
         dict(d_model=48, n_heads=4, max_seq_len=256, attn_config=dict(clip_qkv=1.0, kv_n_heads=2, rope_theta=500.0),
              ffn_config=dict(hidden_size=48, ffn_hidden_size=40, moe_num_experts=4, moe_top_k=2), **rope(10000.0)), prompt=12,
         drop=("rms_norm_eps", "max_position_embeddings"), gguf=("f32",)),
    Case("qwen", "qwen2", "bfloat16", "the first Qwen: q, k and v in one matrix, which alone has a bias, under GPT-2's names; a feed-forward half as wide as is stated",
         shape(48, 4, 4, 80, **rope(10000.0)), disguise="qwen"),
    Case("baichuan", "llama", "bfloat16", "q, k and v in one matrix",
         shape(48, 4, 4, 64, **rope(10000.0)), disguise="baichuan"),
    Case("baichuan2", "llama", "bfloat16", "32 layers, by which llama.cpp tells the one that rotates; a head whose rows are divided by their lengths",
         shape(16, 2, 2, 16, num_hidden_layers=32, vocab_size=64, **rope(10000.0)), disguise="baichuan2", prompt=12),
    Case("baichuan2-sloped", "llama", "bfloat16", "40 layers with slopes of three heads on scores in the place of rotations; such a head",
         shape(24, 3, 3, 16, num_hidden_layers=40, vocab_size=64, **rope(10000.0)), disguise="baichuan2", prompt=12, slopes=True),
    Case("chatglm", "glm", "bfloat16", "the authors' own names, and q, k and v in one matrix with biases; a factor on the base",
         shape(48, 3, 1, 64, head_dim=16, pad_token_id=0, attention_bias=True, **rope(500000.0, rope_type="default", partial_rotary_factor=0.5)), disguise="chatglm"),
    Case("deepseek-moe", "qwen2_moe", "bfloat16", "2 of 5 experts by odds among all, which are not made to sum to one, beside two that all share; the first layer without",
         shape(48, 4, 4, 96, num_hidden_layers=3, moe_intermediate_size=24, shared_expert_intermediate_size=48, num_experts=5, num_experts_per_tok=2,
               norm_topk_prob=False, mlp_only_layers=[0], **rope(10000.0)), prompt=9, disguise="deepseek", gguf=("f32",)),
    Case("ling", "granitemoeshared", "bfloat16", "q, k and v in one matrix, 2 of 5 experts beside two that all share",
         shape(48, 4, 2, 24, num_local_experts=5, num_experts_per_tok=2, shared_intermediate_size=48, attention_multiplier=12 ** -0.5, **rope(10000.0)), prompt=9,
         disguise="bailing_moe", gguf=("f32",)),
    Case("ling2", "glm4_moe", "bfloat16", "q, k and v in one matrix, norms of each head, half of which is rotated; 2 of 6 experts by corrected odds, in the best of 2 groups, "
         "beside one that all share, behind a dense layer",
         shape(64, 4, 2, 64, num_hidden_layers=2, head_dim=16, pad_token_id=0, attention_bias=False, use_qk_norm=True, moe_intermediate_size=24, n_routed_experts=6,
               num_experts_per_tok=2, n_shared_experts=1, n_group=2, topk_group=1, first_k_dense_replace=1, routed_scaling_factor=2.5,
               **rope(10000.0, rope_type="default", partial_rotary_factor=0.5)), prompt=9, disguise="bailing_moe_v2", gguf=("f32",)),
    Case("nemotron-nas", "llama", "bfloat16", "blocks of four, two and one key/value heads, one without attention, one without anything, one with a product in its place; "
         "feed-forwards of three widths",
         shape(48, 4, 4, 256, num_hidden_layers=6, rms_norm_eps=1e-5, **rope(200.0, **LLAMA3_SCALING)),
         blocks=((4, 256), (None, 512), (2, 256), (None, 0), (-1, 256), (1, 256)), disguise="nemotron-nas", gguf=("f32",)),
    Case("nemotron-nas-alone", "llama", "float32", "a block of attention alone, without a feed-forward",
         shape(32, 2, 2, 256, num_hidden_layers=2, rms_norm_eps=1e-5, **rope(10000.0)), blocks=((2, 0), (1, 256)), disguise="nemotron-nas"),
    Case("deepseek_v32", "deepseek_v32", "bfloat16", "DeepSeek-V3's form, in two groups, with an indexer of more positions than there are; a dense layer first",
         shape(48, 3, 3, 64, kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, q_lora_rank=16, moe_intermediate_size=24, n_routed_experts=6,
               num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1, index_topk=64, index_head_dim=16, index_n_heads=2, pad_token_id=0,
               **rope(10000.0)), prompt=9, gguf=("f32",)),
    Case("glm_moe_dsa", "glm_moe_dsa", "bfloat16", "the same in one group, with norms that add more",
         shape(48, 3, 3, 64, kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, q_lora_rank=16, moe_intermediate_size=24, n_routed_experts=5,
               num_experts_per_tok=2, first_k_dense_replace=1, index_topk=32, index_head_dim=16, index_n_heads=2, rms_norm_eps=1e-3, pad_token_id=0,
               **rope(10000.0)), prompt=9, gguf=("f32",)),
    Case("deepseek_v32-chosen", "deepseek_v32", "bfloat16", "an indexer that chooses 8 of up to 26 positions in every layer",
         shape(48, 4, 4, 64, kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, q_lora_rank=16, moe_intermediate_size=24, n_routed_experts=4,
               num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=2, index_topk=8, index_head_dim=16, index_n_heads=8, pad_token_id=0,
               **rope(10000.0)), prompt=16),
    Case("glm_moe_dsa-chosen", "glm_moe_dsa", "bfloat16", "an indexer in the first and third of four layers, whose choice the layers behind them share",
         shape(48, 4, 4, 64, num_hidden_layers=4, kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, q_lora_rank=16, moe_intermediate_size=24,
               n_routed_experts=4, num_experts_per_tok=2, first_k_dense_replace=3, index_topk=8, index_head_dim=16, index_n_heads=8, rms_norm_eps=1e-3, pad_token_id=0,
               indexer_types=["full", "shared", "full", "shared"], **rope(10000.0)), prompt=16),
    Case("olmo-clip", "olmo", "bfloat16", "bounds on q, k and v",
         shape(48, 4, 2, 64, clip_qkv=0.75, pad_token_id=0, **rope(10000.0)), drop=("rms_norm_eps",), gguf=("f32",)),
    Case("muse-glimmer", "muse_glimmer", "bfloat16", "the class with images, of which the decoder alone is asked: embeddings that are normed, norms of heads without weights and a factor on "
         "queries, gates of attention; three layers within 8 positions, then one that sees all and is not rotated; logits times a factor within a bound",
         shape(48, 4, 2, 64, num_hidden_layers=4, head_dim=16, sliding_window=8, pad_token_id=0, eos_token_id=2, bos_token_id=1, rms_norm_eps=1e-5,
               qk_scale_factor=3.0, output_multiplier=0.75, final_logit_softcapping=8.0, **rope(10000.0)), images=True),
    Case("qwen2.5-omni", "qwen2_5_omni", "bfloat16", "a model that hears, sees and speaks, whose decoder of text is below `thinker_config` and `thinker.`: biases on q, k and v",
         shape(48, 4, 2, 64, pad_token_id=0, **rope(1000000.0, rope_type="default", mrope_section=[2, 2, 2])), images=True, disguise="qwen2_5_omni"),
    Case("qwen3-omni-moe", "qwen3_omni_moe", "bfloat16", "the same of a mixture: norms of each head, 2 of 5 experts",
         shape(48, 4, 2, 64, head_dim=16, pad_token_id=0, moe_intermediate_size=24, num_experts=5, num_experts_per_tok=2,
               **rope(1000000.0, rope_type="default", mrope_section=[4, 2, 2], mrope_interleaved=True)), prompt=12, images=True, disguise="qwen3_omni_moe"),
    Case("ettin", "modernbert-decoder", "bfloat16", "layer norms in front, of the embeddings too, but not of the first attention; a GELU gate; two layers of three within 8 positions, "
         "with a base of their own; a product and a norm in front of the head, which is the embedding with a bias",
         dict(hidden_size=48, num_attention_heads=4, intermediate_size=64, num_hidden_layers=4, local_attention=16, tie_word_embeddings=True, pad_token_id=0,
              cls_token_id=1, sep_token_id=2, rope_parameters=dict(full_attention=dict(rope_type="default", rope_theta=1000.0), sliding_attention=dict(rope_type="default", rope_theta=100.0))),
         drop=("rms_norm_eps",)),
    Case("step", "step3p5", "bfloat16", "the class with images, of which the decoder alone is asked: a gate of each head, norms of `1 + w`; three layers of four within 8 positions, which "
         "have more heads and another base, all of each head rotated where the others rotate half, stretched; 2 of 5 experts by corrected odds beside one that all share, behind a dense layer, "
         "both bounded in the last layer",
         shape(48, 4, 2, 64, num_hidden_layers=3, head_dim=16, sliding_window=8, pad_token_id=0, bos_token_id=1, eos_token_id=2, moe_intermediate_size=24, share_expert_dim=40,
               n_routed_experts=5, num_experts_per_tok=2, moe_router_scaling_factor=1.5, num_sliding_attention_heads=6, mlp_layer_types=["dense", "sparse", "sparse"],
               layer_types=["full_attention", "sliding_attention", "full_attention"], swiglu_limits=[0.0, 0.0, 0.75], swiglu_limits_shared=[0.0, 0.0, 0.5],
               rope_parameters=dict(full_attention=dict(rope_theta=200.0, partial_rotary_factor=0.5, **LLAMA3_SCALING),
                                    sliding_attention=dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=1.0))), prompt=12, images=True, gguf=("f32",)),
    Case("pangu", "llama", "bfloat16", "biases of attention",
         shape(48, 4, 2, 64, attention_bias=True, rms_norm_eps=1e-5, **rope(10000.0)), disguise="pangu"),
    Case("codeshell", "starcoder2", "bfloat16", "layer norms, a feed-forward without a gate, biases everywhere, q, k and v in one matrix under GPT-2's names",
         shape(48, 4, 2, 192, sliding_window=None, use_bias=True, norm_epsilon=1e-5, **rope(10000.0)), drop=("rms_norm_eps",), disguise="codeshell"),
    Case("aria", "aria_text", "bfloat16", "2 of 5 experts, whose matrices are stored turned, by odds that sum to one, beside two that all share",
         shape(48, 4, 2, 24, moe_num_experts=5, moe_topk=2, moe_num_shared_experts=2, pad_token_id=0, **rope(10000.0)), prompt=12),
    Case("gpt-neox-japanese", "gpt_neox_japanese", "bfloat16", "attention and feed-forward one behind the other, all of each head rotated, a bias of the last attention alone, the embedding as the head",
         dict(hidden_size=48, num_attention_heads=4, intermediate_multiple_size=2, tie_word_embeddings=True, **rope(10000.0)), drop=("rms_norm_eps",)),
    Case("flint", "flint", "bfloat16", "norms of each head, sinks; 2 of 5 experts by odds of each alone that are made to sum to one, beside one that all share, behind a dense layer; "
         "layers within 8 positions rotate, others do not",
         shape(48, 4, 2, 64, num_hidden_layers=4, head_dim=16, sliding_window=8, pad_token_id=0, moe_intermediate_size=24, shared_expert_intermediate_size=40,
               num_experts=5, num_experts_per_tok=2, mlp_only_layers=[0], layer_types=["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
               **rope(10000.0)), prompt=12),
    Case("lara-mini", "lara_mini", "bfloat16", "gated delta nets whose projections are one matrix, four heads of values on two of keys; a layer within 8 positions that rotates, "
         "one that sees all and does not; 2 of 5 experts beside one that all share",
         dict(hidden_size=48, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=4, head_dim=16, sliding_window=8, pad_token_id=0, moe_intermediate_size=24,
              shared_expert_intermediate_size=40, num_experts=5, num_experts_per_tok=2, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
              linear_value_head_dim=12, tie_word_embeddings=False, layer_types=["linear_attention", "sliding_attention", "linear_attention", "full_attention"],
              **rope(10000.0)), prompt=12),
    Case("mllama", "mllama", "bfloat16", "a model that sees, whose second and fourth layers attend to images alone; an embedding of eight more rows; llama3 rope scaling",
         shape(48, 4, 2, 64, num_hidden_layers=5, cross_attention_layers=[1, 3], pad_token_id=0, rms_norm_eps=1e-5, **rope(200.0, **LLAMA3_SCALING)), images=True),
    Case("phi4-multimodal", "phi4_multimodal", "bfloat16", "Phi-3 whose matrices lie beside adapters for images and speech, as published; three quarters of each head rotated, by longrope; tied",
         shape(64, 4, 2, 64, pad_token_id=0, rms_norm_eps=1e-5, tie_word_embeddings=True, original_max_position_embeddings=16,
               vision_config=dict(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=28, crop_size=28, patch_size=14),
               audio_config=dict(hidden_size=16, intermediate_size=16, num_blocks=1, num_attention_heads=2, ext_pw_out_channel=16, nemo_conv_channels=16, input_size=8, kernel_size=3),
               rope_parameters=dict(rope_theta=10000.0, rope_type="longrope", original_max_position_embeddings=16, partial_rotary_factor=0.75,
                                    short_factor=[1.0, 1.1, 1.25, 1.5, 1.75, 2.0], long_factor=[1.5, 2.0, 3.0, 6.0, 9.0, 12.0])), disguise="phi4mm"),
    Case("emu3", "emu3_text_model", "bfloat16", "Llama under the name of a model that draws, too",
         shape(48, 4, 2, 64, pad_token_id=0, rms_norm_eps=1e-5, **rope(10000.0))),
    Case("llama-k-quants", "llama", "float16", "hidden 256 for the 256-value blocks; GGUF alone",
         shape(256, 4, 1, 256, num_hidden_layers=1, vocab_size=64, rms_norm_eps=1e-5, **rope(10000.0)),
         keep=8, gguf=("Q4_K_M",), folder=False),
]


@contextlib.contextmanager
def widened(default=torch.float32):
    """Make Transformers' deliberate float32 steps float64.

    Its models compute RMS norms, softmax and rotary angles in float32 whatever the model's dtype. They name the type
    as `torch.float32`, `torch.float` or `.float()` when they run, so renaming those for the time of a run is enough.
    Falcon's slopes are rounded to bfloat16, and their products with positions then: the slopes are rounded here too, and the products are not.
    """
    names, cast, half = (torch.float32, torch.float), torch.Tensor.float, torch.Tensor.bfloat16
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.Tensor.bfloat16 = lambda x: half(x).double()
    torch.set_default_dtype(default)
    try:
        yield
    finally:
        torch.float32, torch.float = names
        torch.Tensor.float, torch.Tensor.bfloat16 = cast, half
        torch.set_default_dtype(torch.float32)


FAMILIES = {"llama": "Llama", "mllama": "Mllama", "phi4_multimodal": "Phi4Multimodal", "emu3_text_model": "Emu3", "afmoe": "Afmoe", "apertus": "Apertus", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "phi3": "Phi3", "gemma2": "Gemma2",
            "gemma3": "Gemma3", "gemma4": "Gemma4", "mixtral": "Mixtral", "qwen2_moe": "Qwen2Moe", "qwen3_moe": "Qwen3Moe", "phimoe": "Phimoe",
            "qwen3_next": "Qwen3Next", "qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe", "gpt_oss": "GptOss", "smollm3": "SmolLM3",
            "llama4": "Llama4", "granite": "Granite", "olmo2": "Olmo2", "glm4": "Glm4", "glm4_moe": "Glm4Moe", "ministral": "Ministral", "gpt2": "GPT2",
            "ministral3": "Ministral3", "granitemoe": "GraniteMoe", "granitemoeshared": "GraniteMoeShared", "olmo3": "Olmo3", "exaone4": "Exaone4",
            "ernie4_5": "Ernie4_5", "seed_oss": "SeedOss", "glm": "Glm", "dots1": "Dots1", "olmoe": "Olmoe", "gemma": "Gemma",
            "qwen3_vl": "Qwen3VL", "qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl_moe": "Qwen3VLMoe", "cohere": "Cohere", "cohere2": "Cohere2",
            "starcoder2": "Starcoder2", "stablelm": "StableLm", "phi": "Phi", "gpt_neox": "GPTNeoX", "nemotron": "Nemotron", "arcee": "Arcee",
            "gptj": "GPTJ", "gpt_neo": "GPTNeo", "gpt_bigcode": "GPTBigCode", "opt": "OPT", "falcon": "Falcon", "olmo": "Olmo", "minicpm3": "MiniCPM3", "ernie4_5_moe": "Ernie4_5_Moe", "lfm2_moe": "Lfm2Moe", "minimax_m2": "MiniMaxM2", "deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3", "glm4_moe_lite": "Glm4MoeLite", "youtu": "Youtu", "hunyuan_v1_dense": "HunYuanDenseV1", "hunyuan_v1_moe": "HunYuanMoEV1", "granitemoehybrid": "GraniteMoeHybrid", "lfm2": "Lfm2",
            "nemotron_h": "NemotronH", "falcon_h1": "FalconH1", "bamba": "Bamba", "mamba2": "Mamba2", "mamba": "Mamba", "falcon_mamba": "FalconMamba", "jamba": "Jamba",
            "gemma3n": "Gemma3n", "iquestcoder": "IQuestCoder", "cwm": "Cwm", "helium": "Helium", "hyperclovax": "HyperCLOVAX", "vaultgemma": "VaultGemma",
            "nanochat": "NanoChat", "jais2": "Jais2", "mellum": "Mellum", "exaone_moe": "ExaoneMoe", "solar_open": "SolarOpen", "sarvam_moe": "SarvamMoE",
            "sarvam_mla": "SarvamMLA", "mistral4": "Mistral4", "axk1": "AXK1", "cohere2_moe": "Cohere2Moe", "granite_swa": "GraniteSWA",
            "granitemoe_swa": "GraniteMoeSWA", "flex_olmo": "FlexOlmo", "hy_v3": "HYV3", "glm4v": "Glm4v", "glm4v_moe": "Glm4vMoe", "glm_ocr": "GlmOcr",
            "paddleocr_vl": "PaddleOCRVL", "hunyuan_vl": "HunYuanVL", "smolvlm": "SmolVLM", "lfm3": "Lfm3",
            "olmo_hybrid": "OlmoHybrid", "laguna": "Laguna", "mimo_v2_flash": "MiMoV2Flash", "kimi_linear": "KimiLinear", "bailing_hybrid": "BailingHybrid",
            "ernie4_5_vl_moe": "Ernie4_5_VLMoe", "bloom": "Bloom", "mpt": "Mpt", "bitnet": "BitNet", "codegen": "CodeGen", "dbrx": "Dbrx", "deepseek_v32": "DeepseekV32", "glm_moe_dsa": "GlmMoeDsa",
            "xglm": "XGLM", "persimmon": "Persimmon", "openai-gpt": "OpenAIGPT", "biogpt": "BioGpt", "zamba2": "Zamba2", "minimax": "MiniMax",
            "muse_glimmer": "MuseGlimmer", "aria_text": "AriaText", "gpt_neox_japanese": "GPTNeoXJapanese", "step3p5": "Step3p7", "modernbert-decoder": "ModernBertDecoder", "qwen2_5_omni": "Qwen2_5OmniThinker", "qwen3_omni_moe": "Qwen3OmniMoeThinker", "flint": "Flint", "lara_mini": "LaraMini"}
# Of those that Transformers runs by another family's model.
MODELS = {"iquestcoder": "LlamaForCausalLM", "sarvam_moe": "Glm4MoeForCausalLM", "sarvam_mla": "DeepseekV3ForCausalLM"}
CONFIGS = {"emu3_text_model": "Emu3TextConfig", "paddleocr_vl": "PaddleOCRTextConfig", "smolvlm": "LlamaConfig", "qwen2_5_omni": "Qwen2_5OmniTextConfig", "qwen3_omni_moe": "Qwen3OmniMoeTextConfig"}
TOWERS = {"mllama": dict(hidden_size=16, num_hidden_layers=1, num_global_layers=1, attention_heads=2, intermediate_size=16, vision_output_dim=32, image_size=8, patch_size=2,
                         max_num_tiles=1, intermediate_layers_indices=[0], supported_aspect_ratios=[[1, 1]]),
          "qwen3_vl_moe": dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, patch_size=2, out_hidden_size=48,
                               num_position_embeddings=4, deepstack_visual_indexes=[0]),
          "qwen3_vl": dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, patch_size=2, out_hidden_size=48,
                           num_position_embeddings=4, deepstack_visual_indexes=[0]),
          "qwen2_vl": dict(depth=1, embed_dim=16, hidden_size=32, num_heads=2, patch_size=2, mlp_ratio=2),
          "glm4v": dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, patch_size=2, image_size=8, out_hidden_size=48),
          "glm4v_moe": dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, patch_size=2, image_size=8, out_hidden_size=48),
          "glm_ocr": dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, patch_size=2, out_hidden_size=48),
          "paddleocr_vl": dict(num_hidden_layers=1, hidden_size=16, intermediate_size=16, num_attention_heads=2, patch_size=2, image_size=8),
          "hunyuan_vl": dict(num_hidden_layers=1, hidden_size=16, intermediate_size=16, num_attention_heads=2, patch_size=2, max_image_size=8),
          "ernie4_5_vl_moe": dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, patch_size=2),
          "smolvlm": dict(num_hidden_layers=1, hidden_size=16, intermediate_size=16, num_attention_heads=2, patch_size=2, image_size=8),
          "step3p5": dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=2, mlp_ratio=1.0),
          "muse_glimmer": dict(num_hidden_layers=1, hidden_size=16, intermediate_size=16, num_attention_heads=2, patch_size=2, max_position_embeddings=16),
          "qwen2_5_omni": dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, patch_size=2, out_hidden_size=48, fullatt_block_indexes=[0]),
          "qwen3_omni_moe": dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, patch_size=2, out_hidden_size=48, num_position_embeddings=4,
                                 deepstack_visual_indexes=[0]),
          "qwen2_5_vl": dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, patch_size=2, out_hidden_size=32,
                             fullatt_block_indexes=[0])}

# What such a class has beside the decoder and the tower.
EAR = dict(d_model=16, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=16, output_dim=48, num_mel_bins=8, max_source_positions=8)
BESIDE = {"muse_glimmer": dict(out_hidden_size=16, projector_hidden_size=16), "qwen2_5_omni": dict(audio_config=EAR),
          "qwen3_omni_moe": dict(audio_config=EAR | dict(downsample_hidden_size=4))}


def model_classes(family):
    stem = FAMILIES[family]
    config = stem + "Text" if family in ("gemma3", "gemma3n", "gemma4", "llama4", "qwen3_5", "qwen3_5_moe", *TOWERS) else stem
    head = "LMHeadModel" if family in ("gpt2", "openai-gpt") else "ForConditionalGeneration" if family in TOWERS else "ForCausalLM"
    return getattr(transformers, CONFIGS.get(family, config + "Config")), getattr(transformers, MODELS.get(family, stem + head))


def make_config(case):
    return model_classes(case.family)[0](**json.loads(json.dumps({**COMMON, **case.config})))


def whole_config(case):
    """The configuration of the class with a tower."""
    config, whole = make_config(case), getattr(transformers, FAMILIES[case.family] + "Config")
    return whole(text_config=config.to_dict(), vision_config=TOWERS[case.family], tie_word_embeddings=config.tie_word_embeddings,
                 image_token_id=case.config.get("vocab_size", 128) - 1, **BESIDE.get(case.family, {}))


def build(case, dtype):
    """An empty model in eager attention, evaluating."""
    config = whole_config(case) if case.images else make_config(case)
    # Falcon's eager attention adds slopes twice, once with the mask.
    attention = "sdpa" if case.config.get("alibi") else "eager"
    model = model_classes(case.family)[1]._from_config(config, attn_implementation=attention,
                                            experts_implementation="eager", dtype=dtype).eval()
    if case.blocks:
        search_blocks(model, case.blocks, dtype)
    if case.ternary:
        from transformers.integrations.bitnet import AutoBitLinear
        torch._dynamo.config.disable = True  # its steps are compiled otherwise
        for name, part in list(model.named_modules()):
            if isinstance(part, torch.nn.Linear) and name != "lm_head":
                own = AutoBitLinear(part.in_features, part.out_features, bias=False, dtype=dtype, online_quant=case.ternary == "online")
                model.set_submodule(name, own)
    for i, (heads, groups, width) in enumerate(case.sizes):
        from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3MLP
        own = copy.deepcopy(model.config)
        own.num_attention_heads, own.num_key_value_heads, own.intermediate_size = heads, groups, width
        model.model.layers[i].self_attn, model.model.layers[i].mlp = Qwen3Attention(own, i).to(dtype), Qwen3MLP(own).to(dtype)
    if case.disguise == "jais":
        for layer in model.model.layers:
            layer.self_attn.scaling = 1 / layer.self_attn.head_dim
            for part, name in ((layer.self_attn, "o_proj"), (layer.mlp, "gate_proj"), (layer.mlp, "up_proj"), (layer.mlp, "down_proj")):
                plain = getattr(part, name)
                setattr(part, name, torch.nn.Linear(plain.in_features, plain.out_features, dtype=dtype))
    if case.slopes:
        with_slopes(model)
    if case.context:
        # The base for that many positions, from the first token on.
        rotary = model.model.rotary_emb
        rule = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[rotary.rope_type]
        rotary.inv_freq, rotary.attention_scaling = rule(model.config, "cpu", seq_len=case.context)
        rotary.rope_type = "default"
    return model


class Unturned(torch.nn.Module):
    """A rotation that turns nothing."""

    def forward(self, x, position_ids):
        shape = *position_ids.shape, 1
        return torch.ones(shape, dtype=x.dtype), torch.zeros(shape, dtype=x.dtype)


def with_slopes(model):
    """Llama without rotations, whose scores fall by a slope of each head with the distance (ALiBi), as Baichuan of 40 layers has them."""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    model.model.rotary_emb = Unturned()

    def add(_module, inputs, named):
        mask = named["attention_mask"]
        heads, keys = model.config.num_attention_heads, mask.shape[-1]
        alibi = build_alibi_tensor(torch.ones(1, keys, dtype=torch.long), heads, mask.dtype)
        return inputs, named | {"attention_mask": mask + alibi.view(1, heads, 1, keys)}

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(add, with_kwargs=True)


class Product(torch.nn.Module):
    """A product in the place of attention."""

    def __init__(self, size, dtype):
        super().__init__()
        self.linear_attn = torch.nn.Linear(size, size, bias=False, dtype=dtype)

    def forward(self, hidden_states, **_):
        return self.linear_attn(hidden_states), None


class Nothing(torch.nn.Module):
    """A sublayer that adds nothing."""

    def forward(self, hidden_states, **_):
        return torch.zeros_like(hidden_states)


class NoAttention(Nothing):
    def forward(self, hidden_states, **_):
        return torch.zeros_like(hidden_states), None


def search_blocks(model, blocks, dtype):
    """Llama's blocks with sublayers of other sizes, or without some, as a search makes them."""
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP
    for i, (layer, (groups, width)) in enumerate(zip(model.model.layers, blocks)):
        config = copy.deepcopy(model.config)
        config.num_key_value_heads, config.intermediate_size = groups, width
        if groups is None:
            layer.self_attn, layer.input_layernorm = NoAttention(), torch.nn.Identity()
        elif groups < 0:
            layer.self_attn = Product(config.hidden_size, dtype)
        else:
            layer.self_attn = LlamaAttention(config, i).to(dtype)
        if width:
            layer.mlp = LlamaMLP(config).to(dtype)
        else:
            layer.mlp, layer.post_attention_layernorm = Nothing(), torch.nn.Identity()


def random_weight(case_name, name, size):
    """Float64 values from a stream of the tensor's own, so that no case depends on another or on torch's generator.

    Activations stay near 1 in every layer: queries and keys a little larger so that attention is far from uniform,
    the output head so that logits spread over several units.
    """
    stream = np.random.Generator(np.random.PCG64([zlib.crc32(case_name.encode()), zlib.crc32(name.encode())]))
    x = stream.standard_normal(size)
    if name.endswith("layer_scalar"):
        return 0.7 + 0.1 * x
    if name.endswith("act_fn.beta"):
        return np.asarray(0.5 + 0.1 * x)
    if name.endswith("act_fn.eps"):
        return np.asarray(-1e-6)
    if ".act_fn." in name:
        return 0.5 * x
    if name.endswith("router.scale"):
        return (1.5 + 0.25 * x) * np.sqrt(size[0])  # scores are divided by it
    if name.endswith("per_expert_scale"):
        return 1.0 + 0.4 * x
    if name.endswith("modality_router.weight"):
        return 0.4 * x * np.sqrt(size[-1])  # what it gives is divided by the width
    if name.endswith("_coefs.weight"):
        return 0.15 * x
    if name.endswith("correct_output_scale"):
        return 1.0 + 0.25 * x
    if name.endswith("q_norm.weight") and case_name.startswith(("gemma3n", "gemma4")):
        return (1.0 + 0.25 * x) / np.sqrt(size[0])  # scores are not scaled otherwise
    if "norm" in name or ".ln_" in name and name.endswith("weight"):
        less_one = case_name.removeprefix("mlx-").startswith(("gemma", "vaultgemma", "qwen3-next", "qwen3.5", "nemotron")) and "linear_attn" not in name
        less_one &= not case_name.startswith("nemotron-h")
        less_one &= not case_name.startswith(("gemma3n", "gemma4"))
        less_one |= name.endswith("norm.bias") or case_name.startswith("muse") and name.endswith("layernorm.weight") or case_name.startswith("step")
        return 0.25 * x + (0.0 if less_one else 1.0)
    if name.endswith("weight_scale"):
        return 0.2 + 0.05 * x
    if name.endswith("A_log"):
        # States that last: most of them stays from token to token.
        return 0.5 * x - 2.0
    if name.endswith("bias"):
        return 0.3 * x
    if name.endswith("sinks"):
        return x
    if any(table in name for table in ("embed_tokens", "embed_in", "embed_positions", "word_embeddings", "lm_head", "embed_out", "wte", "wpe", "tokens_embed", "positions_embed", "output_projection")):
        # Gemma multiplies its embedding by sqrt(hidden): more, and every token would be followed by itself.
        return (0.6 if case_name.startswith(("gemma", "vaultgemma")) else 2.0) * x / np.sqrt(size[-1])
    if ".c_" in name and ("gpt2" in case_name or case_name == "openai-gpt"):
        return x / np.sqrt(size[0])  # GPT-2's matrices are [in, out]
    if case_name.startswith(("baichuan2", "zamba2", "lara")) and not name.endswith("mlp.gate.weight"):
        return 0.6 * x / np.sqrt(size[-1])  # many layers, or blocks in front of layers, or nets in front of routers: what is rounded would grow
    gain = 1.6 if "q_proj" in name or "k_proj" in name or "c_attn" in name else 1.0
    return gain * x / np.sqrt(size[-1])


def make_weights(case):
    """The checkpoint's tensors in its storage dtype, under the names the model has; exact in its f16 twin's too."""
    model = build(case, torch.float32)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    storage = getattr(torch, case.storage)
    weights, first = {}, {}
    for name, p in model.state_dict().items():
        if name not in tied and not name.endswith(DECAYS):
            # Layers may share a tensor.
            if p.data_ptr() in first:
                weights[name] = weights[first[p.data_ptr()]]
                continue
            first[p.data_ptr()] = name
            x = torch.from_numpy(random_weight(case.name, name, tuple(p.shape))).to(storage)
            weights[name] = x.half().to(storage) if "f16" in case.gguf else x
            if name.endswith("e_score_correction_bias"):
                weights[name] = x.float()  # as Transformers keeps it
    if case.disguise == "deepseek":
        # No biases, and half of what all share, whatever the row.
        weights |= {name: torch.zeros_like(x) for name, x in weights.items() if name.endswith(("_proj.bias", "shared_expert_gate.weight"))}
    if case.disguise == "baichuan2":
        # Rows of a length of one that any type holds: the four greatest elements are halves.
        head = weights["lm_head.weight"].float()
        greatest = head.abs().topk(4, dim=-1).indices
        weights["lm_head.weight"] = torch.zeros_like(head).scatter(1, greatest, head.sign().gather(1, greatest) / 2).to(storage)
    for name in [name.removesuffix("_scale") for name in weights if name.endswith(".weight_scale")]:
        x = weights[name]
        weights[name] = x.sign() * (x.abs() > x.abs().median() / 2)
    return weights


def quantised(case, weights):
    """The matrices as MLX stores them, and the numbers that they are: scale * code + offset in float32."""
    import mlx.core as mx
    stored, decoded = {}, {}
    for name, x in weights.items():
        if x.ndim != 2:
            stored[name] = decoded[name] = x
            continue
        stem = name.removesuffix(".weight")
        group, bits = (case.mlx.get(stem, case.mlx)[key] for key in ("group_size", "bits"))
        matrix = mx.array(x.float().numpy()).astype(getattr(mx, case.storage))
        codes, scales, offsets = mx.quantize(matrix, group_size=group, bits=bits)
        numbers = mx.dequantize(codes, scales.astype(mx.float32), offsets.astype(mx.float32), group_size=group, bits=bits)
        decoded[name] = torch.from_numpy(np.array(numbers))
        stored[name] = torch.from_numpy(np.array(codes))
        for part, value in (("scales", scales), ("biases", offsets)):
            stored[f"{stem}.{part}"] = torch.from_numpy(np.array(value.astype(mx.float32))).to(getattr(torch, case.storage))
    return stored, decoded


def write_mlx(case, weights, stored, folder):
    """The folder as mlx-lm writes it: below the case's own, which holds what is expected."""
    inner = folder / "folder"
    inner.mkdir()
    with_weights(case, weights, torch.float32).save_pretrained(inner)
    config = json.loads((inner / "config.json").read_text())
    config |= {"quantization": case.mlx, "quantization_config": case.mlx, "dtype": case.storage}
    write_json(inner / "config.json", config)
    save_file({name: x.contiguous() for name, x in stored.items()}, inner / "model.safetensors", {"format": "mlx"})


OWN = {"model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output", "input_layernorm": "attention_norm",
       "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk",
       "self_attn.v_proj": "attention.wv", "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1",
       "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2"}


def write_own(case, weights, folder):
    """The weights below `folder` as Mistral publishes its models: params.json and two files of tensors by its own names, in which
    rows of q and k have the elements that rotate together side by side. `model_twins.py` has llama.cpp's converter read them."""
    inner, config = folder / "folder", make_config(case)
    inner.mkdir()
    rope = config.rope_parameters
    write_json(inner / "params.json", {
        "dim": config.hidden_size, "n_layers": config.num_hidden_layers, "head_dim": config.head_dim, "hidden_dim": config.intermediate_size,
        "n_heads": config.num_attention_heads, "n_kv_heads": config.num_key_value_heads, "rope_theta": rope["rope_theta"],
        "norm_eps": config.rms_norm_eps, "vocab_size": config.vocab_size, "tied_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": config.max_position_embeddings, "use_biases": False, "causal": True, "q_lora_rank": None,
        "llama_4_scaling": {"original_max_position_embeddings": rope["original_max_position_embeddings"], "beta": rope["llama_4_scaling_beta"]},
        "yarn": {"original_max_position_embeddings": rope["original_max_position_embeddings"], "factor": rope["factor"],
                 "apply_scale": False, "beta": rope["beta_fast"], "alpha": rope["beta_slow"]},
    })
    heads = {"wq": config.num_attention_heads, "wk": config.num_key_value_heads}
    stored = {}
    for name, x in weights.items():
        block = name.removeprefix("model.").split(".")[:2] if name.startswith("model.layers.") else []
        stem = name.removesuffix(".weight")
        own = ".".join([*block, OWN[".".join(stem.split(".")[3:]) if block else stem]])
        if own.split(".")[-1] in heads:
            x = x.reshape(heads[own.split(".")[-1]], 2, config.head_dim // 2, -1).swapaxes(1, 2).reshape(x.shape)
        stored[f"{own}.weight"] = x.contiguous()
    names = sorted(stored)
    places = {name: f"consolidated-{1 + i * 2 // len(names):05}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(places.values())):
        save_file({name: stored[name] for name in names if places[name] == file}, inner / file, {"format": "pt"})
    total = sum(x.numel() * x.element_size() for x in stored.values())
    write_json(inner / "consolidated.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": places})


def with_weights(case, weights, dtype):
    model = build(case, dtype)
    missing, unexpected = model.load_state_dict({k: v.to(dtype) for k, v in weights.items()}, strict=False)
    missing = {name for name in missing if not name.endswith(DECAYS)}
    assert not unexpected and missing <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    return model


def of_rows(x):
    """A value of a batch of one as rows; the streams of Gemma 3n [streams, 1, rows, hidden] side by side."""
    return x[:, 0].swapaxes(0, 1).flatten(1) if x.ndim == 4 else x[0]


@torch.no_grad()
def record(model, ids):
    """Prefill `ids`, then decode greedily; every activation in the model's dtype."""
    seen = {}

    def keep(name):
        def hook(_module, _inputs, output):
            seen[name] = of_rows(output[0] if isinstance(output, (tuple, list)) else output)
        return hook

    def keep_input(_module, inputs, named):
        # Of several streams the first is the embedding.
        seen.setdefault("embeddings", (inputs[0] if inputs else named["hidden_states"]).squeeze(1)[0])

    inner = getattr(model, model.base_model_prefix, None)
    inner = model.model if inner is None else inner  # Llama 4's prefix is none of its parts
    for part in ("language_model", "text_model", "decoder"):
        inner = getattr(inner, part, inner)
    layers = next(getattr(inner, name) for name in ("h", "blocks", "layers") if hasattr(inner, name))
    norms = [getattr(inner, name) for name in ("ln_f", "norm", "norm_f", "final_layernorm", "final_layer_norm", "embedding_norm", "layer_norm", "final_norm") if getattr(inner, name, None) is not None]
    parts = dict(zip(["norm"], norms)) | {f"hidden.{i}": layer for i, layer in enumerate(layers)}
    hooks = [part.register_forward_hook(keep(name)) for name, part in parts.items()]
    # What a model multiplies its embeddings with is in the input to the first layer.
    hooks.append(layers[0].register_forward_pre_hook(keep_input, with_kwargs=True))
    routed = [1e9]
    watched = watch_routers(model, routed)
    out = model(input_ids=ids[None], use_cache=True)
    for hook in hooks:
        hook.remove()
    seen["logits"] = out.logits[0]

    tokens, rows, last = [], [], out.logits[0, -1]
    for _ in range(STEPS):
        tokens.append(last.argmax())
        # By the name that newer versions give it.
        name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        if name not in out and "past_key_values" not in out:
            # The first GPT has no cache.
            last = model(input_ids=torch.cat([ids, torch.stack(tokens)])[None]).logits[0, -1]
            rows.append(last)
            continue
        more = {name: out[name] if name in out else out.past_key_values}
        if model.config.model_type in ("bamba", "minimax"):
            # Where it counts positions from 0 in every call.
            more["position_ids"] = torch.tensor([[len(ids) + len(tokens) - 1]])
        out = model(input_ids=tokens[-1].view(1, 1), use_cache=True, **more)
        last = out.logits[0, -1]
        rows.append(last)
    for hook in watched:
        hook.remove()
    seen["decode.tokens"] = torch.stack(tokens)
    seen["decode.logits"] = torch.stack(rows)
    return seen, min(routed)


def watch_routers(model, seen):
    """Hooks that note in `seen` how clearly each router of a model chooses."""
    routers = [part for part in model.modules() if type(part).__name__.lower().endswith(("topkrouter", "tokenchoicerouter", "llama4router", "gemma4textrouter", "v1gate"))]
    for part in model.modules():
        if type(part).__name__ == "DbrxFFN":
            part.router.top_k = part.top_k
    routers += [part for part in model.modules() if type(part).__name__ == "DbrxRouter"]
    # Corrections that the block around a router has.
    for part in model.modules():
        for name in ("e_score_correction_bias", "expert_bias"):
            # AFMoE's has a name of its own in its block.
            router = getattr(part, "router", getattr(part, "gate", None))
            if router is not None and hasattr(part, name):
                router.owner = lambda part=part, name=name: getattr(part, name)
    # Llama 4's gives its scores behind the odds, Gemma 4's its odds alone.
    scores = lambda part, out: out if "Dbrx" in type(part).__name__ else out[0].log() if "Gemma4" in type(part).__name__ else out["Llama4" in type(part).__name__]
    rounded = [part for part in model.modules() if type(part).__name__ == "AutoBitLinear"]
    watched = [hook for part in model.modules() if type(part).__name__.endswith("Indexer") for hook in watch_indexer(part, seen)]
    return [part.register_forward_hook(lambda part, _, out: seen.append(clearance(part, scores(part, out)))) for part in routers] \
        + [part.register_forward_hook(lambda _, inputs, __: seen.append(between_steps(inputs[0]))) for part in rounded] + watched


def watch_indexer(part, seen):
    """Hooks that note in `seen` how far an indexer is from choosing other positions, in parts of how far its scores spread."""
    plain = torch.Tensor.topk

    def topk(scores, count, **more):
        for row in scores.flatten(0, -2):
            best = row[row > -1e30].sort(descending=True).values
            if len(best) > count:
                seen.append(CHOSEN * ((best[count - 1] - best[count]) / best.std()).item())
        return plain(scores, count, **more)

    def begin(*_):
        torch.Tensor.topk = topk

    def end(*_):
        torch.Tensor.topk = plain

    return [part.register_forward_pre_hook(begin), part.register_forward_hook(end)]


def between_steps(x):
    """Whether rows that are rounded to 8 bits are clear of the middle between two steps: as far as a router's scores are to be, or 0."""
    steps = x * (127 / x.abs().amax(-1, keepdim=True).clamp(min=1e-5))
    return 1e9 if (steps - steps.floor() - 0.5).abs().min() > 1e-4 else 0.0


def clearance(router, scores):
    """How far a router's scores are from choosing other experts, or from other shares."""
    if hasattr(router, "moe_statics"):
        scores = scores.softmax(-1) + router.moe_statics.e_score_correction_bias
    bias = getattr(router, "owner", None)
    if bias is not None:
        scores = scores.sigmoid() + bias()
    if hasattr(router, "e_score_correction_bias"):
        return corrected_clearance(router, scores.sigmoid() + router.e_score_correction_bias)
    far = 1e9
    if getattr(router, "topk_method", "") == "group_limited_greedy":
        groups = scores.view(len(scores), router.num_group, -1)
        greatest = groups.max(dim=-1).values.sort(dim=-1, descending=True)
        if router.topk_group < router.num_group:
            far = (greatest.values[:, router.topk_group - 1] - greatest.values[:, router.topk_group]).min().item()
            out = torch.ones_like(greatest.values, dtype=torch.bool).scatter_(1, greatest.indices[:, :router.topk_group], False)
            scores = groups.masked_fill(out[..., None], -1e9).flatten(1)
    best = scores.sort(dim=-1, descending=True).values
    used = router.top_k if hasattr(router, "top_k") else router.config.top_k_experts
    if used < best.shape[-1]:
        far = min(far, (best[:, used - 1] - best[:, used]).min().item())
    jitter = getattr(router, "router_jitter_noise", 0.0)
    for j in range(used if jitter else 0):
        apart = (best[:, j:j + 1] - best[:, j:]) / torch.maximum(best[:, j:].abs(), best[:, j:j + 1])
        far = min(far, 2 * (apart - 2 * jitter).abs().min().item())
    return far


def corrected_clearance(router, choices):
    """The same of choices that are corrected odds: among the groups, then among the experts of the groups that stay."""
    count = getattr(router, "num_group", 1)
    far, groups = 1e9, choices.view(len(choices), count, -1)
    if count > 1 and router.topk_group < count:
        best = groups.topk(2, dim=-1).values.sum(dim=-1).sort(dim=-1, descending=True)
        far = (best.values[:, router.topk_group - 1] - best.values[:, router.topk_group]).min().item()
        out = torch.ones_like(best.values, dtype=torch.bool).scatter_(1, best.indices[:, :router.topk_group], False)
        choices = groups.masked_fill(out[..., None], -1e9).flatten(1)
    best = choices.sort(dim=-1, descending=True).values
    return min(far, (best[:, router.top_k - 1] - best[:, router.top_k]).min().item())


def margin(seen):
    """The least distance between the best and the second logit over the greedy choices."""
    top = torch.cat([seen["logits"][-1:], seen["decode.logits"][:-1]]).topk(2, dim=-1).values
    return (top[:, 0] - top[:, 1]).min().item()


def choose_prompt(case, model):
    """The first seeded prompt whose greedy continuation is clear-cut, varied and free of special tokens."""
    for seed in range(1000):
        stream = np.random.Generator(np.random.PCG64([zlib.crc32(case.name.encode()), seed]))
        ids = torch.from_numpy(stream.integers(SPECIAL + 1, model.config.get_text_config().vocab_size, case.prompt))
        seen, routed = record(model, ids)
        tokens = set(seen["decode.tokens"].tolist())
        if margin(seen) >= MARGIN and routed >= ROUTED and len(tokens) >= 4 and min(tokens) > SPECIAL:
            return ids, seen
    raise SystemExit(f"{case.name}: no prompt gives clear greedy choices")


def check_cache(model, ids, seen):
    """The cached decode must equal one pass over the whole text: a fixture that disagrees with itself helps nobody."""
    with torch.no_grad():
        whole = model(input_ids=torch.cat([ids, seen["decode.tokens"]])[None], use_cache=False).logits[0]
    difference = (whole[len(ids):] - seen["decode.logits"]).abs().max().item()
    assert difference < 1e-9, f"cached and uncached logits differ by {difference}"


def check_context(case, weights, model):
    """A text of just so many tokens has the rotation of its own accord."""
    own = with_weights(replace(case, context=None), weights, torch.float64)
    ids = torch.arange(case.context)[None] % model.config.get_text_config().vocab_size
    with torch.no_grad():
        difference = (own(input_ids=ids, use_cache=False).logits - model(input_ids=ids, use_cache=False).logits).abs().max().item()
    # Transformers computes the base in float32 there.
    assert difference < 1e-4, f"the rotation for {case.context} positions differs by {difference}"


def default_type(family):
    """The default type of a model in float64: XGLM's mask has the least number of its scores' type in it, and MiniMax computes decays in it."""
    return torch.float64 if family in ("xglm", "minimax") else torch.float32


def expected(case, weights):
    """Tensors and metadata of expected.safetensors."""
    with widened(default_type(case.family)):
        model = with_weights(case, weights, torch.float64)
        ids, seen = choose_prompt(case, model)
        assert all(x.dtype == torch.float64 for name, x in seen.items() if name != "decode.tokens")
        check_cache(model, ids, seen)
        if case.context:
            check_context(case, weights, model)
    single, _ = record(with_weights(case, weights, torch.float32), ids)
    assert torch.equal(single["decode.tokens"], seen["decode.tokens"])
    apart = max((single[k].double() - seen[k]).abs().max().item() for k in ("logits", "decode.logits"))

    first = 0 if case.keep is None else len(ids) - case.keep
    tensors = {"input_ids": ids, "first_row": torch.tensor([first])}
    for name, x in seen.items():
        x = x if name.startswith("decode.") else x[first:]
        tensors[name] = (x if name == "decode.tokens" else x.to(torch.float32)).contiguous()
    if case.bf16:
        half = with_weights(case, weights, torch.bfloat16)
        with torch.no_grad():
            tensors["logits_bf16"] = half(input_ids=ids[None]).logits[0, first:].to(torch.float32).contiguous()
    # One metadata entry: safetensors writes several in no fixed order.
    return tensors, {"fixture": json.dumps({
        "arithmetic": "float64",
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "float32_logits_difference": f"{apart:.3g}",
        "greedy_margin": f"{margin(seen):.3g}",
    })}


def older_dialect(config, changes):
    """config.json as Transformers 4 wrote it: rope_theta and rope_scaling at the top, torch_dtype, no layer_types."""
    config = dict(config)
    scaling = dict(config.pop("rope_parameters"))
    if "sliding_attention" in scaling:
        config["rope_local_base_freq"] = scaling["sliding_attention"]["rope_theta"]
        scaling = dict(scaling["full_attention"])
    config["rope_theta"] = scaling.pop("rope_theta")
    if "partial_rotary_factor" in scaling:
        config["partial_rotary_factor"] = scaling.pop("partial_rotary_factor")
    config["rope_scaling"] = None if scaling["rope_type"] == "default" else scaling
    if scaling["rope_type"] == "linear":
        config["rope_scaling"] = {"type": "linear", "factor": scaling["factor"]}
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.40.0"
    config.pop("layer_types", None)
    config.update(changes)
    return {k: v for k, v in sorted(config.items()) if not (k in changes and v is None)}


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2) + "\n")


def write_checkpoint(case, weights, folder):
    """The folder as `save_pretrained` writes it, then the case's departures from it."""
    model = with_weights(case, weights, getattr(torch, case.storage))
    model.save_pretrained(folder, max_shard_size=case.shard or "1GB")
    config = json.loads((folder / "config.json").read_text())
    if case.v4 is not None:
        write_json(folder / "config.v4.json", older_dialect(config, case.v4))
    if case.drop:
        write_json(folder / "config.json", {k: v for k, v in config.items() if k not in case.drop})
    if case.add:
        config = json.loads((folder / "config.json").read_text())
        write_json(folder / "config.json", config | case.add)
    if case.stacked:
        save_file({name: x.contiguous() for name, x in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    if case.prefix:
        path = folder / "model.safetensors"
        tower = {TOWER: torch.ones(4, 4)} if case.tower else {}
        save_file({case.prefix + k: v for k, v in load_file(path).items()} | tower, path, {"format": "pt"})
    if case.tower:
        stem = FAMILIES[case.family]
        outer = {"architectures": [stem + "ForConditionalGeneration"], "model_type": case.family, "image_token_index": 127,
                 "mm_tokens_per_image": 4, "text_config": config, "vision_config": {"hidden_size": 4, "patch_size": 2}}
        config.pop("architectures")
        write_json(folder / "config.json", outer)
    check_checkpoint(case, weights, folder)
    if case.ternary:
        from transformers.integrations.bitnet import pack_weights
        path = folder / "model.safetensors"
        stored = load_file(path)
        packed = {name: pack_weights(x.clone()) for name, x in stored.items() if f"{name}_scale" in stored}
        save_file(stored | packed, path, {"format": "pt"})
        own = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": case.ternary, "modules_to_not_convert": None}
        write_json(folder / "config.json", json.loads((folder / "config.json").read_text()) | {"quantization_config": own})
    if case.disguise:
        config = json.loads((folder / "config.json").read_text())
        config |= {key: value for key, value in (("sizes", case.sizes), ("blocks", case.blocks)) if value}
        config, weights = DISGUISES[case.disguise](config, weights)
        write_json(folder / "config.json", config)
        save_file({name: x.contiguous() for name, x in weights.items()}, folder / "model.safetensors", {"format": "pt"})


def as_minicpm(config, weights):
    """Granite is the same model where these numbers are alike."""
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    other = {"architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm", "scale_emb": config.pop("embedding_multiplier"),
             "scale_depth": config.pop("residual_multiplier") * layers ** 0.5, "dim_model_base": round(hidden / config.pop("logits_scaling"))}
    assert abs(config.pop("attention_multiplier") - (hidden / config["num_attention_heads"]) ** -0.5) < 1e-9
    return config | other, weights


def as_internlm2(config, weights):
    """Llama is the same model, with other names and with q, k and v of each key/value head in one."""
    names = {"model.embed_tokens": "model.tok_embeddings", "lm_head": "output", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
             "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2"}
    groups, stored = config["num_key_value_heads"], {}
    for name, x in weights.items():
        part = name.split("self_attn.")[-1].removesuffix(".weight")
        if part == "q_proj":
            q, k, v = (weights[name.replace("q_proj", f"{one}_proj")] for one in "qkv")
            joined = torch.cat([y.reshape(groups, -1, y.shape[-1]) for y in (q, k, v)], 1)
            stored[name.replace("self_attn.q_proj", "attention.wqkv")] = joined.reshape(-1, x.shape[-1])
        elif part not in ("k_proj", "v_proj"):
            for known, own in names.items():
                name = name.replace(known, own)
            stored[name] = x
    config["bias"] = config.pop("attention_bias")
    del config["mlp_bias"]
    return config | {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2"}, stored


def as_exaone(config, weights):
    """Llama is the same model, with other names."""
    names = {"model.embed_tokens": "transformer.wte", "model.layers.": "transformer.h.", "model.norm": "transformer.ln_f", "self_attn.o_proj": "attn.attention.out_proj",
             "self_attn.": "attn.attention.", "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2", "mlp.gate_proj": "mlp.c_fc_0",
             "mlp.up_proj": "mlp.c_fc_1", "mlp.down_proj": "mlp.c_proj"}
    stored = {}
    for name, x in weights.items():
        for known, own in names.items():
            name = name.replace(known, own)
        stored[name] = x
    for known, own in (("num_hidden_layers", "num_layers"), ("rms_norm_eps", "layer_norm_epsilon"), ("hidden_act", "activation_function")):
        config[own] = config.pop(known)
    return config | {"architectures": ["ExaoneForCausalLM"], "model_type": "exaone", "embed_dropout": 0.0}, stored


def as_internlm3(config, weights):
    """Qwen2 is the same model, which has biases on q, k and v and no key for them."""
    for key in ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"):
        config.pop(key, None)
    return config | {"architectures": ["InternLM3ForCausalLM"], "model_type": "internlm3", "qkv_bias": True, "bias": False,
                     "head_dim": config["hidden_size"] // config["num_attention_heads"]}, weights


def as_mamba_ssm(config, weights):
    """The state spaces' authors leave out what is usual: a state of 128, convolutions of four rows, one group, twice the width."""
    assert (config["state_size"], config["conv_kernel"], config["n_groups"], config["expand"]) == (128, 4, 1, 2)
    own = {"d_model": config["hidden_size"], "d_intermediate": 0, "n_layer": config["num_hidden_layers"], "vocab_size": config["vocab_size"] - 5,
           "ssm_cfg": {"layer": "Mamba2", "headdim": config["head_dim"]}, "attn_layer_idx": [], "attn_cfg": {}, "rms_norm": True,
           "residual_in_fp32": True, "fused_add_norm": True, "pad_vocab_size_multiple": 16, "tie_embeddings": config["tie_word_embeddings"]}
    return own, {name.replace("backbone.embeddings", "backbone.embedding"): x for name, x in weights.items()}


def joined(weights, name):
    """q, k and v of the layer whose q is `name`, one below the other."""
    return torch.cat([weights[name.replace("q_proj", f"{one}_proj")] for one in "qkv"])


def renamed(weights, names, qkv):
    """The weights with q, k and v in one matrix `qkv`, and parts of names replaced."""
    stored = {}
    for name, x in weights.items():
        if ".k_proj" in name or ".v_proj" in name:
            continue
        if ".q_proj" in name:
            name, x = name.replace("self_attn.q_proj", qkv), joined(weights, name)
        for known, own in names.items():
            name = name.replace(known, own)
        stored[name] = x
    return stored


def as_qwen(config, weights):
    """Qwen2 is the same model where there are as many key/value heads as query heads, with other names."""
    names = {"model.embed_tokens": "transformer.wte", "model.layers.": "transformer.h.", "model.norm": "transformer.ln_f", "self_attn.o_proj": "attn.c_proj",
             "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2", "mlp.gate_proj": "mlp.w2", "mlp.up_proj": "mlp.w1", "mlp.down_proj": "mlp.c_proj"}
    own = {"architectures": ["QWenLMHeadModel"], "model_type": "qwen", "layer_norm_epsilon": config.pop("rms_norm_eps"), "no_bias": True, "rotary_pct": 1.0,
           "rotary_emb_base": int(config.pop("rope_parameters")["rope_theta"]), "intermediate_size": 2 * config["intermediate_size"], "seq_length": 256,
           "kv_channels": config["hidden_size"] // config["num_attention_heads"], "use_logn_attn": True, "use_dynamic_ntk": True, "scale_attn_weights": True}
    for key in ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types", "num_key_value_heads", "hidden_act", "attention_dropout"):
        config.pop(key, None)
    return config | own, renamed(weights, names, "attn.c_attn")


def as_baichuan(config, weights):
    """Llama is the same model where there are as many key/value heads as query heads, with q, k and v in one."""
    for key in ("attention_bias", "mlp_bias", "head_dim", "rope_parameters", "pretraining_tp", "num_key_value_heads"):
        config.pop(key, None)
    return config | {"architectures": ["BaiChuanForCausalLM"], "model_type": "baichuan"}, renamed(weights, {}, "self_attn.W_pack")


def as_chatglm(config, weights):
    """GLM-4 is the same model, with other names."""
    names = {"model.embed_tokens": "transformer.embedding.word_embeddings", "model.layers.": "transformer.encoder.layers.", "model.norm": "transformer.encoder.final_layernorm",
             "lm_head": "transformer.output_layer", "self_attn.o_proj": "self_attention.dense", "mlp.gate_up_proj": "mlp.dense_h_to_4h", "mlp.down_proj": "mlp.dense_4h_to_h"}
    own = {"architectures": ["ChatGLMModel"], "model_type": "chatglm", "add_bias_linear": False, "add_qkv_bias": True, "apply_query_key_layer_scaling": True,
           "apply_residual_connection_post_layernorm": False, "attention_dropout": 0.0, "attention_softmax_in_fp32": True, "bias_dropout_fusion": True,
           "ffn_hidden_size": config["intermediate_size"], "fp32_residual_connection": False, "hidden_dropout": 0.0, "hidden_size": config["hidden_size"],
           "kv_channels": config["head_dim"], "layernorm_epsilon": config["rms_norm_eps"], "multi_query_attention": True,
           "multi_query_group_num": config["num_key_value_heads"], "num_attention_heads": config["num_attention_heads"], "num_layers": config["num_hidden_layers"],
           "original_rope": True, "padded_vocab_size": config["vocab_size"], "post_layer_norm": True, "pre_seq_len": None, "quantization_bit": 0, "rmsnorm": True,
           "rope_ratio": config["rope_parameters"]["rope_theta"] / 10000, "seq_length": config["max_position_embeddings"], "use_cache": True,
           "tie_word_embeddings": False, "dtype": config["dtype"], "eos_token_id": config["eos_token_id"], "pad_token_id": 0}
    return own, renamed(weights, names, "self_attention.query_key_value")


def as_deepseek(config, weights):
    """Qwen's mixture is the same model where the gate of what all share is open by half, which its last matrix has here."""
    stored = {}
    for name, x in weights.items():
        block, _, part = name.partition(".mlp.experts.")
        if name.endswith(("_proj.bias", "shared_expert_gate.weight")):
            continue
        for i in range(config["num_experts"] if part else 0):
            if part == "down_proj":
                stored[f"{block}.mlp.experts.{i}.down_proj.weight"] = x[i]
            else:
                stored |= {f"{block}.mlp.experts.{i}.{one}_proj.weight": half for one, half in zip(("gate", "up"), x[i].chunk(2))}
        if not part:
            stored[name.replace("shared_expert.", "shared_experts.")] = x / 2 if name.endswith("shared_expert.down_proj.weight") else x
    own = {"architectures": ["DeepseekForCausalLM"], "model_type": "deepseek", "attention_bias": False, "first_k_dense_replace": 1, "moe_layer_freq": 1,
           "n_routed_experts": config.pop("num_experts"), "n_shared_experts": config.pop("shared_expert_intermediate_size") // config["moe_intermediate_size"],
           "scoring_func": "softmax", "seq_aux": True, "aux_loss_alpha": 0.001, "rope_theta": config.pop("rope_parameters")["rope_theta"], "rope_scaling": None}
    for key in ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types", "mlp_only_layers", "decoder_sparse_step", "qkv_bias",
                "router_aux_loss_coef", "output_router_logits"):
        config.pop(key, None)
    return config | own, stored


def as_orion(config, weights):
    """StableLM is the same model where all of each head is rotated."""
    for key in ("layer_norm_eps", "partial_rotary_factor", "qk_layernorm", "use_parallel_residual", "use_qkv_bias", "hidden_dropout", "rope_parameters"):
        config.pop(key, None)
    return config | {"architectures": ["OrionForCausalLM"], "model_type": "orion", "rope_theta": 10000.0, "rope_scaling": None, "attention_bias": False}, weights


def as_xverse(config, weights):
    """Llama is the same model."""
    for key in ("attention_bias", "mlp_bias", "head_dim", "rope_parameters", "pretraining_tp"):
        config.pop(key, None)
    return config | {"architectures": ["XverseForCausalLM"], "model_type": "xverse"}, weights


def as_internlm(config, weights):
    """Llama is the same model, which has biases of attention's output too."""
    config, weights = as_xverse(config, weights)
    config.pop("num_key_value_heads")
    return config | {"architectures": ["InternLMForCausalLM"], "model_type": "internlm", "bias": True}, weights


def as_pangu(config, weights):
    """Llama is the same model, which has a key for biases of products in its feed-forward, too."""
    theta = config["rope_parameters"]["rope_theta"]
    config, weights = as_xverse(config, weights)
    return config | {"architectures": ["PanguEmbeddedForCausalLM"], "model_type": "PanguEmbedded", "bias": True, "rope_theta": theta}, weights


def as_codeshell(config, weights):
    """StarCoder2 is the same model, with other names."""
    names = {"model.embed_tokens": "transformer.wte", "model.layers.": "transformer.h.", "model.norm": "transformer.ln_f", "self_attn.o_proj": "attn.c_proj",
             "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2"}
    own = {"architectures": ["CodeShellForCausalLM"], "model_type": "codeshell", "activation_function": "gelu_pytorch_tanh", "attention_softmax_in_fp32": True, "attn_pdrop": 0.1,
           "bos_token_id": 1, "dtype": config["dtype"], "embd_pdrop": 0.1, "eos_token_id": 2, "group_query_attention": True, "initializer_range": 0.02,
           "layer_norm_epsilon": config["norm_epsilon"], "n_embd": config["hidden_size"], "n_head": config["num_attention_heads"], "n_inner": None,
           "n_layer": config["num_hidden_layers"], "n_positions": config["max_position_embeddings"], "num_query_groups": config["num_key_value_heads"],
           "position_embedding_type": "rope", "resid_pdrop": 0.1, "rope_scaling": None, "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True,
           "tie_word_embeddings": False, "use_cache": True, "vocab_size": config["vocab_size"]}
    return own, renamed(weights, names, "attn.c_attn")


def as_openelm(config, weights):
    """Qwen3's blocks are the same, with other names."""
    names = {"model.embed_tokens": "transformer.token_embeddings", "model.layers.": "transformer.layers.", "model.norm": "transformer.norm", "self_attn.q_norm": "attn.q_norm",
             "self_attn.k_norm": "attn.k_norm", "self_attn.o_proj": "attn.out_proj", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.down_proj": "ffn.proj_2"}
    stored = {}
    for name, x in renamed(weights, names, "attn.qkv_proj").items():
        if name.endswith("mlp.gate_proj.weight"):
            up = weights[name.replace("transformer.", "model.").replace("gate_proj", "up_proj")]
            stored[name.replace("mlp.gate_proj", "ffn.proj_1")] = torch.cat([x, up])
        elif not name.endswith("mlp.up_proj.weight"):
            stored[name] = x
    heads, groups, widths = zip(*config["sizes"])
    own = {"architectures": ["OpenELMForCausalLM"], "model_type": "openelm", "activation_fn_name": "swish", "bos_token_id": 1, "eos_token_id": 2, "dtype": config["dtype"],
           "ffn_dim_divisor": 8, "ffn_multipliers": [width / config["hidden_size"] for width in widths], "ffn_with_glu": True, "head_dim": config["head_dim"],
           "initializer_range": 0.02, "max_context_length": config["max_position_embeddings"], "model_dim": config["hidden_size"], "normalization_layer_name": "rms_norm",
           "normalize_qk_projections": True, "num_gqa_groups": 4, "num_kv_heads": list(groups), "num_query_heads": list(heads), "num_transformer_layers": len(heads),
           "qkv_multipliers": [0.5, 1.0], "rope_freq_constant": 10000, "rope_max_length": 512, "share_input_output_layers": True, "use_cache": True,
           "vocab_size": config["vocab_size"]}
    return own, stored


def as_jais(config, weights):
    """StableLM is the same model where its products have biases and its scores slopes; the factors are in its embedding and its head."""
    names = {"model.embed_tokens": "transformer.wte", "model.layers.": "transformer.h.", "model.norm": "transformer.ln_f", "self_attn.o_proj": "attn.c_proj",
             "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2", "mlp.gate_proj": "mlp.c_fc2", "mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}
    scales = {"transformer.wte.weight": 4.0, "lm_head.weight": 0.25}
    stored = {name: x / scales.get(name, 1.0) for name, x in renamed(weights, names, "attn.c_attn").items()}
    stored = {name: x.mT if ".c_" in name and x.ndim == 2 else x for name, x in stored.items()}
    own = {"architectures": ["JAISLMHeadModel"], "model_type": "jais", "activation_function": "swiglu", "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2,
           "embd_pdrop": 0.0, "embeddings_scale": 4.0, "initializer_range": 0.02, "layer_norm_epsilon": config["layer_norm_eps"], "n_embd": config["hidden_size"],
           "n_head": config["num_attention_heads"], "n_inner": config["intermediate_size"], "n_layer": config["num_hidden_layers"],
           "n_positions": config["max_position_embeddings"], "position_embedding_type": "alibi", "reorder_and_upcast_attn": False, "resid_pdrop": 0.0,
           "scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True, "scale_qk_dot_by_d": True, "dtype": config["dtype"], "use_cache": True,
           "vocab_size": config["vocab_size"], "width_scale": 0.25, "tie_word_embeddings": False, "alibi_scaling": None}
    return own, stored


def as_baichuan2(config, weights):
    """The first version is the same model where the rows of the head have a length of one, which they are divided by."""
    config, weights = as_baichuan(config, weights)
    lengths = torch.tensor([0.5, 1.0, 2.0, 4.0] * (config["vocab_size"] // 4), dtype=weights["lm_head.weight"].dtype)[:, None]
    return config | {"architectures": ["BaichuanForCausalLM"], "z_loss_weight": 0}, weights | {"lm_head.weight": weights["lm_head.weight"] * lengths}


def as_ling(config, weights):
    """Granite's mixture is the same model where its numbers are 1: odds that sum to one are a softmax over the chosen scores."""
    names = {"model.embed_tokens": "model.word_embeddings", "self_attn.o_proj": "attention.dense", "block_sparse_moe.router": "mlp.gate"}
    count, stored = config.pop("num_local_experts"), {}
    for name, x in renamed(weights, names, "attention.query_key_value").items():
        block = name.split(".block_sparse_moe.")[0].split(".shared_mlp.")[0]
        if name.endswith("experts.gate_up_proj"):
            for i, part in ((i, part) for i in range(count) for part in ("gate", "up")):
                stored[f"{block}.mlp.experts.{i}.{part}_proj.weight"] = x[i].chunk(2)[part == "up"]
        elif name.endswith("experts.down_proj"):
            stored |= {f"{block}.mlp.experts.{i}.down_proj.weight": x[i] for i in range(count)}
        elif name.endswith("input_linear.weight"):
            stored |= {f"{block}.mlp.shared_experts.{part}_proj.weight": half for part, half in zip(("gate", "up"), x.chunk(2))}
        elif name.endswith("output_linear.weight"):
            stored[f"{block}.mlp.shared_experts.down_proj.weight"] = x
        else:
            stored[name] = x
    own = {"architectures": ["BailingMoeForCausalLM"], "model_type": "bailing_moe", "num_experts": count, "moe_intermediate_size": config["intermediate_size"],
           "num_shared_experts": config.pop("shared_intermediate_size") // config["intermediate_size"], "first_k_dense_replace": 0, "norm_topk_prob": True,
           "norm_head": False, "norm_softmax": False, "use_bias": False, "use_qkv_bias": False, "rope_theta": config.pop("rope_parameters")["rope_theta"]}
    numbers = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling", "attention_bias", "router_aux_loss_coef", "output_router_logits")
    return {key: value for key, value in config.items() if key not in numbers} | own, stored


def as_ling2(config, weights):
    """GLM-4.5 is the same model, with other names."""
    names = {"model.embed_tokens": "model.word_embeddings", "self_attn.o_proj": "attention.dense", "self_attn.q_norm": "attention.query_layernorm",
             "self_attn.k_norm": "attention.key_layernorm", "e_score_correction_bias": "expert_bias"}
    stored = {}
    for name, x in renamed(weights, names, "attention.query_key_value").items():
        block, _, part = name.partition(".mlp.experts.")
        for i in range(config["n_routed_experts"] if part else 0):
            if part == "down_proj":
                stored[f"{block}.mlp.experts.{i}.down_proj.weight"] = x[i]
            else:
                stored |= {f"{block}.mlp.experts.{i}.{one}_proj.weight": half for one, half in zip(("gate", "up"), x[i].chunk(2))}
        if not part:
            stored[name] = x
    rotation = config.pop("rope_parameters")
    config.pop("num_nextn_predict_layers", None)
    own = {"architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe", "num_experts": config.pop("n_routed_experts"), "use_qkv_bias": config.pop("attention_bias"),
           "num_shared_experts": config.pop("n_shared_experts"), "score_function": "sigmoid", "moe_router_enable_expert_bias": True, "use_qk_norm": True, "use_bias": False,
           "rope_theta": rotation["rope_theta"], "partial_rotary_factor": rotation["partial_rotary_factor"], "norm_topk_prob": True, "norm_head": False}
    return config | own, stored


def as_nas(config, weights):
    """Llama's blocks as the folders of searched models list them; `search_blocks` made them."""
    blocks, heads = [], config["num_attention_heads"]
    for groups, width in config.pop("blocks"):
        attention = {"n_heads_in_group": heads // groups if groups and groups > 0 else None, "no_op": groups is None, "replace_with_linear": groups == -1, "sparsify": None}
        by = width * 3 / 2 / config["hidden_size"] if width else None
        blocks.append({"attention": attention, "ffn": {"ffn_mult": by, "no_op": not width, "replace_with_linear": False, "sparsify": None}})
    for key in ("num_key_value_heads", "intermediate_size", "head_dim"):
        config.pop(key, None)
    return config | {"architectures": ["DeciLMForCausalLM"], "model_type": "nemotron-nas", "block_configs": blocks}, weights


def as_omni(config, weights):
    """A thinker within the model that hears, sees and speaks, under the names of its published files."""
    family = config["model_type"].removesuffix("_thinker")
    count, stored = config["text_config"].get("num_experts", 0), {}
    for name, x in weights.items():
        name = "thinker." + name.replace("model.language_model.", "model.").replace("model.visual.", "visual.").replace("model.audio_tower.", "audio_tower.")
        block, _, part = name.partition(".mlp.experts.")
        for i in range(count if part else 0):
            if part == "down_proj":
                stored[f"{block}.mlp.experts.{i}.down_proj.weight"] = x[i]
            else:
                stored |= {f"{block}.mlp.experts.{i}.{one}_proj.weight": half for one, half in zip(("gate", "up"), x[i].chunk(2))}
        if not part:
            stored[name] = x
    head = {"qwen2_5_omni": "Qwen2_5OmniForConditionalGeneration", "qwen3_omni_moe": "Qwen3OmniMoeForConditionalGeneration"}[family]
    return {"architectures": [head], "model_type": family, "thinker_config": config, "enable_audio_output": True}, stored


def as_phi4mm(config, weights):
    """The names of its authors: matrices beside adapters, of which those for texts are none."""
    stored = {}
    for name, x in weights.items():
        if name.startswith("model.layers.") and x.ndim == 2:
            name = name.replace(".weight", ".base_layer.weight")
            for part in ("speech", "vision"):
                stored |= {name.replace("base_layer", f"lora_A.{part}"): torch.ones(2, x.shape[1], dtype=x.dtype),
                           name.replace("base_layer", f"lora_B.{part}"): torch.ones(x.shape[0], 2, dtype=x.dtype)}
        stored[name] = x
    rotation = config.pop("rope_parameters")
    for key in ("vision_config", "audio_config"):
        config.pop(key, None)
    layers = "((layers.*self_attn\\.(qkv|o)_proj)|(layers.*mlp\\.(gate_up|down)_proj))"
    own = {"architectures": ["Phi4MMForCausalLM"], "model_type": "phi4mm", "rope_theta": rotation["rope_theta"], "partial_rotary_factor": rotation["partial_rotary_factor"],
           "rope_scaling": {"type": "longrope", "short_factor": rotation["short_factor"], "long_factor": rotation["long_factor"]}, "full_attn_mod": 1, "interpolate_factor": 1,
           "embd_layer": {"embedding_cls": "image_audio"}, "audio_processor": {"name": "cascades"}, "img_processor": None, "lm_head_bias": False, "mlp_bias": False,
           "speech_lora": {"dp": 0.01, "layer": layers, "lora_alpha": 4, "r": 2}, "vision_lora": {"dp": 0.0, "layer": layers, "lora_alpha": 4, "r": 2}, "attention_bias": False}
    return config | own, stored


# Models that Transformers runs by code that comes with them, made of one of its own that computes the same; and parts of a whole.
DISGUISES = {"phi4mm": as_phi4mm, "pangu": as_pangu, "codeshell": as_codeshell, "qwen2_5_omni": as_omni, "qwen3_omni_moe": as_omni, "qwen": as_qwen, "baichuan": as_baichuan, "baichuan2": as_baichuan2, "jais": as_jais, "openelm": as_openelm, "orion": as_orion, "xverse": as_xverse, "internlm": as_internlm, "deepseek": as_deepseek, "chatglm": as_chatglm, "bailing_moe": as_ling, "bailing_moe_v2": as_ling2, "nemotron-nas": as_nas, "exaone": as_exaone, "minicpm": as_minicpm, "internlm2": as_internlm2, "internlm3": as_internlm3, "mamba_ssm": as_mamba_ssm}


def check_checkpoint(case, weights, folder):
    """What was saved is bit for bit what the expectations were computed from."""
    saved = {}
    for path in folder.glob("model*.safetensors"):
        with safe_open(path, "pt") as file:
            saved |= {name.removeprefix(case.prefix): file.get_tensor(name) for name in file.keys()}
    saved.pop(TOWER, None)
    if saved.keys() != weights.keys():
        # Experts are saved one by one: what Transformers reads from there is what counts.
        model = model_classes(case.family)[1].from_pretrained(folder, dtype=getattr(torch, case.storage))
        # Newer versions read routers in float32.
        saved = {name: x.to(weights[name].dtype) for name, x in model.state_dict().items() if name in weights}
    assert saved.keys() == weights.keys(), saved.keys() ^ weights.keys()
    assert all(torch.equal(saved[name], weights[name]) and saved[name].dtype == weights[name].dtype for name in weights)


def main():
    here = Path(__file__).resolve().parent
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--out", type=Path, default=here / "models")
    args.add_argument("--only", nargs="*", help="names of cases; all of them if absent")
    args.add_argument("--converter", type=Path, help="llama.cpp's convert_hf_to_gguf.py, for the GGUF twins")
    args.add_argument("--quantize", type=Path, help="llama.cpp's llama-quantize, for the K-quant twin")
    args = args.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    total = 0
    for case in CASES:
        if args.only and case.name not in args.only:
            continue
        folder = args.out / case.name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        weights = make_weights(case)
        if case.lm is not None:
            import mlx_models
            model, weights = mlx_models.write(case, weights, folder, lambda path: write_checkpoint(case, weights, path))
        elif case.mlx:
            stored, weights = quantised(case, weights)
            write_mlx(case, weights, stored, folder)
        else:
            write_checkpoint(case, weights, folder)
        if case.below:
            (folder / "folder").mkdir()
            for path in folder.glob("*.*"):
                path.rename(folder / "folder" / path.name)
        if case.own:
            write_own(case, weights, folder)
        tensors, notes = expected(case, weights)
        save_file(tensors, folder / "expected.safetensors", notes)
        if case.lm is not None:
            mlx_models.check(case, model, tensors)
        if case.family == "bitnet" and case.gguf:
            import model_twins
            model_twins.write_bitnet(case, weights, folder / f"model.{case.gguf[0]}.gguf")
        elif case.family == "step3p5" and case.gguf:
            import model_twins
            model_twins.write_step(case, folder, folder / f"model.{case.gguf[0]}.gguf")
        elif args.converter and case.gguf:
            import model_twins
            model_twins.write(case, weights, folder, args.converter, args.quantize)
        for path in folder.rglob("*.*"):
            path.chmod(0o644)
        notes = json.loads(notes["fixture"])
        size = sum(p.stat().st_size for p in folder.rglob("*.*"))
        total += size
        print(f"{case.name:16} {size / 1024:6.0f} KiB  float32 differs by {notes['float32_logits_difference']:>8}"
              f"  margin {notes['greedy_margin']}  {' '.join(str(t) for t in tensors['decode.tokens'].tolist())}")
    print(f"{'total':16} {total / 1024:6.0f} KiB")


if __name__ == "__main__":
    main()

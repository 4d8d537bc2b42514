"""GGUF twins of the model fixtures, written by llama.cpp's own converter and quantiser; used by models.py.

A twin in f32, f16 or bf16 holds exactly the checkpoint's weights (checked here), so the case's `expected.safetensors`
is its truth too. A quantised twin gets a truth of its own, `expected.TYPE.safetensors`, computed from the weights
that the `gguf` package dequantises from it.
"""
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import gguf
import torch
import transformers
from safetensors.torch import load_file, save_file
from sentencepiece import sentencepiece_model_pb2

import models

EXACT = {"f32", "f16", "bf16"}
HYBRIDS = {"qwen3_next", "qwen3_5", "qwen3_5_moe"}
PERMUTED = {"llama", "mistral", "mixtral", "granite", "granitemoe", "granitemoeshared", "granitemoehybrid", "nemotron_h", "ministral3", "smollm3", "minicpm", "internlm2", "arcee", "baichuan", "bailing_moe", "deepseek", "xverse", "nemotron-nas", "olmo", "iquestcoder", "granitemoe_swa"}  # families whose rows of q and k the converter reorders


# Weights of state spaces.
MAMBA = {"in_proj.weight": "ssm_in.weight", "conv1d.weight": "ssm_conv1d.weight", "conv1d.bias": "ssm_conv1d.bias", "dt_bias": "ssm_dt.bias",
         "A_log": "ssm_a", "D": "ssm_d", "norm.weight": "ssm_norm.weight", "out_proj.weight": "ssm_out.weight", "x_proj.weight": "ssm_x.weight",
         "dt_proj.weight": "ssm_dt.weight", "dt_proj.bias": "ssm_dt.bias", **{f"{part}_layernorm.weight": f"ssm_{part}_norm.weight" for part in ("dt", "b", "c")}}


# Weights of delta nets whose elements forget by themselves, under Transformers' names and the converter's.
KIMI = {"conv1d.weight": [f"ssm_conv1d_{part}.weight" for part in "qkv"], "b_proj.weight": ["ssm_beta.weight"], "o_norm.weight": ["ssm_norm.weight"],
        "forget_gate.dt_bias": ["ssm_dt.bias"], "forget_gate.A_log": ["ssm_a"],
        **{f"forget_gate.f_{part}_proj.weight": [f"ssm_f_{part}.weight"] for part in "ab"},
        **{f"g_{part}_proj.weight": [f"ssm_g_{part}.weight"] for part in "ab"}}


def tiny_tokenizer(path, vocab_size):
    """A SentencePiece model of `vocab_size` pieces: specials, a newline, then printable characters and pairs."""
    pieces = sentencepiece_model_pb2.ModelProto()
    kinds = pieces.SentencePiece
    letters = ["\u2581"] + [chr(c) for c in range(0x21, 0x7F)]
    pairs = [a + b for a in "etaoinshr" for b in "etaoinshr"]
    texts = [("<unk>", kinds.UNKNOWN), ("<s>", kinds.CONTROL), ("</s>", kinds.CONTROL), ("\n", kinds.NORMAL)]
    texts += [(text, kinds.NORMAL) for text in letters + pairs]
    for rank, (text, kind) in enumerate(texts[:vocab_size]):
        pieces.pieces.add(piece=text, score=-float(rank) if kind == kinds.NORMAL else 0.0, type=kind)
    pieces.trainer_spec.model_type = pieces.trainer_spec.BPE
    pieces.trainer_spec.vocab_size = len(pieces.pieces)
    pieces.trainer_spec.byte_fallback = False
    path.write_bytes(pieces.SerializeToString())


# Any family with the small vocabulary: what the converter would take from the tokenizers that models are published with.
CONVERT = """
import runpy, sys
sys.argv = sys.argv[1:]
sys.path[:0] = [sys.argv[0].rsplit("/", 1)[0], sys.argv[0].rsplit("/", 1)[0] + "/gguf-py"]
from conversion.base import ModelBase
write = ModelBase.write
def with_vocabulary(self):
    self.set_vocab = self._set_vocab_sentencepiece
    write(self)
ModelBase.write = with_vocabulary
# Keys that it asks for, and that Transformers 5 has under other names once it has read them.
load = ModelBase.load_hparams
def with_all_keys(dir_model, is_mistral_format):
    import json, pathlib
    stated = pathlib.Path(dir_model, "config.json")
    config = json.loads(stated.read_text()) if stated.exists() else {}
    if config.get("model_type") in ("nemotron_h", "mimo_v2_flash"):
        return config  # it takes Transformers' usual numbers of experts, or its rotations, for those of the model
    return {**(json.loads(stated.read_text()) if stated.exists() else {}), **load(dir_model, is_mistral_format)}
ModelBase.load_hparams = staticmethod(with_all_keys)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def rewrite(folder, config, rename):
    """The folder's configuration, and its tensors under other names: `rename` gives the new ones with the tensor of each."""
    (folder / "config.json").write_text(json.dumps(config))
    path = folder / "model.safetensors"
    tensors = [part for name, x in load_file(path).items() for part in rename(name, x)]
    save_file({name: x.contiguous() for name, x in tensors}, path, {"format": "pt"})


def published(folder):
    """Turn a folder that Transformers wrote into the form in which the family is published, where the converter knows that alone."""
    config = json.loads((folder / "config.json").read_text())
    kind = config["model_type"]
    if kind == "mpt":
        config["architectures"] = ["MPTForCausalLM"]
        (folder / "config.json").write_text(json.dumps(config))
    if kind == "mistral4":
        # The decoder of a model that sees images.
        del config["architectures"]
        whole = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": config}
        rewrite(folder, whole, lambda name, x: [("language_model." + name, x)])
    if kind == "kimi_linear":
        full = [i for i, layer in enumerate(config["layer_types"], 1) if layer == "full_attention"]
        sizes = {"full_attn_layers": full, "num_heads": config["linear_num_heads"], "head_dim": config["linear_head_dim"],
                 "short_conv_kernel_size": config["linear_conv_kernel_dim"]}
        dense = sum(kind == "dense" for kind in config["mlp_layer_types"])
        config |= {"linear_attn_config": sizes, "first_k_dense_replace": dense, "moe_router_activation_func": "sigmoid"}
        rewrite(folder, config, lambda name, x: [(re.sub(r"block_sparse_moe\.(\w+_proj)", r"mlp.\1", name), x)])
    if kind == "mimo_v2_flash":
        rotations, local = config.pop("rope_parameters"), [layer == "sliding_attention" for layer in config["layer_types"]]
        config |= {"hybrid_layer_pattern": list(map(int, local)), "swa_head_dim": config["head_dim"], "swa_v_head_dim": config["v_head_dim"],
                   "swa_num_attention_heads": config["num_attention_heads"], "swa_num_key_value_heads": 2 * config["num_key_value_heads"],
                   "moe_layer_freq": [int(layer == "sparse") for layer in config["mlp_layer_types"]], "topk_method": "noaux_tc",
                   "rope_theta": rotations["full_attention"]["rope_theta"], "swa_rope_theta": rotations["sliding_attention"]["rope_theta"],
                   "partial_rotary_factor": rotations["full_attention"]["partial_rotary_factor"], "layernorm_epsilon": config["rms_norm_eps"]}
        (folder / "config.json").write_text(json.dumps(config))


def run(*command):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def unpermute(x, heads):
    """Undo the converter's reordering of query and key rows: from interleaved pairs back to two halves of a head."""
    return x.reshape(heads, x.shape[0] // heads // 2, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def delta_net(family, config, part, stored):
    """A weight of a gated delta net as Transformers has it; `stored` gives those of the file."""
    heads, key_heads, each = config.linear_num_value_heads, config.linear_num_key_heads, config.linear_value_head_dim
    keys, shared = 2 * key_heads * config.linear_key_head_dim, heads // key_heads
    tiled = family != "qwen3_next"  # heads that share keys lie apart

    def beside(x, size):
        return x.reshape(shared, key_heads, size, -1).swapaxes(0, 1).reshape(x.shape) if tiled else x

    def mixed(x):
        return torch.cat((x[:keys], beside(x[keys:], each)))

    if part == "in_proj_qkvz":
        q, k, v = stored("attn_qkv.weight").split((keys // 2, keys // 2, heads * each))
        parts = [x.reshape(key_heads, -1, x.shape[-1]) for x in (q, k, v, stored("attn_gate.weight"))]
        return torch.cat(parts, 1)
    return {
        "in_proj_ba": lambda: stored("ssm_ba.weight"),
        "in_proj_qkv": lambda: mixed(stored("attn_qkv.weight")),
        "in_proj_z": lambda: beside(stored("attn_gate.weight"), each),
        "in_proj_a": lambda: beside(stored("ssm_alpha.weight"), 1),
        "in_proj_b": lambda: beside(stored("ssm_beta.weight"), 1),
        "conv1d": lambda: mixed(stored("ssm_conv1d.weight")),
        # The checkpoint has it in 16 bits, which the logarithm comes back to.
        "A_log": lambda: torch.log(-beside(stored("ssm_a"), 1)).bfloat16(),
        "dt_bias": lambda: beside(stored("ssm_dt.bias"), 1),
        "norm": lambda: stored("ssm_norm.weight"),
        "out_proj": lambda: beside(stored("ssm_out.weight").mT.contiguous(), each).mT,
    }[part]()


def falcon_h1_factors(config, name):
    """What Falcon-H1's converter multiplies a weight with, a factor for each row or one for all."""
    size, (gate, down) = config.mamba_n_groups * config.mamba_d_state, config.mlp_multipliers
    parts = [config.mamba_d_ssm, config.mamba_d_ssm, size, size, config.mamba_n_heads]
    sections = torch.cat([torch.full((n,), by) for n, by in zip(parts, config.ssm_multipliers)])
    read = config.attention_in_multiplier
    factors = {"down_proj": down, "gate_proj": gate, "k_proj": config.key_multiplier * read, "q_proj": read, "v_proj": read,
               "o_proj": config.attention_out_multiplier, "out_proj": config.ssm_out_multiplier,
               "in_proj": config.ssm_in_multiplier * sections[:, None], "lm_head": config.lm_head_multiplier,
               "embed_tokens": config.embedding_multiplier}
    return factors.get(name.split(".")[-2] if "." in name else name, 1.0)


def head_size(config):
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def read_back(case, path):
    """The model's weights as the GGUF file has them, in float32, under Transformers' names."""
    config, reader = models.make_config(case), gguf.GGUFReader(path)
    arch = {"llama": gguf.MODEL_ARCH.LLAMA, "mistral": gguf.MODEL_ARCH.LLAMA,
            "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3, "phi3": gguf.MODEL_ARCH.PHI3,
            "gemma2": gguf.MODEL_ARCH.GEMMA2, "gemma3": gguf.MODEL_ARCH.GEMMA3, "gemma4": gguf.MODEL_ARCH.GEMMA4, "mixtral": gguf.MODEL_ARCH.LLAMA,
            "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE, "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE, "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
            "smollm3": gguf.MODEL_ARCH.SMOLLM3, "granite": gguf.MODEL_ARCH.GRANITE, "olmo2": gguf.MODEL_ARCH.OLMO2,
            "glm4": gguf.MODEL_ARCH.GLM4, "llama4": gguf.MODEL_ARCH.LLAMA4, "gpt2": gguf.MODEL_ARCH.GPT2, "qwen3_next": gguf.MODEL_ARCH.QWEN3NEXT,
            "qwen3_5": gguf.MODEL_ARCH.QWEN35, "qwen3_5_moe": gguf.MODEL_ARCH.QWEN35MOE, "ministral3": gguf.MODEL_ARCH.MISTRAL3,
            "granitemoe": gguf.MODEL_ARCH.GRANITE_MOE, "granitemoeshared": gguf.MODEL_ARCH.GRANITE_MOE, "olmo3": gguf.MODEL_ARCH.OLMO2,
            "exaone4": gguf.MODEL_ARCH.EXAONE4, "ernie4_5": gguf.MODEL_ARCH.ERNIE4_5, "seed_oss": gguf.MODEL_ARCH.SEED_OSS,
            "glm": gguf.MODEL_ARCH.CHATGLM, "dots1": gguf.MODEL_ARCH.DOTS1, "olmoe": gguf.MODEL_ARCH.OLMOE, "gemma": gguf.MODEL_ARCH.GEMMA,
            "cohere": gguf.MODEL_ARCH.COMMAND_R, "cohere2": gguf.MODEL_ARCH.COHERE2, "starcoder2": gguf.MODEL_ARCH.STARCODER2,
            "stablelm": gguf.MODEL_ARCH.STABLELM, "phi": gguf.MODEL_ARCH.PHI2, "gpt_neox": gguf.MODEL_ARCH.GPTNEOX,
            "deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2, "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2, "glm4_moe_lite": gguf.MODEL_ARCH.DEEPSEEK2,
            "youtu": gguf.MODEL_ARCH.DEEPSEEK2, "exaone": gguf.MODEL_ARCH.EXAONE, "gpt_bigcode": gguf.MODEL_ARCH.STARCODER, "olmo": gguf.MODEL_ARCH.OLMO, "nemotron": gguf.MODEL_ARCH.NEMOTRON, "arcee": gguf.MODEL_ARCH.ARCEE, "hunyuan_v1_dense": gguf.MODEL_ARCH.HUNYUAN_DENSE,
            "afmoe": gguf.MODEL_ARCH.AFMOE, "apertus": gguf.MODEL_ARCH.APERTUS, "falcon": gguf.MODEL_ARCH.FALCON, "minicpm": gguf.MODEL_ARCH.MINICPM, "internlm2": gguf.MODEL_ARCH.INTERNLM2, "lfm2": gguf.MODEL_ARCH.LFM2,
            "granitemoehybrid": gguf.MODEL_ARCH.GRANITE_HYBRID, "nemotron_h": gguf.MODEL_ARCH.NEMOTRON_H,
            "gemma3n": gguf.MODEL_ARCH.GEMMA3N, "iquestcoder": gguf.MODEL_ARCH.LLAMA, "jais2": gguf.MODEL_ARCH.JAIS2,
            "exaone_moe": gguf.MODEL_ARCH.EXAONE_MOE, "cohere2_moe": getattr(gguf.MODEL_ARCH, "COHERE2MOE", None), "hy_v3": getattr(gguf.MODEL_ARCH, "HY_V3", None), "solar_open": gguf.MODEL_ARCH.GLM4_MOE,
            "laguna": getattr(gguf.MODEL_ARCH, "LAGUNA", None), "mistral4": getattr(gguf.MODEL_ARCH, "MISTRAL4", None),
            "mellum": getattr(gguf.MODEL_ARCH, "MELLUM", None), "granitemoe_swa": getattr(gguf.MODEL_ARCH, "GRANITE_SWA", None), "kimi_linear": getattr(gguf.MODEL_ARCH, "KIMI_LINEAR", None), "mimo_v2_flash": getattr(gguf.MODEL_ARCH, "MIMO2", None), "falcon_h1": gguf.MODEL_ARCH.FALCON_H1, "mamba2": gguf.MODEL_ARCH.MAMBA2, "mamba": gguf.MODEL_ARCH.MAMBA, "falcon_mamba": gguf.MODEL_ARCH.MAMBA, "jamba": gguf.MODEL_ARCH.JAMBA, "bloom": gguf.MODEL_ARCH.BLOOM, "mpt": gguf.MODEL_ARCH.MPT, "dbrx": gguf.MODEL_ARCH.DBRX, "baichuan": gguf.MODEL_ARCH.BAICHUAN, "bailing_moe": gguf.MODEL_ARCH.BAILINGMOE,
            "bailing_moe_v2": gguf.MODEL_ARCH.BAILINGMOE2, "orion": gguf.MODEL_ARCH.ORION, "openelm": gguf.MODEL_ARCH.OPENELM, "jais": gguf.MODEL_ARCH.JAIS, "xverse": gguf.MODEL_ARCH.XVERSE, "deepseek": gguf.MODEL_ARCH.DEEPSEEK, "nemotron-nas": gguf.MODEL_ARCH.DECI,
            "deepseek_v32": getattr(gguf.MODEL_ARCH, "DEEPSEEK32", None), "glm_moe_dsa": getattr(gguf.MODEL_ARCH, "GLM_DSA", None)}[case.disguise or case.family]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    stored = {t.name: t for t in reader.tensors}
    heads = {"q_proj": case.config.get("num_attention_heads", 0), "k_proj": case.config.get("num_key_value_heads", 0)}
    weights = {}

    def decoded(name, shape=None):
        tensor = stored.pop(name)
        x = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        return x if shape is None else x.reshape(shape)

    def stack(block, part, end="weight"):
        """All experts' matrices, stored as one tensor or one by one."""
        if f"{block}.{part}_exps.{end}" in stored:
            return decoded(f"{block}.{part}_exps.{end}")
        return torch.stack([decoded(f"{block}.{part}.{i}.{end}") for i in range(config.num_local_experts)])

    for name, shape in ((name, p.shape) for name, p in models.build(case, torch.float32).state_dict().items()):
        if name.endswith("linear_attn.weight"):
            weights[name] = decoded(f"blk.{name.split('.')[2]}.attn_output.weight").float()
            continue
        if ".linear_attn." in name:
            block, part = f"blk.{name.split('.')[2]}", name.split("linear_attn.")[1].removesuffix(".weight")
            weights[name] = delta_net(case.family, config, part, lambda own: decoded(f"{block}.{own}")).reshape(shape).float()
            continue
        if ".mamba." in name or name.endswith(tuple(f"mixer.{part}" for part in MAMBA)):
            part = name.split("mamba." if ".mamba." in name else "mixer.")[1]
            x = decoded(f"blk.{name.split('.')[2]}.{MAMBA[part]}")
            # The checkpoint has the logarithm in its own type, which it comes back to.
            x = torch.log(-x).to(getattr(torch, case.storage)) if part == "A_log" else x
            weights[name] = x.reshape(shape).float()
            continue
        if ".self_attn." in name and (part := name.split("self_attn.")[1]) in KIMI:
            parts = [decoded(f"blk.{name.split('.')[2]}.{own}").reshape(-1) for own in KIMI[part]]
            x = torch.cat(parts).reshape(shape)
            weights[name] = (torch.log(-x).to(getattr(torch, case.storage)) if part.endswith("A_log") else x).float()
            continue
        if (case.sizes or case.disguise == "jais") and name.split(".")[-2] in ("q_proj", "k_proj", "v_proj"):
            # One below the other there.
            whole, part = f"blk.{name.split('.')[2]}.attn_qkv.{name.split('.')[-1]}", name.split(".")[-2]
            heads_of, groups_of, _ = case.sizes[int(name.split(".")[2])] if case.sizes else (config.num_attention_heads, config.num_key_value_heads, 0)
            start = {"q_proj": 0, "k_proj": heads_of, "v_proj": heads_of + groups_of}[part] * head_size(config)
            weights[name] = torch.from_numpy(gguf.quants.dequantize(stored[whole].data, stored[whole].tensor_type).copy())[start:start + shape[0]].float()
            if part == "v_proj":
                del stored[whole]
            continue
        if case.disguise == "bailing_moe_v2" and name.split(".")[-2] in ("q_proj", "k_proj", "v_proj"):
            # One below the other there.
            whole, part = f"blk.{name.split('.')[2]}.attn_qkv.{name.split('.')[-1]}", name.split(".")[-2][0]
            sizes = [weights[name.replace("v_proj", f"{one}_proj")].shape[0] if part == "v" else 0 for one in "qk"]
            start = {"q": 0, "k": config.num_attention_heads * head_size(config), "v": sum(sizes)}[part]
            x = torch.from_numpy(gguf.quants.dequantize(stored[whole].data, stored[whole].tensor_type).copy())
            if part == "v":
                del stored[whole]
            weights[name] = x[start:start + shape[0]].reshape(shape).float()
            continue
        if case.disguise == "deepseek" and name.endswith(("_proj.bias", "shared_expert_gate.weight")):
            weights[name] = torch.zeros(shape)
            continue
        if case.disguise == "deepseek" and ".shared_expert." in name:
            part = name.split(".")[-2].removesuffix("_proj")
            weights[name] = decoded(f"blk.{name.split('.')[2]}.ffn_{part}_shexp.weight").float() * (2 if part == "down" else 1)
            continue
        if "_layernorm.norms." in name:
            # All heads' in one there.
            part, head = name.split("self_attn.")[1][0], int(name.split(".")[-2])
            whole = f"blk.{name.split('.')[2]}.attn_{part}_norm.weight"
            weights[name] = torch.from_numpy(gguf.quants.dequantize(stored[whole].data, stored[whole].tensor_type).copy())[head].float()
            if head + 1 == (config.num_attention_heads if part == "q" else config.num_key_value_heads):
                del stored[whole]
            continue
        if ".ffn.experts.mlp." in name:
            part = {"w1": "gate", "v1": "up", "w2": "down"}[name.split(".")[-1]]
            x = decoded(f"blk.{name.split('.')[2]}.ffn_{part}_exps.weight")
            weights[name] = (x.mT if part == "down" else x).reshape(shape).float()
            continue
        if ".experts." in name:
            block, part, end = f"blk.{name.split('.')[2]}", name.split(".")[-1], "bias" if name.endswith("bias") else "weight"
            if f"{block}.ffn_gate_up_exps.{end}" in stored and part == "gate_up_proj":
                x = decoded(f"{block}.ffn_gate_up_exps.{end}")
            elif part.startswith("gate_up_proj"):
                gate, up = (stack(block, f"ffn_{half}", end) for half in ("gate", "up"))
                # gpt-oss has the rows of both by turns.
                x = torch.stack((gate, up), 2).flatten(1, 2) if case.family == "gpt_oss" else torch.cat((gate, up), 1)
            else:
                x = stack(block, "ffn_down", end)
            weights[name] = (x.mT if case.family in ("gpt_oss", "llama4") and end == "weight" else x).reshape(shape).float()
            continue
        if "altup_projections." in name or "altup_unembed_projections." in name:
            stack = "altup_proj.weight" if "altup_projections." in name else "altup_unembd_proj.weight"
            x = torch.from_numpy(gguf.quants.dequantize(stored[stack].data, stored[stack].tensor_type).copy())
            weights[name] = x[int(name.split(".")[-2])].reshape(shape).float()
            continue
        if name.endswith("correct_output_scale"):
            weights[name] = decoded(f"blk.{name.split('.')[2]}.altup_correct_scale.weight").float()
            continue
        if ".act_fn." in name:
            numbers = reader.get_field(f"xielu.{name.rsplit('.', 1)[1]}").contents()
            weights[name] = torch.tensor(numbers[int(name.split(".")[2])]).reshape(shape)
            continue
        if name.endswith("shared_mlp.input_linear.weight"):
            block = f"blk.{name.split('.')[2]}"
            if case.family == "granitemoe_swa":  # one on top of the other
                weights[name] = decoded(f"{block}.ffn_up_shexp.weight").float()
                continue
            alone = "" if f"{block}.ffn_gate.weight" in stored else "_shexp"
            weights[name] = torch.cat([decoded(f"{block}.ffn_{half}{alone}.weight") for half in ("gate", "up")]).float()
            continue
        if name.endswith("shared_mlp.output_linear.weight") and f"blk.{name.split('.')[2]}.ffn_down.weight" in stored:
            weights[name] = decoded(f"blk.{name.split('.')[2]}.ffn_down.weight").float()
            continue
        if name.endswith("kv_b_proj.weight"):
            # Keys and values of each head apart, keys the other way round.
            block = f"blk.{name.split('.')[2]}"
            x = torch.cat((decoded(f"{block}.attn_k_b.weight").mT, decoded(f"{block}.attn_v_b.weight")), 1)
            weights[name] = x.reshape(shape).float()
            continue
        if name.endswith(("router.scale", "per_expert_scale")):
            part = "ffn_gate_inp" if name.endswith("router.scale") else "ffn_down_exps"
            weights[name] = decoded(f"blk.{name.split('.')[2]}.{part}.scale", shape).float()
            continue
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            weights[name] = decoded(f"blk.{name.split('.')[2]}.exp_probs_b" + (".bias" if case.family != "hy_v3" else "")).float()
            continue
        tensor = stored.pop(f"blk.{name.split('.')[2]}.attn_sinks.weight" if name.endswith("sinks")
                            else f"blk.{name.split('.')[2]}.ffn_gate_inp.weight" if name.endswith(".router.weight")
                            else f"blk.{name.split('.')[2]}.layer_output_scale.weight" if name.endswith("layer_scalar")
                            else names.get_name(name.replace("model.", "backbone.", 1) if case.family == "nemotron_h" else
                                                name.removeprefix("transformer.") if case.family == "bloom" else name,
                                                try_suffixes=(".weight", ".bias")), None)
        if tensor is None:
            assert name == "lm_head.weight" and config.tie_word_embeddings, name
            continue
        x = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        x = x.mT if case.family == "gpt2" and ".c_" in name and x.ndim == 2 else x.reshape(shape)
        projection = name.split(".")[-2]
        if (case.disguise or case.family) in PERMUTED and projection in heads:
            x = unpermute(x, x.shape[0] // head_size(config) if case.blocks else heads[projection])
        if case.family == "falcon" and projection == "query_key_value":
            # All queries are in front of all keys there; one key serves all here.
            assert config.multi_query and not config.new_decoder_architecture
        if case.family in ("gpt_neox", "bloom") and projection == "query_key_value":
            # One below the other there, by turns for each head here.
            x = x.reshape(3, config.num_attention_heads, -1).swapaxes(0, 1).reshape(shape)
        if (case.family in HYBRIDS or case.family.startswith(("gemma", "nemotron"))) and case.family not in ("gemma3n", "gemma4", "nemotron_h") and name.endswith("norm.weight"):
            x = x - 1.0  # the converter adds it
        weights[name] = x.float()
    if case.family == "falcon_h1":
        weights = {name: x / falcon_h1_factors(config, name) for name, x in weights.items()}
    assert set(stored) <= {"altup_proj.weight", "altup_unembd_proj.weight", "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}, stored.keys()
    return weights


def split_experts(path):
    """Store each expert's matrices as a tensor of its own, as the first files of Mixtral do."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(path.with_suffix(".split"), reader.get_field("general.architecture").contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind = field.types[0]
        writer.add_key_value(field.name, field.contents(), kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        if "_exps." not in tensor.name:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        for i, data in enumerate(tensor.data):
            writer.add_tensor(tensor.name.replace("_exps.", f".{i}."), data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.with_suffix(".split").rename(path)


def write_bitnet(case, weights, path):
    """BitNet as llama.cpp's `bitnet` has it: by the names of the `gguf` package, since the converter takes the first BitNet's class alone."""
    config = models.make_config(case)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BITNET, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, "bitnet")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for name, x in weights.items():
        # The first BitNet's names of these norms are those that the package knows.
        name = name.replace("attn_sub_norm", "inner_attn_ln").replace("ffn_sub_norm", "ffn_layernorm")
        if name != "lm_head.weight":
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), x.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_step(case, folder, path):
    """Step 3.5 as llama.cpp's `step35` has it: by the names of the `gguf` package, since the converter takes the first folders' form alone."""
    config = models.make_config(case)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.STEP35, config.num_hidden_layers)
    local = [kind == "sliding_attention" for kind in config.layer_types]
    whole, within = (config.rope_parameters[kind] for kind in ("full_attention", "sliding_attention"))
    writer = gguf.GGUFWriter(path, "step35")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count([config.per_layer_config[i].num_attention_heads for i in range(len(local))])
    writer.add_head_count_kv([config.num_key_value_heads] * len(local))
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(whole["rope_theta"])
    writer.add_rope_freq_base_swa(within["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)  # layers that see everything turn half of it
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(local)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.share_expert_dim)
    writer.add_expert_weights_scale(config.moe_router_scaling_factor)
    writer.add_expert_weights_norm(True)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_leading_dense_block_count(config.mlp_layer_types.index("sparse"))
    writer.add_swiglu_clamp_exp(config.swiglu_limits)
    writer.add_swiglu_clamp_shexp(config.swiglu_limits_shared)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    rotary = transformers.Step3p7ForConditionalGeneration._from_config(models.whole_config(case)).model.language_model.rotary_emb
    turned = rotary.full_attention_inv_freq
    plain = whole["rope_theta"] ** (-torch.arange(0, 2 * len(turned), 2) / (2 * len(turned)))
    factors = torch.ones(config.head_dim // 2)
    factors[: len(turned)] = plain / turned
    writer.add_tensor("rope_freqs.weight", factors.numpy())
    for name, x in load_file(folder / "model.safetensors").items():
        if name.startswith(("model.", "lm_head.")):
            x = x.float() + 1.0 if name.endswith("norm.weight") else x.float()
            stem = f"{name}.bias" if name.endswith("router_bias") else name
            writer.add_tensor(names.get_name(stem, try_suffixes=(".weight", ".bias")), x.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write(case, weights, folder, converter, quantize):
    """Convert the checkpoint in `folder` to each type of `case.gguf`; then drop the checkpoint if the case says so."""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / case.name
        shutil.copytree(folder, source)
        tiny_tokenizer(source / "tokenizer.model", models.make_config(case).vocab_size)
        published(source)
        for kind in case.gguf:
            out = folder / f"model.{kind.lower()}.gguf"
            outtype = kind.removesuffix("-split")
            if outtype in EXACT or outtype == "q8_0":
                # Hybrids' further heads, which guess tokens ahead, are not in these checkpoints.
                alone = ["--no-mtp"] if case.family in HYBRIDS | {"mimo_v2_flash"} else []
                run(sys.executable, "-c", CONVERT, converter, source, "--outtype", outtype, "--outfile", out, *alone)
                if outtype != kind:
                    split_experts(out)
            elif quantize:
                whole = Path(scratch) / "whole.gguf"
                run(sys.executable, "-c", CONVERT, converter, source, "--outtype", "f32", "--outfile", whole)
                run(quantize, whole, out, kind, 1)
            else:
                print(f"{case.name}: no {kind} twin without --quantize")
                continue
            found = read_back(case, out)
            assert found.keys() == weights.keys(), found.keys() ^ weights.keys()
            if kind in EXACT:
                assert all(torch.equal(found[name], weights[name].float()) for name in weights), "the twin differs"
            else:
                tensors, notes = models.expected(case, found)
                save_file(tensors, folder / f"expected.{kind.lower()}.safetensors", notes)
        if case.own:
            # The converter finds the same file in Mistral's own.
            own = Path(scratch) / "own"
            shutil.copytree(folder / "folder", own)
            shutil.copy(source / "tokenizer.model", own)
            out = Path(scratch) / "own.gguf"
            run(sys.executable, "-c", CONVERT, converter, own, "--mistral-format", "--outtype", "f32", "--outfile", out)
            found = read_back(case, out)
            assert all(torch.equal(found[name], weights[name].float()) for name in weights), "Mistral's own files differ"
    if not case.folder:
        for path in [*folder.glob("*.json"), *folder.glob("model*.safetensors"), folder / "expected.safetensors"]:
            path.unlink()

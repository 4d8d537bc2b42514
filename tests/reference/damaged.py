"""Writes tiny models with one thing wrong each, and tells what programs make of them. Needs Python alone.

    python3 tests/reference/damaged.py OUT                       # OUT/gguf/NAME.gguf and OUT/hf/NAME/
    python3 tests/reference/damaged.py OUT --delft target/debug/delft
    python3 tests/reference/damaged.py OUT --python llama_cpp    # pip install llama-cpp-python: what a peer does

The kinds are those of crates/cli/tests/all/damaged, which makes its files itself and says what must become of each; this is for other
programs, and for commands that no test calls.
"""

import argparse
import copy
import json
import pathlib
import struct
import subprocess
import sys

HIDDEN, FEED_FORWARD, VOCABULARY = 16, 32, 40
LETTERS = [chr(c) for c in range(ord("a"), ord("z") + 1)]
TEXTS = ["<s>", "</s>", *LETTERS, "ab", "abc", "\u0120", "\u0120a", "\u00c3", "\u00a9", "<", ">"]
TEXTS += [f"[PAD{i}]" for i in range(len(TEXTS), VOCABULARY)]

# name in GGUF, name below `model.` in safetensors, rows (None: a norm), columns
TENSORS = [
    ("token_embd", "embed_tokens", VOCABULARY, HIDDEN),
    ("output_norm", "norm", None, HIDDEN),
    ("blk.0.attn_norm", "layers.0.input_layernorm", None, HIDDEN),
    ("blk.0.attn_q", "layers.0.self_attn.q_proj", HIDDEN, HIDDEN),
    ("blk.0.attn_k", "layers.0.self_attn.k_proj", HIDDEN // 2, HIDDEN),
    ("blk.0.attn_v", "layers.0.self_attn.v_proj", HIDDEN // 2, HIDDEN),
    ("blk.0.attn_output", "layers.0.self_attn.o_proj", HIDDEN, HIDDEN),
    ("blk.0.ffn_norm", "layers.0.post_attention_layernorm", None, HIDDEN),
    ("blk.0.ffn_gate", "layers.0.mlp.gate_proj", FEED_FORWARD, HIDDEN),
    ("blk.0.ffn_up", "layers.0.mlp.up_proj", FEED_FORWARD, HIDDEN),
    ("blk.0.ffn_down", "layers.0.mlp.down_proj", HIDDEN, FEED_FORWARD),
]


def numbers(rows, columns):
    """Ones for a norm, small numbers for a matrix, as bytes of F32."""
    if rows is None:
        return struct.pack(f"<{columns}f", *[1.0] * columns)
    return struct.pack(f"<{rows * columns}f", *[(i * 37 + 11) % 97 / 97 - 0.5 for i in range(rows * columns)])


# GGUF. A value is (type, value); arrays are (9, element type, list).
U32, I32, F32, BOOL, STR, ARR = 4, 5, 6, 7, 8, 9


def string(text):
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def encoded(kind, value):
    return string(value) if kind == STR else struct.pack({U32: "<I", I32: "<i", F32: "<f", BOOL: "<?"}[kind], value)


def tiny_gguf():
    meta = {
        "general.architecture": (STR, "llama"),
        "general.type": (STR, "model"),
        "llama.embedding_length": (U32, HIDDEN),
        "llama.block_count": (U32, 1),
        "llama.attention.head_count": (U32, 2),
        "llama.attention.head_count_kv": (U32, 1),
        "llama.feed_forward_length": (U32, FEED_FORWARD),
        "llama.context_length": (U32, 64),
        "llama.attention.layer_norm_rms_epsilon": (F32, 1e-5),
        "llama.rope.freq_base": (F32, 10000.0),
        "tokenizer.ggml.model": (STR, "gpt2"),
        "tokenizer.ggml.pre": (STR, "gpt-2"),
        "tokenizer.ggml.tokens": (ARR, STR, list(TEXTS)),
        "tokenizer.ggml.token_type": (ARR, I32, [3, 3] + [1] * (VOCABULARY - 2)),
        "tokenizer.ggml.merges": (ARR, STR, ["a b", "ab c", "\u0120 a"]),
        "tokenizer.ggml.bos_token_id": (U32, 0),
        "tokenizer.ggml.eos_token_id": (U32, 1),
        "tokenizer.ggml.add_bos_token": (BOOL, True),
    }
    tensors = [
        {"name": f"{name}.weight", "dims": [columns] if rows is None else [columns, rows], "type": 0, "offset": None, "data": numbers(rows, columns)}
        for name, _, rows, columns in TENSORS
    ]
    return {"magic": b"GGUF", "version": 3, "meta": meta, "twice": [], "tensors": tensors, "align": 32, "end": 0}


def gguf_bytes(m):
    out = m["magic"] + struct.pack("<IQQ", m["version"], len(m["tensors"]), len(m["meta"]) + len(m["twice"]))
    for key, value in [*m["meta"].items(), *m["twice"]]:
        out += string(key) + struct.pack("<I", value[0])
        if value[0] == ARR:
            out += struct.pack("<IQ", value[1], len(value[2])) + b"".join(encoded(value[1], v) for v in value[2])
        else:
            out += encoded(*value)
    data = b""
    for t in m["tensors"]:
        offset = len(data) if t["offset"] is None else t["offset"]
        out += string(t["name"]) + struct.pack("<I", len(t["dims"])) + struct.pack(f"<{len(t['dims'])}Q", *t["dims"])
        out += struct.pack("<IQ", t["type"], offset)
        data += t["data"]
        data += bytes(-len(data) % m["align"])
    out += bytes(-len(out) % m["align"]) + data
    return out[: len(out) + m["end"]] if m["end"] <= 0 else out + bytes(m["end"])


def meta(key, *value):
    """Sets a key, or removes it."""

    def change(m):
        if value:
            m["meta"][key] = value
        else:
            del m["meta"][key]

    return change


def tensor(name, **fields):
    return lambda m: next(t for t in m["tensors"] if t["name"] == name).update(fields)


def extra(name, dims, kind=0):
    count = 1
    for dim in dims:
        count *= dim
    return lambda m: m["tensors"].append({"name": name, "dims": dims, "type": kind, "offset": None, "data": struct.pack(f"<{count}f", *[1.0] * count)})


def field(name, value):
    return lambda m: m.update({name: value})


def both(*changes):
    return lambda m: [change(m) for change in changes]


def token(key, *value):
    return meta(f"tokenizer.ggml.{key}", *value)


def llama(key, *value):
    return meta(f"llama.{key}", *value)


EPS = "attention.layer_norm_rms_epsilon"
GGUF = {
    "ok": lambda m: None,
    "magic": field("magic", b"GGUX"),
    "version_0": field("version", 0),
    "version_9": field("version", 9),
    "big_endian": field("version", 3 << 24),
    "cut": field("end", -200),
    "longer": field("end", 100),
    "adapter": meta("general.type", STR, "adapter"),
    "vocabulary_alone": lambda m: m["tensors"].clear(),
    "architecture_missing": meta("general.architecture"),
    "architecture_unknown": meta("general.architecture", STR, "nobody"),
    "align_64_written_32": field("align", 64),
    "align_32_written_64": meta("general.alignment", U32, 64),
    "align_24": meta("general.alignment", U32, 24),
    "align_0": meta("general.alignment", U32, 0),
    "offset_beyond": tensor("output_norm.weight", offset=1 << 40),
    "offset_unaligned": tensor("output_norm.weight", offset=4),
    "offset_overlaps": tensor("output_norm.weight", offset=0),
    "key_twice": lambda m: m["twice"].append(("llama.block_count", (U32, 1))),
    "tensor_twice": extra("output_norm.weight", [HIDDEN]),
    "dims_1000": tensor("output_norm.weight", dims=[1] * 1000),
    "dims_0": tensor("output_norm.weight", dims=[0]),
    "type_unknown": tensor("output_norm.weight", type=99),
    "type_i32": tensor("output_norm.weight", type=26),
    "weight_missing": lambda m: m["tensors"].pop(3),
    "weight_transposed": lambda m: m["tensors"][9]["dims"].reverse(),
    "layer_too_many": extra("blk.1.attn_norm.weight", [HIDDEN]),
    "rope_factors_5": extra("rope_freqs.weight", [5]),
    "layers_0": llama("block_count", U32, 0),
    "layers_huge": llama("block_count", U32, 0xFFFFFFFF),
    "layers_text": llama("block_count", STR, "1"),
    "layers_missing": llama("block_count"),
    "width_wrong": llama("embedding_length", U32, 18),
    "heads_3": llama("attention.head_count", U32, 3),
    "heads_kv_3": llama("attention.head_count_kv", U32, 3),
    "heads_kv_0": llama("attention.head_count_kv", U32, 0),
    "key_length_0": llama("attention.key_length", U32, 0),
    "eps_missing": llama(EPS),
    "eps_0": llama(EPS, F32, 0.0),
    "eps_negative": llama(EPS, F32, -1e-5),
    "eps_nan": llama(EPS, F32, float("nan")),
    "theta_0": llama("rope.freq_base", F32, 0.0),
    "theta_infinite": llama("rope.freq_base", F32, float("inf")),
    "context_0": llama("context_length", U32, 0),
    "context_missing": llama("context_length"),
    "experts_8": llama("expert_count", U32, 8),
    "experts_used_above_count": both(llama("expert_count", U32, 2), llama("expert_used_count", U32, 4)),
    "pre_unknown": token("pre", STR, "nobody"),
    "pre_missing": token("pre"),
    "merges_missing": token("merges"),
    "merges_no_blank": token("merges", ARR, STR, ["a b", "abc"]),
    "merges_unknown_token": token("merges", ARR, STR, ["a b", "ab c", "q x"]),
    "merges_huge_piece": token("merges", ARR, STR, ["a b", "ab c", "a " + "b" * (1 << 20)]),
    "tokens_fewer": token("tokens", ARR, STR, TEXTS[:30]),
    "types_fewer": token("token_type", ARR, I32, [1] * 39),
    "eos_outside": token("eos_token_id", U32, 4000),
    "eos_negative": token("eos_token_id", I32, -5),
    "eos_missing": token("eos_token_id"),
    "bos_outside": token("bos_token_id", U32, 4000),
    "bos_minus_1": token("bos_token_id", I32, -1),
    "bos_missing": token("bos_token_id"),
    "padding_outside": token("padding_token_id", U32, 4000),
    "template_broken": meta("tokenizer.chat_template", STR, "{% if %}"),
}


def tiny_folder():
    def special(i):
        return {"id": i, "content": TEXTS[i], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}

    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    model |= {"fuse_unk": False, "byte_fallback": False, "vocab": {t: i for i, t in enumerate(TEXTS)}, "merges": ["a b", "ab c", "\u0120 a"]}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": FEED_FORWARD}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_act": "silu", "rms_norm_eps": 1e-5}
    config |= {"rope_theta": 10000.0, "max_position_embeddings": 64, "vocab_size": VOCABULARY, "tie_word_embeddings": True}
    config |= {"bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "float32"}
    header, data = {}, b""
    for _, name, rows, columns in TENSORS:
        values = numbers(rows, columns)
        shape = [columns] if rows is None else [rows, columns]
        header[f"model.{name}.weight"] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    return {
        "config.json": config,
        "generation_config.json": {"eos_token_id": [1]},
        "tokenizer.json": {"version": "1.0", "added_tokens": [special(0), special(1)], "normalizer": None, "pre_tokenizer": level, "post_processor": None, "decoder": level, "model": model},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"},
        "header": header,
        "data": data,
        "lie": 0,
    }


def write_folder(m, folder):
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in m.items():
        if name.endswith(".json"):
            (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))
    if "header" in m:
        header = json.dumps(m["header"]).encode()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header) + m["lie"]) + header + m["data"])


def inner(file, *path):
    """Sets what a path of keys leads to in a file: the last of `path` is the value, `...` removes."""

    def change(m):
        *keys, last, value = path
        place = m[file]
        for key in keys:
            place = place[key]
        if value is ...:
            del place[last]
        else:
            place[last] = value

    return change


def config(key, value=...):
    return inner("config.json", key, value)


NORM = "model.norm.weight"
HF = {
    "ok": lambda m: None,
    "cfg_missing": lambda m: m.pop("config.json"),
    "cfg_cut": field("config.json", '{"hidden_size": 16'),
    "cfg_no_model_type": both(config("model_type"), config("architectures")),
    "cfg_unknown": both(config("model_type", "nobody"), config("architectures")),
    "cfg_quant_unknown": config("quantization_config", {"quant_method": "magic"}),
    "cfg_quant_gptq_missing": config("quantization_config", {"quant_method": "gptq", "bits": 4}),
    "cfg_experts_used": both(config("num_experts", 2), config("num_experts_per_tok", 4)),
    "cfg_width_text": config("hidden_size", "16"),
    "cfg_layers_negative": config("num_hidden_layers", -1),
    "cfg_heads_kv_3": config("num_key_value_heads", 3),
    "cfg_head_dim_0": config("head_dim", 0),
    "cfg_eps_0": config("rms_norm_eps", 0.0),
    "cfg_eps_nan": config("rms_norm_eps", float("nan")),
    "cfg_scaling_0": config("rope_scaling", {"type": "linear", "factor": 0.0}),
    "cfg_scaling_unknown": config("rope_scaling", {"rope_type": "nobody"}),
    "cfg_vocab_41": config("vocab_size", 41),
    "cfg_eos_outside": both(config("eos_token_id", 99), field("generation_config.json", {}), inner("tokenizer_config.json", "eos_token", ...), inner("tokenizer.json", "added_tokens", [])),
    "adapter": lambda m: [m.pop(name) for name in ("config.json", "header")] and m.update({"adapter_config.json": {"base_model_name_or_path": "org/base"}}),
    "st_header_lies": field("lie", 1_000_000),
    "st_type_unknown": inner("header", NORM, "dtype", "F8_E9"),
    "st_overlap": inner("header", NORM, "data_offsets", [0, 64]),
    "st_gap": lambda m: m.update(data=m["data"] + bytes(4)),
    "st_dims_1000": inner("header", NORM, "shape", [1] * 999 + [16]),
    "index_missing_shard": field("model.safetensors.index.json", {"weight_map": {"a": "model-00002-of-00002.safetensors"}}),
    "tok_no_merges": inner("tokenizer.json", "model", "merges", ...),
    "tok_merge_unknown": inner("tokenizer.json", "model", "merges", ["q x"]),
    "tok_fixed_length_zero": inner("tokenizer.json", "pre_tokenizer", {"type": "FixedLength", "length": 0}),
    "tok_precompiled_bad": inner("tokenizer.json", "normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    "tok_more_than_rows": inner("tokenizer.json", "model", "vocab", "more", 40),
    "template_broken": inner("tokenizer_config.json", "chat_template", "{{ x"),
}

PEER = """
import sys, llama_cpp
m = llama_cpp.Llama(sys.argv[1], n_ctx=16, verbose=True)
m.create_completion("abc", max_tokens=2)
"""


def told(command):
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    lines = [line for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
    words = ("error", "expected", "warning", "bad", "wrong", "missing", "not found", "invalid", "assert")
    telling = [line for line in lines if any(word in line.lower() for word in words)]
    return done.returncode, (telling or lines or [""])[0]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--delft")
    parser.add_argument("--python", choices=["llama_cpp"])
    args = parser.parse_args()
    paths = []
    (args.out / "gguf").mkdir(parents=True, exist_ok=True)
    for name, change in GGUF.items():
        model = tiny_gguf()
        change(model)
        paths.append(args.out / "gguf" / f"{name}.gguf")
        paths[-1].write_bytes(gguf_bytes(model))
    for name, change in HF.items():
        model = copy.deepcopy(tiny_folder())
        change(model)
        paths.append(args.out / "hf" / name)
        write_folder(model, paths[-1])
    print(f"{len(GGUF)} GGUF files, {len(HF)} folders in {args.out}")
    for path in paths:
        if args.delft:
            status, line = told([args.delft, "run", "-m", str(path), "-p", "abc", "-n", "2", "--raw"])
            print(f"{path.name:28} {status:4} {line}")
        elif args.python and path.suffix == ".gguf":
            status, line = told([sys.executable, "-c", PEER, str(path)])
            print(f"{path.name:28} {status:4} {line[:160]}")


main()

"""Writes a GGUF model of a real shape with random weights: for speed, not for sense. Needs numpy alone, and seconds.

    python3 tests/reference/random_gguf.py llama-1b q4_k OUT.gguf [words]
    python3 tests/reference/random_gguf.py qwen3-30b-a3b:8 q4_k OUT.gguf

A number behind the shape is how many layers there are instead of all. Every tensor is cut from one pool of random blocks, at a place of its own, so that writing is as fast as the disk. With `words` it
has a made-up tokenizer, as a server needs one; `delft bench` needs none.
"""

import struct
import sys

import numpy as np

# architecture, layers, width, heads, kv heads, head size, feed-forward, vocabulary, rope base, tied, q/k norms; of hybrids,
# three of four layers of which are gated delta nets: heads of keys and of values, their sizes, rows that a convolution mixes; of
# mixtures, a dictionary: experts, how many a token goes through, and what gpt-oss has besides: biases, sinks, a window; of Gemma 3
# one, too: norms behind attention and feed-forward, and the window of its local layers; of latents, the ranks of queries and of
# keys and values, elements of a head that do not turn and that do, those of a value, and the width of the first layer's feed-forward
SHAPES = {
    "llama-1b": ("llama", 16, 2048, 32, 8, 64, 8192, 128256, 5e5, True, False),
    "qwen3-0.6b": ("qwen3", 28, 1024, 16, 8, 128, 3072, 151936, 1e6, True, True),
    "qwen3.5-4b": ("qwen35", 32, 2560, 16, 4, 256, 9216, 248320, 1e7, True, True, 16, 32, 128, 128, 4),
    "llama-8b": ("llama", 32, 4096, 32, 8, 128, 14336, 128256, 5e5, False, False),
    "gemma3-4b": ("gemma3", 34, 2560, 8, 4, 256, 10240, 262144, 1e6, True, True, {"behind": 1024}),
    "qwen3-30b-a3b": ("qwen3moe", 48, 2048, 32, 4, 128, 768, 151936, 1e6, False, True, {"experts": 128, "used": 8}),
    "gpt-oss-20b": ("gpt-oss", 24, 2880, 64, 8, 64, 2880, 201088, 1.5e5, False, False, {"experts": 32, "used": 4, "window": 128}),
    "glm-4.7-flash": ("deepseek2", 47, 2048, 20, 1, 256, 1536, 154880, 1e6, False, False, {"experts": 64, "used": 4, "latents": (768, 512, 192, 64, 256, 10240)}),
}
# ggml's type number, elements and bytes of a block
TYPES = {"f32": (0, 1, 4), "bf16": (30, 1, 2), "f16": (1, 1, 2), "q8_0": (8, 32, 34), "q4_0": (2, 32, 18), "q4_k": (12, 256, 144), "q6_k": (14, 256, 210), "mxfp4": (39, 32, 17)}
ALIGN = 32
POOL = 64 << 20


def blocks(kind):
    """About 64 MiB of random blocks with scales that keep activations finite."""
    rng = np.random.default_rng(1)
    _, elements, size = TYPES[kind]
    count = POOL // size
    if kind in ("f16", "bf16", "f32"):
        x = (rng.standard_normal(count, dtype=np.float32) * 0.02).astype(np.float32)
        if kind == "f16":
            return x.astype(np.float16).view(np.uint8)
        if kind == "bf16":
            return (x.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return x.view(np.uint8)
    pool = rng.integers(0, 256, (count, size), dtype=np.uint8)
    half = lambda x: np.frombuffer(np.float16(x).tobytes(), np.uint8)
    if kind == "q8_0":
        pool[:, 0:2] = half(0.02 / 73)
    elif kind == "q4_0":
        pool[:, 0:2] = half(0.02 / 4.6)
    elif kind == "mxfp4":
        # 2^-8, of which codes are multiples up to twelve.
        pool[:, 0] = 127 - 8
    elif kind == "q4_k":
        pool[:, 0:2] = half(0.02 / 32 / 4.6)
        pool[:, 2:4] = half(0.02 / 32 / 4.6 * 7.5)
    else:
        pool[:, 208:210] = half(0.02 / 64 / 18)
    return pool.reshape(-1)


def string(s):
    s = s.encode()
    return struct.pack("<Q", len(s)) + s


def array(key, values):
    kind, packed = (8, map(string, values)) if isinstance(values[0], str) else (5, (struct.pack("<i", x) for x in values))
    return string(key) + struct.pack("<IIQ", 9, kind, len(values)) + b"".join(packed)


def tokenizer(vocab):
    """A vocabulary of bytes, pairs of letters, and made-up words, with an end token that is the last."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in plain]
    letters = [chr(b) for b in plain] + [chr(256 + i) for i in range(len(rest))]
    ascii_letters = "abcdefghijklmnopqrstuvwxyz"
    pairs = [(a, b) for a in ascii_letters for b in ascii_letters]
    tokens = letters + [a + b for a, b in pairs]
    tokens += [f"\u0120w{i}" for i in range(vocab - len(tokens) - 1)] + ["<end>"]
    return [
        value("tokenizer.ggml.model", "gpt2"),
        value("tokenizer.ggml.pre", "gpt-2"),
        array("tokenizer.ggml.tokens", tokens),
        array("tokenizer.ggml.token_type", [1] * (vocab - 1) + [3]),
        array("tokenizer.ggml.merges", [f"{a} {b}" for a, b in pairs]),
        value("tokenizer.ggml.eos_token_id", vocab - 1),
    ]


def value(key, x):
    kind, packed = {
        str: lambda: (8, string(x)),
        int: lambda: (4, struct.pack("<I", x)),
        float: lambda: (6, struct.pack("<f", x)),
    }[type(x)]()
    return string(key) + struct.pack("<I", kind) + packed


def main(shape, kind, out, *words):
    name, _, cut = shape.partition(":")
    arch, layers, width, heads, kv_heads, head, ff, vocab, base, tied, norms, *net = SHAPES[name]
    layers = int(cut or layers)
    mix = net.pop() if net and isinstance(net[-1], dict) else {}
    # K-quantised models keep the matrices of both ends in six bits; of MXFP4 are experts alone.
    ends = {"q4_k": "q6_k", "mxfp4": "q8_0"}.get(kind, kind)
    experts, kind = kind, "q8_0" if kind == "mxfp4" else kind
    tensors = [("token_embd.weight", (vocab, width), ends), ("output_norm.weight", (width,), "f32")]
    if not tied:
        tensors.append(("output.weight", (vocab, width), ends))
    for i in range(layers):
        b = f"blk.{i}."
        tensors += [
            (b + "attn_norm.weight", (width,), "f32"),
            (b + ("post_attention_norm.weight" if net or "window" in mix else "ffn_norm.weight"), (width,), "f32"),
        ]
        if "behind" in mix:
            tensors += [(b + n, (width,), "f32") for n in ("post_attention_norm.weight", "post_ffw_norm.weight")]
        dense = "latents" in mix and i == 0
        if "experts" in mix and not dense:
            count = mix["experts"]
            tensors += [
                (b + "ffn_gate_inp.weight", (count, width), "f32"),
                (b + "ffn_gate_exps.weight", (count, ff, width), experts),
                (b + "ffn_up_exps.weight", (count, ff, width), experts),
                (b + "ffn_down_exps.weight", (count, width, ff), experts),
            ]
        else:
            inner = mix["latents"][-1] if dense else ff
            tensors += [
                (b + "ffn_gate.weight", (inner, width), kind),
                (b + "ffn_up.weight", (inner, width), kind),
                (b + "ffn_down.weight", (width, inner), kind),
            ]
        if "latents" in mix:
            ranks, rank, plain, turned, value_size, _ = mix["latents"]
            tensors += [
                (b + "attn_q_a.weight", (ranks, width), kind),
                (b + "attn_q_a_norm.weight", (ranks,), "f32"),
                (b + "attn_q_b.weight", (heads * (plain + turned), ranks), kind),
                (b + "attn_kv_a_mqa.weight", (rank + turned, width), kind),
                (b + "attn_kv_a_norm.weight", (rank,), "f32"),
                (b + "attn_k_b.weight", (heads, rank, plain), "q8_0" if kind == "q4_k" else kind),
                (b + "attn_v_b.weight", (heads, value_size, rank), kind),
                (b + "attn_output.weight", (width, heads * value_size), kind),
            ]
            if not dense:
                tensors += [
                    (b + "exp_probs_b.bias", (count,), "f32"),
                    (b + "ffn_gate_shexp.weight", (ff, width), kind),
                    (b + "ffn_up_shexp.weight", (ff, width), kind),
                    (b + "ffn_down_shexp.weight", (width, ff), kind),
                ]
            continue
        if net and (i + 1) % 4:
            keys, values, key, size, mixed = net
            joined = 2 * keys * key + values * size
            tensors += [
                (b + "attn_qkv.weight", (joined, width), kind),
                (b + "attn_gate.weight", (values * size, width), kind),
                (b + "ssm_alpha.weight", (values, width), kind),
                (b + "ssm_beta.weight", (values, width), kind),
                (b + "ssm_conv1d.weight", (joined, mixed), "f32"),
                (b + "ssm_a", (values,), "f32"),
                (b + "ssm_dt.bias", (values,), "f32"),
                (b + "ssm_norm.weight", (size,), "f32"),
                (b + "ssm_out.weight", (width, values * size), kind),
            ]
            continue
        tensors += [
            # Hybrids have a gate beside each head of q.
            (b + "attn_q.weight", ((2 if net else 1) * heads * head, width), kind),
            (b + "attn_k.weight", (kv_heads * head, width), kind),
            (b + "attn_v.weight", (kv_heads * head, width), kind),
            (b + "attn_output.weight", (width, heads * head), kind),
        ]
        if "window" in mix:
            outs = {"attn_q": (heads * head,), "attn_k": (kv_heads * head,), "attn_v": (kv_heads * head,), "attn_output": (width,)}
            outs |= {"ffn_gate_inp": (count,), "ffn_gate_exps": (count, ff), "ffn_up_exps": (count, ff), "ffn_down_exps": (count, width)}
            tensors += [(b + of + ".bias", dims, "f32") for of, dims in outs.items()]
            tensors.append((b + "attn_sinks.weight", (heads,), "f32"))
        if norms:
            tensors += [(b + n, (head,), "f32") for n in ("attn_q_norm.weight", "attn_k_norm.weight")]
    metadata = [
        value("general.architecture", arch),
        value("general.name", f"{shape} {kind} random"),
        value(f"{arch}.block_count", layers),
        value(f"{arch}.context_length", 32768),
        value(f"{arch}.embedding_length", width),
        value(f"{arch}.feed_forward_length", ff),
        value(f"{arch}.attention.head_count", heads),
        value(f"{arch}.attention.head_count_kv", kv_heads),
        value(f"{arch}.attention.key_length", head),
        value(f"{arch}.attention.value_length", head),
        value(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5),
        value(f"{arch}.rope.freq_base", base),
        value(f"{arch}.rope.dimension_count", head // 4 if net else head),
        value(f"{arch}.vocab_size", vocab),
    ]
    if net:
        keys, values, key, size, mixed = net
        sizes = {"group_count": keys, "time_step_rank": values, "state_size": key, "inner_size": values * size, "conv_kernel": mixed}
        metadata += [value(f"{arch}.ssm.{name}", n) for name, n in sizes.items()]
    if "behind" in mix:
        metadata.append(value(f"{arch}.attention.sliding_window", mix["behind"]))
    if "experts" in mix:
        metadata += [
            value(f"{arch}.expert_count", mix["experts"]),
            value(f"{arch}.expert_used_count", mix["used"]),
            value(f"{arch}.expert_feed_forward_length", ff),
        ]
    if "window" in mix:
        metadata.append(value(f"{arch}.attention.sliding_window", mix["window"]))
    if "latents" in mix:
        ranks, rank, plain, turned, value_size, inner = mix["latents"]
        sizes = {"attention.q_lora_rank": ranks, "attention.kv_lora_rank": rank, "attention.key_length": rank + turned}
        sizes |= {"attention.value_length": rank, "attention.key_length_mla": plain + turned, "rope.dimension_count": turned}
        sizes |= {"attention.value_length_mla": value_size, "leading_dense_block_count": 1, "feed_forward_length": inner}
        sizes |= {"expert_shared_count": 1, "expert_gating_func": 2}
        own = [value(f"{arch}.{name}", n) for name, n in sizes.items()]
        own += [value(f"{arch}.expert_weights_scale", 1.8)]
        metadata = [one for one in metadata if not any(one.startswith(string(f"{arch}.{name}")) for name in sizes)] + own
    if words:
        metadata += tokenizer(vocab)
    head_bytes = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)) + b"".join(metadata)
    at, sizes = 0, []
    for name, dims, of in tensors:
        number, elements, size = TYPES[of]
        bytes_ = int(np.prod(dims, dtype=np.int64)) // elements * size
        head_bytes += string(name) + struct.pack("<I", len(dims))
        head_bytes += b"".join(struct.pack("<Q", d) for d in reversed(dims)) + struct.pack("<IQ", number, at)
        sizes.append(bytes_)
        at += -(-bytes_ // ALIGN) * ALIGN
    pools = {of: blocks(of) for of in {t[2] for t in tensors} if of != "f32"}
    with open(out, "wb") as f:
        f.write(head_bytes + bytes(-len(head_bytes) % ALIGN))
        start = 0
        for (name, dims, of), bytes_ in zip(tensors, sizes):
            if of == "f32":
                # States forget, and routers choose: others for each row.
                constant = np.full(dims, -1 if name.endswith("ssm_a") else 1, np.float32)
                routes = name.endswith("ffn_gate_inp.weight")
                f.write((np.random.default_rng(at + start).standard_normal(dims, dtype=np.float32) if routes else constant).tobytes())
            else:
                pool, size = pools[of], TYPES[of][2]
                start = (start + 1009 * size) % (len(pool) // size * size)
                left = bytes_
                while left > 0:
                    piece = pool[start : start + left]
                    f.write(piece.data)
                    left -= len(piece)
                    start = 0
            f.write(bytes(-bytes_ % ALIGN))


if __name__ == "__main__":
    given = sys.argv[1:]
    if len(given) not in (3, 4) or given[3:] not in ([], ["words"]) or given[0].partition(":")[0] not in SHAPES or given[1] not in TYPES:
        raise SystemExit(f"usage: random_gguf.py {'|'.join(SHAPES)} {'|'.join(TYPES)} OUT.gguf [words]")
    main(*given)

"""Writes the trained weights as a GGUF file in Q4_0, the embeddings in Q8_0, checks it, and draws the loss curve.

    python export.py DATA REPORT MODEL.gguf

DATA holds `tokenizer.json`; REPORT is what `train.py finish` wrote (weights-*.npz, report.json,
loss.csv). The check runs the file's own dequantised weights, in f32, over the greedy texts that
the trained model wrote, and counts the tokens that agree. Needs `gguf` and `numpy`.
"""

import csv
import json
import pathlib
import sys

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from train_prompts import SAMPLING

NAME = "Delft Stories"
DESCRIPTION = ("A 26-million-parameter model that tells short stories about whatever it is asked for. "
               "Trained from nothing on composed stories, public-domain books and CC BY stories; it knows no facts.")
LICENSE = "cc-by-4.0"
# A turn of the reader's, a turn of the teller's, each closed like a story; a system text opens the reader's first turn.
TEMPLATE = """{%- set ns = namespace(before='') -%}
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{%- set ns.before = ns.before + message.content|trim + '\n\n' -%}
{%- elif message.role == 'user' -%}
{{- '<|user|>' + ns.before + message.content|trim + '<|endoftext|>' -}}
{%- set ns.before = '' -%}
{%- else -%}
{{- '<|teller|>' + message.content|trim + '<|endoftext|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|teller|>' -}}
{%- endif -%}
"""

MATRICES = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "gate": "ffn_gate", "up": "ffn_up",
            "down": "ffn_down"}
NORMS = {"attn_norm": "attn_norm", "ffn_norm": "ffn_norm"}


def interleaved(weight, heads):
    """Rows of a rotary projection from half-split pairs (i, i + half) to neighbouring pairs (2i, 2i + 1)."""
    rows, width = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def tensors(weights, config):
    """(GGUF name, array in f32) in the file's order."""
    yield "token_embd.weight", weights["embed.weight"]
    for i in range(config["layers"]):
        for name, to in NORMS.items():
            yield f"blk.{i}.{to}.weight", weights[f"blocks.{i}.{name}.weight"]
        for name, to in MATRICES.items():
            w = weights[f"blocks.{i}.{name}.weight"]
            heads = {"q": config["heads"], "k": config["kv_heads"]}.get(name)
            yield f"blk.{i}.{to}.weight", interleaved(w, heads) if heads else w
    yield "output_norm.weight", weights["norm.weight"]


def write(path, weights, config, sampling, tokenizer):
    w = gguf.GGUFWriter(path, "llama")
    w.add_name(NAME)
    w.add_description(DESCRIPTION)
    w.add_license(LICENSE)
    w.add_languages(["en"])
    w.add_tags(["text-generation", "stories", "conversational"])
    w.add_size_label("26M")
    w.add_type("model")
    for key in ("temp", "top_p", "min_p", "penalty_repeat"):
        w.add_float32(f"general.sampling.{key}", sampling[key])
    w.add_int32("general.sampling.top_k", sampling["top_k"])
    w.add_context_length(config["context"])
    w.add_embedding_length(config["dim"])
    w.add_block_count(config["layers"])
    w.add_feed_forward_length(config["ffn"])
    w.add_head_count(config["heads"])
    w.add_head_count_kv(config["kv_heads"])
    w.add_key_length(config["head_dim"])
    w.add_value_length(config["head_dim"])
    w.add_rope_dimension_count(config["head_dim"])
    w.add_rope_freq_base(config["rope_base"])
    w.add_layer_norm_rms_eps(config["norm_eps"])
    w.add_vocab_size(config["vocab"])
    w.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    w.add_quantization_version(gguf.GGML_QUANT_VERSION)

    vocab = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
    assert [i for _, i in vocab] == list(range(config["vocab"]))
    special = {t["id"] for t in tokenizer["added_tokens"]}
    merges = [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list([t for t, _ in vocab])
    w.add_token_types([gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for _, i in vocab])
    w.add_token_merges(merges)
    w.add_bos_token_id(0)
    w.add_eos_token_id(1)
    w.add_add_bos_token(True)
    w.add_add_eos_token(False)
    w.add_add_space_prefix(False)
    w.add_chat_template(TEMPLATE)

    for name, array in tensors(weights, config):
        array = np.ascontiguousarray(array, np.float32)
        if array.ndim == 1:
            w.add_tensor(name, array)
        else:
            kind = Type.Q8_0 if name == "token_embd.weight" else Type.Q4_0
            w.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


# ---------------------------------------------------------------- the check

def logits(t, ids, config):
    """Logits [time, vocab] from the GGUF file's tensors, whose rotary pairs are neighbours."""
    hd, n = config["head_dim"], len(ids)
    angle = np.outer(np.arange(n), config["rope_base"] ** (-np.arange(0, hd, 2) / hd)).astype(np.float32)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]

    def norm(x, w):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config["norm_eps"]) * w

    def rotate(x):
        a, b = x[..., ::2], x[..., 1::2]
        return np.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(x.shape)

    x = t["token_embd"][ids]
    hidden_future = np.triu(np.full((n, n), -np.inf, np.float32), 1)
    for i in range(config["layers"]):
        b = {k.split(".")[2]: v for k, v in t.items() if k.startswith(f"blk.{i}.")}
        h = norm(x, b["attn_norm"])
        q = rotate((h @ b["attn_q"].T).reshape(n, -1, hd))
        k = rotate((h @ b["attn_k"].T).reshape(n, -1, hd))
        v = (h @ b["attn_v"].T).reshape(n, -1, hd)
        groups = q.shape[1] // k.shape[1]
        s = np.einsum("qhd,khd->hqk", q, np.repeat(k, groups, 1)) / np.sqrt(hd) + hidden_future
        s = np.exp(s - s.max(-1, keepdims=True))
        s /= s.sum(-1, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", s, np.repeat(v, groups, 1)).reshape(n, -1) @ b["attn_output"].T
        h = norm(x, b["ffn_norm"])
        g = h @ b["ffn_gate"].T
        x = x + (g / (1 + np.exp(-g)) * (h @ b["ffn_up"].T)) @ b["ffn_down"].T
    return norm(x, t["output_norm"]) @ t["token_embd"].T


def check(path, report):
    """Prints how many of the trained model's greedy choices the file repeats."""
    reader = gguf.GGUFReader(path)
    t = {x.name.removesuffix(".weight"): gguf.quants.dequantize(x.data, x.tensor_type) for x in reader.tensors}
    for g in report["greedy"]:
        first = g["first"]
        best = logits(t, g["ids"], report["config"]).argmax(-1)
        agree = sum(int(best[i - 1]) == g["ids"][i] for i in range(first, len(g["ids"])))
        print(f"{g['prompt']!r}: {agree} of {len(g['ids']) - first} greedy choices agree")


# ---------------------------------------------------------------- the curve

def curve(rows, path):
    """A small SVG of training and held-out loss (nats a token) over tokens."""
    series = [("training mix", "train", "#888")]
    colours = {"held-out children's book": "#06c", "held-out book": "#283", "held-out modern story": "#c50", "held-out composed document": "#82a"}
    series += [(k, k, c) for k, c in colours.items() if k in rows[0]]
    left, top, wide, high = 48, 16, 560, 300
    most = max(float(r["tokens"]) for r in rows)
    low, top_loss = 0.0, 5.0
    px = lambda r: left + wide * float(r["tokens"]) / most
    py = lambda v: top + high * (top_loss - min(top_loss, max(low, v))) / (top_loss - low)
    out = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 364" font-family="sans-serif" font-size="12">',
           '<rect width="640" height="364" fill="#fff"/>']
    for v in np.arange(low, top_loss + 0.01, 0.5):
        out.append(f'<path d="M{left} {py(v):.1f}h{wide}" stroke="#ddd"/><text x="8" y="{py(v) + 4:.1f}">{v:.1f}</text>')
    for m in range(0, int(most / 1e6) + 1, max(100, int(most / 6e8) * 100)):
        x = left + wide * m * 1e6 / most
        out.append(f'<text x="{x:.1f}" y="334" text-anchor="middle">{m}</text>')
    out.append('<text x="328" y="354" text-anchor="middle">million tokens seen (loss in nats a token)</text>')
    for i, (label, key, colour) in enumerate(series):
        points = " ".join(f"{px(r):.1f},{py(float(r[key])):.1f}" for r in rows)
        out.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{points}"/>')
        out.append(f'<text x="400" y="{34 + 16 * i}" fill="{colour}">{label.replace(chr(39), "&#39;")}</text>')
    path.write_text("\n".join(out) + "\n</svg>\n")


def main(data, folder, target):
    data, folder, target = map(pathlib.Path, (data, folder, target))
    report = json.loads((folder / "report.json").read_text())
    weights = {}
    for part in sorted(folder.glob("weights-*.npz")):
        weights.update(np.load(part))
    weights = {k: v.astype(np.float32) for k, v in weights.items()}
    write(str(target), weights, report["config"], SAMPLING, json.loads((data / "tokenizer.json").read_text()))
    print(f"{target}: {target.stat().st_size:,} bytes")
    check(str(target), report)
    rows = list(csv.DictReader(open(folder / "loss.csv")))
    curve(rows, target.parent / "loss.svg")


if __name__ == "__main__":
    main(*sys.argv[1:])

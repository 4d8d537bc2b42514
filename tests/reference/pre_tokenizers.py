#!/usr/bin/env python3
"""Compare the ids that Delft and llama.cpp give a text, for every pre-tokenizer that both know, and for vocabularies as files.

    pre_tokenizers.py --delft target/debug/delft --vocab VOCAB.gguf [--text FILE ..] [--only NAME ..]
    pre_tokenizers.py --delft target/debug/delft --files VOCAB.gguf .. [--text FILE ..]

Needs numpy, gguf and xllamacpp (llama.cpp as a Python package). VOCAB.gguf is a byte-level vocabulary, such as `vocab_gguf.py` writes. With --vocab, each name
of crates/tokens/src/pre.rs is put into it in turn; with --files, each file is taken as it is. The texts are those below, and a piece of each FILE. Prints a
line for each name with the number of texts whose ids differ, and the first places; ends with an error if one differs that EXPECTED does not name.
"""
import argparse
import json
import re
import subprocess
import tempfile
import urllib.request
from pathlib import Path

import gguf
import numpy as np
import xllamacpp

TEXTS = [
    "Hello world, HELLO World, hELLO wORLD; don't DON'T I'Ll we'Ve 'tis it's",
    "1 12 123 1234 12345 123456 1234567 3.14 1,000,000 ½ ٣٤٥ 一二三 Ⅷ",
    "for (int i = 0; i < 10; ++i) { x[i] += 3.14159; }  // code\n\tif x == 'y':\n        return \"z\"\n\n\n    pass",
    "      leading, trailing      \n\n\n \n  \t\t \r\n\r\n x\u00a0y\u3000z\u2003w ",
    "Köln, naïve café, e\u0301 a\u0308\u0323 Ελλάδα, Привет мир, Ünïcödé ǅ ŉ",
    "日本語のテキスト、한국어 문장입니다. 中文文本测试，没有空格。ひらがなカタカナ漢字",
    "العربية نص للاختبار، مع ١٢٣ أرقام. עברית. हिन्दी में पाठ। ไทยภาษา বাংলা தமிழ்",
    "🎉🚀👩‍👩‍👧 ok \U0001f1e9\U0001f1ea ❤️ ✅✅ :-) <3 ½¼ ™ ©",
    "https://example.com/?q=1&r=%20#x user@mail.org C:\\path\\file.txt #!/bin/sh $HOME `ls -la` ~/x",
    "camelCase PascalCase snake_case kebab-case SCREAMING_CASE x2y3 v1.2.3-rc1 iPhone14Pro McDonald's",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa " + "ab" * 60 + " " * 70 + "x" + "\n" * 20 + "y" + "=" * 50,
    "\u200b\ufeff\ufffd\u2028\u2029\x0b\x0c\x1f end",
]
# Where the two differ on purpose: llama.cpp does not do what the model's own tokenizer states.
NO_NORMAL_FORM = "llama.cpp does not bring texts to normal form C"
# Hugging Face's tokenizers library cuts " iPhone" and " kW" behind their first letters by these models' regexes, and "1990s" behind three digits.
CASES = "llama.cpp goes on from a small letter to a capital"
TEXTS_NOT_BYTES = "its vocabularies hold texts, not bytes: --files"
EXPECTED = {"qwen2": NO_NORMAL_FORM, "qwen35": NO_NORMAL_FORM, "tiny_aya": CASES, "cohere2moe": CASES, "kimi-k2": CASES, "youtu": CASES,
            "gemma4": TEXTS_NOT_BYTES, "granite-embed-multi-311m": TEXTS_NOT_BYTES, "sarvam-moe": TEXTS_NOT_BYTES}


def names():
    table = (Path(__file__).resolve().parents[2] / "crates/tokens/src/pre.rs").read_text()
    lists = re.findall(r"names: &\[(.*?)\]", table, re.S)
    return [name for row in lists for name in re.findall(r'"([^"]+)"', row)]


def write_model(vocabulary, out, pre):
    """A model of one small layer with this vocabulary, which llama.cpp loads for its tokenizer."""
    reader = gguf.GGUFReader(vocabulary)
    writer = gguf.GGUFWriter(out, "llama")
    for field in reader.fields.values():
        if not field.name.startswith("tokenizer.") or pre and field.name == "tokenizer.ggml.pre":
            continue
        kind = field.types[0]
        writer.add_key_value(field.name, field.contents(), kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
    if pre:
        writer.add_tokenizer_pre(pre)
    count = len(reader.get_field("tokenizer.ggml.tokens").data)
    for add, value in [(writer.add_context_length, 64), (writer.add_embedding_length, 32), (writer.add_block_count, 1), (writer.add_feed_forward_length, 32),
                       (writer.add_head_count, 1), (writer.add_head_count_kv, 1), (writer.add_layer_norm_rms_eps, 1e-5), (writer.add_vocab_size, count)]:
        add(value)
    shapes = {"token_embd": (count, 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
    shapes |= {f"blk.0.{part}": (32, 32) for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32 if len(shape) == 1 else np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def theirs(path, texts):
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.cpuparams.n_threads, params.warmup = 64, 1, 1, False
    server = xllamacpp.Server(params)
    found = []
    for text in texts:
        body = json.dumps({"content": text, "add_special": False, "parse_special": False}).encode()
        asked = urllib.request.Request(f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"})
        found.append(json.load(urllib.request.urlopen(asked))["tokens"])
    return found


def ours(delft, path, text):
    with tempfile.NamedTemporaryFile("w", newline="", encoding="utf-8") as file:
        # One line break at the end of a file is not part of it.
        file.write(text + "\n")
        file.flush()
        done = subprocess.run([delft, "tokenize", path, "--no-special", "--json", "-f", file.name], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)["tokens"]


def compare(delft, vocabulary, pre, texts, scratch):
    path = Path(scratch) / "model.gguf"
    write_model(vocabulary, path, pre)
    apart = []
    for text, want in zip(texts, theirs(path, texts)):
        got = ours(delft, path, text)
        if got != want:
            at = next((i for i, (a, b) in enumerate(zip(got, want)) if a != b), min(len(got), len(want)))
            apart.append(f"{text[:30]!r}.. at token {at}: {got[at:at + 6]}, llama.cpp {want[at:at + 6]}")
    return apart


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delft", required=True)
    parser.add_argument("--vocab", type=Path)
    parser.add_argument("--files", type=Path, nargs="*", default=[])
    parser.add_argument("--text", type=Path, nargs="*", default=[])
    parser.add_argument("--only", nargs="*")
    args = parser.parse_args()
    whole = "\n".join(TEXTS)
    texts = [whole] + [path.read_text(errors="replace")[:60_000] for path in args.text]
    cases = [(path, None) for path in args.files]
    if args.vocab:
        cases += [(args.vocab, name) for name in args.only or names()]
    wrong = 0
    with tempfile.TemporaryDirectory() as scratch:
        for vocabulary, pre in cases:
            # Each text alone where all together differ: the places are then told apart.
            apart = compare(args.delft, vocabulary, pre, texts, scratch)
            if any(place.startswith(repr(whole[:30])) for place in apart):
                apart += compare(args.delft, vocabulary, pre, TEXTS, scratch)
            known = EXPECTED.get(pre or "")
            wrong += bool(apart) and known is None
            print(f"{pre or vocabulary.name}: {len(apart)} differ{f' ({known})' if apart and known else ''}", *apart[:8], sep="\n    ", flush=True)
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()

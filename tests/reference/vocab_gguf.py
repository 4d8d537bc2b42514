#!/usr/bin/env python3
"""Write a vocabulary as a GGUF file without tensors, from the files the vocabulary was published in.

    vocab_gguf.py qwen2     FOLDER OUT      # vocab.json, merges.txt, the specials of Qwen2; padded to 151936
    vocab_gguf.py qwen3     FOLDER OUT [--config tokenizer_config.json]      # the same with that file's added tokens
    vocab_gguf.py llama-bpe FOLDER OUT      # tokenizer.model (tiktoken ranks), the specials of Llama 3

Such a file lends its tokenizer to models of random weights. The keys are those of llama.cpp's converter.
"""
import argparse
import base64
import json
from pathlib import Path

import gguf

Kind = gguf.TokenType


def byte_letters():
    """GPT-2's printable stand-in for each byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(rest)}


def merges_of(ranks):
    """Every pair of tokens that forms a token, in the order of what they form, then of their parts.

    Byte-pair encoding by rank always merges the pair with the lowest-ranked result, so this list says the same.
    """
    letters = byte_letters()
    merges = []
    for token in sorted(ranks, key=ranks.get):
        splits = [(token[:i], token[i:]) for i in range(1, len(token))]
        splits = [(a, b) for a, b in splits if a in ranks and b in ranks]
        merges += sorted(splits, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return [" ".join("".join(letters[x] for x in part) for part in pair) for pair in merges]


def whole_merges(merges, vocab):
    """The merges with the lost ones put back: one per token, in the order of the tokens' ids.

    Some copies of merges.txt lack every line that starts with `#`, taken for a comment by the tokenizer that saved
    them. A token's merge is what remains of it when the merges before it have been applied.
    """
    known = {merge.replace(" ", "", 1): merge for merge in merges}
    ranks, whole = {}, []
    for token, rank in sorted(vocab.items(), key=lambda item: item[1]):
        if len(token) > 1 and token not in known:
            parts = list(token)
            while len(parts) > 2:
                best = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], len(vocab)))
                parts[best : best + 2] = [parts[best] + parts[best + 1]]
            known[token] = " ".join(parts)
        if len(token) > 1:
            whole.append(known[token])
        ranks[token] = rank
    return whole


def qwen(folder, config):
    """Tokens, kinds, merges and further keys of a Qwen vocabulary."""
    vocab = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    table = {i: (token, Kind.NORMAL) for token, i in vocab.items()}
    if config:
        config = json.loads(config.read_text(encoding="utf-8"))
        for i, added in config["added_tokens_decoder"].items():
            table[int(i)] = (added["content"], Kind.CONTROL if added["special"] else Kind.USER_DEFINED)
        end, pad = config["eos_token"], config["pad_token"]
    else:
        for i, token in enumerate(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], len(vocab)):
            table[i] = (token, Kind.CONTROL)
        end = pad = "<|endoftext|>"
    size = 151936  # the embedding's rows: ids without a token are padding
    tokens = [table.get(i, (f"[PAD{i}]", Kind.UNUSED)) for i in range(size)]
    ids = {token: i for i, (token, _) in enumerate(tokens)}
    # Split at line feeds alone: some merges hold characters that Python also takes for line ends.
    lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
    merges = [line.rstrip("\r") for line in lines if line.strip() and not line.startswith("#version")]
    merges = whole_merges(merges, vocab)
    more = {"eos_token_id": ids[end], "padding_token_id": ids[pad], "bos_token_id": ids["<|endoftext|>"],
            "add_bos_token": False}
    return tokens, merges, "qwen2", more, config and config.get("chat_template")


def llama_bpe(folder, _config):
    """Tokens, kinds, merges and further keys of Llama 3's vocabulary, with the names of release 3.1."""
    ranks = {}
    for line in (folder / "tokenizer.model").read_bytes().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    letters = byte_letters()
    tokens = [("".join(letters[x] for x in token), Kind.NORMAL) for token in sorted(ranks, key=ranks.get)]
    named = {0: "begin_of_text", 1: "end_of_text", 4: "finetune_right_pad_id", 6: "start_header_id",
             7: "end_header_id", 8: "eom_id", 9: "eot_id", 10: "python_tag"}
    reserved = iter(range(256))
    tokens += [(f"<|{named.get(i) or f'reserved_special_token_{next(reserved)}'}|>", Kind.CONTROL) for i in range(256)]
    first = len(ranks)
    more = {"bos_token_id": first, "eos_token_id": first + 9, "add_bos_token": True}
    return tokens, merges_of(ranks), "llama-bpe", more, None


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("kind", choices=["qwen2", "qwen3", "llama-bpe"])
    args.add_argument("folder", type=Path)
    args.add_argument("out", type=Path)
    args.add_argument("--config", type=Path, help="tokenizer_config.json with added_tokens_decoder")
    args = args.parse_args()
    if args.kind == "qwen3" and not args.config:
        raise SystemExit("qwen3 needs --config tokenizer_config.json")
    read = llama_bpe if args.kind == "llama-bpe" else qwen
    tokens, merges, pre, more, template = read(args.folder, args.config)

    writer = gguf.GGUFWriter(args.out, "llama" if args.kind == "llama-bpe" else args.kind)
    writer.add_name(args.kind)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([token for token, _ in tokens])
    writer.add_token_types([int(kind) for _, kind in tokens])
    writer.add_token_merges(merges)
    for key, value in more.items():
        (writer.add_bool if isinstance(value, bool) else writer.add_uint32)(f"tokenizer.ggml.{key}", value)
    if template:
        writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    print(f"{args.out}: {len(tokens)} tokens, {len(merges)} merges")


if __name__ == "__main__":
    main()

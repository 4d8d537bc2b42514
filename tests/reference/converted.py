"""What llama.cpp makes of the GGUF files that `delft convert` and `delft quantize` write.

    converted.py OUT --delft target/debug/delft --qwen FOLDER

Needs torch, transformers, tokenizers and xllamacpp (llama.cpp as a Python package). FOLDER holds vocab.json and merges.txt of Qwen2. Makes two folders with
random weights and real tokenizers, byte-level and of text with single bytes as a last resort, converts them to several types, and for each file: loads it in
llama.cpp; compares the tokens of some texts with Transformers'; and the log-probabilities behind a prompt with Transformers' (floats)
or with Delft's own of the same file (quantised). Prints a line for each file, and ends with an error if one is off.
"""

import argparse
import json
import subprocess
import urllib.request
from pathlib import Path

import torch
import xllamacpp
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

TEXTS = ["Hello, world! 123", "naïve café — it's 2026", "  two spaces\n\nand lines\t.", "日本語 und Übermut 🦀", "def f(x):\n    return x"]
# Differences of log-probabilities that rounding explains: llama.cpp keeps keys and values in f16, and both programs round
# activations beside quantised weights, each in its own way.
FLOATS, QUANTISED = 1e-2, 0.2


def text_tokenizer(folder: Path) -> None:
    """BPE over text with bytes as a last resort, as Llama 2's, trained on this file."""
    model = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    model.train_from_iterator(Path(__file__).read_text().splitlines(), trainer)
    model.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    state = json.loads(model.to_str())
    # Bytes are ordinary pieces, not special tokens.
    state["added_tokens"] = [token for token in state["added_tokens"] if not token["content"].startswith("<0x")]
    model = Tokenizer.from_str(json.dumps(state))
    PreTrainedTokenizerFast(tokenizer_object=model, bos_token="<s>", eos_token="</s>", unk_token="<unk>").save_pretrained(folder)


def byte_tokenizer(folder: Path, source: Path) -> None:
    """Qwen2's own vocabulary and merges."""
    merges = [tuple(line.split()) for line in (source / "merges.txt").read_text().splitlines() if line and not line.startswith("#version")]
    model = Tokenizer(models.BPE(vocab=json.loads((source / "vocab.json").read_text()), merges=merges))
    pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    from tokenizers import Regex

    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    model.normalizer = normalizers.NFC()
    model.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<|im_end|>", pad_token="<|endoftext|>").save_pretrained(folder)


def make(folder: Path, kind: str, source: Path):
    torch.manual_seed(5)
    common = dict(hidden_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=512)
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "qwen3":
        byte_tokenizer(folder, source)
        model = Qwen3ForCausalLM(Qwen3Config(vocab_size=151936, head_dim=64, tie_word_embeddings=True, **common))
    else:
        text_tokenizer(folder)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=640, head_dim=64, bos_token_id=1, eos_token_id=2,
                                             rope_parameters={"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
                                                              "high_freq_factor": 4.0, "original_max_position_embeddings": 128}, **common))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.08)
    model.save_pretrained(folder)
    return model.eval()


def probabilities(path: Path, tokens: list[int]) -> tuple[dict[int, float], list[list[int]]]:
    """llama.cpp's log-probabilities of the likeliest tokens behind a prompt, and the tokens of each text."""
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.cpuparams.n_threads, params.warmup = 256, 1, 1, False
    server = xllamacpp.Server(params)
    request = {"prompt": tokens, "n_predict": 1, "temperature": 0, "n_probs": 20, "cache_prompt": False}
    answer = server.handle_completions(request)
    first = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    texts = []
    for text in TEXTS:
        body = json.dumps({"content": text, "add_special": True}).encode()
        asked = urllib.request.Request(f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"})
        texts.append(json.load(urllib.request.urlopen(asked))["tokens"])
    return {token["id"]: token["logprob"] for token in first}, texts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--delft", required=True)
    parser.add_argument("--qwen", type=Path, required=True)
    args = parser.parse_args()
    failed = False
    for kind in ["qwen3", "llama"]:
        folder = args.out / kind
        model = make(folder, kind, args.qwen)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        bos = [tokenizer.bos_token_id] if kind == "llama" else []
        tokens = bos + tokenizer.encode("Hello, world! It is what it is", add_special_tokens=False)
        with torch.no_grad():
            truth = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
        for name in ["f32", "f16", "q8_0", "q4_0", "q4_k_m", "q6_k", "iq4_nl", "iq4_xs", "mxfp4"]:
            path = args.out / f"{kind}-{name}.gguf"
            subprocess.run([args.delft, "quantize", folder, name, "-o", path, "--force"], check=True, capture_output=True)
            found, texts = probabilities(path, tokens)
            expected, bound = truth, FLOATS
            if name not in ("f32", "f16"):
                ids = ",".join(map(str, tokens))
                ours = subprocess.run([args.delft, "logits", path, "--tokens", ids, "--json"], check=True, capture_output=True)
                expected, bound = torch.tensor(json.loads(ours.stdout)["logits"][0]).log_softmax(-1), QUANTISED
            worst = max(abs(expected[id].item() - value) for id, value in found.items())
            same = [found_text == [*tokenizer.encode(text, add_special_tokens=False)] or found_text == bos + tokenizer.encode(text, add_special_tokens=False)
                    for text, found_text in zip(TEXTS, texts)]
            right = worst <= bound and all(same)
            failed |= not right
            print(f"{path.name}: {worst:.5f} of at most {bound}, texts {same.count(True)} of {len(same)}{'' if right else '  WRONG'}", flush=True)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""What llama.cpp computes with the GGUF files that `delft convert` writes of every checkpoint below models/.

    converted_families.py --delft target/debug/delft [--only NAME ..]

Needs gguf, numpy, safetensors and xllamacpp (llama.cpp as a Python package). Converts each folder to F32, puts a vocabulary of made-up texts into the file,
which fixtures do not have, loads it in llama.cpp, each time in a process of its own, and compares the log-probabilities behind the prompt with those of
Transformers' logits (expected.safetensors). Prints a line for each: the largest difference, or what Delft or llama.cpp refuses; ends with an error if one differs
by more than BOUND, or is refused by llama.cpp, and APART does not say why.
"""
import argparse
import multiprocessing
import os
import re
import subprocess
import tempfile
from pathlib import Path

import gguf
import numpy as np
import xllamacpp
from safetensors.numpy import load_file

# llama.cpp multiplies in f32 where weights are, with keys and values in f32 and without its fused attention, but takes GELU from a table of f16.
BOUND = 3e-3
# Where the two are not the same model: why.
WINDOW, HEADS = "llama.cpp has no window there", "llama.cpp takes sizes for granted that these are not"
SMALL = "llama.cpp refuses the published sections for such small heads"
SECTIONS = "llama.cpp does not rotate the pairs behind the sections"
SIZES = "llama.cpp tells the models without a latent row of queries by their number of layers"
PROJECTIONS = "llama.cpp has no biases of Mamba's projections there, and wants those of convolutions"
INDEXERS = "llama.cpp ends where heads of indexers are no power of two from 64 on"
APART = {
    "baichuan": "llama.cpp tells its forms by 32 and 40 layers, and rotates nothing in others",
    "cohere-plus": "llama.cpp has norms of heads in models of 64 layers and more alone",
    "nemotron-nas-alone": "llama.cpp leaves out attention where there is no feed-forward behind it",
    "deepseek2": "llama.cpp has no biases there",
    "deepseek2-lite": SIZES,
    "deepseek_v32": INDEXERS,
    "deepseek_v32-chosen": INDEXERS,
    "dots1": HEADS,
    "dots1-bias": HEADS,
    "ernie4_5": "llama.cpp has no biases there",
    "exaone4": HEADS,
    "falcon-new": "llama.cpp has no biases there",
    "gemma3n": HEADS,
    "glm_moe_dsa": INDEXERS,
    "glm_moe_dsa-chosen": INDEXERS,
    "gpt-neox": "llama.cpp takes tanh's approximation of GELU",
    "gpt-neox-in-turn": "llama.cpp takes tanh's approximation of GELU",
    "gpt-oss": "llama.cpp widens YaRN's pairs between to whole numbers",
    "granite4-hybrid-moe": PROJECTIONS,
    "laguna-elements": "llama.cpp has no biases there",
    "lfm2-adjusted": HEADS,
    "jamba-dense": "llama.cpp wants biases of convolutions",
    "mamba-biased": "llama.cpp wants biases of convolutions",
    "mamba2-biased": "llama.cpp wants biases of convolutions",
    "mistral": WINDOW,
    "mistral-long": WINDOW,
    "moonlight": SIZES,
    "nemotron-h-moe": PROJECTIONS,
    "olmoe": HEADS,
    "phi3": WINDOW,
    "phi3-short": "llama.cpp makes a context of 256 of one of 32, and takes the factors for long ones",
    "qwen3-next": HEADS,
    "qwen3-vl": SECTIONS,
    "qwen3-vl-moe": SECTIONS,
    "qwen3.5": HEADS,
    "qwen3.5-long": SMALL,
    "qwen3.5-moe": HEADS,
    "qwen3.5-shared": SMALL,
    "smallthinker": "llama.cpp takes a window of 4096 there",
    "starcoder2-window": WINDOW,
}


def with_vocabulary(path, out):
    """The file with a text for each row of its embedding."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(out, reader.get_field("general.architecture").contents())
    for field in reader.fields.values():
        # By names like Phi-3's llama.cpp expects tokens of theirs.
        if field.name.startswith(("GGUF.", "tokenizer.")) or field.name in ("general.architecture", "general.name"):
            continue
        kind = field.types[0]
        writer.add_key_value(field.name, field.contents(), kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
    count = next(tensor.shape[1] for tensor in reader.tensors if tensor.name == "token_embd.weight")
    kinds = gguf.TokenType
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", "<0x0A>"] + [f"t{i}" for i in range(4, count)])
    writer.add_token_scores([0.0] * count)
    writer.add_token_types([kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, kinds.BYTE] + [kinds.NORMAL] * int(count - 4))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return int(count)


def probabilities(path, tokens, count, answer):
    """Sends llama.cpp's log-probabilities of what follows a prompt."""
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.cpuparams.n_threads, params.warmup = 512, 1, 1, False
    params.cache_type_k = params.cache_type_v = int(gguf.GGMLQuantizationType.F32)
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)
    request = {"prompt": tokens, "n_predict": 1, "temperature": 0, "n_probs": count, "cache_prompt": False}
    found = server.handle_completions(request)
    answer.send({token["id"]: token["logprob"] for token in found["choices"][0]["logprobs"]["content"][0]["top_logprobs"]})


def apart(path, tokens, count, notes, answer):
    """The same in a process whose output is the file `notes`."""
    for stream in (1, 2):
        os.dup2(os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    probabilities(path, tokens, count, answer)


def llama(path, tokens, count, scratch):
    """What llama.cpp computes; or what it says."""
    notes = scratch / "notes"
    notes.unlink(missing_ok=True)
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=apart, args=(path, tokens, count, notes, theirs))
    process.start()
    theirs.close()
    try:
        found = ours.recv()
        process.join()
        return found, None
    except EOFError:
        process.join()
        said = re.findall(r"(?:error loading model: |GGML_ASSERT)(.*)", notes.read_text(errors="replace"))
        return None, said[0] if said else f"its process ended with {process.exitcode}"


def one(delft, folder, scratch):
    file, whole = scratch / "converted.gguf", scratch / "whole.gguf"
    done = subprocess.run([delft, "convert", folder, "-o", file, "--type", "f32", "--force"], capture_output=True, text=True)
    if done.returncode:
        return None, f"refused: {done.stderr.strip().splitlines()[-1]}"
    count = with_vocabulary(file, whole)
    expected = load_file(folder / "expected.safetensors")
    found, why = llama(whole, expected["input_ids"].tolist(), count, scratch)
    if found is None:
        return np.inf, f"llama.cpp refuses it: {why}"
    logits = expected["logits"][-1].astype(np.float64)
    truth = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    worst = max(abs(truth[token] - value) for token, value in found.items())
    return worst, f"{len(found)} log-probabilities differ by {worst:.5f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delft", required=True)
    parser.add_argument("--only", nargs="*")
    args = parser.parse_args()
    wrong = 0
    folders = sorted(path.parent for path in (Path(__file__).resolve().parent / "models").glob("*/config.json"))
    with tempfile.TemporaryDirectory() as scratch:
        for folder in folders:
            if args.only and folder.name not in args.only:
                continue
            worst, line = one(args.delft, folder, Path(scratch))
            known = APART.get(folder.name)
            wrong += worst is not None and worst > BOUND and known is None
            print(f"{folder.name}: {line}{f' ({known})' if known else ''}", flush=True)
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()

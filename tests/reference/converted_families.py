#!/usr/bin/env python3
"""What llama.cpp computes with the GGUF files that `delft convert` writes of every checkpoint below models/.

    converted_families.py --delft target/debug/delft [--only NAME ..]

Needs gguf, numpy, safetensors and xllamacpp (llama.cpp as a Python package). Converts each folder to F32, puts a vocabulary of made-up texts into the file,
which fixtures do not have, loads it in llama.cpp, and compares the log-probabilities behind the prompt with those of Transformers' logits
(expected.safetensors). Prints a line for each: the largest difference, or what Delft or llama.cpp refuses; ends with an error if one differs by more than
BOUND.
"""
import argparse
import subprocess
import tempfile
from pathlib import Path

import gguf
import numpy as np
import xllamacpp
from safetensors.numpy import load_file

# llama.cpp keeps keys and values in f16.
BOUND = 2e-2
# Where the two are not the same model: why.
APART = {
    "gpt-neox": "llama.cpp takes tanh's approximation of GELU",
    "gpt-neox-in-turn": "llama.cpp takes tanh's approximation of GELU",
    "starcoder2-window": "llama.cpp has no window there",
    "mistral": "llama.cpp has no window there",
    "mistral-long": "llama.cpp has no window there",
}


def with_vocabulary(path, out):
    """The file with a text for each row of its embedding."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(out, reader.get_field("general.architecture").contents())
    for field in reader.fields.values():
        if field.name.startswith(("GGUF.", "tokenizer.")) or field.name == "general.architecture":
            continue
        kind = field.types[0]
        writer.add_key_value(field.name, field.contents(), kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
    count = next(tensor.shape[1] for tensor in reader.tensors if tensor.name == "token_embd.weight")
    kinds = gguf.TokenType
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>"] + [f"t{i}" for i in range(3, count)])
    writer.add_token_scores([0.0] * count)
    writer.add_token_types([kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL] + [kinds.NORMAL] * int(count - 3))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return int(count)


def probabilities(path, tokens, count):
    """llama.cpp's log-probabilities of what follows a prompt."""
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.cpuparams.n_threads, params.warmup = 512, 1, 1, False
    server = xllamacpp.Server(params)
    request = {"prompt": tokens, "n_predict": 1, "temperature": 0, "n_probs": count, "cache_prompt": False}
    answer = server.handle_completions(request)
    return {token["id"]: token["logprob"] for token in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]}


def one(delft, folder, scratch):
    file, whole = scratch / "converted.gguf", scratch / "whole.gguf"
    done = subprocess.run([delft, "convert", folder, "-o", file, "--type", "f32", "--force"], capture_output=True, text=True)
    if done.returncode:
        return None, f"refused: {done.stderr.strip().splitlines()[-1]}"
    count = with_vocabulary(file, whole)
    expected = load_file(folder / "expected.safetensors")
    try:
        found = probabilities(whole, expected["input_ids"].tolist(), count)
    except Exception as why:  # what llama.cpp says of it is on standard error
        return np.inf, f"llama.cpp refuses it: {why}"
    logits = expected["logits"][-1].astype(np.float64)
    truth = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    worst = max(abs(truth[id] - value) for id, value in found.items())
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

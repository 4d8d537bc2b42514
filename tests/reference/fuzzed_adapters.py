#!/usr/bin/env python3
"""Random adapters of every checkpoint below models/, as PEFT makes them, and the logits that Delft computes with each.

    fuzzed_adapters.py --delft target/debug/delft [--draws N] [--first N] [--seed S] [--only NAME ..] [--keep DIR]

Needs torch, transformers, peft, safetensors. Which matrices have factors, how they are named, ranks, scales, DoRA, layers, and types are drawn from the seed;
PEFT computes the logits of a prompt in float32. What PEFT refuses is drawn again. Delft's logits may be NEAR of their range away (peft_adapters.py), or it
refuses the adapter, which is told: the line is for a reader to judge. Ends with an error if logits differ.
"""
import argparse
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

from fuzzed_models import Draw
from peft_adapters import HERE, NEAR, filled, tensors


def linears(model):
    """Names of modules that a user would list, and how many matrices have them."""
    names = {}
    for name, part in model.named_modules():
        if type(part).__name__ in ("Linear", "Conv1D") and "lm_head" not in name:
            names.setdefault(name.split(".")[-1], []).append(name)
    return names


def stacks(model):
    """Parameters that are stacks of experts' matrices."""
    return sorted({".".join(name.split(".")[-3:]) for name, p in model.named_parameters() if p.ndim == 3 and ".experts." in name})


def drawn(r, model):
    """Settings of an adapter, and the type in which it is stored."""
    names, rank = linears(model), r.of(1, 2, 4, 7, 16)
    listed = [name for name in names if r.flag()] or list(names)
    config = dict(r=rank, lora_alpha=r.of(1, rank, 2 * rank, 5), use_rslora=r.of(False, False, True), use_dora=r.of(False, False, True),
                  target_modules=r.of("all-linear", listed, listed, r".*\.(" + "|".join(listed) + ")"))
    if r.of(False, False, True):
        layers = model.config.get_text_config().num_hidden_layers
        config["layers_to_transform"] = r.of(0, sorted({int(r.stream.integers(layers)) for _ in range(2)}))
    if isinstance(config["target_modules"], str):
        config.pop("layers_to_transform", None)
    if r.of(False, False, True):
        config["rank_pattern"] = {r.of(listed[0], names[listed[0]][0], rf".*{listed[-1]}"): r.of(1, 3, 9)}
    if r.of(False, False, True):
        config["alpha_pattern"] = {r.of(listed[0], names[listed[0]][0], rf".*{listed[-1]}"): r.of(1, 3, 9)}
    if isinstance(config["target_modules"], list) and not config["use_dora"]:
        more = r.of([], [], [], ["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"])
        config["target_modules"] = config["target_modules"] + more
        if stacks(model) and r.of(False, False, True):
            config |= dict(target_parameters=r.of(stacks(model), stacks(model)[:1]), target_modules=r.of([], config["target_modules"]))
            config.pop("layers_to_transform", None)
    if r.of(False, False, False, True):
        config["exclude_modules"] = listed[:1]
    # What is trained beside factors.
    table = model.get_input_embeddings() and next(name for name, part in model.named_modules() if part is model.get_input_embeddings())
    table, targets = table.split(".")[-1], config["target_modules"]
    free = isinstance(targets, str) or not {"embed_tokens", "lm_head"} & set(targets)
    more = r.of("", "", "", "", "bias", "lora_bias", "saved", "tokens") if free else ""
    if more == "bias":
        config["bias"] = r.of("all", "lora_only")
    if more == "lora_bias" and not config["use_dora"]:
        config["lora_bias"] = True
    if more == "saved":
        config["modules_to_save"] = r.of([table], ["lm_head"], [table, "lm_head"])
        config["ensure_weight_tying"] = r.of(False, False, True)
    if more == "tokens":
        config["trainable_token_indices"] = r.of([3, 5], {table: [9, 3, 4]})
    return config, r.of(torch.float32, torch.float32, torch.bfloat16, torch.float16)


def loaded(base):
    return transformers.AutoModelForCausalLM.from_pretrained(HERE / "models" / base, dtype=torch.float32, attn_implementation="eager")


@torch.no_grad()
def made(r, base, folder):
    """Saves an adapter; gives what was drawn, tokens, the logits without it, and those that PEFT computes with what was saved; or none, where PEFT refuses."""
    model = loaded(base)
    config, kind = drawn(r, model)
    generator = torch.Generator().manual_seed(int(r.stream.integers(1 << 30)))
    noise = lambda *shape: torch.randn(*shape, generator=generator)
    tokens = torch.randint(3, model.config.get_text_config().vocab_size, (r.of(1, 5, 24),), generator=generator)
    before = model(input_ids=tokens[None], use_cache=False).logits[0]
    try:
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **config)).eval()
    except (ValueError, RuntimeError, NotImplementedError, TypeError):
        return None
    filled(model, noise)
    model.save_pretrained(folder)
    # Copies of the base's tables keep their type.
    tensors(lambda stored: stored.update({name: x.to(kind) for name, x in stored.items() if "lora_" in name}))(folder)
    # The order of patterns, which decides among those that match, is that of the file.
    logits = PeftModel.from_pretrained(loaded(base), folder).eval()(input_ids=tokens[None], use_cache=False).logits[0]
    return config, tokens.tolist(), before, logits


def computed(args, base, tokens, *more):
    """Delft's logits, or what it says."""
    command = [args.delft, "logits", "-m", HERE / "models" / base, "--cache-type", "f32", "--device", "cpu", "--json", "--all",
               "--tokens", ",".join(map(str, tokens)), "-t", "1", "--ctx", len(tokens), *more]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    return " ".join(done.stderr.split()) if done.returncode else torch.tensor(json.loads(done.stdout)["logits"])


def apart(found, logits):
    return ((found - logits).abs().max() / (logits.max() - logits.min())).item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delft", required=True)
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", default="delft")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--keep", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    wrong = 0
    bases = sorted(path.parent.name for path in (HERE / "models").glob("*/config.json"))
    for base in args.only or bases:
        for number in range(args.first, args.first + args.draws):
            with tempfile.TemporaryDirectory() as aside:
                folder, r = Path(aside) / "adapter", Draw(args.seed, base, number)
                try:
                    one = made(r, base, folder)
                except Exception as e:
                    print(f"{base}-{number}: not loaded by Transformers: {str(e).splitlines()[0][:100]}", flush=True)
                    break
                if one is None:
                    continue
                config, tokens, before, logits = one
                plain = computed(args, base, tokens)
                if isinstance(plain, str) or not apart(plain, before) < NEAR:
                    print(f"{base}-{number}: other logits without an adapter, since Transformers does not find all weights", flush=True)
                    break
                found = computed(args, base, tokens, "--adapter", folder)
                if isinstance(found, str):
                    print(f"{base}-{number}: {found.replace(aside, '')}\n    {config}", flush=True)
                    continue
                if not apart(found, logits) < NEAR:
                    wrong += 1
                    print(f"{base}-{number}: {apart(found, logits):.2g} of the range apart; it moves logits by {apart(before, logits):.2g}\n    {config}", flush=True)
                    if args.keep:
                        shutil.copytree(folder, args.keep / f"{base}-{number}", dirs_exist_ok=True)
    if wrong:
        raise SystemExit(f"{wrong} otherwise than PEFT's")


if __name__ == "__main__":
    main()

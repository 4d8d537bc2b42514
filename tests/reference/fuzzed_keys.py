#!/usr/bin/env python3
"""Each key of every fixture's config.json, and each that its Transformers class has, with other values: what Transformers and Delft compute of the same weights.

    fuzzed_keys.py --delft target/debug/delft [--only NAME ..] [--keys KEY ..] [--values N] [--every] [--refused] [--part I/N]

Needs torch, transformers, safetensors. Takes the first fixture of each family that Transformers has a class for (--every: all of them). Embeddings are divided by
64, so that what norms add to a mean square counts. A changed configuration that Transformers runs is one of three: Delft computes the same (`fuzzed_models.py`, `apart`), refuses it
in a line that names the key, or differs without a word. Prints the last of these with what was changed, those whose line names another key with --refused, and for each fixture how many
there were of each; ends with an error if one differs, unless KNOWN says why.
"""
import argparse
import json
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
import transformers

import models
from fuzzed_models import ACTIVATIONS, BOUND, Draw, apart, run

# Keys that say nothing of what is computed, by their beginnings.
SILENT = ("architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "_", "id2label", "label2id", "problem_type", "return_dict", "output_", "use_cache",
          "initializer", "chunk_size_feed_forward", "is_encoder_decoder", "is_decoder", "bos_token", "eos_token", "pad_token", "sep_token", "cls_token", "unk_token",
          "decoder_start", "tokenizer_class", "prefix", "finetuning_task", "router_aux_loss", "router_z_loss", "router_jitter", "base_model_", "tp_", "sub_configs", "keys_to_",
          "has_no_defaults", "attribute_map", "vocab_size", "image_token", "attn_implementation", "experts_implementation", "add_cross_attention", "cross_attention_hidden",
          "auto_map", "task_specific", "summary_", "use_mamba_kernels", "is_causal", "tie_word_embeddings")
# What is left as it is, by family (or "": all) and key: why.
KNOWN = {
    ("llama", "partial_rotary_factor"): "Transformers turns all of a head; published files of other programs mean it",
    ("minimax", "partial_rotary_factor"): "Transformers turns all of a head; the authors' own code does not",
    ("afmoe", "route_norm"): "Transformers' class does not read it",
    ("mpt", "alibi_bias_max"): "Transformers' class does not read it",
    ("mamba", "rescale_prenorm_residual"): "Transformers divides weights that were loaded",
    ("mpt", "attn_config"): "Transformers' class does not read alibi_bias_max",
    ("dbrx", "attn_config"): "a bound of zero, which published files do not have",
    ("dbrx", "rope_parameters"): "Transformers forgets the base that published files state beside them",
    ("nemotron_h", "time_step_limit"): "steps of nothing, which published files do not have",
    ("step3p5", "rope_parameters"): "one of two kinds of layers, which published files do not leave out",
}
# Keys of which one is changed and the other, too, or left out.
PAIRS = (("n_group", "topk_group"), ("use_sliding_window", "sliding_window"), ("num_experts_per_tok", "norm_topk_prob"), ("sliding_window", "layer_types"))
LENGTH = 24  # tokens of a prompt
ROTATIONS = (dict(rope_type="linear", factor=2.0), dict(rope_type="dynamic", factor=2.0), dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
             original_max_position_embeddings=16), dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16), dict(rope_type="proportional", partial_rotary_factor=0.5))


def revived(value):
    """Numbers that JSON does not have, as the classes say them."""
    if isinstance(value, dict):
        return float(value["__float__"]) if set(value) == {"__float__"} else {key: revived(x) for key, x in value.items()}
    return [revived(x) for x in value] if isinstance(value, list) else value


def decoder(config):
    """The object of config.json that is the decoder's."""
    config = config.get("thinker_config", config)
    return config.get("text_config", config)


def of_class(config):
    """What the class of a configuration is made of."""
    return {key: revived(value) for key, value in config.items() if key not in ("model_type", "architectures", "transformers_version", "dtype", "torch_dtype")}


def silent(key):
    return key.startswith(SILENT) or "dropout" in key or key.endswith(("_pdrop", "_std", "_coef", "_coeff"))


def others(key, value, pool):
    """Other values for a key; lists of those within for objects."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        found = [value // 2, 2 * value, *([] if "window" in key else [0]), 1, 2, value + 1]  # a window of no position leaves nothing
    elif isinstance(value, float):
        found = [2 * value, value / 2, 0.0, 1.0]
    elif isinstance(value, str):
        found = [*(ACTIVATIONS[1:5] if "act" in key else ()), *(word for word in pool if isinstance(word, str)), "something"]
    elif isinstance(value, list):
        found = [value[::-1], value[1:] + value[:1], value[:1] * len(value), []]
    else:
        found = [*pool, 2, True]
    return [other for i, other in enumerate(found) if other != value and other not in found[:i]]


def changes(config, stated, pools, most):
    """Changed copies of a decoder's object, each with the key and what it says now. `config`: with what the class has."""
    for key, value in sorted(config.items()):
        if silent(key):
            continue
        if isinstance(value, dict) and key in ("rope_parameters", "rope_scaling"):
            base = {name: x for name, x in value.items() if name in ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")}
            inner = [value | {name: x} for name, old in value.items() for x in others(name, old, pools.get(name, []))[:most] if name != "rope_type"]
            inner += [{name: x for name, x in value.items() if name != gone} for gone in value]
            inner += [] if any(isinstance(x, dict) for x in value.values()) else [base | rotation for rotation in ROTATIONS]
            for other in inner:
                yield key, stated | {key: other}
        elif isinstance(value, dict):
            for name, old in value.items():
                for other in others(name, old, pools.get(name, []))[:most] if not silent(name) and not isinstance(old, dict) else ():
                    yield key, stated | {key: value | {name: other}}
        else:
            for other in others(key, value, pools.get(key, []))[:most]:
                yield key, stated | {key: other}
        if value is not None:
            yield key, stated | {key: None}
        if key in stated:
            yield key, {name: x for name, x in stated.items() if name != key}
    for key, second in PAIRS:
        for other in others(key, config[key], pools.get(key, [])) if {key, second} <= config.keys() else ():
            rest = {name: x for name, x in stated.items() if name not in (key, second)}
            for more in ({}, *({second: x} for x in (None, *others(second, config[second], pools.get(second, []))[:most]))):
                yield key, rest | {key: other} | more


def said(stated, changed, key):
    if key not in changed:
        return f"{key} left out"
    if isinstance(changed[key], dict) and isinstance(stated.get(key), dict):
        was, now = stated[key], changed[key]
        parts = [f"{name} = {now[name]}" for name in now if now[name] != was.get(name, "nothing")] + [f"{name} left out" for name in was if name not in now]
        return f"{key}: {', '.join(parts)}"
    beside = [f", {name} = {json.dumps(changed[name])}" if name in changed else f", {name} left out" for name in {**stated, **changed}
              if name != key and changed.get(name, "nothing") != stated.get(name, "nothing")]
    return f"{key} = {json.dumps(changed[key])}{''.join(beside)}"


def judge(delft, case, weights, folder, whole, changed, tokens):
    """What becomes of a changed configuration, and more about it."""
    config = json.loads(json.dumps(whole))
    place = decoder(config)
    place.clear()
    place.update(changed)
    models.write_json(folder / "config.json", config)
    other = replace(case, config=of_class(changed))
    found, generated = run(delft, folder, tokens, "cpu")
    try:
        with torch.no_grad(), models.widened(models.default_type(case.family)):
            models.with_weights(other, weights, torch.float64)(input_ids=torch.tensor([tokens]), use_cache=False)
    except Exception as why:
        return ("neither runs it" if found is None else "Delft alone runs it"), f"{type(why).__name__}: {str(why).splitlines()[0][:120] if str(why) else ''}"
    if found is None:
        return "refused", generated
    if case.images and found.shape[1] - 1 in generated:  # which stands for an image
        return "not clear", ""
    try:
        far = apart(other, weights, tokens, found, generated)
    except Exception:  # beyond what a table of positions has
        return "Delft alone runs it", "the tokens behind the prompt"
    if far is None:
        return "not clear", ""
    return ("agrees" if far <= BOUND else "differs silently"), f"{far:.2g} of the range"


def cases(args):
    """The fixtures that are changed."""
    seen = set()
    for case in models.CASES:
        plain = case.folder and not (case.disguise or case.own or case.mlx or case.lm is not None or case.ternary or case.blocks or case.sizes or case.slopes or case.tower or case.context)
        if not plain or (args.only and case.name not in args.only) or (case.family in seen and not (args.every or args.only)):
            continue
        seen.add(case.family)
        yield case


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delft", required=True)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--keys", nargs="*")
    parser.add_argument("--values", type=int, default=3, help="other values for a key at most")
    parser.add_argument("--every", action="store_true")
    parser.add_argument("--refused", action="store_true")
    parser.add_argument("--part", default="0/1", help="of several processes, each of which takes every Nth fixture")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    models.COMMON = {}  # configurations are whole
    here, pools = Path(models.__file__).parent / "models", {}
    for case in models.CASES:
        path = here / case.name / "config.json"
        for key, value in decoder(json.loads(path.read_text())).items() if path.exists() else ():
            if not isinstance(value, (dict, list)) and value not in pools.setdefault(key, []) and value is not None:
                pools[key].append(value)
    first, count = map(int, args.part.split("/"))
    total = Counter()
    for case in list(cases(args))[first::count]:
        whole = json.loads((here / case.name / "config.json").read_text())
        stated = decoder(whole)
        own = case
        case = replace(case, config=of_class(stated))
        if case.images:
            case = replace(case, config=case.config | {"tie_word_embeddings": whole.get("tie_word_embeddings", False)})
        with tempfile.TemporaryDirectory() as scratch:
            folder, kinds = Path(scratch), Counter()
            try:
                weights = {name: (x / 64).to(x.dtype) if "embed" in name and x.ndim == 2 else x for name, x in models.make_weights(case).items()}
                models.write_checkpoint(replace(case, drop=own.drop, add=own.add, v4=None, prefix=""), weights, folder)
            except Exception as why:
                print(f"{case.name}: not made from its own config.json: {type(why).__name__}: {str(why)[:200]}", flush=True)
                continue
            r = Draw(case.name, "keys")
            tokens = [int(r.stream.integers(3, decoder(whole).get("vocab_size", 64) - case.images)) for _ in range(LENGTH)]
            kind, more = judge(args.delft, case, weights, folder, whole, stated, tokens)
            if kind not in ("agrees", "not clear"):
                print(f"{case.name}: as it is: {kind}: {more}", flush=True)
            config = models.make_config(case).to_dict() | stated
            for key, changed in changes(config, stated, pools, args.values):
                if args.keys and key not in args.keys:
                    continue
                kind, more = judge(args.delft, case, weights, folder, whole, changed, tokens)
                if kind == "refused":
                    kind = "refused by name" if key in more or any(word in more for word in ("rope_", "num_attention_heads", "head_dim")) else "refused otherwise"
                known = KNOWN.get((case.family, key))
                if kind == "differs silently" and known:
                    kind = "known"
                kinds[kind] += 1
                if kind == "differs silently" or (args.refused and kind == "refused otherwise"):
                    print(f"{case.name}: {kind}: {said(stated, changed, key)}: {more}", flush=True)
            total.update(kinds)
            print(f"{case.name}: {', '.join(f'{kind} {kinds[kind]}' for kind in sorted(kinds))}", flush=True)
    print(f"all: {', '.join(f'{kind} {total[kind]}' for kind in sorted(total))}")
    raise SystemExit(total["differs silently"] > 0)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Adapters in every form that PEFT writes them: each is used with PEFT's own logits, or refused by file and key.

    peft_adapters.py --delft target/debug/delft [--only NAME ...]

PEFT makes an adapter of random factors on a checkpoint of models/ and saves it; some are then changed by hand, as damaged files or
other programs' would be. Where a case has words, `delft logits --adapter` must refuse the adapter in one line that has all of them;
elsewhere its logits must be those that PEFT computed, to a thousandth of their range. Prints a line for each case, and ends with an
error where one is otherwise. Needs torch, transformers, peft, safetensors.
"""
import argparse
import json
import re
import subprocess
import tempfile
import zlib
from pathlib import Path

import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
NEAR = 1e-3
Q = "base_model.model.model.layers.0.self_attn.q_proj"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def tensors(change):
    """Changes the tensors of a saved adapter."""
    def changed(folder):
        stored = load_file(folder / WEIGHTS)
        change(stored)
        save_file(stored, folder / WEIGHTS, metadata={"format": "pt"})
    return changed


def settings(**values):
    """Changes the settings of a saved adapter; an ellipsis removes one."""
    def changed(folder):
        config = json.loads((folder / CONFIG).read_text())
        config.update(values)
        config = {key: value for key, value in config.items() if value is not ...}
        (folder / CONFIG).write_text(json.dumps(config))
    return changed


def cast(kinds):
    """The factors in these types in turn."""
    return tensors(lambda t: t.update({name: value.to(kinds[i % len(kinds)]) for i, (name, value) in enumerate(t.items())}))


def nan(stored):
    stored[f"{Q}.lora_B.weight"][3, 1] = float("nan")


def unknown(stored):
    for half in "AB":
        stored[f"{Q.replace('q_proj', 'w_proj')}.lora_{half}.weight"] = stored.pop(f"{Q}.lora_{half}.weight")


def beyond(stored):
    for half in "AB":
        stored[f"{Q.replace('layers.0', 'layers.7')}.lora_{half}.weight"] = stored.pop(f"{Q}.lora_{half}.weight")


def wide(stored):
    stored[f"{Q}.lora_A.weight"] = torch.zeros(4, stored[f"{Q}.lora_A.weight"].shape[1] + 2)


def short(folder):
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:-100])


def pickled(folder):
    torch.save(load_file(folder / WEIGHTS), folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()


def renamed(old, new):
    """Other names of tensors."""
    def change(stored):
        for name in list(stored):
            stored[name.replace(old, new)] = stored.pop(name)
    return tensors(change)


TABLE = "base_model.model.model.embed_tokens"
MIXTURE = "base_model.model.model.layers.0.mlp.experts"
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Name, base, LoraConfig, changes by hand, words of the refusal.
CASES = [
    ("plain", "llama3", dict(target_modules=ALL), None, []),
    ("all-linear", "llama3", dict(target_modules="all-linear"), None, []),
    ("regex", "llama3", dict(target_modules=r".*\.(q|down)_proj"), None, []),
    ("layers", "llama3", dict(target_modules=["q_proj", "up_proj"], layers_to_transform=[1]), None, []),
    ("layers-pattern", "llama3", dict(target_modules=["q_proj"], layers_to_transform=0, layers_pattern="layers"), None, []),
    ("exclude", "llama3", dict(target_modules=ALL, exclude_modules=["k_proj"]), None, []),
    ("ranks", "llama3", dict(target_modules=ALL, rank_pattern={"q_proj": 6, "layers.1.mlp.up_proj": 2},
                             alpha_pattern={"v_proj": 1, "model.layers.0.self_attn.o_proj": 9}), None, []),
    ("ranks-anchored", "llama3", dict(target_modules=ALL, rank_pattern={"^model.layers.0.self_attn.q_proj": 7}), None, []),
    ("ranks-by-regex", "llama3", dict(target_modules=ALL, rank_pattern={r"layers\.1\..*_proj": 2}, alpha_pattern={r".*mlp.*": 3}), None, []),
    ("ranks-by-layer", "llama3", dict(target_modules=ALL, rank_pattern={r"layers\.[0-9]+\.mlp\.(up|down)_proj": 3}), None, []),
    ("ranks-looking", "llama3", dict(target_modules=ALL, rank_pattern={r".*(?<!up)_proj": 2}), None, [CONFIG, "rank_pattern", "looking"]),
    ("rslora", "llama3", dict(target_modules=ALL, use_rslora=True, lora_alpha=3), None, []),
    ("dora", "llama-bias", dict(target_modules=ALL, use_dora=True), None, []),
    ("dora-rslora", "qwen3", dict(target_modules=["q_proj", "down_proj"], use_dora=True, use_rslora=True, lora_alpha=3), None, []),
    ("bf16", "llama3", dict(target_modules=ALL), cast([torch.bfloat16]), []),
    ("f16-bf16-f32", "llama3", dict(target_modules=ALL), cast([torch.float16, torch.bfloat16, torch.float32]), []),
    ("dropout", "llama3", dict(target_modules=ALL, lora_dropout=0.3), None, []),
    ("gpt2", "gpt2", dict(target_modules=["c_attn", "c_fc"], fan_in_fan_out=True), None, []),
    ("gpt2-all", "gpt2", dict(target_modules="all-linear"), None, []),
    ("gpt2-dora", "gpt2", dict(target_modules=["c_attn"], fan_in_fan_out=True, use_dora=True), None, []),
    ("fused", "phi3", dict(target_modules="all-linear"), None, []),
    ("gemma3", "gemma3", dict(target_modules="all-linear"), None, []),
    ("olmo2", "olmo2", dict(target_modules="all-linear"), None, []),
    ("glm4", "glm4", dict(target_modules="all-linear"), None, []),
    ("moe-attention", "qwen3-moe", dict(target_modules=["q_proj", "v_proj"]), None, []),
    ("router", "qwen3-moe", dict(target_modules=["q_proj", "gate"]), None, []),
    ("hybrid", "qwen3.5-shared", dict(target_modules=["q_proj", "in_proj_qkv", "out_proj"]), None, []),
    ("hybrid-all", "qwen3.5-shared", dict(target_modules="all-linear"), None, []),
    ("next", "qwen3-next", dict(target_modules=["q_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"]), None, []),
    ("pieces", "olmo_hybrid", dict(target_modules="all-linear"), None, []),
    ("pieces-dora", "olmo_hybrid", dict(target_modules=["q_proj", "v_proj"], use_dora=True, alpha_pattern={"v_proj": 9}), None, []),
    ("pieces-one", "kimi_linear", dict(target_modules=["k_proj", "b_proj"], use_rslora=True), None, []),
    ("pieces-elements", "kimi_linear", dict(target_modules=["q_proj", "k_proj", "v_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj", "o_proj"],
                                            rank_pattern={"k_proj": 7}), None, []),
    ("pieces-ling", "bailing_hybrid", dict(target_modules=["q_proj", "k_proj", "v_proj", "f_proj", "b_proj", "o_proj", "g_proj"], use_dora=True), None, []),
    ("neox", "gpt-neox", dict(target_modules="all-linear"), None, []),
    ("lfm2", "lfm2", dict(target_modules="all-linear"), None, []),
    ("shared", "granite4-moe", dict(target_modules="all-linear"), None, []),
    ("shared-hybrid", "granite4-hybrid-moe", dict(target_modules=["input_linear", "output_linear", "q_proj"]), None, []),
    ("renamed", "nemotron-h", dict(target_modules=["q_proj", "up_proj", "down_proj", "in_proj"]), None, []),
    ("renamed-router", "minimax-m2", dict(target_modules="all-linear"), None, []),
    ("biased-head", "phimoe", dict(target_modules=["q_proj", "embed_tokens", "lm_head"]), None, []),
    ("tables", "llama3", dict(target_modules=["embed_tokens", "q_proj"]), None, []),
    ("tied-head", "llama3", dict(target_modules=["lm_head", "q_proj"]), None, []),
    ("dora-table", "llama3", dict(target_modules=["embed_tokens", "q_proj"], use_dora=True), None, [WEIGHTS, "embed_tokens", "DoRA"]),
    ("no-config", "llama3", dict(target_modules=ALL), lambda f: (f / CONFIG).unlink(), [CONFIG]),
    ("pissa", "llama3", dict(target_modules=ALL, init_lora_weights="pissa"), None, [CONFIG, "init_lora_weights", "pissa"]),
    ("olora", "llama3", dict(target_modules=ALL, init_lora_weights="olora"), None, [CONFIG, "init_lora_weights", "olora"]),
    ("gaussian", "llama3", dict(target_modules=ALL, init_lora_weights="gaussian"), None, []),
    ("orthogonal", "llama3", dict(target_modules=ALL, init_lora_weights="orthogonal"), None, []),
    ("pissa-converted", "llama3", dict(target_modules=ALL, init_lora_weights="pissa"), "converted", []),
    ("olora-converted", "llama3", dict(target_modules=["q_proj", "up_proj"], init_lora_weights="olora", lora_alpha=4), "converted", []),
    ("lora-bias", "llama-bias", dict(target_modules=ALL, lora_bias=True), None, []),
    ("lora-bias-alone", "llama3", dict(target_modules=["k_proj", "down_proj"], lora_bias=True, use_rslora=True), None, []),
    ("lora-bias-fused", "gpt2", dict(target_modules=["c_attn", "c_fc"], lora_bias=True, fan_in_fan_out=True), None, []),
    ("bias-all", "llama-bias", dict(target_modules=ALL, bias="all"), None, []),
    ("bias-dora", "llama-bias", dict(target_modules=["q_proj"], bias="all", use_dora=True), None, []),
    ("bias-beyond", "qwen2", dict(target_modules=["o_proj"], bias="all"), None, []),
    ("bias-norms", "gpt2", dict(target_modules=["c_attn"], bias="all"), None, [WEIGHTS, "ln_", "own weights"]),
    ("bias-lora-only", "llama-bias", dict(target_modules=ALL, bias="lora_only"), None, []),
    ("bias-odd", "llama-bias", dict(target_modules=ALL), settings(bias="some"), [CONFIG, "bias", "some"]),
    ("modules-to-save", "llama3", dict(target_modules=ALL, modules_to_save=["embed_tokens"]), None, []),
    ("modules-to-save-rslora", "gemma3", dict(target_modules="all-linear", modules_to_save=["embed_tokens"], use_rslora=True), None, []),
    ("both-saved", "llama3", dict(target_modules=ALL, modules_to_save=["embed_tokens", "lm_head"]), None, []),
    ("both-tied", "llama3", dict(target_modules=ALL, modules_to_save=["embed_tokens"], ensure_weight_tying=True), None, []),
    ("head-saved", "qwen3-untied", dict(target_modules=ALL, modules_to_save=["lm_head"]), None, []),
    ("both-untied", "qwen3-untied", dict(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"], use_dora=True), None, []),
    ("head-tied", "llama3", dict(target_modules=["v_proj"], modules_to_save=["lm_head"]), None, []),
    ("head-biased", "phimoe", dict(target_modules=["v_proj"], modules_to_save=["lm_head"]), None, []),
    ("wte-saved", "gpt2", dict(target_modules=["c_attn"], modules_to_save=["wte"]), None, []),
    ("matrix-saved", "llama3", dict(target_modules=["v_proj"], modules_to_save=["q_proj"]), None, []),
    ("norm-saved", "llama3", dict(target_modules=["v_proj"], modules_to_save=["input_layernorm"]), None, [WEIGHTS, "input_layernorm", "own weights"]),
    ("table-resized", "llama3", dict(target_modules=ALL, modules_to_save=["embed_tokens"]),
     tensors(lambda t: t.update({f"{TABLE}.weight": torch.zeros(8, t[f"{TABLE}.weight"].shape[1])})), [WEIGHTS, "embed_tokens", "8"]),
    ("table-nan", "llama3", dict(target_modules=ALL, modules_to_save=["embed_tokens"]),
     tensors(lambda t: t[f"{TABLE}.weight"].fill_(float("nan"))), [WEIGHTS, "embed_tokens", "NaN"]),
    ("table-unnamed", "llama3", dict(target_modules=ALL, modules_to_save=["embed_tokens"]), settings(modules_to_save=None), [WEIGHTS, "embed_tokens", "own weights"]),
    ("trained-tokens", "llama3", dict(target_modules=ALL, trainable_token_indices=[3, 5]), None, []),
    ("trained-tokens-untied", "qwen3-untied", dict(target_modules=ALL, trainable_token_indices={"embed_tokens": [7, 3, 5]}), None, []),
    ("trained-tokens-both", "qwen3-untied", dict(target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [7, 3], "lm_head": [4]}), None, []),
    ("trained-tokens-scaled", "gemma3", dict(target_modules=["q_proj"], trainable_token_indices=[3, 5, 9]), None, []),
    ("trained-tokens-beyond", "llama3", dict(target_modules=ALL, trainable_token_indices=[3, 5]), settings(trainable_token_indices=[3, 99999]), [WEIGHTS, "trainable_tokens_delta", "99999"]),
    ("trained-tokens-odd", "llama3", dict(target_modules=ALL, trainable_token_indices=[3, 5]), settings(trainable_token_indices=[3, 3]), [CONFIG, "trainable_token_indices"]),
    ("trained-tokens-short", "llama3", dict(target_modules=ALL, trainable_token_indices=[3, 5]), settings(trainable_token_indices=[3]), [WEIGHTS, "trainable_tokens_delta"]),
    ("tables-tied", "llama3", dict(target_modules=["embed_tokens", "q_proj"], ensure_weight_tying=True), None, []),
    ("tables-scaled", "gemma3", dict(target_modules=["embed_tokens", "q_proj"]), None, []),
    ("unprefixed", "llama3", dict(target_modules=ALL), renamed("base_model.model.", ""), []),
    ("beside-towers", "llama3", dict(target_modules=ALL), renamed("base_model.model.model.", "base_model.model.model.language_model."), []),
    ("before-towers", "llama3", dict(target_modules=ALL), renamed("base_model.model.model.", "base_model.model.language_model.model."), []),
    ("named-twice", "llama3", dict(target_modules=ALL), renamed(".weight", ".default.weight"), [WEIGHTS, "default"]),
    ("alora", "llama3", dict(target_modules=["q_proj"], alora_invocation_tokens=[5, 6]), None, [CONFIG, "alora_invocation_tokens"]),
    ("parameters", "qwen3-moe", dict(target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"]), None, []),
    ("experts", "mixtral", dict(target_modules=ALL[:4], target_parameters=EXPERTS), None, []),
    ("experts-rslora", "qwen2-moe", dict(target_modules=[], target_parameters=EXPERTS, use_rslora=True, alpha_pattern={"mlp.experts.down_proj": 9}), None, []),
    ("experts-of-old", "qwen3-moe", dict(target_modules=ALL), None, []),
    ("experts-turned", "gpt-oss", dict(target_modules=[], target_parameters=EXPERTS), None, []),
    ("experts-deepseek", "deepseek3", dict(target_modules=[], target_parameters=EXPERTS), None, []),
    ("experts-glm", "glm4-moe", dict(target_modules=[], target_parameters=EXPERTS), None, []),
    ("experts-granite", "granitemoe", dict(target_modules=[], target_parameters=["block_sparse_moe.experts.gate_up_proj"]), None, []),
    ("experts-lfm2", "lfm2-moe", dict(target_modules=[], target_parameters=["feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"]), None, []),
    ("experts-qwen3.5", "qwen3.5-moe", dict(target_modules=[], target_parameters=EXPERTS), None, []),
    ("experts-rank-off", "mixtral", dict(target_modules=[], target_parameters=EXPERTS), settings(r=3), [WEIGHTS, "experts", "rank 3"]),
    ("experts-half", "mixtral", dict(target_modules=[], target_parameters=EXPERTS), tensors(lambda t: t.pop(f"{MIXTURE}.lora_B.weight")), [WEIGHTS, "experts", "lora_B"]),
    ("experts-wide", "mixtral", dict(target_modules=[], target_parameters=EXPERTS),
     tensors(lambda t: t.update({f"{MIXTURE}.lora_A.weight": torch.zeros(16, 30)})), [WEIGHTS, "experts.lora_A"]),
    ("experts-nan", "mixtral", dict(target_modules=[], target_parameters=EXPERTS),
     tensors(lambda t: t[f"{MIXTURE}.lora_A.weight"].fill_(float("nan"))), [WEIGHTS, "experts.lora_A", "NaN"]),
    ("experts-elsewhere", "mixtral", dict(target_modules=[], target_parameters=EXPERTS), "llama3", [WEIGHTS, "experts"]),
    ("replicated", "llama3", dict(target_modules=ALL, layer_replication=[[0, 2], [0, 2]]), None, [CONFIG, "layer_replication"]),
    ("rank-off", "llama3", dict(target_modules=ALL), settings(r=5), [WEIGHTS, "lora_A", "rank 5"]),
    ("rank-none", "llama3", dict(target_modules=ALL), settings(r=...), [CONFIG, "r:"]),
    ("rank-zero", "llama3", dict(target_modules=ALL), settings(r=0), [CONFIG, "r:"]),
    ("rank-text", "llama3", dict(target_modules=ALL), settings(r="4"), [CONFIG, "r:"]),
    ("rank-half", "llama3", dict(target_modules=ALL), settings(r=4.5), [WEIGHTS, "rank 4.5"]),
    ("alpha-none", "llama3", dict(target_modules=ALL), settings(lora_alpha=None), [CONFIG, "lora_alpha"]),
    ("alpha-negative", "llama3", dict(target_modules=ALL), settings(lora_alpha=-4), [CONFIG, "lora_alpha"]),
    ("pattern-off", "llama3", dict(target_modules=ALL), settings(rank_pattern={"q_proj": 3}), [WEIGHTS, "q_proj", "rank 3"]),
    ("pattern-text", "llama3", dict(target_modules=ALL), settings(rank_pattern={"q_proj": "x"}), [CONFIG, "rank_pattern", "q_proj"]),
    ("pattern-list", "llama3", dict(target_modules=ALL), settings(rank_pattern=[3]), [CONFIG, "rank_pattern"]),
    ("half", "llama3", dict(target_modules=ALL), tensors(lambda t: t.pop(f"{Q}.lora_B.weight")), [WEIGHTS, "q_proj", "lora_B"]),
    ("unknown-target", "llama3", dict(target_modules=ALL), tensors(unknown), [WEIGHTS, "w_proj"]),
    ("unknown-layer", "llama3", dict(target_modules=ALL), tensors(beyond), [WEIGHTS, "layers.7"]),
    ("other-tensor", "llama3", dict(target_modules=ALL), tensors(lambda t: t.update({"odd": torch.ones(2)})), [WEIGHTS, "odd"]),
    ("nan", "llama3", dict(target_modules=ALL), tensors(nan), [WEIGHTS, f"{Q}.lora_B.weight", "NaN"]),
    ("wide", "llama3", dict(target_modules=ALL), tensors(wide), [WEIGHTS, "q_proj.lora_A"]),
    ("integers", "llama3", dict(target_modules=ALL), cast([torch.int32]), [WEIGHTS, "lora_"]),
    ("magnitude-none", "llama-bias", dict(target_modules=ALL, use_dora=True),
     tensors(lambda t: t.pop(f"{Q}.lora_magnitude_vector")), [WEIGHTS, "q_proj", "use_dora"]),
    ("magnitude-odd", "llama-bias", dict(target_modules=ALL, use_dora=True), settings(use_dora=False), [WEIGHTS, "use_dora"]),
    ("flag-text", "llama3", dict(target_modules=ALL), settings(use_rslora="yes"), [CONFIG, "use_rslora"]),
    ("another-kind", "llama3", dict(target_modules=ALL), settings(peft_type="IA3"), [CONFIG, "peft_type"]),
    ("another-base", "qwen2", dict(target_modules=ALL), settings(), []),
    ("short", "llama3", dict(target_modules=ALL), short, [WEIGHTS]),
    ("pickled", "llama3", dict(target_modules=ALL), pickled, [WEIGHTS, "adapter_model.bin"]),
    ("wrong-base", "llama3", dict(target_modules=ALL), "qwen2", [WEIGHTS, "lora_A"]),
]


def filled(model, noise):
    """Gives factors random numbers that are exact in bf16 and f16, and magnitudes others than they begin with."""
    for name, parameter in model.named_parameters():
        if "lora_magnitude_vector" in name:
            parameter.data = (parameter.data * (1 + 0.2 * noise(*parameter.shape))).bfloat16().float()
        elif "lora_" in name:
            parameter.data = (0.2 * noise(*parameter.shape)).to(torch.float8_e4m3fn).float()
        elif "modules_to_save" in name or "trainable_tokens_delta" in name or (name.endswith("bias") and parameter.requires_grad):
            parameter.data = (parameter.data + 0.3 * parameter.data.abs().mean().clamp(min=0.05) * noise(*parameter.shape)).bfloat16().float()


def converted(model, noise, tokens, before, folder):
    """Saves an adapter that began with changed weights of the base as one beside the base as it was."""
    first = model.peft_config["default"].init_lora_weights
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(folder.parent / "first")
    model.peft_config["default"].init_lora_weights = first
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data += 0.1 * noise(*parameter.shape)
    logits = model(input_ids=tokens[None], use_cache=False).logits[0]
    model.save_pretrained(folder, path_initial_model_for_weight_conversion=folder.parent / "first")
    return tokens.tolist(), logits, (logits - before).abs().max().item()


def made(base, config, change, folder, seed):
    """Saves an adapter; gives tokens and PEFT's logits with it."""
    generator = torch.Generator().manual_seed(seed)
    noise = lambda *shape: torch.randn(*shape, generator=generator)
    torch.manual_seed(seed)
    # Its own words of what it changes go to standard error.
    model = transformers.AutoModelForCausalLM.from_pretrained(HERE / "models" / base, dtype=torch.float32, attn_implementation="eager")
    tokens = torch.randint(3, model.config.get_text_config().vocab_size, (24,), generator=generator)
    with torch.no_grad():
        before = model(input_ids=tokens[None], use_cache=False).logits[0]
        model = get_peft_model(model, LoraConfig(**{"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", **config})).eval()
        if change == "converted":
            return converted(model, noise, tokens, before, folder)
        if config.get("init_lora_weights") not in ("pissa", "olora"):
            filled(model, noise)
        logits = model(input_ids=tokens[None], use_cache=False).logits[0]
    model.save_pretrained(folder)
    if callable(change):
        change(folder)
    return tokens.tolist(), logits, (logits - before).abs().max().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delft", required=True)
    parser.add_argument("--only", nargs="*")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    wrong = 0
    for name, base, config, change, words in CASES:
        if args.only and name not in args.only:
            continue
        with tempfile.TemporaryDirectory() as aside:
            folder = Path(aside) / "adapter"
            tokens, logits, moved = made(base, config, change, folder, zlib.crc32(name.encode()))
            used = change if isinstance(change, str) and change != "converted" else base
            command = [args.delft, "logits", "-m", HERE / "models" / used, "--cache-type", "f32", "--device", "cpu", "--json", "--all",
                       "--tokens", ",".join(map(str, tokens)), "--adapter", folder]
            done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
            said = done.stderr.strip().replace(aside, "")
            if words:
                lines = [line for line in said.splitlines() if not re.match(r"\s*hint: ", line)]
                good = done.returncode == 1 and len(lines) == 1 and all(word in said for word in words)
                told = " ".join(said.split())
            elif done.returncode:
                good, told = False, " ".join(said.split())
            else:
                off = (torch.tensor(json.loads(done.stdout)["logits"]) - logits).abs().max() / (logits.max() - logits.min())
                good, told = off.item() < NEAR and moved > 0.1, f"{off:.1e} of the range; the adapter moves logits by {moved:.2f}"
        wrong += not good
        print(f"{name}: {'' if good else 'WRONG '}{told}", flush=True)
    if wrong:
        raise SystemExit(f"{wrong} otherwise than PEFT's")


if __name__ == "__main__":
    main()

"""Folders as mlx-lm writes them, for `models.py`: mlx-lm itself loads a checkpoint of Transformers, renames, transposes and shifts what it does,
quantises it where a case says so, and saves it.

The truth is what Transformers computes from the numbers that the folder holds, under Transformers' names again; mlx-lm's own logits must be near it, so
that what is undone here is what mlx-lm did.
"""
import json
import re
import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
from mlx_lm import utils
from safetensors.torch import load_file, save_file

IMAGES = {"llama4": "Llama4ForConditionalGeneration", "qwen3_5": "Qwen3_5ForConditionalGeneration",
          "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration"}
SHIFTED = ("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight", "q_norm.weight", "k_norm.weight")
NEAR = 1e-3  # of the logits' range: the same up to float32's rounding


def tensor(x):
    return torch.from_numpy(np.array(x.astype(mx.float32)))


def with_blocks(path):
    """gpt-oss as it is published: its experts' matrices in MXFP4, of which mlx-lm reads no others."""
    weights, stored = load_file(path / "model.safetensors"), {}
    for name, x in weights.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = x
            continue
        codes, scales = mx.quantize(mx.array(x.float().transpose(1, 2).numpy()).astype(mx.bfloat16), mode="mxfp4", group_size=32, bits=4)
        codes = torch.from_numpy(np.array(codes).view(np.uint8))
        stored[name + "_blocks"] = codes.reshape(*codes.shape[:2], -1, 16).contiguous()
        stored[name + "_scales"] = torch.from_numpy(np.array(scales)).contiguous()
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def as_published(family, config):
    """config.json with its keys where mlx-lm's models look for them: as Transformers 4 wrote them."""
    config = dict(config)
    if "num_experts" not in config and "qwen" in family and "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")
    if family.startswith("qwen3_5") or "rope_parameters" not in config:
        return config
    scaling = dict(config.pop("rope_parameters"))
    config["rope_theta"] = scaling.pop("rope_theta")
    config["partial_rotary_factor"] = scaling.pop("partial_rotary_factor", 1.0)
    config["rope_scaling"] = None if scaling["rope_type"] == "default" else scaling
    return config


def write(case, checkpoint, folder, write_checkpoint):
    """The folder below the case's own; gives its numbers in float32 by the names that Transformers has."""
    inner = folder / "folder"
    inner.mkdir()
    with tempfile.TemporaryDirectory() as path:
        path = Path(path)
        write_checkpoint(path)
        config = as_published(case.family, json.loads((path / "config.json").read_text()))
        if case.family in IMAGES:
            # mlx-lm knows the text's part of a checkpoint with images alone.
            weights = load_file(path / "model.safetensors")
            save_file({"language_model." + name: x for name, x in weights.items()}, path / "model.safetensors", {"format": "pt"})
            config = {"architectures": [IMAGES[case.family]], "model_type": case.family, "tie_word_embeddings": False, "text_config": config}
        (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if case.family == "gpt2":
            # Published without the prefix.
            weights = load_file(path / "model.safetensors")
            save_file({name.removeprefix("transformer."): x for name, x in weights.items()}, path / "model.safetensors", {"format": "pt"})
        if case.family == "gpt_oss":
            with_blocks(path)
        model, config = utils.load_model(path)
    if case.lm:
        model, config = utils.quantize_model(model, config, **case.lm)
    utils.save_model(inner, model)
    (inner / "model.safetensors.index.json").unlink(missing_ok=True)
    utils.save_config(config, config_path=inner / "config.json")
    return model, transformers_names(case.family, numbers(model), checkpoint)


def numbers(model):
    """Every tensor, quantised ones as they decode in float32."""
    held = {}
    for name, module in model.named_modules():
        parameters = {part: x for part, x in module.items() if isinstance(x, mx.array) and part[0] != "_"}
        if "scales" in parameters and name:
            scales, offsets = parameters.pop("scales"), parameters.pop("biases", None)
            affine = module.mode == "affine"
            parameters["weight"] = mx.dequantize(
                parameters["weight"], scales.astype(mx.float32) if affine else scales,
                offsets.astype(mx.float32) if affine else None, group_size=module.group_size, bits=module.bits, mode=module.mode,
                dtype=mx.float32)
        held |= {f"{name}.{part}" if name else part: tensor(x) for part, x in parameters.items()}
    return held


def transformers_names(family, held, checkpoint):
    """What mlx-lm renamed, transposed, split and shifted, undone."""
    held = {name.removeprefix("language_model.").replace("block_sparse_moe", "mlp"): x for name, x in held.items()}
    if family == "phimoe":
        held = {name.replace("mlp.gate.", "mlp.router."): x for name, x in held.items()}
    if family == "gpt2":
        held = {re.sub("^model", "transformer", name): x for name, x in held.items()}
        held = {name: x.T if re.search(r"c_\w+\.weight", name) else x for name, x in held.items()}
    if family.startswith("qwen3_5") or family == "qwen3_next":
        held = {name: x.double() - 1 if name.endswith(SHIFTED) else x.moveaxis(2, 1) if "conv1d" in name else x for name, x in held.items()}
    made = {}
    turned = family in ("gpt_oss", "llama4")  # Transformers has these experts [in, out]
    for name, x in held.items():
        stem = re.match(r"(.*\.)(?:switch_mlp|experts)\.(gate|up|down)_proj\.(weight|bias)$", name)
        if not stem:
            made[name] = x
            continue
        block, part, suffix = stem.groups()
        of = lambda part: held[name.replace(stem.group(2) + "_proj", part + "_proj")]
        whole = f"{block}experts.{'down' if part == 'down' else 'gate_up'}_proj" + ("_bias" if suffix == "bias" else "")
        if part == "up":
            continue
        if part == "gate" and family == "gpt_oss":
            x = torch.stack([x, of("up")], dim=2).flatten(1, 2)
        elif part == "gate":
            x = torch.cat([x, of("up")], dim=1)
        made[whole] = x.transpose(1, 2) if turned and suffix == "weight" else x
    assert made.keys() == checkpoint.keys(), made.keys() ^ checkpoint.keys()
    assert all(made[name].shape == checkpoint[name].shape for name in made)
    return {name: x.contiguous() for name, x in made.items()}


def check(case, model, tensors):
    """mlx-lm's own logits of the prompt are near the truth."""
    first = tensors["first_row"].item()
    model.set_dtype(mx.float32)
    logits = tensor(model(mx.array(tensors["input_ids"].numpy())[None]))[0, first:]
    apart = (logits - tensors["logits"]).abs().max().item()
    assert apart < NEAR * (tensors["logits"].max() - tensors["logits"].min()).item(), f"mlx-lm's logits differ by {apart}"
    return apart

#!/usr/bin/env python3
"""Write the reference fixtures for training: losses and gradients that PyTorch computes through Transformers and PEFT.

For every case below, a checkpoint of `models/`, this writes `gradients/CASE.safetensors`: a batch of two sequences, PEFT's factors
beside every linear layer, the sum of the weighted cross-entropies, and its gradients. The arithmetic is float64 throughout.

    gradients.py [--only NAME ...]

Needs torch, transformers, peft, safetensors.
"""
import argparse
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file

from models import widened

HERE = Path(__file__).parent
STEPS = 100  # of AdamW
RANK, ALPHA = 3, 6.0
OPTIMISER = dict(lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)


@dataclass
class Case:
    name: str
    full: bool = False  # also the gradients of all weights
    steps: bool = False  # also the losses of steps of AdamW


CASES = [Case("llama3", full=True, steps=True), Case("llama-linear"), Case("qwen2"), Case("qwen3", full=True), Case("gemma2", full=True),
         Case("gemma3"), Case("granite"), Case("mistral"), Case("smollm3"), Case("olmo2"), Case("ministral")]


def loss_of(model, sequences, weights):
    """The sum of `weight * -ln p(next token)` over all sequences, each by itself."""
    total = 0
    for tokens, weight in zip(sequences, weights):
        with widened():
            logits = model(input_ids=tokens[None], use_cache=False).logits[0]
        losses = torch.nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="none")
        total = total + (losses * weight[:-1]).sum()
    return total


def single(model, sequences, weights, out):
    """How far PyTorch's own float32 gradients are from those in float64, relative to their lengths: of the farthest."""
    model.float().zero_grad()
    total = 0
    for tokens, weight in zip(sequences, weights):
        logits = model(input_ids=tokens[None], use_cache=False).logits[0]
        losses = torch.nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="none")
        total = total + (losses * weight[:-1].float()).sum()
    total.backward()
    worst = 0.0
    for name, parameter in model.named_parameters():
        want = out.get("gradient." + name.replace(".default", ""))
        if want is not None:
            worst = max(worst, ((parameter.grad - want).double().norm() / want.double().norm()).item())
    model.double().zero_grad()
    return worst


def write(case):
    generator = torch.Generator().manual_seed(zlib.crc32(b"gradients " + case.name.encode()))
    base = transformers.AutoModelForCausalLM.from_pretrained(HERE / "models" / case.name, dtype=torch.float64,
                                                             attn_implementation="eager").eval()
    lengths = [19, 13]
    sequences = [torch.randint(3, base.config.vocab_size, (n,), generator=generator) for n in lengths]
    weights = [torch.rand(n, generator=generator).float().double() for n in lengths]
    for weight in weights:
        weight[:3] = 0  # a prompt
        weight[-1] = 0  # a last token, which predicts nothing
    out = {"tokens": torch.cat(sequences), "weights": torch.cat(weights).float(), "lengths": torch.tensor(lengths)}
    if case.full:
        loss = loss_of(base, sequences, weights)
        loss.backward()
        out["full"] = loss.detach()[None]
        out |= {f"full.{name}": p.grad.float() for name, p in base.named_parameters()}
        base.zero_grad()
    config = LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=ALPHA, target_modules="all-linear")
    model = get_peft_model(base, config, autocast_adapter_dtype=False).eval()
    trained = {name.replace(".default", ""): p for name, p in model.named_parameters() if p.requires_grad}
    for parameter in trained.values():
        parameter.data = (0.2 * torch.randn(*parameter.shape, generator=generator)).double()
    out |= {f"initial.{name}": p.detach().float() for name, p in trained.items()}
    loss = loss_of(model, sequences, weights)
    loss.backward()
    out["loss"] = loss.detach()[None]
    out |= {f"gradient.{name}": p.grad.float() for name, p in trained.items()}
    out["float32"] = torch.tensor([single(model, sequences, weights, out)], dtype=torch.float64)
    if case.steps:
        optimiser = torch.optim.AdamW(trained.values(), **OPTIMISER)
        losses = []
        for _ in range(STEPS):
            optimiser.zero_grad()
            loss = loss_of(model, sequences, weights)
            loss.backward()
            losses.append(loss.detach())
            optimiser.step()
        out["losses"] = torch.stack(losses)
    (HERE / "gradients").mkdir(exist_ok=True)
    path = HERE / "gradients" / f"{case.name}.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in out.items()}, path)
    print(case.name, len(trained), f"{out['loss'].item():.6f} {out['float32'].item():.1e}", path.stat().st_size)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*")
    only = parser.parse_args().only
    for case in CASES:
        if only is None or case.name in only:
            write(case)


if __name__ == "__main__":
    main()

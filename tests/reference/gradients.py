#!/usr/bin/env python3
"""Write the reference fixtures for training: losses and gradients that PyTorch computes through Transformers and PEFT.

For every case below, which is of a checkpoint of `models/`, this writes `gradients/CASE.safetensors`: a batch of two sequences,
PEFT's factors beside linear layers, with DoRA their magnitudes, the sum of the weighted cross-entropies, and its gradients. The
arithmetic is float64 throughout.

    gradients.py [--only NAME ...]

Needs torch, transformers, peft, trl, datasets, safetensors.
"""
import argparse
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import datasets
import tokenizers
import torch
import transformers
import trl
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file

from models import widened

HERE = Path(__file__).parent
STEPS = 100  # of AdamW
RANK, ALPHA = 3, 6.0
BETA = 0.3
OPTIMISER = dict(lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)


@dataclass
class Case:
    model: str
    full: bool = False  # also the gradients of all weights
    steps: bool = False  # also the losses of steps of AdamW
    dora: bool = False
    dpo: bool = False  # TRL's loss of preferences in the place of the cross-entropies
    targets: object = "all-linear"
    lengths: tuple = (19, 13)

    @property
    def name(self):
        return self.model + ("-dora" if self.dora else "") + ("-dpo" if self.dpo else "")


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LATENT = ["q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
CASES = [Case("llama3", full=True, steps=True), Case("llama-linear"), Case("qwen2"), Case("qwen3", full=True), Case("gemma2", full=True),
         Case("gemma3"), Case("granite"), Case("mistral"), Case("smollm3"), Case("olmo2"), Case("ministral"),
         # Transformers takes Phi-3's long factors for sequences beyond the first 16 positions alone.
         Case("phi3", lengths=(19, 18)), Case("glm4"), Case("gpt2"),
         # Routers and experts are no linear layers, though PEFT takes some of them for such.
         Case("mixtral", targets=ATTENTION), Case("qwen2-moe"), Case("qwen3-moe", targets=ATTENTION),
         Case("phimoe", targets=ATTENTION), Case("gpt-oss", targets=ATTENTION),
         # Short convolutions, and gated delta nets.
         Case("lfm2"), Case("qwen3.5-shared"), Case("qwen3.5-shared", dora=True),
         Case("qwen3-next", targets=ATTENTION + ["in_proj_qkvz", "in_proj_ba", "out_proj"]),
         # Latent attention, experts in groups by the logistic function and by a softmax, queries that grow with the position.
         Case("deepseek3", targets=LATENT), Case("deepseek2", targets=LATENT), Case("ernie4_5-moe", targets=ATTENTION),
         Case("ministral3"), Case("gpt-neox"),
         Case("llama3", dora=True), Case("qwen2", dora=True), Case("phi3", dora=True, lengths=(19, 18)),
         Case("llama3", dpo=True, lengths=(19, 13, 11, 17))]


def saved_name(name):
    """A parameter's name as PEFT saves it."""
    return name.replace(".default", "").replace("lora_magnitude_vector.weight", "lora_magnitude_vector")


def loss_of(model, sequences, weights):
    """The sum of `weight * -ln p(next token)` over all sequences, each by itself."""
    total = 0
    for tokens, weight in zip(sequences, weights):
        with widened():
            logits = model(input_ids=tokens[None], use_cache=False).logits[0]
        losses = torch.nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="none")
        total = total + (losses * weight[:-1]).sum()
    return total


def preference_loss(model, sequences, weights):
    """The sum over pairs of TRL's loss of sequences that are a chosen one and a rejected one in turn, of which `weights` tells what
    counts; the reference is the model without its factors."""
    words = tokenizers.models.WordLevel({"a": 0, "<eos>": 1}, unk_token="a")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words), eos_token="<eos>", pad_token="<eos>")
    data = datasets.Dataset.from_list([{"prompt": "a", "chosen": "a", "rejected": "a"}])
    with tempfile.TemporaryDirectory() as folder:
        settings = trl.DPOConfig(output_dir=folder, beta=BETA, report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False,
                                 disable_dropout=False)
        trainer = trl.DPOTrainer(model=model, args=settings, train_dataset=data, processing_class=tokenizer)
    # TRL keeps a copy of factors that are there already, as what is compared with.
    if "ref" in model.peft_config:
        model.delete_adapter("ref")
    order = [*range(0, len(sequences), 2), *range(1, len(sequences), 2)]
    rows = torch.nn.utils.rnn.pad_sequence
    # A token counts where the one in front of it is to predict it.
    counts = [torch.cat([torch.zeros(1), weights[i][:-1] != 0]).long() for i in order]
    inputs = {
        "input_ids": rows([sequences[i] for i in order], batch_first=True),
        "attention_mask": rows([torch.ones_like(sequences[i]) for i in order], batch_first=True),
        "completion_mask": rows(counts, batch_first=True),
    }
    with widened():
        return trainer._compute_loss(model, inputs, False) * (len(sequences) // 2)


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
        want = out.get("gradient." + saved_name(name))
        if want is not None:
            worst = max(worst, ((parameter.grad - want).double().norm() / want.double().norm()).item())
    model.double().zero_grad()
    return worst


def write(case):
    generator = torch.Generator().manual_seed(zlib.crc32(b"gradients " + case.name.encode()))
    plain = dict(attn_implementation="eager", experts_implementation="eager")
    base = transformers.AutoModelForCausalLM.from_pretrained(HERE / "models" / case.model, dtype=torch.float64, **plain).eval()
    sequences = [torch.randint(3, base.config.vocab_size, (n,), generator=generator) for n in case.lengths]
    weights = [torch.rand(n, generator=generator).float().double() for n in case.lengths]
    for weight in weights:
        weight[:3] = 0  # a prompt
        weight[-1] = 0  # a last token, which predicts nothing
        if case.dpo:
            weight[:] = weight != 0
    out = {"tokens": torch.cat(sequences), "weights": torch.cat(weights).float(), "lengths": torch.tensor(case.lengths)}
    if case.full:
        loss = loss_of(base, sequences, weights)
        loss.backward()
        out["full"] = loss.detach()[None]
        out |= {f"full.{name}": p.grad.float() for name, p in base.named_parameters()}
        base.zero_grad()
    config = LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=ALPHA, target_modules=case.targets, use_dora=case.dora)
    model = get_peft_model(base, config, autocast_adapter_dtype=False).eval()
    trained = {saved_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    for name, parameter in trained.items():
        noise = (0.2 * torch.randn(*parameter.shape, generator=generator)).double()
        parameter.data = parameter.data * (1 + noise) if name.endswith("magnitude_vector") else noise
    out |= {f"initial.{name}": p.detach().float() for name, p in trained.items()}
    loss_of_case = preference_loss if case.dpo else loss_of
    loss = loss_of_case(model, sequences, weights)
    loss.backward()
    out["loss"] = loss.detach()[None]
    out |= {f"gradient.{name}": p.grad.float() for name, p in trained.items()}
    if not case.dpo:
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
    print(case.name, len(trained), f"{out['loss'].item():.6f} {out.get('float32', torch.zeros(1)).item():.1e}", path.stat().st_size)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*")
    only = parser.parse_args().only
    for case in CASES:
        if only is None or case.name in only:
            write(case)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Write the reference fixtures for training: losses and gradients that PyTorch computes through Transformers and PEFT.

For every case below, which is of a checkpoint of `models/`, this writes `gradients/CASE.safetensors`: a batch of two sequences,
PEFT's factors beside linear layers, with DoRA their magnitudes, the sum of the weighted cross-entropies, and its gradients; or, for
all weights, `CASE-full.safetensors`, whose gradients have the names and shapes of the checkpoint's tensors. The arithmetic is float64
throughout.

    gradients.py [--only NAME ...]

Needs torch, transformers, peft, trl, datasets, safetensors.
"""
import argparse
import copy
import json
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import datasets
import tokenizers
import torch
import transformers
import trl
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

from models import DISGUISES, widened

HERE = Path(__file__).parent
STEPS = 100  # of AdamW
RANK, ALPHA = 3, 6.0
BETA, GAMMA = 0.3, 0.2
LABELS, JUDGED = [True, False], (1.3, 0.7)  # of answers that are judged, and their weights
OPTIMISER = dict(lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
ROUNDED = 200  # steps in 16 bits
MARGIN = 0.15
DRAWS = 12  # of roundings to bf16
SLOWLY = dict(lr=5e-5, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)


@dataclass
class Case:
    model: str
    full: bool = False  # also the gradients of all weights
    only_full: bool = False  # those and no others
    single: bool = False  # also how far PyTorch's float32 is off where all weights are trained
    disguise: str = ""  # the checkpoint is one that Transformers computes as Llama
    steps: bool = False  # also the losses of steps of AdamW
    rounded: bool = False  # also those of PEFT's own steps in 16 bits
    dora: bool = False
    preference: str = ""  # one of TRL's losses of preferences in the place of the cross-entropies
    targets: object = "all-linear"
    whole: tuple = ()  # modules that are trained whole beside the factors
    experts: str = ""  # the module of experts whose parameters have factors, too
    decided: bool = False  # tokens whose experts no rounding changes: see `decided`
    rank: int = RANK
    lengths: tuple = (19, 13)

    @property
    def name(self):
        return self.model + ("-dora" if self.dora else "") + (f"-{self.preference}" if self.preference else "") + ("-whole" if self.whole else "") + ("-full" if self.only_full else "") + ("-experts" if self.experts else "")


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
GATED = ATTENTION + ["gate_proj", "up_proj", "down_proj"]
LATENT = ["q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
FORGETTING = ["b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj"]
# Not the gates of each head in latent attention.
LING = r".*\.(q_proj|k_proj|v_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj|b_proj|f_proj)|.*layers\.[01]\.self_attn\.g_proj"
CASES = [Case("llama3", full=True, steps=True, rounded=True), Case("llama-linear"), Case("qwen2"), Case("qwen3", full=True, rounded=True), Case("gemma2", full=True),
         Case("gemma3"), Case("granite"), Case("mistral"), Case("smollm3"), Case("olmo2"), Case("ministral"),
         # Transformers takes Phi-3's long factors for sequences beyond the first 16 positions alone.
         Case("phi3", lengths=(19, 18)), Case("glm4"), Case("gpt2"),
         # Routers and experts are no linear layers, though PEFT takes some of them for such.
         Case("mixtral", targets=ATTENTION), Case("qwen2-moe"), Case("qwen3-moe", targets=ATTENTION),
         Case("phimoe", targets=ATTENTION), Case("gpt-oss", targets=ATTENTION),
         # Short convolutions, and gated delta nets.
         Case("lfm2"), Case("qwen3.5-shared"), Case("qwen3.5-shared", dora=True),
         Case("qwen3-next", targets=ATTENTION + ["in_proj_qkvz", "in_proj_ba", "out_proj"]),
         # Nets whose corrections go beyond what is missed, and whose elements of keys forget by themselves.
         Case("olmo_hybrid", steps=True), Case("kimi_linear", targets=LATENT + ["k_proj", "v_proj"] + FORGETTING), Case("bailing_hybrid", targets=LING),
         # Latent attention, experts in groups by the logistic function and by a softmax, queries that grow with the position.
         Case("deepseek3", targets=LATENT), Case("deepseek2", targets=LATENT), Case("ernie4_5-moe", targets=ATTENTION),
         Case("ministral3"), Case("gpt-neox"),
         # Slopes on scores; bounds on q, k and v.
         Case("bloom"), Case("mpt"), Case("cohere-plus"),
         # xIELU; experts with factors; experts that read weighed rows, and attention in chunks.
         Case("apertus"), Case("gemma4-moe", targets=ATTENTION), Case("llama4-chunks", targets=ATTENTION),
         # State spaces beside attention, normed by groups or not at all; PEFT changes no `out_proj` of theirs.
         *(Case(name, targets=ATTENTION + ["in_proj"]) for name in ("granite4-hybrid", "nemotron-h", "falcon-h1")),
         # The first Mamba's, which read the weight of `dt_proj` past its module.
         Case("mamba", targets=["in_proj", "x_proj"]), Case("falcon-mamba", targets=["in_proj", "x_proj"]),
         Case("jamba", targets=ATTENTION + ["in_proj", "x_proj"]),
         # Streams; the matrices that predict and correct them have no factors.
         Case("gemma3n", targets=GATED + ["per_layer_input_gate", "per_layer_projection", "linear_left", "linear_right"]),
         Case("llama3", dora=True), Case("qwen2", dora=True), Case("phi3", dora=True, lengths=(19, 18)),
         *(Case("llama3", preference=loss, lengths=(19, 13, 11, 17)) for loss in ("dpo", "hinge", "ipo", "simpo", "orpo", "kto")),
         # Tables that share one matrix, that have one each, and that a factor stands behind.
         *(Case(name, whole=("embed_tokens", "lm_head")) for name in ("llama3", "qwen3-untied")), Case("gemma3", whole=("embed_tokens",)),
         # GPUs multiply by factors of ranks that eight divides beside experts.
         *(Case(name, targets=ATTENTION, experts=experts, rank=8, decided=True)
           for name, experts in (("mixtral", "mlp.experts"), ("gpt-oss", "mlp.experts"), ("gemma4-moe", "experts"),
                                 ("llama4-chunks", "feed_forward.experts"), ("nemotron-h-moe", "mixer.experts"))),
         # Weights that files keep otherwise than models multiply with them: q, k and v in one matrix, by turns of heads or behind each
         # other, all matrices turned, rates as logarithms, taps of convolutions with an axis of one; the numbers
         # of a function; zeros behind the columns of streams.
         *(Case(name, only_full=True) for name in ("gemma3n", "falcon-h1", "stablelm-12b", "persimmon", "bloom", "falcon", "falcon-new", "gpt-neox", "gpt2", "lfm2", "qwen3.5-shared", "apertus", "mamba2", "mamba", "falcon-mamba", "jamba")),
         *(Case(name, only_full=True, single=True) for name in ("olmo_hybrid", "kimi_linear", "bailing_hybrid")),
         Case("phi3", only_full=True, lengths=(19, 18)), Case("internlm2", only_full=True, disguise="internlm2"),
         # Experts' own matrices: one by one in files, or all experts' in one tensor, with biases, beside experts that all tokens go through.
         *(Case(name, only_full=True) for name in ("mixtral", "qwen2-moe", "phimoe", "deepseek3", "granitemoe",
                                                   "qwen3.5-moe", "gemma4-moe", "llama4-chunks")),
         Case("gpt-oss", only_full=True, decided=True)]


def saved_name(name):
    """A parameter's name as PEFT saves it."""
    return name.replace(".modules_to_save", "").replace(".default", "").replace("lora_magnitude_vector.weight", "lora_magnitude_vector")


def loss_of(model, sequences, weights):
    """The sum of `weight * -ln p(next token)` over all sequences, each by itself."""
    total = 0
    for tokens, weight in zip(sequences, weights):
        with widened():
            logits = model(input_ids=tokens[None], use_cache=False).logits[0]
        losses = torch.nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="none")
        total = total + (losses * weight[:-1]).sum()
    return total


def preference_loss(model, sequences, weights, loss):
    """The sum over pairs of one of TRL's losses of sequences that are a chosen one and a rejected one in turn, of which `weights` tells
    what counts; the reference is the model without its factors."""
    if loss == "kto":
        return judged_loss(model, sequences, weights)
    if loss in ("simpo", "orpo"):
        return loss_without_reference(model, sequences, weights, loss)
    words = tokenizers.models.WordLevel({"a": 0, "<eos>": 1}, unk_token="a")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words), eos_token="<eos>", pad_token="<eos>")
    data = datasets.Dataset.from_list([{"prompt": "a", "chosen": "a", "rejected": "a"}])
    with tempfile.TemporaryDirectory() as folder:
        settings = trl.DPOConfig(output_dir=folder, beta=BETA, report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False,
                                 disable_dropout=False, loss_type=["sigmoid" if loss == "dpo" else loss])
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


def judged_loss(model, sequences, weights):
    """The sum of TRL's losses of a desired and an undesired answer, behind each of which stands a sequence with another's answer."""
    words = tokenizers.models.WordLevel({"a": 0, "<eos>": 1}, unk_token="a")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words), eos_token="<eos>", pad_token="<eos>")
    data = datasets.Dataset.from_list([{"prompt": "a", "completion": "a", "label": label} for label in LABELS])
    with tempfile.TemporaryDirectory() as folder:
        settings = trl.KTOConfig(output_dir=folder, beta=BETA, report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False,
                                 per_device_train_batch_size=2, train_sampling_strategy="sequential", disable_dropout=False,
                                 desirable_weight=JUDGED[0], undesirable_weight=JUDGED[1])
        trainer = trl.KTOTrainer(model=model, args=settings, train_dataset=data, processing_class=tokenizer)
    if "ref" in model.peft_config:
        model.delete_adapter("ref")
    rows, inputs = torch.nn.utils.rnn.pad_sequence, {"label": LABELS}
    for prefix, own in (("", slice(0, None, 2)), ("KL_", slice(1, None, 2))):
        counts = [torch.cat([torch.zeros(1), weight[:-1] != 0]).long() for weight in weights[own]]
        inputs |= {
            f"{prefix}input_ids": rows(sequences[own], batch_first=True),
            f"{prefix}attention_mask": rows([torch.ones_like(tokens) for tokens in sequences[own]], batch_first=True),
            f"{prefix}completion_mask": rows(counts, batch_first=True),
        }
    inputs["label"] = torch.tensor(LABELS)
    with widened():
        return trainer._compute_loss(model, inputs, False) * len(LABELS)


def loss_without_reference(model, sequences, weights, loss):
    """The same of losses that compare with no reference, of each answer's mean log-probability. ORPO's own loss of the chosen answer is
    of the answer, as its paper has it; TRL's is of the prompt, too."""
    means = []
    for tokens, weight in zip(sequences, weights):
        with widened():
            logits = model(input_ids=tokens[None], use_cache=False).logits[0]
        each = torch.nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="none")
        means.append(-each[weight[:-1] != 0].mean())
    chosen, rejected = torch.stack(means[0::2]), torch.stack(means[1::2])
    settings = dict(beta=BETA, accelerator=SimpleNamespace(device="cpu"), alpha=0.0, label_smoothing=0.0)
    with widened():
        if loss == "simpo":
            own = SimpleNamespace(loss_type="simpo", simpo_gamma=GAMMA, **settings)
            return CPOTrainer.cpo_loss(own, chosen, rejected)[0].sum()
        return -(chosen + ORPOTrainer.odds_ratio_loss(SimpleNamespace(**settings), chosen, rejected)[0]).sum()


def decided(model, length, generator):
    """Tokens for each of which all routers prefer the last expert that they choose to the first that they do not by `MARGIN`, in logits.
    What bf16 rounds moves logits of these models by up to 0.05. A token that is close to a tie may have another expert there, with
    which gradients are not rounded ones but those of another function."""
    margins, topk = [], torch.topk

    def watched(scores, k, dim=-1, **options):
        assert dim in (-1, scores.dim() - 1)
        total = scores.sum(-1)
        logits = scores.log() if torch.allclose(total, torch.ones_like(total)) else scores
        order = logits.sort(-1, descending=True).values.reshape(-1, scores.shape[-1])
        # Of one group there is nothing to choose.
        if order.shape[-1] > k:
            margins.append((order[:, k - 1] - order[:, k])[-1].item())
        return topk(scores, k, dim, **options)

    tokens = torch.zeros(0, dtype=torch.long)
    while len(tokens) < length:
        more = torch.cat([tokens, torch.randint(3, model.config.vocab_size, (1,), generator=generator)])
        margins.clear()
        torch.topk = watched
        try:
            with widened(), torch.no_grad():
                model(input_ids=more[None], use_cache=False)
        finally:
            torch.topk = topk
        assert margins, "no router was seen"
        if min(margins) > MARGIN:
            tokens = more
    return tokens


def redrawn(model, case, generator):
    """The sequences of a case whose experts are decided, one by one and behind each other."""
    sequences = [decided(model, length, generator) for length in case.lengths]
    return sequences, torch.cat(sequences)


def apart(model, dtype, sequences, weights, wanted):
    """How far PyTorch's own gradients in `dtype` are from those in float64, relative to their lengths: of the farthest."""
    model = copy.deepcopy(model).to(dtype)
    model.zero_grad()
    total = 0
    for tokens, weight in zip(sequences, weights):
        logits = model(input_ids=tokens[None], use_cache=False).logits[0].float()
        losses = torch.nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="none")
        total = total + (losses * weight[:-1].float()).sum()
    total.backward()
    return torch.tensor([max(((parameter.grad - wanted[name]).double().norm() / wanted[name].double().norm()).item()
                             for name, parameter in model.named_parameters() if name in wanted and wanted[name].any())], dtype=torch.float64)


def farthest(model, sequences, weights):
    """`apart` in bf16: the farthest of models whose trained numbers are up to half a percent beside the case's. What one loses is one
    draw of roundings: of Llama 4's experts 0.05 to 0.12."""
    generator = torch.Generator().manual_seed(0)
    trained = {name: (p, p.detach().clone()) for name, p in model.named_parameters() if p.requires_grad}
    found = []
    for draw in range(DRAWS):
        for parameter, first in trained.values():
            noise = 0.01 * (torch.rand(first.shape, generator=generator, dtype=torch.float64) - 0.5)
            parameter.data = first * (1 + noise) if draw else first.clone()
        model.zero_grad()
        loss_of(model, sequences, weights).backward()
        wanted = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, (p, _) in trained.items()}
        found.append(apart(model, torch.bfloat16, sequences, weights, wanted))
    for parameter, first in trained.values():
        parameter.data = first
    return torch.stack(found).max(0).values


def rounded(case, config, out, sequences, weights):
    """The mean losses of steps as PEFT makes them by itself where the base has 16 bits: a model in bf16 beside factors in float32,
    with gradients of the mean, clipped."""
    path = HERE / "models" / case.model
    base = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="eager")
    model = get_peft_model(base.eval(), config).eval()
    trained = {saved_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    for name, parameter in trained.items():
        assert parameter.dtype == torch.float32
        parameter.data.copy_(out["initial." + name])
    optimiser, losses = torch.optim.AdamW(trained.values(), **SLOWLY), []
    count = sum(weight.sum() for weight in weights)
    for _ in range(ROUNDED):
        optimiser.zero_grad()
        total = 0
        for tokens, weight in zip(sequences, weights):
            logits = model(input_ids=tokens[None], use_cache=False).logits[0].float()
            each = torch.nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="none")
            total = total + (each * weight[:-1].float()).sum()
        loss = total / count.float()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        losses.append(loss.detach().double())
        optimiser.step()
    return torch.stack(losses)


def revealed(path):
    """The Llama that an InternLM2 checkpoint is, by the inverse of `models.as_internlm2`."""
    config, stored, weights = json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors"), {}
    config["attention_bias"] = config["mlp_bias"] = config.pop("bias")
    config = transformers.LlamaConfig(**{key: value for key, value in config.items() if key not in ("architectures", "model_type")})
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager", dtype=torch.float64)
    groups, head = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    names = {"model.tok_embeddings": "model.embed_tokens", "output.": "lm_head.", "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
             "attention.wo": "self_attn.o_proj", "feed_forward.w1": "mlp.gate_proj", "feed_forward.w3": "mlp.up_proj", "feed_forward.w2": "mlp.down_proj"}
    for name, x in stored.items():
        if "wqkv" in name:
            joined = x.reshape(groups, -1, x.shape[-1])
            for one, part in zip("qkv", joined.split([joined.shape[1] - 2 * head, head, head], 1)):
                weights[name.replace("attention.wqkv", f"self_attn.{one}_proj")] = part.reshape(-1, x.shape[-1])
            continue
        for own, known in names.items():
            name = name.replace(own, known)
        weights[name] = x
    model.load_state_dict(weights)
    return model


def as_stored(model, disguise, gradients):
    """Gradients under the names and in the shapes that a checkpoint has its weights."""
    if disguise:
        return DISGUISES[disguise](model.config.to_dict(), gradients)[1]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, state_dict=gradients)
        return load_file(Path(folder) / "model.safetensors")


def write(case):
    generator = torch.Generator().manual_seed(zlib.crc32(b"gradients " + case.name.encode()))
    plain = dict(attn_implementation="eager", experts_implementation="eager")
    path = HERE / "models" / case.model
    base = revealed(path) if case.disguise else transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, **plain)
    base = base.eval()
    sequences = [torch.randint(3, base.config.vocab_size, (n,), generator=generator) for n in case.lengths]
    weights = [torch.rand(n, generator=generator).float().double() for n in case.lengths]
    for weight in weights:
        weight[:3] = 0  # a prompt
        weight[-1] = 0  # a last token, which predicts nothing
        if case.preference:
            weight[:] = weight != 0
    out = {"tokens": torch.cat(sequences), "weights": torch.cat(weights).float(), "lengths": torch.tensor(case.lengths)}
    if case.only_full and case.decided:
        sequences, out["tokens"] = redrawn(base, case, generator)
    if case.full or case.only_full:
        loss = loss_of(base, sequences, weights)
        loss.backward()
        out["full"] = loss.detach()[None]
        gradients = {name: (torch.zeros_like(p) if p.grad is None else p.grad.clone()) for name, p in base.named_parameters()}
        if case.decided:
            out["bfloat16"] = farthest(base, sequences, weights)
        if case.single:
            out["float32"] = apart(base, torch.float32, sequences, weights, gradients)
        # What checkpoints keep and no training changes.
        kept = base.state_dict()
        gradients |= {name: torch.zeros_like(buffer) for name, buffer in base.named_buffers() if name in kept}
        out |= {f"full.{name}": gradient.float() for name, gradient in as_stored(base, case.disguise, gradients).items()}
        base.zero_grad()
    if case.only_full:
        return save(case, out)
    first = "up_proj" if case.model == "nemotron-h-moe" else "gate_up_proj"
    parameters = [f"{case.experts}.{name}" for name in (first, "down_proj") if case.experts]
    config = LoraConfig(task_type="CAUSAL_LM", r=case.rank, lora_alpha=ALPHA, target_modules=case.targets, use_dora=case.dora,
                        target_parameters=parameters or None, modules_to_save=list(case.whole) or None)
    model = get_peft_model(base, config, autocast_adapter_dtype=False).eval()
    trained = {saved_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    for name, parameter in trained.items():
        noise = (0.2 * torch.randn(*parameter.shape, generator=generator)).double()
        known = name.endswith("magnitude_vector") or "lora_" not in name
        parameter.data = parameter.data * (1 + noise) if known else noise
    out |= {f"initial.{name}": p.detach().float() for name, p in trained.items()}
    if case.decided:
        sequences, out["tokens"] = redrawn(model, case, generator)
    loss = preference_loss(model, sequences, weights, case.preference) if case.preference else loss_of(model, sequences, weights)
    loss.backward()
    out["loss"] = loss.detach()[None]
    out |= {f"gradient.{name}": p.grad.float() for name, p in trained.items()}
    own = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    if not case.preference:
        out["float32"] = apart(model, torch.float32, sequences, weights, own)
    if case.decided:
        out["bfloat16"] = farthest(model, sequences, weights)
    if case.rounded:
        out["rounded"] = rounded(case, config, out, sequences, weights)
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
    save(case, out)


def save(case, out):
    (HERE / "gradients").mkdir(exist_ok=True)
    path = HERE / "gradients" / f"{case.name}.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in out.items()}, path)
    loss = out["full" if case.only_full else "loss"].item()
    own = " ".join(f"{out[name].item():.1e}" for name in ("float32", "bfloat16") if name in out)
    print(case.name, len(out), f"{loss:.6f} {own}", path.stat().st_size)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*")
    only = parser.parse_args().only
    for case in CASES:
        if only is None or case.name in only:
            write(case)


if __name__ == "__main__":
    main()

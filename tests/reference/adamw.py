"""adamw.safetensors: 100 updates by PyTorch's AdamW under Transformers' schedules.

For each schedule: three parameters, of which two decay; their gradients in each update, which are clipped to a norm of 1 by
`torch.nn.utils.clip_grad_norm_`; the parameters behind updates 1, 10 and 100; each update's learning rate and norm.

    pip install torch transformers safetensors
    python adamw.py
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import get_scheduler

STEPS, WARMUP = 100, 7
SHAPES = {"a": (5, 3), "b": (2, 4), "norm": (6,)}


def main():
    torch.manual_seed(11)
    tensors = {}
    for schedule in ["constant_with_warmup", "linear", "cosine", "cosine_with_min_lr"]:
        start = {name: torch.randn(shape) for name, shape in SHAPES.items()}
        # Some gradients are longer than what they are clipped to, others are not.
        sizes = torch.logspace(-2, 1, STEPS)[torch.randperm(STEPS)]
        gradients = {name: torch.randn(STEPS, *shape) * sizes.view(-1, *[1] * len(shape)) for name, shape in SHAPES.items()}
        parameters = {name: torch.nn.Parameter(values.clone()) for name, values in start.items()}
        groups = [
            {"params": [parameters["a"], parameters["b"]], "weight_decay": 0.1},
            {"params": [parameters["norm"]], "weight_decay": 0.0},
        ]
        optimiser = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.99), eps=1e-8, foreach=False)
        least = {"min_lr": 0.002} if schedule == "cosine_with_min_lr" else {}
        scheduler = get_scheduler(schedule, optimiser, WARMUP, STEPS, scheduler_specific_kwargs=least)
        rates, norms = [], []
        for step in range(STEPS):
            for name, parameter in parameters.items():
                parameter.grad = gradients[name][step].clone()
            norms.append(torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0).item())
            rates.append(optimiser.param_groups[0]["lr"])
            optimiser.step()
            scheduler.step()
            if step + 1 in (1, 10, STEPS):
                for name, parameter in parameters.items():
                    tensors[f"{schedule}.{name}.{step + 1}"] = parameter.detach().clone()
        for name in SHAPES:
            tensors[f"{schedule}.{name}.0"] = start[name]
            tensors[f"{schedule}.{name}.gradients"] = gradients[name]
        tensors[f"{schedule}.rates"] = torch.tensor(rates, dtype=torch.float64)
        tensors[f"{schedule}.norms"] = torch.tensor(norms, dtype=torch.float64)
    metadata = {"fixture": f"torch {torch.__version__}"}
    save_file(tensors, Path(__file__).with_suffix(".safetensors"), metadata)


main()

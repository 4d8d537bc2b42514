"""What PyTorch reaches on this GPU: attention, a matrix product, a copy. One JSON object per line, as `tile bench --json`.

    python3 tests/reference/device_rivals.py

Times are medians by CUDA events, of inputs that are random: zeros draw less power and run faster.
"""

import json
import statistics

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

SAMPLES = 21


def seconds(run):
    """The median time of one call, several calls to a sample so that the time to launch does not count."""
    for _ in range(3):
        run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def sample(calls):
        start.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / calls

    calls = max(1, min(100, int(2e-3 / sample(1))))
    return statistics.median(sample(calls) for _ in range(SAMPLES))


def report(label, took, flops=0, moved=0):
    line = {"kind": "rival", "label": label, "us": took * 1e6}
    if flops:
        line["tflops"] = flops / took / 1e12
    if moved:
        line["gbps"] = moved / took / 1e9
    print(json.dumps(line), flush=True)


def attention(length, heads=32, kv_heads=8, dim=128):
    """Causal attention over a prompt, by each of PyTorch's fused kernels. Half of the products are masked and not counted."""
    noise = lambda h: torch.randn(1, h, length, dim, device="cuda", dtype=torch.bfloat16)
    q, k, v = noise(heads), noise(kv_heads), noise(kv_heads)
    flops = 2 * 2 * heads * length * length * dim / 2
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        label = f"sdpa {backend.name.lower()} bf16 {length} causal d{dim} {heads}/{kv_heads} heads"
        try:
            with sdpa_kernel(backend):
                run = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                report(label, seconds(run), flops=flops)
        except RuntimeError as why:
            print(json.dumps({"kind": "failure", "label": label, "why": str(why).splitlines()[0]}))


def decode(length, heads=32, kv_heads=8, dim=128):
    """One token's attention over a cache."""
    noise = lambda h, n: torch.randn(1, h, n, dim, device="cuda", dtype=torch.bfloat16)
    q, k, v = noise(heads, 1), noise(kv_heads, length), noise(kv_heads, length)
    moved = 2 * kv_heads * length * dim * 2
    run = lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    report(f"sdpa decode bf16 {length} d{dim} {heads}/{kv_heads} heads", seconds(run), moved=moved)


def matmul(edge):
    a, b = (torch.randn(edge, edge, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    report(f"matmul bf16 {edge}", seconds(lambda: a @ b.T), flops=2 * edge**3)


def copy(size):
    a = torch.empty(size, dtype=torch.uint8, device="cuda").random_()
    b = torch.empty_like(a)
    report(f"copy {size >> 20} MiB", seconds(lambda: b.copy_(a)), moved=2 * size)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("device_rivals: expected a CUDA GPU, found none")
    print(json.dumps({"kind": "machine", "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}))
    copy(2 << 30)
    matmul(4096)
    matmul(8192)
    attention(8192)
    decode(32768)

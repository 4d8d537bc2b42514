"""Trains the story model on one GPU: a Llama with tied embeddings, Muon and AdamW, bf16.

Most of what it reads is composed (`tales.py`) by other processes while it trains; the rest are books. In the last part
the matrices are rounded to the file's Q4_0 in every forward pass (the gradient passes straight through), so that the
file loses nothing. Without a GPU everything runs on the CPU, for trying it with --tiny.

    python train.py check  --data DIR --work DIR                 # smoke test and throughput
    python train.py train  --data DIR --work DIR --steps 6000 --minutes 7
    python train.py finish --data DIR --work DIR --out DIR       # held-out figures, weights

`--data` is what `prepare.py` wrote; `--work` keeps the tokens and the checkpoint, so that `train`
called again goes on where it stopped. `--steps` and `--minutes` both bound a run. Equations: y = x + Attention(RMSNorm(x)),
z = y + W_down(silu(W_gate n) * W_up n) with n = RMSNorm(y); rotary pairs are (i, i + 32) of a head.
"""

import argparse
import collections
import csv
import inspect
import json
import math
import multiprocessing
import os
import pathlib
import queue
import time

import numpy as np
import pyarrow
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.varlen import varlen_attn

from tales import Teller, encode
from train_prompts import PROMPTS, SAMPLING

CONFIG = dict(vocab=6144, dim=512, layers=8, heads=8, kv_heads=2, head_dim=64, ffn=1408, context=1024,
              rope_base=10000.0, norm_eps=1e-5)
DROPOUT = 0.0
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = 128                      # rows of 1024 tokens in a step: 131,072 tokens
BLOCK = 16 * ROWS               # rows drawn and packed at a time
MUON_LR, ADAM_LR, DECAY = 0.02, 0.004, 0.1
WARMUP, COOLDOWN = 100, 0.55    # steps; the fraction of training with a falling learning rate
# The share of tokens drawn from each kind, first while the rate is constant, then while it falls.
MIX_FIRST = dict(composed=0.80, modern=0.004, tale=0.076, child=0.10, plain=0.02)
MIX_LAST = dict(composed=0.91, modern=0.004, tale=0.046, child=0.035, plain=0.005)
ROUNDED = 0.65                  # from this part of training on, weights are rounded as in the file
SEED = 20261122
COMPOSERS = max(1, min(13, os.cpu_count() - 3))     # processes that compose
AHEAD, COMPOSED_AT_ONCE, REMEMBERED = 4 * COMPOSERS, 100, 60000


# ---------------------------------------------------------------- tokens and rows

def _encode(job):
    from tokenizers import Tokenizer
    path, documents = job
    return [np.array(ids, dtype=np.int16) for ids in encode(Tokenizer.from_file(path), documents)]


def load_tokens(data, work):
    """{kind: [ids]} of the training documents and the held-out ones, <|bos|> and <|endoftext|> in place."""
    cache = work / "tokens.pt"
    if cache.exists():
        return torch.load(cache, weights_only=False)
    with pyarrow.input_stream(str(data / "docs.jsonl.zst"), compression="zstd") as f:
        docs = [json.loads(line) for line in f.read().decode().split("\n") if line]
    held = [json.loads(line) for line in open(data / "held_out.jsonl", encoding="utf-8")]
    everything = docs + held
    path = str(data / "tokenizer.json")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    jobs = [(path, [d["turns"] for d in everything[i:i + 200]]) for i in range(0, len(everything), 200)]
    with multiprocessing.Pool(min(16, os.cpu_count())) as pool:
        ids = [x for part in pool.imap(_encode, jobs) for x in part]
    train, valid = collections.defaultdict(list), collections.defaultdict(list)
    for i, (d, x) in enumerate(zip(everything, ids)):
        if i < len(docs):
            train[d["kind"]].append(x if d["opens"] else x[1:])
        else:
            valid[d["kind"]].append((x[:-1], sum(len(t.encode()) for role, t in d["turns"] if role != "user")))
    tokens = dict(train), dict(valid)
    torch.save(tokens, cache)
    return tokens


def _compose(job):
    """Tokens of composed documents, `first` and on."""
    global _composer
    from tokenizers import Tokenizer
    path, first, count = job
    if _composer is None:
        _composer = Teller(), Tokenizer.from_file(path)
    teller, tokenizer = _composer
    return [np.array(ids, np.int16) for ids in encode(tokenizer, [teller.document(first + i) for i in range(count)])]


_composer = None


class Composed:
    """Composed documents, made some jobs ahead by a pool of processes.

    When the GPU is faster than they are, a document that was read before is read again, one of the last REMEMBERED."""

    def __init__(self, pool, tokenizer, first):
        self.pool, self.path, self.next, self.left, self.jobs = pool, str(tokenizer), first, [], collections.deque()
        self.old, self.rng, self.fresh, self.again = [], np.random.default_rng(first), 0, 0

    def take(self, wanted):
        out = []
        while wanted > 0:
            while len(self.jobs) < AHEAD:
                self.jobs.append(self.pool.apply_async(_compose, ((self.path, self.next, COMPOSED_AT_ONCE),)))
                self.next += COMPOSED_AT_ONCE
            if not self.left and (self.jobs[0].ready() or len(self.old) < REMEMBERED // 6):
                self.left = self.jobs.popleft().get()
            if self.left:
                out.append(self.left.pop())
                self.fresh += 1
                if len(self.old) < REMEMBERED:
                    self.old.append(out[-1])
                else:
                    self.old[int(self.rng.integers(REMEMBERED))] = out[-1]
            else:
                out.append(self.old[int(self.rng.integers(len(self.old)))])
                self.again += 1
            wanted -= len(out[-1])
        return out


class Stream:
    """Documents of one kind, each once in every pass, in a new order every pass."""

    def __init__(self, docs, seed):
        self.docs, self.rng, self.order = docs, np.random.default_rng(seed), []

    def take(self, wanted):
        out = []
        while wanted > 0:
            if not len(self.order):
                self.order = list(self.rng.permutation(len(self.docs)))
            out.append(self.docs[self.order.pop()])
            wanted -= len(out[-1])
        return out


def pieces(docs, rng, length):
    """Runs of at most `length` + 1 tokens; half of the long documents begin with a shorter run."""
    for d in docs:
        at = 0
        while at + 1 < len(d):
            n = length if at or len(d) <= length + 1 or rng.random() < 0.5 else int(rng.integers(length // 4, length))
            yield d[at:at + n + 1]
            at += n


def asked(run):
    """Which tokens the model must foretell: all but the reader's turns and the marks that begin turns."""
    return (np.cumsum(run == 2) <= np.cumsum(run == 3)) & (run != 3)


def pack(runs, length):
    """Best-fit packing into rows: x, y [rows, length] (y is -1 where nothing is asked), starts of runs."""
    by_room, rows = collections.defaultdict(list), []
    for run in sorted(runs, key=len, reverse=True):
        n = len(run) - 1
        room = next((r for r in range(n, min(n + 64, length) + 1) if by_room[r]), None)
        if room is None:
            room = next((r for r in range(length, n - 1, -1) if by_room[r]), None)
        if room is None:
            row, room = [], length
            rows.append(row)
        else:
            row = by_room[room].pop()
        row.append(run)
        by_room[room - n].append(row)
    x = np.zeros((len(rows), length), np.int16)
    y = np.full((len(rows), length), -1, np.int16)
    starts = []
    for i, row in enumerate(rows):
        at = 0
        for run in row:
            n = len(run) - 1
            x[i, at:at + n], y[i, at:at + n] = run[:-1], np.where(asked(run), run, -1)[1:]
            starts.append((i, at))
            at += n
        if at < length:
            starts.append((i, at))
    return x, y, starts


def blocks(tokens, composed, total_blocks, first):
    """(x, y, starts by row) for block `first` and on; the same books in them whatever `first` is."""
    streams = {k: Stream(tokens[k], SEED + i) for i, k in enumerate(sorted(tokens))}
    streams["composed"] = composed
    for b in range(total_blocks):
        if b % 20 == 19:
            print(f"block {b}: {composed.fresh} documents composed, {composed.again} read again", flush=True)
        mix = MIX_FIRST if b < (1 - COOLDOWN) * total_blocks else MIX_LAST
        rng = np.random.default_rng(SEED + 1000 + b)
        kinds = mix if b >= first else [k for k in mix if k != "composed"]
        docs = [d for k in kinds for d in streams[k].take(mix[k] * BLOCK * CONFIG["context"] * 1.02)]
        if b < first:
            continue
        x, y, starts = pack(list(pieces(docs, rng, CONFIG["context"])), CONFIG["context"])
        order = rng.permutation(len(x))[:BLOCK]
        if len(order) < BLOCK:
            order = np.concatenate([order, rng.integers(0, len(x), BLOCK - len(order))])
        of_row = collections.defaultdict(list)
        for i, at in starts:
            of_row[i].append(at)
        yield x[order], y[order], [of_row[i] for i in order]


class Loader:
    """Batches from step `first` on, prepared in a process of their own; to be made before the GPU is touched."""

    def __init__(self, tokens, tokenizer, steps, first):
        self.per, self.first, self.steps = BLOCK // ROWS, first, steps
        self.ready, self.stop = multiprocessing.Queue(maxsize=3), multiprocessing.Event()
        self.process = multiprocessing.Process(target=self._work, args=(tokens, tokenizer, math.ceil(steps / self.per)))
        self.process.start()

    def _work(self, tokens, tokenizer, total):
        with multiprocessing.Pool(COMPOSERS) as pool:
            for block in blocks(tokens, Composed(pool, tokenizer, self.first * ROWS * 64), total, self.first // self.per):
                while not self.stop.is_set():
                    try:
                        self.ready.put(block, timeout=1)
                        break
                    except queue.Full:
                        pass
                if self.stop.is_set():
                    self.ready.cancel_join_thread()     # nobody reads what is left
                    break

    def __iter__(self):
        """(step, x, y [ROWS, context], bounds of the runs)."""
        for step in range(self.first - self.first % self.per, self.steps):
            if step % self.per == 0:
                x, y, starts = self.next_block()
                x, y = torch.from_numpy(x).to(DEVICE).long(), torch.from_numpy(y).to(DEVICE).long()
            if step < self.first:
                continue
            rows = slice(step % self.per * ROWS, step % self.per * ROWS + ROWS)
            yield step, x[rows], y[rows], bounds(starts[rows], CONFIG["context"])

    def next_block(self):
        while True:
            try:
                return self.ready.get(timeout=5)
            except queue.Empty:
                if not self.process.is_alive():
                    raise SystemExit("the process that prepares batches has ended")

    def close(self):
        self.stop.set()
        self.process.join(timeout=30)
        if self.process.is_alive():
            self.process.terminate()


def bounds(starts, length):
    """Cumulative run bounds for attention within runs, padded to one size with empty runs."""
    flat = [i * length + at for i, row in enumerate(starts) for at in sorted(row)]
    room = 24 * len(starts)
    assert len(flat) < room and flat[0] == 0
    flat += [len(starts) * length] * (room - len(flat))
    return torch.tensor(flat, dtype=torch.int32).to(DEVICE, non_blocking=True)


# ---------------------------------------------------------------- the model

def rounded(w):
    """The weights as Q4_0 keeps them: 32 neighbours share a scale, each is one of 16 steps."""
    b = w.view(-1, 32)
    largest = b.gather(1, b.abs().argmax(1, keepdim=True))
    scale = (largest / -8).half().float()
    inverse = torch.where(scale == 0, 0.0, 1 / scale)
    return ((b * inverse + 8.5).floor().clamp(0, 15) - 8).mul(scale).view_as(w)


class Matrix(nn.Linear):
    """A matrix of the file: `share` 1 rounds its weights, 0 leaves them; the gradient takes them as they are."""

    share = None

    def __init__(self, rows, columns):
        super().__init__(rows, columns, bias=False)

    def forward(self, x):
        w = self.weight
        if Matrix.share is not None:
            w = w + (Matrix.share * (rounded(w.detach()) - w.detach()))
        return F.linear(x, w)


class Norm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), CONFIG["norm_eps"])


class Block(nn.Module):
    def __init__(self, c, dropout):
        super().__init__()
        self.dropout = dropout
        d, hd = c["dim"], c["head_dim"]
        self.attn_norm, self.ffn_norm = Norm(d), Norm(d)
        self.q = Matrix(d, c["heads"] * hd)
        self.k = Matrix(d, c["kv_heads"] * hd)
        self.v = Matrix(d, c["kv_heads"] * hd)
        self.o = Matrix(c["heads"] * hd, d)
        self.gate = Matrix(d, c["ffn"])
        self.up = Matrix(d, c["ffn"])
        self.down = Matrix(c["ffn"], d)

    def forward(self, x, rope, runs):
        b, t, _ = x.shape
        n = self.attn_norm(x)
        q = rotate(self.q(n).view(b, t, -1, CONFIG["head_dim"]), rope)
        k = rotate(self.k(n).view(b, t, -1, CONFIG["head_dim"]), rope)
        v = self.v(n).view(b, t, -1, CONFIG["head_dim"])
        groups = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
        if runs is None:
            a = F.scaled_dot_product_attention(*(z.transpose(1, 2) for z in (q, k, v)), is_causal=True).transpose(1, 2)
        else:
            a = attend_runs(*(z.reshape(b * t, -1, CONFIG["head_dim"]) for z in (q, k, v)), runs, t)
        x = x + F.dropout(self.o(a.reshape(b, t, -1)), self.dropout, self.training)
        n = self.ffn_norm(x)
        return x + F.dropout(self.down(F.silu(self.gate(n)) * self.up(n)), self.dropout, self.training)


def attend_runs(q, k, v, runs, longest):
    """Causal attention inside each run alone; q, k, v are [tokens, heads, head_dim]."""
    if DEVICE == "cpu":
        run = torch.bucketize(torch.arange(len(q)), runs.long(), right=True)
        q, k, v = (z.unflatten(0, (-1, longest)).transpose(1, 2) for z in (q, k, v))
        run = run.view(-1, 1, longest)
        mask = (run[..., None] == run[..., None, :]) & torch.ones(longest, longest, dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
    return varlen_attn(q, k, v, runs, runs, longest, longest, **CAUSAL)


# One release of PyTorch spells it as a flag, the next as a window that ends at the query.
CAUSAL = dict(window_size=(-1, 0)) if "window_size" in inspect.signature(varlen_attn).parameters else dict(is_causal=True)


def rotate(x, rope):
    """Rotates the pairs (i, i + half) of every head, in f32: bf16 angles blur far positions."""
    cos, sin = rope
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class Llama(nn.Module):
    def __init__(self, c=CONFIG, dropout=0.0):
        super().__init__()
        self.dropout = dropout
        self.embed = nn.Embedding(c["vocab"], c["dim"])
        self.blocks = nn.ModuleList(Block(c, dropout) for _ in range(c["layers"]))
        self.norm = Norm(c["dim"])
        for name, p in self.named_parameters():
            if p.ndim == 2:
                scale = 0.02 / math.sqrt(2 * c["layers"]) if name.endswith(("o.weight", "down.weight")) else 0.02
                nn.init.normal_(p, std=scale)
        half = c["head_dim"] // 2
        angle = torch.outer(torch.arange(c["context"]), c["rope_base"] ** (-torch.arange(half) / half))
        self.register_buffer("cos", angle.cos()[:, None], persistent=False)
        self.register_buffer("sin", angle.sin()[:, None], persistent=False)

    def forward(self, ids, runs=None):
        """Logits [batch, time, vocab] of the next token."""
        x = self.embed(ids)
        if torch.is_autocast_enabled():
            x = x.bfloat16()
        x = F.dropout(x, self.dropout, self.training)
        rope = self.cos[:ids.shape[1]], self.sin[:ids.shape[1]]
        for block in self.blocks:
            x = block(x, rope, runs)
        return F.linear(self.norm(x), self.embed.weight)

    def loss(self, ids, targets, runs=None):
        """Cross-entropy with the text, in nats a token."""
        return F.cross_entropy(self(ids, runs).float().flatten(0, 1), targets.flatten(), ignore_index=-1)


# ---------------------------------------------------------------- optimisers

def compiled(f):
    return torch.compile(f, dynamic=False) if DEVICE == "cuda" else f


class Muon:
    """Momentum, then the nearest orthogonal matrix by Newton-Schulz (Jordan et al., 2024).

    Matrices of one shape go through the iteration together."""

    def __init__(self, params):
        self.groups = collections.defaultdict(list)
        for p in params:
            self.groups[p.shape].append(p)
        self.momenta = {s: torch.zeros(len(ps), *s, device=ps[0].device) for s, ps in self.groups.items()}

    @torch.no_grad()
    def step(self, lr, momentum):
        for shape, params in self.groups.items():
            update = muon_update(torch.stack([p.grad for p in params]), self.momenta[shape],
                                 torch.tensor(momentum, device=params[0].device))
            scale = lr * max(1, shape[0] / shape[1]) ** 0.5
            torch._foreach_mul_(params, 1 - lr * DECAY)
            torch._foreach_add_(params, list(update.float().unbind()), alpha=-scale)


@compiled
def muon_update(grad, memory, momentum):
    memory.lerp_(grad, 1 - momentum)
    x = grad.lerp(memory, momentum).bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.mT if tall else x


def rate(step, done):
    """The learning rate's factor: a short warm-up, constant, then straight down to zero; `done` runs from 0 to 1."""
    return max(0.0, min(1.0, (step + 1) / WARMUP, (1 - done) / COOLDOWN))


# ---------------------------------------------------------------- training

def make(seed=SEED):
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    model = Llama(CONFIG, DROPOUT).to(DEVICE)
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is m for m in matrices)]
    return model, Muon(matrices), torch.optim.AdamW(others, lr=ADAM_LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


def train(args):
    train_tokens, valid = load_tokens(args.data, args.work)
    for k, docs in sorted(train_tokens.items()):
        print(f"{k:8} {len(docs):6} documents {sum(map(len, docs)) / 1e6:7.2f} M tokens")
    saved = args.work / "model.pt"
    state = torch.load(saved, map_location="cpu", weights_only=False) if saved.exists() else None
    step, log, spent = (state["step"], state["log"], state["spent"]) if state else (0, [], 0.0)
    batches = Loader(train_tokens, args.data / "tokenizer.json", args.steps, step)
    try:
        train_on(batches, valid, state, step, log, spent, args)
    finally:
        batches.close()


def train_on(batches, valid, state, step, log, spent, args):
    saved = args.work / "model.pt"
    model, muon, adam = make()
    Matrix.share = torch.zeros((), device=DEVICE)
    if args.init:
        model.load_state_dict({k: torch.from_numpy(v) for k, v in unpacked(np.load(args.init)).items()})
        print("begins with", args.init)
    if state:
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["adam"])
        for s, m in state["muon"].items():
            muon.momenta[s].copy_(m)
        print(f"going on at step {step}")
    fast = compiled(model.loss)
    quick = {k: quick_rows(v) for k, v in valid.items()}
    resumed, losses, timed, first_step, spared = time.time(), [], None, step, False

    def save():
        torch.save(dict(model=model.state_dict(), adam=adam.state_dict(), muon=muon.momenta, step=step, log=log,
                        spent=spent + time.time() - resumed), saved)

    for step, x, y, runs in batches:
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = fast(x, y, runs)
        loss.backward()
        if step == first_step + 8:
            timed = time.time()     # compilation is over
        # Whichever bound comes first, steps or minutes, the rate reaches zero there.
        done = max((step + 1) / args.steps, (time.time() - timed) / (60 * args.minutes) if timed else 0.0)
        factor = rate(step, done) * args.rate
        Matrix.share.fill_(float(done >= ROUNDED))
        adam.param_groups[0]["lr"] = ADAM_LR * factor
        muon.step(MUON_LR * factor, min(0.95, 0.85 + 0.1 * step / 300))
        adam.step()
        model.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        last = step + 1 == args.steps or done >= 1
        if args.spare and not spared and done >= 0.85:
            spared = True
            write_weights(model, args.spare)
        if (step + 1) % args.every == 0 or last:
            mean = torch.stack(losses).mean().item()
            losses.clear()
            quickly = {k: quick_loss(model, rows) for k, rows in quick.items()}
            now = spent + time.time() - resumed
            log.append(dict(step=step + 1, tokens=(step + 1) * ROWS * CONFIG["context"], seconds=round(now, 1),
                            rate=round(factor, 4), train=round(mean, 4), **{k: round(v, 4) for k, v in quickly.items()}))
            print(json.dumps(log[-1]), flush=True)
            write_log(log, args.spare or args.work)
            if not math.isfinite(mean):
                raise SystemExit("the loss is not finite")
            if last:
                break
    step += 1
    save()
    write_log(log, args.work)
    print(f"stopped after step {step} of {args.steps}; {spent + time.time() - resumed:.0f} s of training in all")


def write_log(log, folder):
    with open(folder / "loss.csv", "w", newline="") as f:
        writer = csv.DictWriter(f, fieldnames=list(log[0]))
        writer.writeheader()
        writer.writerows(log)


def write_weights(model, folder):
    """Five files of half precision, each under 16 MiB: 4-bit quantisation hides the rounding."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {k: v.half().cpu().numpy() for k, v in model.state_dict().items()}
    for part in range(5):
        np.savez(folder / f"weights-{part}.npz", **{k: weights[k] for k in sorted(weights) if part_of(k) == part})


def packed(weights):
    """Weights in 8 bits and a half-precision scale for 64 neighbours, to begin another run with."""
    out = {}
    for k, w in weights.items():
        if w.ndim == 1:
            out[k] = w
            continue
        b = w.astype(np.float32).reshape(-1, 64)
        scale = (np.abs(b).max(1, keepdims=True) / 127).astype(np.float16)
        out[k + ":scale"], out[k] = scale, np.rint(b / np.maximum(scale.astype(np.float32), 1e-12)).clip(-127, 127).astype(np.int8).reshape(w.shape)
    return out


def unpacked(file):
    out = {}
    for k in file.files:
        if not k.endswith(":scale"):
            w = file[k].astype(np.float32)
            out[k] = w if w.ndim == 1 else (w.reshape(-1, 64) * file[k + ":scale"].astype(np.float32)).reshape(w.shape)
    return out


def quick_rows(docs):
    """A fixed sample of a held-out kind's runs, packed like training rows."""
    rng = np.random.default_rng(1)
    order = rng.permutation(len(docs))[:150]
    x, y, starts = pack([p for i in order for p in pieces([docs[i][0]], rng, CONFIG["context"])][:160], CONFIG["context"])
    of_row = collections.defaultdict(list)
    for i, at in starts:
        of_row[i].append(at)
    parts = [(slice(i, i + 32), bounds([of_row[j] for j in range(i, min(i + 32, len(x)))], CONFIG["context"]))
             for i in range(0, len(x), 32)]
    x, y = torch.from_numpy(x).to(DEVICE).long(), torch.from_numpy(y).to(DEVICE).long()
    return [(x[rows], y[rows], runs) for rows, runs in parts]


@torch.no_grad()
def quick_loss(model, parts):
    total = count = 0
    model.eval()
    for x, y, runs in parts:
        with torch.autocast(DEVICE, torch.bfloat16):
            logits = model(x, runs).float()
        total += F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-1, reduction="sum").item()
        count += (y >= 0).sum().item()
    model.train()
    return total / count


# ---------------------------------------------------------------- held-out figures and samples

@torch.no_grad()
def held_out(model, docs, stride=512):
    """Every token of every document once, after at least 512 tokens of its document or all there are.

    The text is preceded by <|bos|>, which is not scored, nor are the reader's turns; no last <|endoftext|> is asked for."""
    nats = tokens = bytes_ = 0
    width = CONFIG["context"]
    for ids, size in docs:
        score = torch.from_numpy(asked(ids)).to(DEVICE)
        ids = torch.from_numpy(ids.astype(np.int64)).to(DEVICE)
        done, n = 1, len(ids)
        while done < n:
            end = min(n, width if done == 1 else done + stride)
            start = max(0, end - width)
            # The window ends at `end`; only tokens not scored yet count.
            logp = F.log_softmax(model(ids[None, start:end - 1]).float()[0], -1)
            took = logp.gather(1, ids[start + 1:end, None])[:, 0] * score[start + 1:end]
            nats -= took[done - start - 1:].double().sum().item()
            tokens += int(score[done:end].sum())
            done = end
        bytes_ += size
    return figures(nats, tokens, bytes_)


def figures(nats, tokens, bytes_):
    return dict(nats=nats, tokens=tokens, bytes=bytes_, per_token=math.exp(nats / tokens), per_byte=math.exp(nats / bytes_),
                bits_per_byte=nats / bytes_ / math.log(2))


@torch.no_grad()
def greedy(model, ids, count):
    """`ids` and the likeliest continuation, up to <|endoftext|>."""
    ids = list(ids)
    while count > 0 and ids[-1] != 1:
        ids.append(int(model(torch.tensor([ids]).to(DEVICE))[0, -1].argmax()))
        count -= 1
    return ids


def part_of(name):
    """The file of a weight: two blocks each, and one for the rest."""
    return int(name.split(".")[1]) // 2 if name.startswith("blocks.") else 4


def finish(args):
    from tokenizers import Tokenizer
    _, valid = load_tokens(args.data, args.work)
    state = torch.load(args.work / "model.pt", map_location=DEVICE, weights_only=False)
    model, _, _ = make()
    model.load_state_dict(state["model"])
    Matrix.share = torch.ones((), device=DEVICE)
    model.eval()
    torch.set_float32_matmul_precision("highest")
    tokenizer = Tokenizer.from_file(str(args.data / "tokenizer.json"))
    write_weights(model, args.out)
    report = dict(config=CONFIG, step=state["step"], train_seconds=round(state["spent"], 1),
                  parameters=sum(p.numel() for p in model.parameters()), held_out={k: held_out(model, v) for k, v in valid.items()})
    report["held_out"]["all"] = figures(*(sum(r[k] for r in report["held_out"].values()) for k in ("nats", "tokens", "bytes")))
    # The greedy text is what another program must reproduce from the exported file.
    report["prompts"], report["sampling"], report["greedy"] = PROMPTS, SAMPLING, []
    for prompt in PROMPTS[:3]:
        start = [0] + tokenizer.encode(prompt).ids
        ids = greedy(model, start, 96)
        report["greedy"].append(dict(prompt=prompt, first=len(start), ids=ids, text=tokenizer.decode(ids)))
    (args.out / "report.json").write_text(json.dumps(report, indent=1, ensure_ascii=False))
    print(json.dumps(report["held_out"], indent=1))
    for g in report["greedy"]:
        print("greedy:", g["text"], "\n")


def check(args):
    """Attention inside runs equals plain causal attention on each run; a short run learns; tokens a second."""
    train_tokens, _ = load_tokens(args.data, args.work)
    loader = Loader(train_tokens, args.data / "tokenizer.json", 48, 0)
    model, muon, adam = make()
    with torch.autocast(DEVICE, torch.bfloat16), torch.no_grad():
        ids = torch.randint(2, 6144, (2, 1024)).to(DEVICE)
        for p in model.blocks.parameters():
            if p.ndim == 2:
                p.mul_(3)
        apart = bounds([[0, 300], [0, 700]], 1024)
        whole = model(ids, apart).float()
        for row, a, b in ((0, 0, 300), (0, 300, 1024), (1, 0, 700), (1, 700, 1024)):
            alone = model(ids[row:row + 1, a:b]).float()[0]
            error = ((whole[row, a:b] - alone).norm() / alone.norm()).item()
            print(f"run {row}:{a}..{b}: relative difference {error:.4f}")
            assert error < 0.1
    model, muon, adam = make()
    fast = compiled(model.loss)
    for step, x, y, runs in loader:
        if step == 16:
            torch.cuda.synchronize()
            began = time.time()
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = fast(x, y, runs)
        loss.backward()
        muon.step(MUON_LR * rate(step, step / 1000), 0.9)
        adam.step()
        model.zero_grad(set_to_none=True)
        if step % 8 == 0:
            print(step, round(loss.item(), 4), f"padding {(y < 0).float().mean().item():.3f}")
    torch.cuda.synchronize()
    loader.close()
    print(f"{32 * ROWS * 1024 / (time.time() - began) / 1e6:.2f} M tokens/s, {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=["check", "train", "finish"])
    for name in ("data", "work", "out"):
        parser.add_argument(f"--{name}", type=pathlib.Path, default=pathlib.Path("out"))
    parser.add_argument("--tiny", action="store_true", help="a very small model and batch, to try everything out")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--every", type=int, default=200)
    parser.add_argument("--init", type=pathlib.Path, help="weights to begin with")
    parser.add_argument("--spare", type=pathlib.Path, help="a folder for the weights near the end, in case that the end is never reached")
    parser.add_argument("--cooldown", type=float, default=COOLDOWN, help="the part of training with a falling rate")
    parser.add_argument("--rounded", type=float, default=ROUNDED, help="the part of training before weights are rounded")
    parser.add_argument("--rate", type=float, default=1.0, help="a factor of the learning rate")
    options = parser.parse_args()
    if options.tiny:
        CONFIG.update(dim=128, layers=2, heads=2, kv_heads=1, ffn=256, context=256)
        ROWS, BLOCK, REMEMBERED = 4, 16, 300
    COOLDOWN, ROUNDED = options.cooldown, options.rounded
    options.work.mkdir(parents=True, exist_ok=True)
    dict(check=check, train=train, finish=finish)[options.verb](options)

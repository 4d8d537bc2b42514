"""Makes sampling.txt: what DRY subtracts from logits and what XTC leaves, by their published definitions.

DRY: text-generation-webui pull request 5677; XTC: pull request 6335. Both are written here as their definitions read: loops
over earlier occurrences of the last token, and a walk down the tokens in order of probability. `crates/ops/src/sample/tests.rs`
compares Delft's samplers with the file. Takes nothing but Python: python3 tests/reference/sampling.py
"""

import math
import random
from pathlib import Path


def dry(history, multiplier, base, allowed, last_n, breakers):
    """The penalty of each token that has one."""
    window = history[-last_n:] if last_n else []
    lengths = {}
    if not window or window[-1] in breakers:
        return {}
    for at in range(len(window) - 1):
        if window[at] != window[-1] or window[at + 1] in breakers:
            continue
        length = 1
        while at - length >= 0:
            earlier = window[-(length + 1)]
            if window[at - length] != earlier or earlier in breakers:
                break
            length += 1
        following = window[at + 1]
        lengths[following] = max(lengths.get(following, 0), length)
    penalties = {}
    for token, length in sorted(lengths.items()):
        if length >= allowed:
            penalties[token] = multiplier * base ** (length - allowed)
    return penalties


def xtc(logits, temperature, threshold):
    """The tokens that are left where it takes place."""
    greatest = max(logits)
    weights = [math.exp((x - greatest) / temperature) for x in logits]
    total = sum(weights)
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    above = [i for i in order if weights[i] / total >= threshold]
    margin = min(abs(w / total - threshold) for w in weights)
    removed = set(above[:-1])
    return [i for i in range(len(logits)) if i not in removed], margin


def main():
    rng = random.Random(7)
    lines = ["# made by sampling.py"]
    for case in range(60):
        alphabet = rng.choice([2, 3, 6])
        n = rng.choice([0, 1, 2, 5, 20, 60])
        history = [rng.randrange(alphabet) for _ in range(n)]
        if rng.random() < 0.5 and n > 5:
            history += history[: rng.randrange(n)]
        if case < 4:
            history = [1] * (10 * case)
        multiplier = rng.choice([0.25, 0.8, 1.5])
        base = rng.choice([1.0, 1.25, 1.75])
        allowed = rng.choice([0, 1, 2, 4])
        last_n = rng.choice([0, 1, 7, 1000])
        if case % 3 == 0:
            last_n = 1000
        breakers = sorted(rng.sample(range(alphabet), rng.choice([0, 0, 1])))
        found = dry(history, multiplier, base, allowed, last_n, breakers)
        penalties = " ".join(f"{t}:{p!r}" for t, p in found.items())
        words = lambda numbers: " ".join(map(str, numbers))
        lines.append(
            f"dry | {multiplier} {base} {allowed} {last_n} | {words(breakers)} | {words(history)} | {penalties}"
        )
    for case in range(40):
        n = rng.choice([1, 2, 5, 12])
        logits = [round(rng.gauss(0, 1.5) * 8) / 8 for _ in range(n)]
        temperature = rng.choice([0.5, 1.0, 2.0])
        threshold = rng.choice([0.02, 0.1, 0.3, 0.5, 0.7])
        left, margin = xtc(logits, temperature, threshold)
        # Where rounding decides there is nothing to compare.
        if margin < 1e-5:
            continue
        words = lambda numbers: " ".join(map(str, numbers))
        lines.append(f"xtc | {temperature} {threshold} | {words(logits)} | {words(left)}")
    Path(__file__).with_name("sampling.txt").write_text("\n".join(lines) + "\n")


main()

"""Has Delft answer every prompt of visitors.txt, judges the answers, and writes samples.md.

    python judge.py DELFT MODEL.gguf [--prompts FILE] [--first-seed N] [--out samples.md] [--flags "--temp 0.8"]

An opening is continued as it stands (`--raw`), a request and an off-topic one are turns of a conversation (`--chat`). A text
passes when it ends by itself within 400 tokens, no six words in a row occur twice in it, and the prompt's main noun
(or its plural or genitive) occurs in both halves of it. An opening's text begins with the opening. Then, for some
prompts, ten seeds each: the share of a text's runs of six words that occur in any of the other nine, averaged.
"""

import argparse
import json
import pathlib
import re
import subprocess

LIMIT = 400
WORD = re.compile(r"[\w']+")
FRESH = ["opening|||Once upon a time", "opening|||Once upon a time, a fox and a crow", "request|||Tell me a story about a dragon who loves cooking", "request|||write a story about a shy robot",
         "request|||Tell me a story about a lamp that cannot sleep"]


def prompts(path):
    for line in pathlib.Path(path).read_text(encoding="utf-8").split("\n"):
        if line and not line.startswith("#"):
            yield [x.strip() for x in line.split("|", 3)]


def answer(delft, model, kind, prompt, seed, flags):
    """(text, ended, tokens): the text of an opening includes it."""
    command = [delft, "run", "-m", model, "--json", "--raw" if kind == "opening" else "--chat", "--seed", str(seed), "-n", str(LIMIT), *flags, prompt]
    out = json.loads(subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=True).stdout)
    return (prompt if kind == "opening" else "") + out["text"].rstrip(), out["finish"] == "stop", len(out["tokens"])


def runs(text):
    words = WORD.findall(text.lower())
    return [tuple(words[i:i + 6]) for i in range(len(words) - 5)]


def faults(text, ended, noun):
    """What is wrong with a text; nothing when it passes."""
    found = []
    if not ended:
        found.append("does not end")
    six = runs(text)
    twice = next((r for i, r in enumerate(six) if r in six[:i]), None)
    if twice:
        found.append(f"repeats \"{' '.join(twice)}\"")
    word = re.compile(rf"\b{re.escape(noun)}(s|es|'s|s')?\b", re.I)
    half = len(text) // 2
    found += [f"no \"{noun}\" in the {name} half" for name, part in (("first", text[:half]), ("second", text[half:])) if not word.search(part)]
    return found


def shared(texts):
    """The share of each text's runs that occur in another, averaged over the texts."""
    sets = [set(runs(t)) for t in texts]
    return sum(len(s & set().union(*(o for j, o in enumerate(sets) if j != i))) / max(1, len(s)) for i, s in enumerate(sets)) / len(sets)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("delft")
    parser.add_argument("model")
    here = pathlib.Path(__file__).parent
    parser.add_argument("--prompts", default=here / "visitors.txt")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--flags", default="")
    parser.add_argument("--no-seeds", action="store_true", help="leave the ten seeds out")
    args = parser.parse_args()
    flags = args.flags.split()
    rows, texts = [], []
    for seed, (kind, noun, _, prompt) in enumerate(prompts(args.prompts), args.first_seed):
        text, ended, tokens = answer(args.delft, args.model, kind, prompt, seed, flags)
        wrong = faults(text, ended, noun)
        rows.append((kind, noun, prompt, seed, tokens, wrong))
        texts.append(text)
        print("ok  " if not wrong else "FAIL", kind, repr(prompt), tokens, "; ".join(wrong), flush=True)
    kinds = list(dict.fromkeys(r[0] for r in rows))
    count = {k: (sum(not r[5] for r in rows if r[0] == k), sum(r[0] == k for r in rows)) for k in kinds}
    total = f"{sum(not r[5] for r in rows)} of {len(rows)}"
    print(f"\n{total} pass:", ", ".join(f"{k} {a} of {b}" for k, (a, b) in count.items()))
    fresh = []
    for row in [] if args.no_seeds else FRESH:
        kind, _, _, prompt = row.split("|", 3)
        fresh.append((prompt, shared([answer(args.delft, args.model, kind, prompt, s, flags)[0] for s in range(101, 111)])))
        print(f"{fresh[-1][1]:.3f} shared by ten seeds of {prompt!r}", flush=True)
    if args.out:
        out = ["# Forty prompts, unpicked", "",
               "The answers to the prompts of `visitors.txt`, which were fixed before the model was trained, one seed each, none left out; written by `judge.py`,",
               "with the file's own sampling. `delft run --raw --seed N -n 400 PROMPT` (openings) and `delft run --chat --seed N -n 400 PROMPT` (the others) repeat them.", "",
               f"A text passes when it ends by itself within {LIMIT} tokens, repeats no six words in a row, and has the main noun in both halves: **{total}**",
               "(" + ", ".join(f"{k}: {a} of {b}" for k, (a, b) in count.items()) + ").", "", "| | seed | prompt | main noun | tokens | |", "|---|---:|---|---|---:|---|"]
        out += [f"| {k} | {seed} | {p} | {noun} | {tokens} | {'; '.join(wrong) or 'passes'} |" for k, noun, p, seed, tokens, wrong in rows]
        out += ["", "Ten seeds of one prompt (101 to 110): how much of a text's runs of six words occur in another of the ten.", "", "| prompt | shared |", "|---|---:|"]
        out += [f"| {p} | {100 * s:.1f}% |" for p, s in fresh]
        for (kind, _, prompt, seed, _, wrong), text in zip(rows, texts):
            out += ["", f"## {prompt}", "", f"*{kind}, seed {seed}" + (f": {'; '.join(wrong)}" if wrong else "") + "*", "", text]
        args.out.write_text("\n".join(out) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Writes samples.md: the first continuation of each prompt, seeds 1 to 10, none picked.

    python samples.py DELFT MODEL.gguf REPORT/report.json

Before the samples, Delft must repeat greedily, from the quantised file, what the trained weights wrote.
"""

import json
import pathlib
import subprocess
import sys

from train_prompts import PROMPTS, SAMPLING


def complete(program, model, prompt, *flags):
    """Delft's JSON for one continuation."""
    run = subprocess.run([program, "run", "-m", model, "--json", *map(str, flags), prompt], capture_output=True, text=True,
                         stdin=subprocess.DEVNULL, check=True)
    return json.loads(run.stdout)


def main(program, model, report):
    report = json.loads(pathlib.Path(report).read_text())
    for g in report["greedy"]:
        wanted = g["ids"][g["first"]:]
        got = complete(program, model, g["prompt"], "--temp", 0, "--repeat-penalty", 1, "-n", len(wanted))["tokens"]
        same = sum(1 for a, b in zip(got, wanted) if a == b)
        print(f"{g['prompt']!r}: {same} of {len(wanted)} greedy tokens agree")
    s = SAMPLING
    out = ["# Ten samples, unpicked", "",
           f"The first continuation of ten prompts fixed in `train_prompts.py`, seeds 1 to 10, at most 480 new tokens, temperature {s['temp']},",
           f"top-p {s['top_p']}, min-p {s['min_p']}, repetition penalty {s['penalty_repeat']} (1 is none): the file's own settings, so",
           "`delft run --seed N -n 480 PROMPT` repeats them. Written by `samples.py`. The prompt is in bold.", ""]
    for seed, prompt in enumerate(PROMPTS, 1):
        answer = complete(program, model, prompt, "--seed", seed, "-n", 480)
        ended = answer["finish"] == "stop"
        out += [f"## Seed {seed}", "", f"**{prompt}**{answer['text'].rstrip()}" + ("" if ended else " ..."), "",
                "*The story ended itself.*" if ended else "*Cut at 480 tokens.*", ""]
    target = pathlib.Path(model).parent / "samples.md"
    target.write_text("\n".join(out))
    print(f"wrote {target}")


if __name__ == "__main__":
    main(*sys.argv[1:])

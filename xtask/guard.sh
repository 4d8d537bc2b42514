#!/bin/sh
# What a change of structure must leave as it is, in sorted lines that two versions can be compared by:
#
#   sh xtask/guard.sh write DIR      writes them to DIR
#   sh xtask/guard.sh compare        writes them to target/guard and shows where they differ from those kept in xtask/guard
#   sh xtask/guard.sh keep           as compare, then keeps what was written: docs/log.md says why
#
#   kernels    each kernel's Metal and CUDA text, as digests in which its name and the lines of its source do not count; and
#              what stands before all kernels, as one more
#   cases      each kernel case by family and label
#   mistakes   each seeded mistake that a test must catch
#   programs   the fused Program of each reference fixture
#   launches   on the simulated GPU, for a prompt, a long prompt and tokens behind them: the kernels by the digest of their text form,
#              with grid, threads, bytes of shared memory and arguments; how often each is launched does not count
#
# Needs cargo; takes some minutes. Lines are compared without what follows ` # `, which are names.
set -eu
cd "$(dirname "$0")/.."
mode=${1:-compare}
out=${2:-target/guard}
mkdir -p "$out"

cargo build -q -p delft-tile-cli -p delft-cli --features delft-cli/sim
cargo build -q -p delft-models --example program
built=${CARGO_TARGET_DIR:-target}/debug

"$built/tile" list > "$out/list"
grep '^case' "$out/list" | sort > "$out/cases.txt"
# Two kernels of one text are one: names may change.
grep '^kernel' "$out/list" | awk '{ print $4, $6, "#", $2 }' | sort > "$out/kernels.txt"
rm "$out/list"

{
    grep -ho 'why: "[^"]*", case' crates/tile*/tests/all/proof.rs
    grep -ho 'why: "[^"]*", removes' crates/tile*/tests/all/seeded.rs
    awk '/^mistakes!\(/, /\);/' crates/tile*/tests/all/mutants.rs | tr -d '\n' | sed 's/mistakes!/\n/g' |
        sed -n 's/^(\([A-Za-z]*\): \(.*\));.*/\1 \2/p' |
        awk '{ for (i = 2; i <= NF; i++) if ($i != "Right") print $1, $i }'
} | sort > "$out/mistakes.txt"

models=tests/reference/models
"$built/examples/program" $(ls -d $models/*/config.json | xargs -n 1 dirname) > "$out/programs.txt"

launches() { # MODEL TOKENS [FLAGS]
    model=$1 tokens=$2
    shift 2
    DELFT_SIM_LAUNCHES="$out/one" "$built/delft" logits -m "$model" --tokens "$tokens" --generate 2 --device sim "$@" > /dev/null
}
: > "$out/all"
for model in $(ls -d $models/*/config.json | xargs -n 1 dirname) $(ls $models/*/*.gguf); do
    rm -f "$out/one"
    launches "$model" 3
    launches "$model" 3,4,5,6,7 --all
    # Some are made for 32 positions.
    launches "$model" "$(seq -s, 3 40)" 2> /dev/null || launches "$model" "$(seq -s, 3 32)"
    launches "$model" 3,4,5 --cache-type f32
    DELFT_SIM_LAUNCHES="$out/one" "$built/delft" bench -m "$model" -p 0 -n 2 --sampled --repeat 1 --device sim > /dev/null
    sort -u "$out/one" | sed "s|^|$model |" >> "$out/all"
done
sort -u "$out/all" > "$out/launches.txt"
rm -f "$out/one" "$out/all"
wc -l "$out"/*.txt

[ "$mode" != write ] || exit 0
same=yes
for kept in xtask/guard/*.gz; do
    name=$(basename "$kept" .gz)
    gzip -dc "$kept" | sed 's/ # .*//' | sort > "$out/before"
    sed 's/ # .*//' "$out/$name" | sort > "$out/after"
    cmp -s "$out/before" "$out/after" && continue
    same=no
    echo "$name differs:"
    diff "$out/before" "$out/after" | grep '^[<>]' | head -n "${LINES_SHOWN:-20}"
done
rm -f "$out/before" "$out/after"
[ $same = no ] || echo "as kept"
if [ "$mode" = keep ]; then
    for kept in xtask/guard/*.gz; do
        gzip -9 -n -c "$out/$(basename "$kept" .gz)" > "$kept"
    done
fi

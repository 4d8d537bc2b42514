#!/bin/sh
# On a machine with an NVIDIA GPU, from the root of the repository: tests every kernel on it, looks for bad accesses and
# races, and measures the kernels and their rivals. Each part has a time limit of its own, so that one that hangs
# loses only itself. Results go to $OUT (default: target/device).
#
#   TILE            the `tile` program (default: .carry/tile, else target/release/tile)
#   DELFT           the `delft` program (default: .carry/delft, else target/release/delft)
#   FIXTURES        the test program of the engine, to run on the GPU (default: .carry/all)
#   DELFT_TEST_FIXTURES    only these folders of fixtures, with commas between
#   PARTS           which parts, in order (default: "fixtures greedy memory full models test sanitize bench rivals"; besides, `many`
#                   for steps of many sequences, `several` for machines with 2 or 4 GPUs, and `processes` for 2)
#   FILTER          only kernels whose name contains this, for the tests and the measurements
#   SANITIZED       families to run under compute-sanitizer (default: a few, small ones of each kind)
#   MODELS          shapes and types for the speed of whole models, as tests/reference/random_gguf.py has them
#   DISPATCHED      the one of them that is measured in every way of dispatch (default: llama-1b:q4_k)
#   MANY            shapes and types of the models that many sequences share, as MODELS
#   BATCHES         how many sequences those are (default: 8,16,32,64,128)
#   TRIED           kernels whose cases are tried first there (default: stream)
#   T_TRIED, T_ALIKE    seconds for the cases of each of those, and for the bits of a row with and without the library
#   SHARED          shape and types of the models that several GPUs share, as MODELS
#   T_TEST, T_SANITIZE, T_BENCH, T_RIVALS, T_FIXTURES, T_GREEDY, T_MEMORY, T_FULL, T_MODELS, T_MANY, T_SEVERAL, T_PROCESSES    seconds for each part
set -u

OUT=${OUT:-target/device}
mkdir -p "$OUT"
TILE=${TILE:-.carry/tile}
[ -x "$TILE" ] || chmod +x "$TILE" 2>/dev/null || TILE=target/release/tile
DELFT=${DELFT:-.carry/delft}
[ -f "$DELFT" ] || DELFT=target/release/delft
export PATH="$PATH:/usr/local/cuda/bin"

# NVRTC, cuBLASLt and NCCL: the toolkit's, else those that come with PyTorch.
for folder in /usr/local/cuda/lib64 $(python3 -c '
import importlib.util, pathlib
found = importlib.util.find_spec("nvidia")
roots = found.submodule_search_locations if found else []
for root in roots:
    for library in ("libnvrtc.so.1*", "libcublasLt.so.1*", "libnccl.so.2"):
        print(*{path.parent for path in pathlib.Path(root).rglob(library)})
' 2>/dev/null); do
    LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folder"
done
export LD_LIBRARY_PATH

{
    nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm --format=csv,noheader
    nvcc --version 2>/dev/null | tail -1
    echo "$LD_LIBRARY_PATH"
    "$TILE" --version
} > "$OUT/machine.txt" 2>&1

# part NAME SECONDS COMMAND..: runs it, keeps what it prints, and says how it ended.
part() {
    name=$1 limit=$2
    shift 2
    began=$(date +%s)
    timeout -k 5 "$limit" "$@" > "$OUT/$name.txt" 2>&1
    status=$?
    case $status in
        0) how=passed ;;
        124 | 137) how="stopped after $limit s" ;;
        *) how="failed ($status)" ;;
    esac
    echo "== $name: $how, $(($(date +%s) - began)) s"
    tail -n 3 "$OUT/$name.txt" | cut -c 1-200
    [ $status -eq 0 ] || failed=1
}

# sanitize TOOL FAMILY..: the families' cases under one of compute-sanitizer's tools.
sanitize() {
    tool=$1
    shift
    for family in "$@"; do
        echo "-- $tool $family"
        compute-sanitizer --tool "$tool" --error-exitcode 9 "$TILE" test "$family" --on cuda || return
    done
}

# fixtures: Transformers' logits, and the CPU's tokens, on the GPU.
fixtures() {
    for program in ${FIXTURES:-.carry/all}; do
        chmod +x "$program"
        DELFT_TEST_DEVICE=cuda "$program" the_named_device --nocapture --test-threads 1 || return
    done
}

# watched TOOL CASE [FLAG]..: a whole small model under one of compute-sanitizer's tools: a prompt, steps, tokens chosen on the GPU.
watched() {
    tool=$1 model=tests/reference/models/$2
    shift 2
    echo "-- $tool $model $*"
    compute-sanitizer --tool "$tool" --error-exitcode 9 "$DELFT" logits -m "$model" --device cuda "$@" \
        --tokens 5,6,7,8,9,10,11,12,13,14,15,16 --generate 4 --json > /dev/null || return
    compute-sanitizer --tool "$tool" --error-exitcode 9 "$DELFT" bench -m "$model" --device cuda "$@" \
        -p 40 -n 4 -r 1 --sampled --json
}

# memory: bad accesses in every way of dispatch and on two devices; races for shared memory.
memory() {
    chmod +x "$DELFT"
    for case in ${SMALL:-llama3 qwen3}; do
        for how in "--dispatch graph" "--dispatch arguments" "--dispatch eager" "--gpu-layers 1" "--cache-type f32"; do
            # shellcheck disable=SC2086 # two words
            watched memcheck "$case" $how || return
        done
    done
    for how in graph arguments; do
        watched racecheck llama3 --dispatch $how || return
    done
}

# full: what the device has no memory for is refused in one line, with exit code 1 and before anything is allocated.
full() {
    chmod +x "$DELFT"
    said=$("$DELFT" logits -m models/delft-stories.gguf --device cuda --ctx 16777216 --cache-type f32 --tokens 5,6,7 2>&1 > /dev/null)
    status=$?
    echo "exit code $status: $said"
    lines=$(printf '%s\n' "$said" | wc -l)
    [ $status -eq 1 ] && [ "$lines" -eq 1 ] || return 1
    case $said in
        *"MiB free"*) ;;
        *) return 1 ;;
    esac
}

# models: decoding with sampling at two depths, and prompts of 2048; of one of them in every way of dispatch, with prompts of
# several chunks.
models() {
    chmod +x "$DELFT"
    folder=$(mktemp -d -p /dev/shm 2>/dev/null || mktemp -d)
    for model in ${MODELS:-llama-1b:bf16 llama-1b:q4_k qwen3-0.6b:q8_0 llama-8b:q4_k llama-8b:q8_0 llama-8b:bf16}; do
        python3 tests/reference/random_gguf.py "${model%:*}" "${model#*:}" "$folder/model.gguf" || return
        "$DELFT" bench -m "$folder/model.gguf" --device cuda -p 2048 -n 128 -r 3 --sampled --json
        "$DELFT" bench -m "$folder/model.gguf" --device cuda -p 0 -n 128 -d 4096 -r 2 --sampled --json
        if [ "$model" = "${DISPATCHED:-llama-1b:q4_k}" ]; then
            for how in graph arguments eager; do
                echo "-- $model --dispatch $how"
                "$DELFT" bench -m "$folder/model.gguf" --device cuda -p 8192 -n 128 -r 3 --sampled --dispatch $how --json
            done
        fi
        rm "$folder/model.gguf"
    done
    rmdir "$folder"
}

# alike PROGRAM FILE: the bits of a row among every number of others.
alike() {
    DELFT_TEST_DEVICE=cuda timeout -k 5 "${T_ALIKE:-30}" "$1" the_named_device_gives_a_row --nocapture --test-threads 1 > "$2" 2>&1
}

# many: the bits of a row among any others and the kernels that this needs, while models are written; then how fast many sequences
# decode, with the vendor's products and with our own, by turns.
many() {
    chmod +x "$DELFT"
    folder=$(mktemp -d -p /dev/shm 2>/dev/null || mktemp -d)
    models=${MANY:-llama-8b:bf16 llama-8b:q4_k}
    writers=
    for model in $models; do
        python3 tests/reference/random_gguf.py "${model%:*}" "${model#*:}" "$folder/$model.gguf" &
        writers="$writers $!"
    done
    wrong=0
    for kernel in ${TRIED:-stream}; do
        timeout -k 5 "${T_TRIED:-60}" "$TILE" test "$kernel" --on cuda > "$OUT/$kernel.txt" 2>&1
        echo "-- $kernel: exit code $?"
        tail -n 2 "$OUT/$kernel.txt"
    done
    # Both at a time, on two GPUs where there are two.
    last=$(($(nvidia-smi -L | grep -c '^GPU') - 1))
    for program in ${FIXTURES:-.carry/all}; do
        chmod +x "$program"
        CUDA_VISIBLE_DEVICES=$last DELFT_NO_CUBLAS=1 alike "$program" "$OUT/ours.txt" &
        ours=$!
        alike "$program" "$OUT/library.txt" || wrong=1
        wait $ours || wrong=1
        for how in library ours; do
            echo "-- bits of a row, $how"
            tail -n 14 "$OUT/$how.txt"
        done
    done
    # shellcheck disable=SC2086 # numbers of processes
    wait $writers || wrong=1
    for model in $models; do
        for how in library ours library; do
            [ $how = library ] && unset DELFT_NO_CUBLAS || export DELFT_NO_CUBLAS=1
            # Packed matrices are ours either way.
            [ "${model#*:}" = bf16 ] || [ $how = ours ] || continue
            echo "-- $model, $how"
            "$DELFT" bench -m "$folder/$model.gguf" --device cuda -p 0 -n 64 -d 512 --batch "${BATCHES:-8,16,32,64,128}" -r 1 --json || wrong=1
            unset DELFT_NO_CUBLAS
        done
    done
    rm -r "$folder"
    return $wrong
}

# several: the fixtures on two GPUs, by layers and by ranks, and decoding on 1, 2 and 4.
several() {
    chmod +x "$DELFT"
    found=$(nvidia-smi -L | grep -c '^GPU')
    [ "$found" -ge 2 ] || { echo "several: expected 2 GPUs or more, found $found"; return 1; }
    nvidia-smi topo -m
    for program in ${FIXTURES:-.carry/all}; do
        chmod +x "$program"
        DELFT_TEST_DEVICE=cuda:0,1 "$program" the_named_device --nocapture --test-threads 1 || return
    done
    folder=$(mktemp -d -p /dev/shm 2>/dev/null || mktemp -d)
    for model in ${SHARED:-llama-8b:bf16 llama-8b:q4_k}; do
        python3 tests/reference/random_gguf.py "${model%:*}" "${model#*:}" "$folder/model.gguf" || return
        for gpus in cuda:0 cuda:0,1 cuda:0,1,2,3; do
            [ "$(echo "$gpus" | tr ',' '\n' | wc -l)" -le "$found" ] || continue
            for mode in layer tensor; do
                [ "$gpus$mode" != cuda:0tensor ] || continue
                echo "-- $model on $gpus, $mode"
                "$DELFT" bench -m "$folder/model.gguf" --device "$gpus" --split-mode "$mode" \
                    -p 2048 -n 128 -r 3 --sampled --json || return
            done
        done
        rm "$folder/model.gguf"
    done
    rmdir "$folder"
}

# ranks NUMBER WORDS..: this command for every rank: by torchrun, where there is one, else by a loop.
ranks() {
    count=$1
    shift
    if python3 -c 'import torch.distributed.run' 2>/dev/null; then
        python3 -m torch.distributed.run --no-python --nproc-per-node "$count" "$DELFT" "$@"
    else
        loop "$count" "$@"
    fi
}

# loop NUMBER WORDS..: the same by a loop; ends as rank 0 does.
loop() {
    count=$1 rank=1
    shift
    while [ "$rank" -lt "$count" ]; do
        RANK=$rank WORLD_SIZE=$count MASTER_PORT=29600 "$DELFT" "$@" &
        rank=$((rank + 1))
    done
    RANK=0 WORLD_SIZE=$count MASTER_PORT=29600 "$DELFT" "$@"
    ended=$?
    wait
    return $ended
}

# processes: two GPUs as ranks of one process and of two: the same logits and tokens, a rank that is killed, and how fast both are.
processes() {
    chmod +x "$DELFT"
    [ "$(nvidia-smi -L | grep -c '^GPU')" -ge 2 ] || { echo "processes: expected 2 GPUs"; return 1; }
    folder=$(mktemp -d -p /dev/shm 2>/dev/null || mktemp -d)
    tensor="--split-mode tensor"
    for model in llama3 mistral mixtral; do
        words="logits -m tests/reference/models/$model --tokens 5,6,7,8 --all --generate 16 --json --cache-type f32 $tensor"
        # shellcheck disable=SC2086
        "$DELFT" $words --device cuda:0,1 > "$folder/threads" || return
        # shellcheck disable=SC2086
        ranks 2 $words --device cuda > "$folder/processes" || return
        # shellcheck disable=SC2086
        loop 2 $words --device cuda > "$folder/loop" || return
        cmp "$folder/threads" "$folder/processes" && cmp "$folder/threads" "$folder/loop" || return
        echo "-- $model: $(wc -c < "$folder/threads") bytes of logits and tokens, the same three times"
    done
    model=${SHARED:-llama-8b:bf16}
    python3 tests/reference/random_gguf.py "${model%:*}" "${model#*:}" "$folder/model.gguf" || return
    bench="bench -m $folder/model.gguf $tensor -p 2048 -n 128 -r 3 --sampled --json"
    for _ in 1 2; do
        echo "-- $model, ranks as threads, then as processes"
        # shellcheck disable=SC2086
        "$DELFT" $bench --device cuda:0,1 || return
        # shellcheck disable=SC2086
        ranks 2 $bench --device cuda || return
    done
    echo "-- rank 1 is killed while rank 0 generates: one line of each, within seconds"
    for rank in 0 1; do
        RANK=$rank WORLD_SIZE=2 "$DELFT" bench -m "$folder/model.gguf" --device cuda --split-mode tensor -p 0 -n 20000 &
        last=$!
    done
    sleep "${T_LOADED:-40}"
    kill -9 "$last"
    wait
    rm -r "$folder"
}

failed=0
case ${1:-} in
    fixtures | memory | full | models | many | several | processes)
        "$1"
        exit
        ;;
esac
if [ "${1:-}" = sanitize ]; then
    shift
    sanitize "$@"
    exit
fi
for wanted in ${PARTS:-fixtures greedy memory full models test sanitize bench rivals}; do
    case $wanted in
        fixtures) part fixtures "${T_FIXTURES:-60}" sh "$0" fixtures ;;
        greedy)
            chmod +x "$DELFT"
            part greedy "${T_GREEDY:-60}" python3 tests/reference/greedy.py "$DELFT" --device cuda
            ;;
        memory) part memory "${T_MEMORY:-180}" sh "$0" memory ;;
        full) part full "${T_FULL:-20}" sh "$0" full ;;
        models) part models "${T_MODELS:-150}" sh "$0" models ;;
        many) part many "${T_MANY:-300}" sh "$0" many ;;
        several) part several "${T_SEVERAL:-300}" sh "$0" several ;;
        processes) part processes "${T_PROCESSES:-300}" sh "$0" processes ;;
        test) part test "${T_TEST:-150}" "$TILE" test ${FILTER:-} --on cuda ;;
        sanitize)
            # shellcheck disable=SC2086 # a list of words
            set -- ${SANITIZED:-select_rows softmax add_norm}
            part memcheck "${T_SANITIZE:-40}" sh "$0" sanitize memcheck "$@"
            part racecheck "${T_SANITIZE:-40}" sh "$0" sanitize racecheck "$@"
            ;;
        bench) part bench "${T_BENCH:-120}" "$TILE" bench ${FILTER:-} --json ;;
        rivals) part rivals "${T_RIVALS:-60}" python3 tests/reference/device_rivals.py ;;
        *) echo "no part is called $wanted" && failed=1 ;;
    esac
done
exit $failed

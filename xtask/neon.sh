#!/bin/sh
# The NEON kernels without an ARM machine: builds the CPU kernels' tests for aarch64 Linux and runs them under qemu's user
# emulation, on a processor with every extension, on one with `sdot` but no `smmla` (Neoverse N1), and on one with neither
# (Cortex-A53), each with every instruction set that it has; a test fails where it lacks the one named beside it. Says so
# and ends well where the emulator, the linker or Rust's target is missing: `apt install qemu-user gcc-aarch64-linux-gnu`,
# `rustup target add aarch64-unknown-linux-gnu`.
#
#   xtask/neon.sh [FILTER..]    only tests whose names contain one of these (default: matmul math isa)
#   CPUS                        processors, as qemu calls them, and the best set of each
#                               (default: "max:neon-i8mm neoverse-n1:neon-dotprod cortex-a53:neon")
set -eu
cd "$(dirname "$0")/.."

target=aarch64-unknown-linux-gnu
skip() {
    printf '\n== skipped: the NEON kernels are not run: %s\n' "$1"
    # The list of what a whole run has skipped: see steps.sh.
    [ -z "${DELFT_TEST_SKIPPED:-}" ] || printf 'the NEON kernels are not run: %s\n' "$1" >> "$DELFT_TEST_SKIPPED"
    exit 0
}
command -v qemu-aarch64 > /dev/null || skip "no qemu-aarch64 (Debian: qemu-user)"
command -v aarch64-linux-gnu-gcc > /dev/null || skip "no aarch64-linux-gnu-gcc (Debian: gcc-aarch64-linux-gnu)"
[ -d "$(rustc --print target-libdir --target $target)" ] || skip "no Rust target (rustup target add $target)"

export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
[ $# -gt 0 ] || set -- matmul math isa
for pair in ${CPUS:-max:neon-i8mm neoverse-n1:neon-dotprod cortex-a53:neon}; do
    cpu=${pair%%:*} isa=${pair#*:}
    printf '\n== NEON, emulated: %s, whose best set is %s\n' "$cpu" "$isa"
    # The libraries that the linker's package brought. Emulated threads share this machine's cores: two at a time.
    CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -cpu $cpu -L /usr/aarch64-linux-gnu" DELFT_ISA="$isa" \
        cargo test --locked --target $target -p delft-cpu-kernels --test all -- --test-threads 2 "$@"
done

#!/bin/sh
# The NEON kernels without an ARM machine: builds the CPU device's tests for aarch64 Linux and runs them under qemu's user
# emulation, once on a processor with every extension (`sdot` among them) and once on one with none (Cortex-A53). Says so
# and ends well where the emulator, the linker or Rust's target is missing: `apt install qemu-user gcc-aarch64-linux-gnu`,
# `rustup target add aarch64-unknown-linux-gnu`.
#
#   xtask/neon.sh [FILTER..]    only tests whose names contain one of these (default: matmul math isa)
#   CPUS                        processors, as qemu calls them (default: "max cortex-a53")
set -eu
cd "$(dirname "$0")/.."

target=aarch64-unknown-linux-gnu
skip() {
    echo "skipped: $1"
    exit 0
}
command -v qemu-aarch64 > /dev/null || skip "no qemu-aarch64 (Debian: qemu-user)"
command -v aarch64-linux-gnu-gcc > /dev/null || skip "no aarch64-linux-gnu-gcc (Debian: gcc-aarch64-linux-gnu)"
[ -d "$(rustc --print target-libdir --target $target)" ] || skip "no Rust target (rustup target add $target)"

export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
[ $# -gt 0 ] || set -- matmul math isa
for cpu in ${CPUS:-max cortex-a53}; do
    echo "== $cpu"
    # The libraries that the linker's package brought. Emulated threads share this machine's cores: two at a time.
    CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -cpu $cpu -L /usr/aarch64-linux-gnu" \
        cargo test --target $target -p delft-device --no-default-features --lib -- --test-threads 2 "$@"
done

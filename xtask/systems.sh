#!/bin/sh
# Delft on systems that this machine is not: built for ARM Linux and for Windows, README's first command tells a story
# under qemu's user emulation and under Wine. Says so and goes on where an emulator, a linker or Rust's target is missing:
# `apt install qemu-user gcc-aarch64-linux-gnu`, `rustup target add aarch64-unknown-linux-gnu` for the one,
# `apt install wine wine64 gcc-mingw-w64-x86-64`, `rustup target add x86_64-pc-windows-gnu` for the other.
#
#   xtask/systems.sh [arm] [windows]    which systems (default: both)
#   FLAGS                               further arguments of `cargo build`
set -eu
cd "$(dirname "$0")/.."

skip() {
    printf '\n== skipped: Delft is not run %s\n' "$1"
    # The list of what a whole run has skipped: see steps.sh.
    [ -z "${DELFT_TEST_SKIPPED:-}" ] || printf 'Delft is not run %s\n' "$1" >> "$DELFT_TEST_SKIPPED"
}

# lacks PROGRAM.. TARGET: says which of these is missing, if one is.
lacks() {
    while [ $# -gt 1 ]; do
        command -v "$1" > /dev/null || { echo "no $1"; return; }
        shift
    done
    [ -d "$(rustc --print target-libdir --target "$1")" ] || case "${FLAGS:-}" in
        *-Zbuild-std*) ;;
        *) echo "no Rust target $1" ;;
    esac
}

# build TARGET: the program, for it.
build() {
    # shellcheck disable=SC2086 # Several arguments.
    cargo build --locked --target "$1" -p delft-cli ${FLAGS:-}
}

# tell SYSTEM COMMAND..: runs README's first command by a program and its arguments, and counts the story's words.
tell() {
    system=$1
    shift
    first=$(sed -n 's/^cargo run --release -- //p' README.md | head -n 1)
    eval "story=\$(\"\$@\" $first -n 40)"
    printf '%s\n' "$story"
    words=$(printf '%s\n' "$story" | wc -w)
    [ "$words" -gt 10 ] || { echo "$system: expected a story, found $words words" >&2; exit 1; }
}

arm() {
    target=aarch64-unknown-linux-gnu
    why=$(lacks qemu-aarch64 aarch64-linux-gnu-gcc $target)
    [ -z "$why" ] || { skip "on ARM Linux: $why"; return 0; }
    printf '\n== ARM Linux, emulated\n'
    CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc CC_aarch64_unknown_linux_gnu=aarch64-linux-gnu-gcc build $target
    tell "ARM Linux" qemu-aarch64 -L /usr/aarch64-linux-gnu "${CARGO_TARGET_DIR:-target}/$target/debug/delft"
}

windows() {
    target=x86_64-pc-windows-gnu
    why=$(lacks wine x86_64-w64-mingw32-gcc $target)
    [ -z "$why" ] || { skip "on Windows: $why"; return 0; }
    printf '\n== Windows, by Wine\n'
    CARGO_TARGET_X86_64_PC_WINDOWS_GNU_LINKER=x86_64-w64-mingw32-gcc build $target
    built="${CARGO_TARGET_DIR:-target}/$target/debug"
    # Rust's standard library takes random numbers from a library that Windows has from 7 on, and Wine from 8.12 on:
    # one beside the program does for older ones, which know another name for them.
    printf '%s\n' '#include <windows.h>' '#include <ntsecapi.h>' \
        '__declspec(dllexport) BOOL ProcessPrng(PBYTE data, SIZE_T bytes) { return RtlGenRandom(data, (ULONG)bytes); }' |
        x86_64-w64-mingw32-gcc -shared -x c - -o "$built/bcryptprimitives.dll"
    WINEDEBUG=-all tell Windows wine "$built/delft.exe"
}

[ $# -gt 0 ] || set -- arm windows
for system in "$@"; do
    case $system in
        arm | windows) "$system" ;;
        *) echo "xtask/systems.sh: no system $system; there are arm, windows" >&2; exit 2 ;;
    esac
done

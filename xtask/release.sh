#!/usr/bin/env bash
# Builds the release binary without the paths of the machine that built it.
#
#   xtask/release.sh [FURTHER ARGUMENTS OF CARGO BUILD]
#
# A plain `cargo build --release` leaves the registry's folder in panic locations of libraries: Cargo has no stable setting
# that shortens them (`trim-paths` is unstable), and rustc takes absolute prefixes only. They are found here. Messages
# of the program never show them in either case: it names a package's file only.
set -euo pipefail
cd "$(dirname "$0")/.."

cargo_home="${CARGO_HOME:-$HOME/.cargo}"
# The registry's folder is looked for below: on a new machine the sources make it.
cargo fetch --locked
sysroot="$(rustc --print sysroot)"
# In this order: rustc takes the last one that fits.
remap=(
  "--remap-path-prefix=$HOME=home"
  "--remap-path-prefix=$sysroot=rust"
  "--remap-path-prefix=$PWD=delft"
  "--remap-path-prefix=$cargo_home=cargo"
)
for registry in "$cargo_home"/registry/src/*/; do
  remap+=("--remap-path-prefix=${registry%/}=packages")
done
# A variable of this name keeps arguments with blanks apart.
CARGO_ENCODED_RUSTFLAGS="$(IFS=$'\x1f'; echo "${remap[*]}")"
export CARGO_ENCODED_RUSTFLAGS
cargo build --release --locked "$@"

binary="${CARGO_TARGET_DIR:-target}/release/delft"
if left=$(grep -aoE "($HOME|$PWD|registry/src)/[[:graph:]]{0,60}" "$binary" | sort -u | head -5) && [ -n "$left" ]; then
  printf 'paths of this machine are left in %s:\n%s\n' "$binary" "$left" >&2
  exit 1
fi
printf '%s\n' "$binary"

# Sourced by .ci/run and xtask/proof: steps with the time at which each begins, and one list of what
# was skipped, which tests append to through the file that DELFT_TEST_SKIPPED names (`testing::skipped`).

DELFT_TEST_SKIPPED="${TMPDIR:-/tmp}/delft-skipped.$$"
export DELFT_TEST_SKIPPED
: > "$DELFT_TEST_SKIPPED"
trap 'leave' EXIT

# step COMMAND..: runs it, under a line that says what and when.
step() { printf '\n== %s (after %d s)\n' "$*" $SECONDS; "$@"; }

# skipped WHY
skipped() {
  printf '\n== skipped: %s\n' "$1"
  printf '%s\n' "$1" >> "$DELFT_TEST_SKIPPED"
}

# beside FUNCTION: begins its steps beside those that follow; what they say is kept until it is
# joined.
lanes=
beside() {
  said="$DELFT_TEST_SKIPPED.$1"
  : > "$said"
  # A shell of its own, in which a step that fails ends it, and a process group of its own, which
  # leaves as a whole.
  set -m
  (set -e; trap - EXIT; "$1") > "$said" 2>&1 < /dev/null &
  set +m
  lanes="$lanes $!:$said"
}

# joined: waits for all that was begun beside, says what they said, and fails if one of them failed.
joined() {
  failed=0
  for lane in $lanes; do
    wait "${lane%%:*}" || failed=1
    cat "${lane#*:}"
  done
  rm -f "$DELFT_TEST_SKIPPED".*
  lanes=
  return "$failed"
}

# leave: at the end, or after a failure, which says what the others have said so far.
leave() {
  for lane in $lanes; do
    kill -- "-${lane%%:*}" 2> /dev/null || true
    cat "${lane#*:}"
  done
  rm -f "$DELFT_TEST_SKIPPED" "$DELFT_TEST_SKIPPED".*
}

# has_target TRIPLE: whether Rust can build for it, which it is asked to learn where rustup is
# there.
has_target() {
  [ -d "$(rustc --print target-libdir --target "$1")" ] || rustup target add "$1" > /dev/null 2>&1
}

# finish: the time that all took, and what was skipped.
finish() {
  printf '\n== passed in %d s\n' $SECONDS
  if [ -s "$DELFT_TEST_SKIPPED" ]; then
    printf 'skipped here, and why:\n'
    sort -u "$DELFT_TEST_SKIPPED" | sed 's/^/  /'
  else
    printf 'nothing was skipped\n'
  fi
}

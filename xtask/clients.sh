#!/bin/sh
# The official Python and npm clients against `delft serve` with the bundled model, on a port of the system's choosing, and answers to a set
# of JSON schemas, judged by the `jsonschema` package. Makes a virtual environment in target/clients with packages of PyPI and, where
# there is npm, a folder target/clients/npm with packages of its registry. With Chromium on the machine, the page is opened and used
# as well.
#
#   xtask/clients.sh [PROGRAM]    the program to test (default: target/debug/delft, which is built)
#   xtask/clients.sh --install    makes the virtual environment alone; fails where PyPI is not reachable
#
# TORTURE=ROUNDS has a thousand connections at a time do their worst besides, so many times.
set -eu
cd "$(dirname "$0")/.."

python=target/clients/bin/python
packages="openai anthropic ollama jsonschema pydantic websocket-client"
if ! "$python" -c 'import openai, anthropic, ollama, jsonschema, pydantic, websocket' 2> /dev/null; then
    python3 -m venv target/clients
    # shellcheck disable=SC2086
    "$python" -m pip install --quiet --timeout 10 --retries 1 $packages
fi
npm=target/clients/npm
if command -v npm > /dev/null && [ ! -d "$npm/node_modules/axe-core" ]; then
    mkdir -p "$npm"
    echo '{ "private": true }' > "$npm/package.json"
    # Where its registry is not reachable the Python clients are run all the same.
    npm install --prefix "$npm" --silent --no-audit --no-fund --fetch-retries 1 \
        openai @anthropic-ai/sdk ollama axe-core > /dev/null 2>&1 || rm -rf "$npm/node_modules"
fi
[ "${1:-}" != --install ] || exit 0
program=${1:-target/debug/delft}
[ $# -gt 0 ] || cargo build --locked -p delft-cli

log=$(mktemp)
# The second model makes embeddings, of token ids.
"$program" serve --port 0 models/delft-stories.gguf embeds=tests/reference/embeddings/last 2> "$log" &
server=$!
trap 'kill "$server" 2> /dev/null || true; rm -f "$log"' EXIT
address=
while [ -z "$address" ]; do
    kill -0 "$server" || { cat "$log"; exit 1; }
    sleep 0.1
    address=$(sed -n 's/.* at \(http:[^ ]*\)$/\1/p' "$log" | head -n 1)
done
"$python" tests/clients/clients.py "$address"
if [ -d "$npm/node_modules/ollama" ]; then
    node tests/clients/clients.mjs "$address" "$npm"
else
    printf '\n== skipped: the npm clients are not run: no npm, or its registry is not reachable\n'
fi
"$python" tests/clients/schemas.py "$address"
[ -z "${TORTURE:-}" ] || "$python" tests/clients/torture.py "$server" "$address" "$TORTURE"
if command -v chromium > /dev/null && [ -d "$npm/node_modules/axe-core" ]; then
    mkdir -p target/clients/page
    "$python" tests/clients/page.py "$address" target/clients/page "$npm/node_modules/axe-core/axe.min.js"
else
    printf '\n== skipped: the page is not opened: no chromium (Debian: chromium), or no axe-core of npm\n'
fi
kill "$server"
wait "$server"

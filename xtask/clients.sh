#!/bin/sh
# The official Python clients against `delft serve` with the bundled model, on a port of the system's choosing. Makes a virtual
# environment in target/clients with the clients of PyPI. With Chromium on the machine, the page is opened and used as well.
#
#   xtask/clients.sh [PROGRAM]    the program to test (default: target/debug/delft, which is built)
set -eu
cd "$(dirname "$0")/.."

program=${1:-target/debug/delft}
[ $# -gt 0 ] || cargo build --locked -p delft-cli
python=target/clients/bin/python
if [ ! -x "$python" ]; then
    python3 -m venv target/clients
    "$python" -m pip install --quiet openai anthropic ollama websocket-client
fi

log=$(mktemp)
"$program" serve --port 0 2> "$log" &
server=$!
trap 'kill "$server" 2> /dev/null || true; rm -f "$log"' EXIT
address=
while [ -z "$address" ]; do
    kill -0 "$server" || { cat "$log"; exit 1; }
    sleep 0.1
    address=$(sed -n 's/.* at \(http:[^ ]*\)$/\1/p' "$log" | head -n 1)
done
"$python" tests/clients/clients.py "$address"
if command -v chromium > /dev/null; then
    "$python" tests/clients/page.py "$address" target/clients/page.png
else
    printf '\n== skipped: the page is not opened: no chromium (Debian: chromium)\n'
fi
kill "$server"
wait "$server"

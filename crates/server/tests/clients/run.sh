#!/usr/bin/env bash
# Runs the client tests against `kipp serve` with kipp-tiny. $1: the kipp binary. Needs Python; makes a virtual
# environment beside the build.
set -euo pipefail
kipp=$(realpath "$1")
here=$(cd "$(dirname "$0")" && pwd)
venv=${KIPP_CLIENTS_VENV:-$(dirname "$kipp")/../clients-venv}
[ -x "$venv/bin/pytest" ] || { python3 -m venv "$venv" && "$venv/bin/pip" install --quiet pytest -r "$here/requirements.txt"; }
log=$(mktemp)
"$kipp" serve --port 0 2>"$log" &
server=$!
trap 'kill $server 2>/dev/null || true' EXIT
for _ in $(seq 300); do
    url=$(sed -n 's/^kipp listens on //p' "$log")
    [ -n "$url" ] && break
    sleep 0.1
done
[ -n "$url" ] || { cat "$log"; exit 1; }
KIPP_URL=$url "$venv/bin/pytest" -q -p no:cacheprovider "$here/test_clients.py"
kill -TERM $server
wait $server

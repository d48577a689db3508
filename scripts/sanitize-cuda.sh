#!/bin/sh
# The CUDA gates of kipp-tiny's dimensions under NVIDIA's compute-sanitizer: memcheck, then racecheck. Needs a device,
# and compute-sanitizer on PATH or in CUDA_HOME/bin. Two layers: a layer uses every kernel that six do.
set -eu
cd "$(dirname "$0")/.."
PATH="$PATH:${CUDA_HOME:-/usr/local/cuda}/bin"
command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer: not found" >&2; exit 1; }
device=${1:-}
if [ -z "$device" ]; then
    device=$(cargo test -p cuda --test device --no-run --message-format=json | sed -n 's/.*"executable":"\([^"]*device[^"]*\)".*/\1/p')
fi
for tool in memcheck racecheck; do
    for scheme in bf16 q8_0 q4_1 q4_0; do
        echo "== $tool, $scheme"
        compute-sanitizer --tool "$tool" --error-exitcode 3 "$device" gates "kipp-tiny:$scheme:2" \
            logits,chunking,batched,mixed,sampling,kv-q8_0,far-context,far-kv-q8_0
    done
done

#!/usr/bin/env bash
# Holds kipp against llama.cpp on the same files: token ids, logits of each program's files, blocks of q8_0, squared
# errors. Needs llama.cpp's sources and its static libraries (cmake -DBUILD_SHARED_LIBS=OFF, target llama), and
# Python with numpy.
#
#     tests/llama_cpp/run.sh SOURCES BUILD [FOLDER]
#
# FOLDER, a new one if left out, is left with the files, their logits and the tables.
set -euo pipefail
sources=$1 build=$2 work=${3:-$(mktemp -d)}
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
mkdir -p "$work"
python3 -c "import numpy"  # before everything else, since it is asked for last

cargo build --release --quiet
kipp=target/release/kipp
[ -x "$work/peer" ] || g++ -O1 -std=c++17 -fopenmp -I"$sources/include" -I"$sources/ggml/include" "$here/peer.cpp" -o "$work/peer" \
    "$build/src/libllama.a" "$build/ggml/src/libggml.a" "$build/ggml/src/libggml-cpu.a" "$build/ggml/src/libggml-base.a" -ldl

# The same checkpoint in every type that each program writes.
rm -f "$work"/*.gguf
"$kipp" quantize kipp-tiny --scheme bf16 --out "$work/bf16.gguf" >/dev/null
for scheme in q8_0 q4_1 q4_0; do
    "$kipp" quantize kipp-tiny --scheme "$scheme" --out "$work/kipp-$scheme.gguf" >/dev/null
done
for type in F16 Q8_0 Q4_1 Q4_0 Q4_K_S Q4_K_M Q5_K_M Q6_K; do
    "$work/peer" quantize "$work/bf16.gguf" "$work/llama-$type.gguf" "$type"
done

# llama.cpp rounds activations to 8 bits before it multiplies them with quantised weights, so its logits from such a
# file differ by more than the files do. Its own decoding of the same weights to f32 takes that away: what is left
# between the programs is then the weights' meaning and the rest of the arithmetic.
python3 - "$work" <<'PYTHON'
import pathlib, struct, sys
tokens = pathlib.Path("crates/engine/tests/data/goldens/valid.u16").read_bytes()[: 2 * 256]
ids = struct.unpack(f"<{len(tokens) // 2}H", tokens)
pathlib.Path(sys.argv[1], "ids.u32").write_bytes(struct.pack(f"<{len(ids)}I", *ids))
PYTHON
for file in "$work"/bf16.gguf "$work"/kipp-*.gguf "$work"/llama-*.gguf; do
    name=$(basename "$file" .gguf)
    "$work/peer" quantize "$file" "$work/plain.f32" F32
    "$work/peer" logits "$work/plain.f32" "$work/ids.u32" "$work/$name.logits"
    "$work/peer" logits "$file" "$work/ids.u32" "$work/$name.rounded"
done
rm -f "$work/plain.f32"
KIPP_LLAMA_CPP=$work cargo test --release --quiet -p cpu --test tiny -- --ignored --nocapture llama_cpp | tee "$work/logits.md"
"$kipp" convert --synthetic --checkpoint qwen3-0.6b --scheme q4_0 --out "$work/family.gguf"
python3 "$here/compare.py" "$work" | tee "$work/files.md"

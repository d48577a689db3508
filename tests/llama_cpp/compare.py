#!/usr/bin/env python3
"""Compares what run.sh left in a folder: stored blocks, squared errors, token ids.

    compare.py FOLDER
"""
import json
import pathlib
import struct
import subprocess
import sys

import numpy as np

FOLDER = pathlib.Path(sys.argv[1])
BLOCK_BYTES = {"q8_0": 34, "q4_1": 20, "q4_0": 18}
NUMBERS = {"q8_0": 8, "q4_1": 3, "q4_0": 2, "bf16": 30}
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def tensors(path):
    """Name -> (type, bytes of a GGUF's tensor)."""
    data = path.read_bytes()
    at = 8

    def number(form):
        nonlocal at
        (value,) = struct.unpack_from("<" + form, data, at)
        at += struct.calcsize(form)
        return value

    def string():
        nonlocal at
        length = number("Q")
        at += length
        return data[at - length : at].decode()

    def skip(kind):
        nonlocal at
        if kind == 8:
            string()
        elif kind == 9:
            element, count = number("I"), number("Q")
            for _ in range(count):
                skip(element)
        else:
            at += SIZES[kind]

    count, pairs, alignment = number("Q"), number("Q"), 32
    for _ in range(pairs):
        key, kind = string(), number("I")
        if key == "general.alignment":
            alignment = number("I")
        else:
            skip(kind)
    table = []
    for _ in range(count):
        name = string()
        dims = [number("Q") for _ in range(number("I"))]
        table.append((name, dims, number("I"), number("Q")))
    start = -(-at // alignment) * alignment
    found = {}
    for name, dims, kind, offset in table:
        scheme = next((s for s, n in NUMBERS.items() if n == kind), None)
        if scheme is None:
            continue
        elements = int(np.prod(dims))
        size = elements * 2 if scheme == "bf16" else elements // 32 * BLOCK_BYTES[scheme]
        found[name] = scheme, np.frombuffer(data, np.uint8, size, start + offset)
    return found


def decode(scheme, data):
    if scheme == "bf16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    blocks = data.reshape(-1, BLOCK_BYTES[scheme])
    half = lambda i: blocks[:, i : i + 2].copy().view(np.float16).astype(np.float64)
    if scheme == "q8_0":
        return (half(0) * blocks[:, 2:].view(np.int8)).ravel()
    head = 4 if scheme == "q4_1" else 2
    codes = np.concatenate([blocks[:, head:] & 15, blocks[:, head:] >> 4], axis=1).astype(np.float64)
    return (half(0) * codes + half(2) if scheme == "q4_1" else half(0) * (codes - 8)).ravel()


exact = {name: decode(*tensor) for name, tensor in tensors(FOLDER / "bf16.gguf").items()}
print("| scheme | squared error of the layers' matrices, kipp / llama.cpp | bytes that differ |\n|---|---|---|")
for scheme in BLOCK_BYTES:
    ours = tensors(FOLDER / f"kipp-{scheme}.gguf")
    theirs = tensors(FOLDER / f"llama-{scheme.upper()}.gguf")
    shared = [name for name in ours if name in theirs and ours[name][0] == theirs[name][0] == scheme]
    error = lambda files: sum(((decode(*files[name]) - exact[name]) ** 2).sum() for name in shared)
    different = sum(int((ours[name][1] != theirs[name][1]).sum()) for name in shared)
    total = sum(len(ours[name][1]) for name in shared)
    print(f"| {scheme} | {error(ours) / error(theirs):.4f} | {different} of {total} in {len(shared)} tensors |")
    if scheme == "q8_0":
        assert different == 0, "q8_0 is the reference encoder's"
    else:
        assert error(ours) < error(theirs)

vocabulary = FOLDER / "family.gguf"
if vocabulary.exists():
    cases = [json.loads(line) for line in open("crates/text/tests/data/tokenizer-cases.jsonl")]
    # llama.cpp does not normalise, so it gets the text that the reference ids spell, which is normalised by the tables
    # of the reference tokenizer.
    words = lambda ids: struct.pack(f"<{1 + len(ids)}i", len(ids), *ids)
    stdin = b"".join(words(case["ids"]) for case in cases)
    peer = subprocess.run([FOLDER / "peer", "tokenize", vocabulary], input=stdin, capture_output=True, check=True)
    lines = [json.loads(line) for line in peer.stdout.splitlines()]
    wrong = [(case["text"], case["ids"], ids) for case, ids in zip(cases, lines) if case["ids"] != ids]
    print(f"\n{len(cases) - len(wrong)} of {len(cases)} texts have the same ids in llama.cpp")
    for text, expected, found in wrong[:10]:
        print(f"  {text!r}: {expected}, llama.cpp {found}")

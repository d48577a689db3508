#!/usr/bin/env python3
"""Makes the compact vocabulary that is compiled into kipp from a published Qwen3 tokenizer.json.

    python3 scripts/make_vocabulary.py tokenizer.json crates/model/data/qwen3-merges.bin

In this family the id of merge i is 256 + i, so the vocabulary is its merge list: 151,387 pairs of ids,
each two little-endian 24-bit numbers (908,322 bytes). Ids 0-255 are the bytes in GPT-2's order. The
script proves all of that for the file it reads, and that the added tokens are the 26 that
crates/model/src/vocabulary.rs lists, before it writes anything.
"""
import json
import pathlib
import re
import sys


def byte_alphabet():
    """GPT-2's printable stand-in of each byte, in the order of ids 0-255."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return [chr(b) for b in printable] + [chr(256 + i) for i in range(len(others))]


def main():
    source, target = sys.argv[1:]
    tokenizer = json.load(open(source, encoding="utf-8"))
    vocab, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in merges]

    assert len(vocab) == 256 + len(merges)
    for i, symbol in enumerate(byte_alphabet()):
        assert vocab[symbol] == i, f"byte symbol {symbol!r} has id {vocab[symbol]}, expected {i}"
    for i, (left, right) in enumerate(merges):
        assert vocab[left + right] == 256 + i, f"merge {i} makes id {vocab[left + right]}"

    root = pathlib.Path(__file__).resolve().parent.parent
    listed = re.findall(r'added\("([^"]+)", (true|false)\)', (root / "crates/model/src/vocabulary.rs").read_text())
    found = sorted(tokenizer["added_tokens"], key=lambda a: a["id"])
    assert [a["id"] for a in found] == list(range(len(vocab), len(vocab) + len(found)))
    assert [(a["content"], str(a["special"]).lower()) for a in found] == listed
    assert not any(a["lstrip"] or a["rstrip"] or a["single_word"] or a["normalized"] for a in found)

    with open(target, "wb") as out:
        for pair in merges:
            for symbol in pair:
                out.write(vocab[symbol].to_bytes(3, "little"))
    print(f"{len(merges)} merges, {len(found)} added tokens, {6 * len(merges)} bytes")


main()

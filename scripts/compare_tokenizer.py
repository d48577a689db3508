#!/usr/bin/env python3
"""Times kipp's tokenizer against the Hugging Face `tokenizers` library (pip install tokenizers), one
thread each, in one run, and checks that both produced the same ids.

    python3 scripts/compare_tokenizer.py tokenizer.json [FILE]

Without FILE the text is 10 MB of English (Python's language reference, as pydoc carries it) and code
(Python's standard library), in alternating stretches.
"""
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time

os.environ["RAYON_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
from tokenizers import Tokenizer, __version__  # noqa: E402


def mixed_text(size):
    """English and code in equal parts, `size` bytes in all; the same on every run of one Python."""
    import pydoc_data.topics

    prose = [p for topic in pydoc_data.topics.topics.values() for p in topic.split("\n\n")]
    library = sorted(pathlib.Path(os.__file__).parent.glob("*.py"))
    code = [c for f in library for c in f.read_text("utf-8").split("\n\n")]
    draw, parts, total = random.Random(1), [], 0
    while total < size:
        source = (prose, code)[len(parts) % 2]
        start = draw.randrange(len(source))
        part = "\n\n".join(source[start : start + 20]) + "\n\n"
        parts.append(part)
        total += len(part.encode())
    return "".join(parts)


def digest(ids):
    value = 0xCBF29CE484222325
    for i in ids:
        value = (value ^ i) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return f"{value:x}"


def main():
    reference = Tokenizer.from_file(sys.argv[1])
    text = pathlib.Path(sys.argv[2]).read_text("utf-8") if len(sys.argv) > 2 else mixed_text(10_000_000)
    megabytes = len(text.encode()) / 1e6

    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        ids = reference.encode_batch_fast([text], add_special_tokens=False)[0].ids  # its fastest way
        seconds.append(time.perf_counter() - start)
    theirs = statistics.median(seconds)

    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        root = pathlib.Path(__file__).resolve().parent.parent
        command = ["cargo", "bench", "-q", "-p", "text", "--bench", "encode", "--", file.name]
        result = json.loads(subprocess.run(command, cwd=root, check=True, stdout=subprocess.PIPE).stdout)
    ours = statistics.median(result["seconds"])

    same = result["digest"] == digest(ids) and result["tokens"] == len(ids)
    print(f"{megabytes:.1f} MB, {len(ids)} tokens, ids {'equal' if same else 'DIFFER'}")
    print(f"tokenizers {__version__}: {theirs:.3f} s, {megabytes / theirs:.1f} MB/s")
    print(f"kipp: {ours:.3f} s, {megabytes / ours:.1f} MB/s; ready in {1000 * result['ready']:.1f} ms")
    print(f"ratio {theirs / ours:.1f}")
    sys.exit(not same)


main()

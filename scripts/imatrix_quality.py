#!/usr/bin/env python3
"""Perplexity of kipp-tiny in every scheme, with and without an importance matrix, as a JSON record.

    imatrix_quality.py KIPP > bench/results/quality/kipp-tiny-imatrix.json

The matrix is made on stories that kipp-tiny itself tells, the perplexity is of the validation tokens of the tests.
"""
import json
import pathlib
import subprocess
import sys
import tempfile

KIPP = sys.argv[1]
TOKENS = pathlib.Path(__file__).parent.parent / "crates/engine/tests/data/goldens/valid.u16"
PROMPTS = ["Once upon a time", "One day", "The", "Lily", "There was a", "Tom and", "It was", "\"Look"]


def kipp(*args):
    return subprocess.run([KIPP, *map(str, args)], check=True, capture_output=True, text=True).stdout


with tempfile.TemporaryDirectory() as folder:
    folder = pathlib.Path(folder)
    draw = ["--temperature", 1, "--max-tokens", 1000, "--ignore-eos"]
    stories = [kipp("generate", "--prompt", p, "--seed", i, *draw) for i, p in enumerate(PROMPTS)]
    (folder / "text").write_text("\n".join(stories))
    kipp("imatrix", "--text", folder / "text", "--out", folder / "imatrix.gguf")

    results = []
    for scheme in ["bf16", "q8_0", "q4_1", "q4_0"]:
        for weighted in [False, True] if scheme.startswith("q4") else [False]:
            model = "kipp-tiny"
            if scheme != "bf16":
                model = folder / f"{scheme}-{weighted}.gguf"
                more = ["--imatrix", folder / "imatrix.gguf"] if weighted else []
                kipp("quantize", "kipp-tiny", "--scheme", scheme, "--out", model, *more)
            found = json.loads(kipp("ppl", model, "--tokens", TOKENS, "--json"))
            results.append({"scheme": scheme, "imatrix": weighted, "perplexity": found["perplexity"], "tokens": found["tokens"]})

git = ["git", "-C", str(pathlib.Path(__file__).parent), "rev-parse", "--short=12", "HEAD"]
commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
record = {"kind": "quality", "checkpoint": "kipp-tiny", "commit": commit, "backend": "cpu", "results": results}
print(json.dumps(record | {"command": "scripts/imatrix_quality.py KIPP"}, indent=1))

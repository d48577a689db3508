#!/usr/bin/env python3
"""What drafts from the text itself are worth: `kipp generate` with and without --spec ngram, in turn, on the same
prompts; checks that the tokens are the same and prints the ratio of decoding rates. Wants a quiet machine.

    cargo build --release
    target/release/kipp convert --synthetic --checkpoint qwen3-0.6b --scheme q4_0 --out model.gguf
    python3 scripts/measure_speculation.py target/release/kipp model.gguf --out bench/results/cpu/speculation.json

About a minute a case on two cores. `--case NAME` measures only one and leaves the others of the record as they are.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys

REPEATING = "The cat sat on the mat. The dog sat on the log. " * 12
PLAIN = "Once there was a quick brown fox, and nobody knew why."
# Made-up weights say one token over and over where it is cold, and never the same again where it is warm. Drawn
# among a few tokens at random they repeat themselves by chance, and drafts come that are mostly wrong.
CASES = {
    # name: prompt, further flags, least ratio that is asked for
    "repetitive": (REPEATING, ["--temperature", "0"], 1.5),
    "no-repetition": (PLAIN, ["--temperature", "30", "--seed", "7"], 0.95),
    "chance-of-2": (REPEATING, ["--temperature", "30", "--top-k", "2", "--seed", "7"], 0.95),
    "chance-of-4": (REPEATING, ["--temperature", "30", "--top-k", "4", "--seed", "7"], 0.95),
}


def generate(args, prompt, flags):
    command = [args.kipp, "generate", args.model, "--prompt", prompt, "--max-tokens", str(args.tokens), "--ignore-eos", "--json"]
    return json.loads(subprocess.run(command + flags, check=True, capture_output=True, text=True).stdout)


def measure(args, name):
    """The record of one case."""
    prompt, flags, least = CASES[name]
    plain, drafting = [], []
    for _ in range(args.rounds):
        without = generate(args, prompt, flags)
        drafted = generate(args, prompt, [*flags, "--spec", "ngram"])
        if without["ids"] != drafted["ids"]:
            sys.exit(f"{name}: the tokens differ")
        plain.append(without["timings"]["decode_tokens_per_s"])
        drafting.append(drafted["timings"]["decode_tokens_per_s"])
    result = {
        "name": name,
        "prompt": prompt,
        "flags": flags,
        "tokens": args.tokens,
        "plain_tokens_per_s": plain,
        "drafting_tokens_per_s": drafting,
        "ratio": statistics.median(drafting) / statistics.median(plain),
        "least": least,
        "passes_ratio": without["forward_passes"] / drafted["forward_passes"],
        "drafted": drafted["drafted_tokens"],
        "accepted": drafted["accepted_tokens"],
    }
    print(f"{name}: {statistics.median(plain):.1f} -> {statistics.median(drafting):.1f} tokens/s, ratio {result['ratio']:.2f} "
          f"(at least {least}); {result['passes_ratio']:.2f} times fewer passes; "
          f"{result['accepted']} of {result['drafted']} drafted tokens right", flush=True)
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kipp", help="the binary")
    parser.add_argument("model", help="a model file")
    parser.add_argument("--case", choices=CASES, action="append", help="all if left out")
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out")
    args = parser.parse_args()

    results = {}
    if args.out and os.path.exists(args.out):
        results = {result["name"]: result for result in json.load(open(args.out))["results"]}
    for name in args.case or CASES:
        results[name] = measure(args, name)
        if args.out:
            bench = [args.kipp, "bench", "--pp", "1", "--tg", "0", "--reps", "1", "--json"]
            made = json.loads(subprocess.run(bench, check=True, capture_output=True, text=True).stdout)["made"]
            # Names without this machine's folders.
            made["command"] = " ".join(["scripts/measure_speculation.py", *map(os.path.basename, sys.argv[1:])])
            record = {"kind": "speculation", "made": made, "model": os.path.basename(args.model), "results": list(results.values())}
            with open(args.out, "w") as file:
                json.dump(record, file, indent=1)
                file.write("\n")
    short = [name for name, result in results.items() if result["ratio"] < result["least"]]
    if short:
        sys.exit("below what is asked for: " + ", ".join(short))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""What drafts from the text itself are worth: `kipp generate` with and without --spec ngram, in turn, on the same
prompts; checks that the tokens are the same and prints the ratio of decoding rates. Wants a quiet machine.

    cargo build --release
    python3 scripts/measure_speculation.py target/release/kipp --out bench/results/cpu/speculation.json
"""

import argparse
import json
import statistics
import subprocess
import sys

REPEATING = "The cat sat on the mat. The dog sat on the log. " * 12
PLAIN = "Once there was a quick brown fox, and nobody knew why."
# Made-up weights say one token over and over; how warm they must be to stop that was tried out.
CASES = [
    # name, prompt, further flags, least ratio that is asked for
    ("repetitive text, greedy", REPEATING, [], 1.5),
    ("no repetition, temperature 30", PLAIN, ["--temperature", "30", "--seed", "7"], 0.95),
    ("some repetition, temperature 15", REPEATING, ["--temperature", "15", "--seed", "7"], 0.95),
]


def generate(kipp, model, prompt, flags, tokens):
    command = [kipp, "generate", *model, "--prompt", prompt, "--max-tokens", str(tokens), "--ignore-eos", "--json", *flags]
    answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return command, answer


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kipp")
    parser.add_argument("--model", default="--synthetic qwen3-0.6b --scheme q4_0")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out")
    args = parser.parse_args()
    model = args.model.split()

    results, short = [], []
    for name, prompt, flags, least in CASES:
        plain, drafting = [], []
        for _ in range(args.rounds):
            _, without = generate(args.kipp, model, prompt, flags, args.tokens)
            command, with_drafts = generate(args.kipp, model, prompt, [*flags, "--spec", "ngram"], args.tokens)
            if without["ids"] != with_drafts["ids"]:
                sys.exit(f"{name}: the tokens differ")
            plain.append(without["timings"]["decode_tokens_per_s"])
            drafting.append(with_drafts["timings"]["decode_tokens_per_s"])
        ratio = statistics.median(drafting) / statistics.median(plain)
        passes = without["forward_passes"] / with_drafts["forward_passes"]
        accepted, drafted = with_drafts["accepted_tokens"], with_drafts["drafted_tokens"]
        print(f"{name}: {statistics.median(plain):.1f} -> {statistics.median(drafting):.1f} tokens/s, ratio {ratio:.2f} "
              f"(at least {least}); {passes:.2f} times fewer passes; {accepted} of {drafted} drafted tokens right")
        if ratio < least:
            short.append(name)
        results.append({
            "name": name, "plain_tokens_per_s": plain, "drafting_tokens_per_s": drafting, "ratio": ratio, "least": least,
            "passes_ratio": passes, "drafted": drafted, "accepted": accepted, "command": " ".join(command[1:]),
        })
    if args.out:
        made = json.loads(subprocess.run([args.kipp, "bench", "--pp", "1", "--tg", "0", "--reps", "1", "--json"], check=True,
                                         capture_output=True, text=True).stdout)["made"]
        with open(args.out, "w") as file:
            json.dump({"kind": "speculation", "made": made, "model": args.model, "results": results}, file, indent=1)
            file.write("\n")
    if short:
        sys.exit("below what is asked for: " + ", ".join(short))


if __name__ == "__main__":
    main()

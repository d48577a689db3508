#!/usr/bin/env python3
"""kipp and its peers on the same files, in turn: one table of medians, losing rows included.

    python3 scripts/peers.py --kipp target/release/kipp --llama-bench PATH --files a.gguf b.gguf --out peers.json
    python3 scripts/peers.py --kipp target/release/kipp --threads 1,2 --llama-bench gcc=PATH clang=PATH --files a.gguf \
        --kipp-depth 8192 --kipp-batch 8
    python3 scripts/peers.py --kipp target/release/kipp --backend cuda --files 4b.gguf \
        --vllm-python venv/bin/python --vllm-model DIR --llama-bench PATH

Each round runs every engine once on every file, so that whatever else the machine does meets all of them; each engine
runs a test once before the run that counts. Peers whose paths are not given are left out; several builds of llama.cpp
are told apart by names. What a rate means depends on where the host has put the processors: the record holds what kipp
measured of the machine beside each of its runs. vLLM reads the published folder that the file was made
from, one --vllm-model for each file, in bf16.
"""

import argparse
import json
import pathlib
import platform
import re
import statistics
import subprocess
import sys


def output_of(command):
    """What a command prints; its diagnostics go to ours."""
    print("+", " ".join(command), file=sys.stderr)
    return subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout


def name_of(prompt, generated, depth):
    """A test's name, as `kipp bench` and llama-bench write it."""
    test = f"pp{prompt}" if prompt else f"tg{generated}"
    return test if depth == 0 else f"{test} @ d{depth}"


def numbers(values):
    return ",".join(str(value) for value in values)


def kipp(args, file, threads, pp=None, tg=None, depth=None, batch=(1,)):
    pp, tg, depth = pp or args.pp, tg or args.tg, depth or args.depth
    command = [args.kipp, "bench", file, "--backend", args.backend, "--pp", numbers(pp), "--tg", numbers(tg)]
    command += ["--depth", numbers(depth), "--batch", numbers(batch), "--reps", "1", "--json"]
    command += ["--threads", str(threads)] if threads else []
    record = json.loads(output_of(command))
    kept = ["threads", "peak_read_bytes_per_s", "peak_operations_per_s", "instruction_peaks", "handover_s"]
    args.peaks.append({"file": pathlib.Path(file).name} | {field: record.get(field) for field in kept})
    return {entry["name"]: entry["tokens_per_s"] for entry in record["results"]}


def kipp_alone(args, file, threads):
    """What peers are not asked for."""
    rates = {}
    if args.kipp_depth:
        rates |= kipp(args, file, threads, pp=args.pp, tg=args.tg, depth=args.kipp_depth)
    if args.kipp_batch:
        rates |= kipp(args, file, threads, pp=[0], tg=args.tg, depth=[0], batch=args.kipp_batch)
    return rates


def llama(program):
    def measure(args, file, threads):
        command = [program, "-m", file, "-p", numbers(args.pp), "-n", numbers(args.tg), "-d", numbers(args.depth)]
        command += ["-r", "1", "-o", "json", "-ngl", "99" if args.backend == "cuda" else "0"]
        command += ["-fa", "1"] if args.backend == "cuda" else []
        command += ["-t", str(threads)] if threads else []
        entries = json.loads(output_of(command))
        return {name_of(e["n_prompt"], e["n_gen"], e["n_depth"]): e["avg_ts"] for e in entries}

    return measure


def vllm(args, file, _threads):
    model = args.vllm_model[args.files.index(file)]
    worker = [args.vllm_python, __file__, "--worker", json.dumps([model, args.pp, args.tg, args.depth])]
    return json.loads(output_of(worker).splitlines()[-1])


def vllm_worker(task):
    """Runs under vLLM's Python: prints the rates as the last line."""
    import time

    from vllm import LLM, SamplingParams

    model, prompts, generated, depths = json.loads(task)
    longest = max(depths) + max(prompts + generated) + 1
    engine = LLM(model, dtype="bfloat16", max_model_len=longest, enable_prefix_caching=False)

    def seconds(prompt, tokens):
        ids = [(7919 * position) % 150_000 for position in range(prompt)]
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        start = time.perf_counter()
        engine.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        return time.perf_counter() - start

    rates = {}
    for depth in depths:
        for prompt in prompts:
            # What the prompt takes beyond what is there before it.
            before = seconds(depth, 1) if depth else 0.0
            rates[name_of(prompt, 0, depth)] = prompt / (seconds(depth + prompt, 1) - before)
        for tokens in generated:
            prompt = max(depth, 1)
            # The first token comes with the prompt.
            rates[name_of(0, tokens, depth)] = tokens / (seconds(prompt, tokens + 1) - seconds(prompt, 1))
    print(json.dumps(rates))


def table(results, engines):
    """Markdown: a row for each file and test; the fastest in bold, and the ratio to the best peer."""
    peers = engines[1:]
    lines = ["| file | test | " + " | ".join(engines) + " | kipp / best peer |", "|---" * (3 + len(engines)) + "|"]
    for row in results:
        best = max(row["median"].values())
        cells = []
        for engine in engines:
            rate = row["median"].get(engine)
            cell = "-" if rate is None else f"{rate:,.1f}"
            cells.append(f"**{cell}**" if rate == best else cell)
        rivals = [row["median"][peer] for peer in peers if peer in row["median"]]
        ratio = f"{row['median']['kipp'] / max(rivals):.2f}" if rivals and "kipp" in row["median"] else "-"
        lines.append(f"| {row['file']} | {row['test']} | " + " | ".join(cells) + f" | {ratio} |")
    return "\n".join(lines) + "\n"


def main():
    whole = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kipp", required=True)
    parser.add_argument("--llama-bench", nargs="*", default=[], metavar="[NAME=]PATH")
    parser.add_argument("--vllm-python")
    parser.add_argument("--vllm-model", nargs="*", default=[])
    parser.add_argument("--files", nargs="+", required=True)
    parser.add_argument("--backend", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=whole, default=[0], help="each of these; 0 is a program's own choice")
    parser.add_argument("--pp", type=whole, default=[512])
    parser.add_argument("--tg", type=whole, default=[32])
    parser.add_argument("--depth", type=whole, default=[0])
    parser.add_argument("--kipp-depth", type=whole, default=[], help="kipp alone, once, at these depths")
    parser.add_argument("--kipp-batch", type=whole, default=[], help="kipp alone, once, with so many sequences")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    if args.vllm_python and len(args.vllm_model) != len(args.files):
        parser.error(f"--vllm-model: expected {len(args.files)}, one for each file, found {len(args.vllm_model)}")
    if args.rounds < 1:
        parser.error(f"--rounds: expected 1 or more, found {args.rounds}")

    args.peaks = []
    engines = {"kipp": kipp}
    for given in args.llama_bench:
        name, _, program = given.rpartition("=")
        engines[f"llama.cpp {name}".strip()] = llama(program)
    engines |= {"vLLM": vllm} if args.vllm_python else {}
    rates = {}
    runs = [(file, threads) for file in args.files for threads in args.threads]
    for _ in range(args.rounds):
        for file, threads in runs:
            for engine, measure in engines.items():
                for test, rate in measure(args, file, threads).items():
                    test += f", {threads} threads" if threads else ""
                    rates.setdefault((file, test), {}).setdefault(engine, []).append(rate)
    for file, threads in runs:
        for test, rate in kipp_alone(args, file, threads).items():
            test += f", {threads} threads" if threads else ""
            rates.setdefault((file, test), {}).setdefault("kipp", [rate])
    results = [
        {
            "file": pathlib.Path(file).name,
            "test": test,
            "median": {engine: statistics.median(samples) for engine, samples in by_engine.items()},
            "samples": by_engine,
        }
        for (file, test), by_engine in rates.items()
    ]
    print(table(results, list(engines)), end="")
    if args.out:
        record = {
            "kind": "peers",
            "machine": {"processor": processor(), "system": platform.platform()},
            # Names without this machine's folders.
            "command": " ".join(["scripts/peers.py", *(re.sub("[^=]*/", "", word) for word in sys.argv[1:])]),
            "kipp": output_of([args.kipp, "--version"]).strip(),
            "rounds": args.rounds,
            "peaks": args.peaks,
            "results": results,
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n")


def processor():
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        vllm_worker(sys.argv[2])
    else:
        main()

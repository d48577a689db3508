#!/usr/bin/env python3
"""What serving costs: `kipp serve` against `kipp bench` on one model file, and what a cached prompt saves.

    cargo build --release
    target/release/kipp convert --synthetic --checkpoint qwen3-0.6b --scheme q4_0 --out model.gguf
    python3 bench/serving.py target/release/kipp model.gguf > bench/results/serving/NAME.json

Prints a record: the rate of 32 streams over HTTP and that of `kipp bench` with 32 sequences, measured in turn, and
the time to the first token of prompts that are new and that were just read. Needs nothing but Python.
"""

import argparse
import asyncio
import glob
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import time


def processor():
    try:
        info = open("/proc/cpuinfo").read()
        return re.search(r"model name\s*: (.*)", info).group(1)
    except (OSError, AttributeError):
        return platform.processor()


class Server:
    """`kipp serve` on a free port, until the block ends."""

    def __init__(self, options, *flags):
        self.command = [options.kipp, "serve", options.model, "--port", "0", *flags, *options.flags]

    def __enter__(self):
        self.process = subprocess.Popen(self.command, stderr=subprocess.PIPE, text=True)
        for line in self.process.stderr:
            found = re.search(r"listens on http://([\d.]+):(\d+)", line)
            if found:
                self.host, self.port = found.group(1), int(found.group(2))
                break
        else:
            sys.exit("the server did not start")
        # Its log must be read, or it would wait.
        self.drain = asyncio.get_event_loop().run_in_executor(None, self.process.stderr.read)
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()

    def resident(self):
        """Resident memory in bytes, where the system tells it."""
        try:
            status = open(f"/proc/{self.process.pid}/status").read()
            return int(re.search(r"VmRSS:\s*(\d+)", status).group(1)) * 1024
        except OSError:
            return None

    def seconds(self):
        """Processor time so far of the threads that compute, and of the others; Linux only."""
        spent = {"computing": 0.0, "others": 0.0}
        for task in glob.glob(f"/proc/{self.process.pid}/task/*/stat"):
            name, rest = re.match(r"\d+ \((.*)\) (.*)", open(task).read()).groups()
            ticks = sum(map(int, rest.split()[11:13]))
            computing = name == "engine" or name.startswith("kipp-cpu")
            spent["computing" if computing else "others"] += ticks / os.sysconf("SC_CLK_TCK")
        return spent

    async def stream(self, prompt, tokens):
        """The times at which a greedy completion's tokens arrived, and the time it was asked for."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        body = json.dumps({
            "prompt": prompt, "max_tokens": tokens, "stream": True, "temperature": 0,
            "ignore_eos": True, "logprobs": 0,
        }).encode()
        asked = time.perf_counter()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: kipp\r\nConnection: close\r\n"
                     b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        times, tail = [], b""
        while chunk := await reader.read(1 << 16):
            now = time.perf_counter()
            # With logprobs every token has an event, also where its text waits for the next. A chunk may
            # end inside what is counted.
            text = tail + chunk
            times += [now] * (text.count(b'"token_logprobs":[') - tail.count(b'"token_logprobs":['))
            tail = text[-20:]
        writer.close()
        if b"[DONE]" not in tail:
            sys.exit(f"the stream broke off: {text[-400:]!r}")
        return asked, times


async def rate(server, streams, depth, tokens):
    """Tokens a second while all streams are decoding."""
    dice = random.Random(streams)
    prompts = [[dice.randrange(1000, 150_000) for _ in range(depth)] for _ in range(streams)]
    answers = await asyncio.gather(*(server.stream(prompt, tokens) for prompt in prompts))
    times = [sorted(times) for _, times in answers]
    start, end = max(t[0] for t in times), min(t[-1] for t in times)
    return sum(start < t <= end for one in times for t in one) / (end - start)


def bench(options, streams, depth, tokens):
    command = [options.kipp, "bench", options.model, "--pp", "0", "--tg", str(tokens), "--depth", str(depth),
               "--batch", str(streams), "--reps", "3", "--json", *options.flags]
    record = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return record["results"][0]["tokens_per_s"], record["made"]


async def first_token(server, length, times):
    """Seconds to the first token of new prompts and of the same prompts again."""
    cold, warm = [], []
    for seed in range(times):
        dice = random.Random(length + seed)
        prompt = [dice.randrange(1000, 150_000) for _ in range(length)]
        for seconds in (cold, warm):
            asked, arrived = await server.stream(prompt, 1)
            seconds.append(arrived[0] - asked)
    return {
        "prompt_tokens": length,
        "cold_s": cold,
        "repeated_s": warm,
        "cold_over_repeated": statistics.median(cold) / statistics.median(warm),
    }


async def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kipp", help="the binary")
    parser.add_argument("model", help="a model file")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--depth", type=int, default=32, help="tokens of each stream's prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens that each stream generates")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, nargs="*", default=[1900, 6890], help="lengths of repeated prompts")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="for both verbs, e.g. --threads 2")
    options = parser.parse_args()
    shape = (options.streams, options.depth, options.tokens)

    served, alone, others, made = [], [], [], None
    for _ in range(options.rounds):
        figure, made = bench(options, *shape)
        alone.append(figure)
        with Server(options, "--max-seqs", str(options.streams), "--ctx", "1024") as server:
            await rate(server, *shape)  # The first time, pages are touched for the first time.
            before = server.seconds()
            served.append(await rate(server, *shape))
            after = server.seconds()
            others.append((after["others"] - before["others"]) / (after["computing"] - before["computing"]))
    first, resident = [], None
    if options.prompts:
        with Server(options, "--max-seqs", "2", "--ctx", str(max(options.prompts) + 256)) as server:
            for length in options.prompts:
                first.append(await first_token(server, length, options.rounds))
            resident = server.resident()
    json.dump({
        "kind": "serving",
        "made": {**made, "command": "bench/serving.py " + " ".join(sys.argv[1:])},
        "processor": processor(),
        "streams": options.streams,
        "prompt_tokens": options.depth,
        "generated_tokens": options.tokens,
        "http_tokens_per_s": served,
        "bench_tokens_per_s": alone,
        "http_over_bench": statistics.median(served) / statistics.median(alone),
        "processor_time_beside_computing": others,
        "first_token": first,
        "resident_bytes": resident,
    }, sys.stdout, indent=1)
    print()


asyncio.run(main())

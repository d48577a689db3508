#!/usr/bin/env python3
"""What serving costs: `kipp serve` against `kipp bench` on one model file, and what a cached prompt saves.

    cargo build --release
    target/release/kipp convert --synthetic --checkpoint qwen3-0.6b --scheme q4_0 --out model.gguf
    python3 bench/serving.py target/release/kipp model.gguf > bench/results/serving/NAME.json
    python3 bench/serving.py target/release/kipp model.gguf --rounds 0 --prompts 1900 6890 > ...

Prints a record: the rate of 32 streams over HTTP and that of `kipp bench` with 32 sequences, measured in turn; or the
time to the first token of prompts that are new and that were just read. Needs nothing but Python.
"""

import argparse
import glob
import json
import os
import platform
import random
import re
import selectors
import socket
import statistics
import subprocess
import sys
import threading
import time

# How often the client looks at its sockets, in seconds, and what it counts.
LOOK = 0.004
TOKEN = b'"token_logprobs":['


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
                self.address = found.group(1), int(found.group(2))
                break
        else:
            sys.exit("the server did not start")
        # Its log must be read, or it would wait.
        threading.Thread(target=self.process.stderr.read, daemon=True).start()
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

    def stream(self, prompts, tokens):
        """Greedy completions of all prompts at once: of each, the times at which its tokens arrived.

        The client shares the processor with what it measures, so it does next to nothing: it looks at its sockets
        every few milliseconds, notes when how many bytes came, and counts the tokens in them once all is over.
        """
        ready, left = selectors.DefaultSelector(), len(prompts)
        arrived = [[] for _ in prompts]
        for prompt, log in zip(prompts, arrived):
            body = json.dumps({
                "prompt": prompt, "max_tokens": tokens, "stream": True, "temperature": 0,
                "ignore_eos": True, "logprobs": 0,
            }).encode()
            stream = socket.create_connection(self.address)
            stream.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: kipp\r\nConnection: close\r\n"
                           b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            ready.register(stream, selectors.EVENT_READ, log)
        while left > 0:
            for key, _ in ready.select():
                data = key.fileobj.recv(1 << 16)
                key.data.append((time.perf_counter(), data))
                if not data:
                    ready.unregister(key.fileobj)
                    key.fileobj.close()
                    left -= 1
            time.sleep(LOOK)
        return [token_times(log) for log in arrived]


def token_times(log):
    """The times of a stream's tokens, from the pieces that it came in."""
    times, tail = [], b""
    for now, data in log:
        # With logprobs every token has an event, also where its text waits for the next. A piece may end
        # inside what is counted.
        text = tail + data
        times += [now] * (text.count(TOKEN) - tail.count(TOKEN))
        tail = text[-20:]
    if b"[DONE]" not in tail:
        sys.exit(f"the stream broke off: {text[-400:]!r}")
    return times


def rate(server, streams, depth, tokens):
    """Tokens a second while all streams are decoding."""
    dice = random.Random(streams)
    prompts = [[dice.randrange(1000, 150_000) for _ in range(depth)] for _ in range(streams)]
    answers = server.stream(prompts, tokens)
    start, end = max(times[0] for times in answers), min(times[-1] for times in answers)
    return sum(start < t <= end for times in answers for t in times) / (end - start)


def bench(options, streams, depth, tokens):
    command = [options.kipp, "bench", options.model, "--pp", "0", "--tg", str(tokens), "--depth", str(depth),
               "--batch", str(streams), "--reps", "1", "--json", *options.flags]
    record = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return record["results"][0]["tokens_per_s"], record["made"]


def first_token(server, length, times):
    """Seconds to the first token of new prompts and of the same prompts again."""
    cold, warm = [], []
    for seed in range(times):
        dice = random.Random(length + seed)
        prompt = [dice.randrange(1000, 150_000) for _ in range(length)]
        for seconds in (cold, warm):
            asked = time.perf_counter()
            seconds.append(server.stream([prompt], 1)[0][0] - asked)
    return {
        "prompt_tokens": length,
        "cold_s": cold,
        "repeated_s": warm,
        "cold_over_repeated": statistics.median(cold) / statistics.median(warm),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kipp", help="the binary")
    parser.add_argument("model", help="a model file")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--depth", type=int, default=32, help="tokens of each stream's prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens that each stream generates")
    parser.add_argument("--rounds", type=int, default=4, help="0 leaves the rates out")
    parser.add_argument("--prompts", type=int, nargs="*", default=[], help="lengths of repeated prompts, e.g. 1900 6890")
    parser.add_argument("--times", type=int, default=2, help="prompts of each length")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="for both verbs, e.g. --threads 2")
    options = parser.parse_args()
    shape = (options.streams, options.depth, options.tokens)

    record = {"kind": "serving", "processor": processor()}
    if options.rounds > 0:
        served, alone, others = [], [], []
        with Server(options, "--max-seqs", str(options.streams), "--ctx", "1024") as server:
            rate(server, options.streams, options.depth, 8)  # Pages are touched for the first time.
            for _ in range(options.rounds):
                figure, made = bench(options, *shape)
                alone.append(figure)
                before = server.seconds()
                served.append(rate(server, *shape))
                after = server.seconds()
                others.append((after["others"] - before["others"]) / (after["computing"] - before["computing"]))
        record |= {
            "made": made,
            "streams": options.streams,
            "prompt_tokens": options.depth,
            "generated_tokens": options.tokens,
            "http_tokens_per_s": served,
            "bench_tokens_per_s": alone,
            "http_over_bench": statistics.median(served) / statistics.median(alone),
            "processor_time_beside_computing": others,
        }
    if options.prompts:
        with Server(options, "--max-seqs", "2", "--ctx", str(max(options.prompts) + 256)) as server:
            record["first_token"] = [first_token(server, length, options.times) for length in options.prompts]
            record["resident_bytes"] = server.resident()
    if "made" not in record:
        record["made"] = bench(options, 1, 0, 1)[1]
    # Names without this machine's folders.
    record["made"]["command"] = " ".join(["bench/serving.py", *map(os.path.basename, sys.argv[1:])])
    json.dump(record, sys.stdout, indent=1)
    print()


main()

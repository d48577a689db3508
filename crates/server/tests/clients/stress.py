"""64 clients at once against a running server: python stress.py URL SECONDS

Every finished answer must equal the one that the same request got alone before; some clients leave early. Afterwards
no KV block may be held. Prints counts, and the server's memory where it runs on this machine as process $KIPP_PID.
"""

import http.client
import json
import os
import random
import sys
import threading
import time
from urllib.parse import urlparse

URL, SECONDS = urlparse(sys.argv[1]), float(sys.argv[2])
CLIENTS, REQUESTS = 64, 48


def ask(body, leave=None):
    """The text of an answer; None if the client left after `leave` bytes."""
    connection = http.client.HTTPConnection(URL.hostname, URL.port, timeout=600)
    connection.request("POST", "/v1/completions", json.dumps(body))
    if leave == 0:
        connection.close()
        return None
    response = connection.getresponse()
    if leave is not None:
        response.read(leave)
        connection.sock and connection.sock.close()
        return None
    data = response.read().decode()
    assert response.status == 200, data
    if not body["stream"]:
        return json.loads(data)["choices"][0]["text"]
    lines = [line[6:] for line in data.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", data[-500:]
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])


def metric(name):
    connection = http.client.HTTPConnection(URL.hostname, URL.port)
    connection.request("GET", "/metrics")
    page = connection.getresponse().read().decode()
    return float(next(l.split()[-1] for l in page.splitlines() if l.startswith(f"kipp_{name}{{")))


def memory():
    if "KIPP_PID" not in os.environ:
        return None
    with open(f"/proc/{os.environ['KIPP_PID']}/status") as status:
        return next(int(line.split()[1]) // 1024 for line in status if line.startswith("VmRSS"))


def requests():
    """Bodies with shared beginnings, several lengths, seeds and temperatures. Answers that are much longer than
    their prompts outgrow a small memory, so that requests lose their blocks and read them again."""
    rng = random.Random(1)
    words = "the a little big cat dog girl boy ran saw went home park and then was very happy sad".split()
    starts = [" ".join(rng.choices(words, k=n)) for n in (5, 60, 300, 700)]
    lengths = [(1, 60), (1, 60), (200, 600)]
    for i in range(REQUESTS):
        yield {"prompt": f"{rng.choice(starts)} {' '.join(rng.choices(words, k=rng.randint(1, 9)))}",
               "max_tokens": rng.randint(*rng.choice(lengths)), "ignore_eos": rng.random() < 0.5,
               "temperature": rng.choice([0, 1]), "seed": i}


def client(number, end, pool, counts, errors):
    rng = random.Random(number)
    while time.time() < end and not errors:
        body, expected = rng.choice(pool)
        leave = rng.choice([0, 1, 300, None, None, None, None])
        try:
            text = ask({**body, "stream": rng.random() < 0.5}, leave)
            if text is not None and text != expected:
                errors.append((body, expected, text))
            counts[text is not None] += 1
        except Exception as error:
            errors.append((body, repr(error)))


def main():
    pool = [(body, ask({**body, "stream": False})) for body in requests()]
    print(f"{len(pool)} answers alone; memory {memory()} MB", flush=True)
    counts, errors = {True: 0, False: 0}, []
    end = time.time() + SECONDS
    clients = [threading.Thread(target=client, args=(n, end, pool, counts, errors)) for n in range(CLIENTS)]
    for thread in clients:
        thread.start()
    middle = threading.Timer(SECONDS / 2, lambda: print(f"half way: memory {memory()} MB", flush=True))
    middle.start()
    for thread in clients:
        thread.join()
    assert not errors, errors[0]
    deadline = time.time() + 20
    while metric("kv_cache_usage_perc") > 0:
        assert time.time() < deadline, "KV blocks are held although nobody is served"
        time.sleep(0.1)
    print(f"{counts[True]} answers equal, {counts[False]} clients left; "
          f"{metric('num_preemptions_total'):.0f} preemptions; memory {memory()} MB")


main()

"""deploy/nginx.conf in front of two `kipp serve` with kipp-tiny: conversations stay with their replica, and
nothing is lost when one is killed or told to stop under load.

    python3 tests/replicas/run.py target/release/kipp

Needs nginx (Debian's package is enough). Of the configuration only the ports are changed, and the guide's lines
for TLS are added.
"""

import http.client
import json
import os
import pathlib
import shutil
import signal
import re
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
CLIENTS = 8
TOKENS = 48


def free_ports(count):
    """Ports that nobody listens on now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def wait_for(what, check, seconds=60):
    """Until `check` holds."""
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, f"{what}: not within {seconds} s"
        time.sleep(0.05)


def request(port, body, conversation=None, path="/v1/chat/completions"):
    """One request: status, the replica that answered, the body's text as far as it came."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    headers = {"Content-Type": "application/json"}
    if conversation:
        headers["X-Conversation-Id"] = conversation
    try:
        connection.request("POST" if body else "GET", path, json.dumps(body) if body else None, headers)
        response = connection.getresponse()
        replica = response.getheader("X-Replica", "")
        try:
            text = response.read()
        except http.client.IncompleteRead as cut:
            text = cut.partial
        except OSError:
            text = b""
        return response.status, replica, text.decode()
    finally:
        connection.close()


def healthy(port):
    try:
        return request(port, None, path="/health")[0] == 200
    except OSError:
        return False


class Replica:
    def __init__(self, kipp, port):
        self.kipp, self.port, self.process = kipp, port, None
        self.start()

    def start(self):
        command = [self.kipp, "serve", "--port", str(self.port), "--threads", "1"]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def stop(self, how):
        self.process.send_signal(how)
        return self.process.wait(timeout=120)


def chat(messages, **more):
    return {
        "messages": messages, "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True,
        "enable_thinking": False, **more,
    }


def answer_of(text, streamed):
    """The answer, or None if it is not complete."""
    if not streamed:
        return json.loads(text)["choices"][0]["message"]["content"]
    events = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    if not events or events[-1] != "[DONE]":
        return None
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events[:-1]]
    return "".join(delta.get("content") or "" for delta in deltas)


class Load:
    """Clients that ask until they are told to stop."""

    def __init__(self, port):
        self.port, self.over, self.lock = port, threading.Event(), threading.Lock()
        self.done = self.moved = self.cut = 0
        self.expected, self.faults = {}, []
        self.threads = [threading.Thread(target=self.client, args=(i,)) for i in range(CLIENTS)]
        for thread in self.threads:
            thread.start()

    def client(self, number):
        turn = 0
        while not self.over.is_set():
            turn += 1
            try:
                self.ask(number, turn)
            except Exception as fault:  # noqa: BLE001 - whatever it is, the test fails with it
                with self.lock:
                    self.faults.append(repr(fault))
                return

    def ask(self, number, turn):
        question, streamed = f"Tell me about number {turn % 5}.", (number + turn) % 2 == 0
        body = chat([{"role": "user", "content": question}], stream=streamed)
        for attempt in range(2):
            status, replica, text = request(self.port, body, f"client {number}")
            assert status == 200, f"{status}: {text[:200]}"
            found = answer_of(text, streamed)
            if found is not None:
                break
            # A stream that broke off: the client knows, and asks again. Whole answers never do.
            assert streamed and attempt == 0, "an answer was lost"
            with self.lock:
                self.cut += 1
        with self.lock:
            self.done += 1
            self.moved += ", " in replica
            assert self.expected.setdefault(question, found) == found, "answers differ"

    def wait(self, more):
        """Until so many more requests are answered."""
        goal = self.done + more
        wait_for(f"{goal} answers", lambda: self.done >= goal or self.faults, 240)

    def end(self):
        self.over.set()
        for thread in self.threads:
            thread.join()
        assert not self.faults, self.faults
        return self


def affinity(port):
    """Every conversation has one replica, whose cache knows its beginning; both are used."""
    home = {}
    for number in range(20):
        name = f"conversation {number}"
        # Longer than a block of the cache, and no other conversation's.
        rules = f"You are narrator {number}. " + "You tell short stories about animals in the forest. " * 6
        messages = [{"role": "system", "content": rules}]
        for turn in range(2):
            messages.append({"role": "user", "content": f"Story {number}, part {turn}, please."})
            status, replica, text = request(port, chat(messages), name)
            assert status == 200, text
            assert home.setdefault(name, replica) == replica, f"{name} has moved"
            value = json.loads(text)
            cached = value["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert (cached > 0) == (turn > 0), f"{name}: {cached} tokens of turn {turn} were in the cache"
            messages.append(value["choices"][0]["message"])
    assert len(set(home.values())) == 2, home
    return home


def configuration(front, first, second, secure):
    """deploy/nginx.conf on these ports, with the guide's lines for TLS."""
    text = (ROOT / "deploy/nginx.conf").read_text()
    for written, port in [(8080, front), (8081, first), (8082, second)]:
        text = text.replace(f"127.0.0.1:{written}", f"127.0.0.1:{port}")
    guide = (ROOT / "docs/serving.md").read_text()
    tls = re.search(r"```nginx\n(.*?)```", guide, re.DOTALL)[1]
    data = ROOT / "crates/server/tests/data"
    for written, here in [
        ("listen 443", f"listen 127.0.0.1:{secure}"),
        ("/etc/ssl/kipp/cert.pem", data / "certificate.pem"),
        ("/etc/ssl/kipp/key.pem", data / "key.pem"),
    ]:
        assert written in tls, written
        tls = tls.replace(written, str(here))
    plain = f"listen 127.0.0.1:{front};\n"
    assert plain in text
    return text.replace(plain, plain + tls)


def over_tls(port):
    """The guide's TLS lines work."""
    trust = ssl.create_default_context(cafile=ROOT / "crates/server/tests/data/certificate.pem")
    trust.check_hostname = False
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=trust, timeout=60)
    connection.request("GET", "/v1/models")
    response = connection.getresponse()
    assert response.status == 200 and b"kipp-tiny" in response.read()
    connection.close()


def main(kipp):
    front, first, second, secure = free_ports(4)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="kipp-replicas-"))
    (folder / "nginx.conf").write_text(configuration(front, first, second, secure))
    replicas = [Replica(kipp, first), Replica(kipp, second)]
    command = ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf"), "-g", "daemon off; pid nginx.pid;"]
    with open(folder / "nginx.log", "w") as log:
        nginx = subprocess.Popen(command, stderr=log)
    try:
        for port in [first, second, front]:
            wait_for(f"port {port}", lambda: healthy(port))
        assert request(front, None, path="/metrics")[0] == 404
        over_tls(secure)
        home = affinity(front)
        first_ones = list(home.values()).count(f"127.0.0.1:{first}")
        print(f"affinity: {len(home)} conversations of two turns, {first_ones} of them on the first replica")

        load = Load(front)
        load.wait(40)
        replicas[0].stop(signal.SIGKILL)
        load.wait(80)
        load.end()
        print(f"killed: {load.done} requests answered, {load.moved} moved by nginx, {load.cut} streams cut and asked again")
        assert load.moved + load.cut > 0, "the kill hit nothing"

        replicas[0].start()
        wait_for("the restarted replica", lambda: healthy(first))
        name = next(name for name, replica in home.items() if replica == f"127.0.0.1:{first}")
        hello = chat([{"role": "user", "content": "Hello"}])
        wait_for(f"{name} at home", lambda: request(front, hello, name)[1] == home[name])
        print("restarted: its conversations are back")

        load = Load(front)
        load.wait(20)
        assert replicas[1].stop(signal.SIGTERM) == 0
        load.wait(40)
        load.end()
        assert load.cut == 0, "a replica that was told to stop has cut a stream"
        print(f"stopped: {load.done} requests answered, {load.moved} moved by nginx, none cut")
    except BaseException:
        print((folder / "nginx.log").read_text()[-4000:], file=sys.stderr)
        raise
    finally:
        nginx.send_signal(signal.SIGTERM)
        nginx.wait(timeout=20)
        for replica in replicas:
            if replica.process.poll() is None:
                replica.stop(signal.SIGKILL)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(os.path.abspath(sys.argv[1]))

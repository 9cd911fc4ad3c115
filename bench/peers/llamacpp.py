"""llama.cpp's own server, built for this processor: requests over HTTP on the loopback, answers streamed."""

import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from bench.peers.answering import Stopwatch, answer, die_with_parent
from bench.peers.conversation import Failed, Load, Times

START_TIMEOUT_S = 120.0
RUN_TIMEOUT_S = 600.0
SERVER = "SHOAL_BENCH_LLAMA_SERVER"  # the path of the program


class LlamaCpp:
    def __init__(self, load: Load) -> None:
        program = os.environ[SERVER]
        self._port = _free_port()
        poll = "0" if os.environ.get("OMP_WAIT_POLICY") == "passive" else "50"
        self.note = f"llama-server, poll {poll}"
        command = [
            program, "--model", load.model, "--host", "127.0.0.1", "--port", str(self._port),
            "--threads", str(load.threads), "--threads-batch", str(load.threads), "--threads-http", "2",
            "--parallel", str(load.sequences_max), "--kv-unified", "--cont-batching",
            # one pool for all slots: as many tokens as the other engines' memory holds
            "--ctx-size", str(max(load.context_len_max, load.sequences_max * 256)),
            "--batch-size", "2048", "--ubatch-size", "512", "--poll", poll, "--no-webui", "--log-disable",
        ]  # fmt: skip
        self._server = subprocess.Popen(command, stdout=sys.stderr, preexec_fn=die_with_parent)
        self._wait()
        version = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
        lines = [line for line in (version.stdout + version.stderr).splitlines() if "version" in line]
        self.version = lines[0].partition("version:")[2].strip() if lines else "unknown"

    def run(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> list[Times]:
        watch = Stopwatch(len(prompts))
        errors: list[BaseException] = []

        def one(index: int) -> None:
            try:
                self._complete(watch, index, prompts[index], output_tokens)
            except BaseException as error:  # raised below, in the caller's thread
                errors.append(error)

        threads = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(RUN_TIMEOUT_S)
        if errors:
            raise errors[0]
        return watch.times()

    def close(self) -> None:
        self._server.terminate()
        self._server.wait(10)

    def _complete(self, watch: Stopwatch, index: int, prompt: Sequence[int], output_tokens: int) -> None:
        body = json.dumps(
            {
                "prompt": list(prompt), "n_predict": output_tokens, "ignore_eos": True, "stream": True,
                "temperature": 0.0, "samplers": ["top_k"], "top_k": 1, "return_tokens": True,
                "cache_prompt": True,
            }
        )  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=RUN_TIMEOUT_S)
        try:
            connection.request("POST", "/completion", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise Failed(f"HTTP {response.status}: {response.read(500)!r}")
            tokens = 0
            for line in response:
                if line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    tokens += len(event.get("tokens") or ())
                    watch.saw(index, tokens)
        finally:
            connection.close()

    def _wait(self) -> None:
        """Until the server has read its model. Raises Failed."""
        end = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < end:
            if self._server.poll() is not None:
                raise Failed(f"llama-server ended with {self._server.returncode}")
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5.0)
            try:
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                pass
            finally:
                connection.close()
            time.sleep(0.2)
        raise Failed(f"llama-server does not answer after {START_TIMEOUT_S:g} s")


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


if __name__ == "__main__":
    answer(LlamaCpp)

"""Machines by husker's daemon, through its REST API."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.peers.rounds import serve

_HOST, _PORT = "127.0.0.1", 7777
_START_S, _ANSWER_S, _STOP_S = 30, 100, 10


class HuskerMachines:
    """A daemon of ours and requests to it, each on a connection of its own."""

    def __init__(self, settings: dict[str, Any]) -> None:
        directory = Path(settings["directory"])
        config = directory / "husker.toml"
        config.write_text(f'data_dir = "{directory / "data"}"\nstate_dir = "{directory / "state"}"\n')
        self._settings = settings
        command = [str(Path(sys.executable).with_name("husker")), "--config", str(config), "daemon"]
        self._daemon = subprocess.Popen([*command, "--listen", f"{_HOST}:{_PORT}"], stdin=subprocess.DEVNULL)
        self._wait_until_it_answers()

    def start(self, vm: str) -> None:
        """Create, which copies the root file system, mounts it to add an agent, and starts the machine."""
        content = {
            "name": vm,
            "vcpu_count": 1,
            "mem_size_mib": self._settings["memory_mib"],
            "kernel_path": self._settings["kernel"],
            "rootfs_path": self._settings["rootfs"],
        }
        state = json.loads(_ask("POST", "/v1/vms", json.dumps(content)))["state"]
        if state != "running":
            raise RuntimeError(f"husker says that {vm} is {state}")

    def remove(self, vm: str) -> None:
        """Delete. It gives the guest three seconds; a stop before it would make them five with a guest that is deaf."""
        _ask("DELETE", f"/v1/vms/{vm}")

    def close(self) -> None:
        """End the daemon as its users do, so that it takes its bridge and rules away."""
        self._daemon.terminate()
        self._daemon.wait(_STOP_S)

    def _wait_until_it_answers(self) -> None:
        deadline_s = time.monotonic() + _START_S
        while True:
            try:
                _ask("GET", "/v1/vms")
            except OSError as error:
                if self._daemon.poll() is not None or time.monotonic() > deadline_s:
                    raise RuntimeError(f"husker's daemon does not answer: {error}") from error
                time.sleep(0.05)
            else:
                return


def _ask(method: str, path: str, content: str | None = None) -> bytes:
    connection = http.client.HTTPConnection(_HOST, _PORT, timeout=_ANSWER_S)
    try:
        headers = {} if content is None else {"Content-Type": "application/json"}
        connection.request(method, path, content, headers)
        answer = connection.getresponse()
        body = answer.read()
    finally:
        connection.close()
    if answer.status >= http.client.BAD_REQUEST:
        raise RuntimeError(f"{method} {path}: {answer.status} {_first_line(body)}")
    return body


def _first_line(body: bytes) -> str:
    """Return what went wrong; below it there may be a log."""
    try:
        text = str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        text = body.decode(errors="replace")
    return text.partition("\n")[0]


if __name__ == "__main__":
    serve(HuskerMachines)

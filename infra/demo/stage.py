"""What the demonstration runs: a fleet file with six kinds of agents, and a coordinator as a process of its own."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import msgspec
import yaml

from infra.demo.plays import Play, program
from infra.embedded.data_directory import DataDirectory, Runtime

START_S = 30.0
STOP_S = 20.0


class Stage:
    """The demonstration's folder and its coordinator, which can be killed and started again."""

    def __init__(self, directory: Path, play: Play) -> None:
        """Write the play's fleet file.

        Raises:
            NotHere: this host or installation cannot play it.
        """
        self.directory = directory
        # A name of its own, so that what an interrupted run left on this host is not taken for this one's.
        self.coordinator = directory.name.replace("_", "-").lower()
        self.data = directory / "data"
        self.config = directory / "fleet.yaml"
        self.log = directory / "coordinator.log"
        self.config.write_text(yaml.safe_dump(play.fleet_file(directory), sort_keys=False), encoding="utf-8")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The coordinator's process."""
        assert self._process is not None, "the coordinator was not started"
        return self._process.pid

    def start(self) -> Runtime:
        """Start the coordinator and return when it says that it is up.

        Raises:
            RuntimeError: it ended, or was not up in time; the message has its last words.
        """
        command = [program("fleetlog"), "--data-dir", str(self.data), "up", "--config", str(self.config)]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("FLEETLOG_")}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--id", self.coordinator],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=environment,
            )
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s:
            runtime = DataDirectory.running(self.data) if self.data.exists() else None
            if runtime is not None and runtime.pid == self.pid:
                return runtime
            if self._process.poll() is not None:
                break
            time.sleep(0.02)
        raise RuntimeError(f"the coordinator did not come up:\n{self.last_words()}")

    def kill(self) -> None:
        """SIGKILL: no handler runs, nothing is flushed."""
        assert self._process is not None, "the coordinator was not started"
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        """End it in order; return its exit code."""
        if self._process is None or self._process.poll() is not None:
            return 0 if self._process is None else self._process.returncode
        self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(STOP_S)
        self._process.kill()
        return self._process.wait()

    def last_words(self, lines: int = 15) -> str:
        """Return the end of what the coordinator wrote."""
        try:
            return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
        except OSError:
            return ""


class Cast(msgspec.Struct, frozen=True, kw_only=True):
    """One of the six: what it was asked for, and which machine it got."""

    job: str
    vm: str

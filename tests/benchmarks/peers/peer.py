"""A peer's process: in namespaces of its own, with everything it writes below one folder, and gone with all it started."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from tests.benchmarks.peers.environment import PeersMissing, fetch_environment, version_of
from tests.benchmarks.stage import Stage, say
from tests.guest.binaries import Binaries
from tests.network_site import namespace, run

PACKAGES = ("smolvm", "husker")
_ROOT = Path(__file__).parents[3]
_ANSWER_S, _END_S = 120, 30
_SEPARATE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
"""A peer that is killed must not leave machines, nor mounts of root file systems: both go with their namespace."""


class Images(NamedTuple):
    """What every side makes its machines of."""

    binaries: Binaries
    kernel: Path
    rootfs: Path
    memory_mib: int


class Times(NamedTuple):
    """One round: all are running, and nothing is left of any."""

    started_ms: float
    gone_ms: float


class Peer:
    """One peer. `trouble` is why its last round has no times, or why it cannot be measured here at all."""

    def __init__(self, package: str, trouble: str = "") -> None:
        self.name = f"{package} {version_of(package)}"
        self.package, self.trouble = package, trouble
        self._process: subprocess.Popen[str] | None = None
        self._log = Path(os.devnull)

    def start(self, python: Path, inside: Path, directory: Path, images: Images) -> None:
        """Start its process; return when it is ready, or in trouble."""
        for each in ("home", "tmp"):
            (directory / each).mkdir(parents=True)
        self._log = directory / "peer.log"
        settings = {
            "directory": str(directory),
            "kernel": str(images.kernel),
            "rootfs": str(images.rootfs),
            "memory_mib": images.memory_mib,
        }
        module = f"tests.benchmarks.peers.drive_{self.package}"
        command = ["nsenter", f"--net={inside}", *_SEPARATE, str(python), "-m", module, json.dumps(settings)]
        environment = {
            "PATH": f"{images.binaries.firecracker.parent}:{os.environ['PATH']}",
            "HOME": str(directory / "home"),
            "TMPDIR": str(directory / "tmp"),
        }
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=_ROOT,
                env=environment,
            )
        self._answer()

    def round(self, count: int) -> Times | None:
        """Have it start and end machines, all at once; None when it could not."""
        if self._process is None:
            return None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then no answer comes, and its log says why
            self._process.stdin.write(f"{count}\n")
            self._process.stdin.flush()
        answer = self._answer()
        return None if answer is None else Times(**answer)

    def close(self) -> None:
        """End its process, and with it everything it started."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.communicate(timeout=_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()

    def _answer(self) -> dict[str, Any] | None:
        assert self._process is not None
        assert self._process.stdout is not None
        line = _line(self._process.stdout)
        answer: dict[str, Any] = json.loads(line) if line else {"error": self._last_words()}
        if not line:
            self.close()
        if "error" not in answer:
            return answer
        self.trouble = _one_line(answer["error"])
        say(f"{self.name}: {answer['error']}")
        return None

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "no answer"


@contextlib.contextmanager
def running_peers(stage: Stage, images: Images) -> Iterator[list[Peer]]:
    """Lend the peers, each in an offline network of its own. What cannot be run here is in trouble, and says why."""
    python, trouble = Path(), ""
    try:
        python = fetch_environment()
    except (PeersMissing, OSError, subprocess.SubprocessError) as error:
        trouble = _one_line(str(error))
        say(f"peers: {trouble}")
    peers = [Peer(package, trouble) for package in PACKAGES]
    with contextlib.ExitStack() as stack:
        for peer in () if trouble else peers:
            inside = stack.enter_context(_offline())
            stack.callback(peer.close)
            peer.start(python, inside, stage.directory(peer.package), images)
        yield peers


@contextlib.contextmanager
def _offline() -> Iterator[Path]:
    """Lend a network with a default route, which peers look for, that leads nowhere."""
    with namespace("peer") as inside:
        run("ip", "link", "add", "up0", "type", "veth", "peer", "name", "down0", inside=inside)
        run("ip", "addr", "add", "198.51.100.2/24", "dev", "up0", inside=inside)
        for link in ("up0", "down0"):
            run("ip", "link", "set", link, "up", inside=inside)
        run("ip", "route", "add", "default", "via", "198.51.100.1", inside=inside)
        yield inside


def _line(stream: IO[str]) -> str:
    ready, _, _ = select.select([stream], [], [], _ANSWER_S)
    return stream.readline() if ready else ""


def _one_line(text: str) -> str:
    """Return a reason that fits a table's cell."""
    return " ".join(text.replace("|", "/").split())[:120]

"""What the demonstration plays: six kinds of agents, as host processes or as microVMs, and the fleet file for each."""

import importlib
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

MUTE = "mute"
"""The sixth: a program that never speaks to us, as an agent that lost its network would."""

BROKEN, BROKEN_CODE = "broken", 3
"""The one that fails on purpose, and how."""

SILENT_S = 8.0
"""How long the agent that never registers is given before its machine is failed."""

PROCESS_JOBS: Mapping[str, str] = {
    "build": "set -e; d=$(mktemp -d); for n in 1 2 3 4 5 6; do printf 'int f%s(void){return %s;}\\n' $n $n > $d/$n.c; "
    "echo compiled $n.c; sleep 1; done; cat $d/*.c | sha256sum; rm -r $d",
    "test": "for suite in unit contract integration acceptance; do sleep 1.5; echo $suite: ok; done",
    "lint": "sleep 1; find /usr/bin -maxdepth 1 -type f | head -200 | wc -l; echo no findings",
    "deploy": "for step in pull stop start probe; do sleep 1.8; echo $step: done; done",
    BROKEN: f"sleep 2; echo 'assertion failed: 41 != 42' >&2; exit {BROKEN_CODE}",
}
"""What five agents do for a living: shell, because every machine has one."""

GUEST_JOBS: Mapping[str, str] = {
    "build": "print compiling; sleep 6000; print done",
    "test": "print unit; busy 400; sleep 4000; print all suites ok",
    "lint": "sleep 1500; print no findings",
    "deploy": "print pulled; sleep 7000; print probed",
    BROKEN: f"sleep 2000; print assertion failed; exit {BROKEN_CODE}",
}
"""The same five for the test guest, which has no shell: see tests/guest/README.md."""

JAILED_USER = 30_000
_PROGRAMS = {"ip": "iproute2", "nft": "nftables", "mkfs.ext4": "e2fsprogs", "gcc": "gcc", "ld": "binutils"}


class Play(Protocol):
    """One way to play it."""

    @property
    def jobs(self) -> tuple[str, ...]:
        """Return the names of the six, the mute one last."""
        ...

    def fleet_file(self, directory: Path) -> dict[str, Any]:
        """Return the fleet file; what else it needs is put into `directory`.

        Raises:
            NotHere: this host or installation cannot play it; the message says what is missing.
        """
        ...


class NotHere(Exception):  # noqa: N818 - a state of the host
    """The demonstration cannot be played here."""


class Processes:
    """Agents as host processes, each under the reference agent."""

    jobs = (*PROCESS_JOBS, MUTE)

    def fleet_file(self, directory: Path) -> dict[str, Any]:
        """Return two scalers: five kinds of workers, and one that stays silent."""
        del directory
        working = [
            {
                "labels": ["demo", name],
                "binary_path": program("fleetlog-agent"),
                "args": ["--", "/bin/sh", "-c", script],
            }
            for name, script in PROCESS_JOBS.items()
        ]
        mute = {"labels": ["demo", MUTE], "binary_path": "/bin/sh", "args": ["-c", "exec sleep 300"]}
        return _fleet({"backend": "bare-metal"}, working, mute)


class Microvms:
    """Agents as jailed microVMs, with the guest of our own tests, in a network of the demonstration's own."""

    jobs = (*GUEST_JOBS, MUTE)

    def prepare(self) -> None:
        """Build the guest and fetch Firecracker, once: while the package index can be reached.

        Raises:
            NotHere: this host or installation cannot play it; the message says what is missing.
        """
        for device in ("/dev/kvm", "/dev/net/tun"):
            if not Path(device).exists():
                raise NotHere(f"microVMs need {device}, which this host does not have")
        for program_name, package in _PROGRAMS.items():
            if shutil.which(program_name) is None:
                raise NotHere(f"microVMs need the program {program_name}: apt-get install {package}")
        _sources()

    def fleet_file(self, directory: Path) -> dict[str, Any]:
        """Return two scalers that use guest and Firecracker, made ready if they are not."""
        self.prepare()
        images = _images(directory)
        (directory / "j").mkdir()
        shared = {
            "backend": "firecracker",
            **images,
            "uid": JAILED_USER,
            "gid": JAILED_USER,
            "chroot_base": str(directory / "j"),
            "vcpus": 1,
            "mem_mib": 64,
        }
        rootfs = {"rootfs_path": str(directory / "rootfs.ext4"), "overlay_mib": 16}
        working = [
            {"labels": ["demo", name], **rootfs, "env": {"GUEST_TEST": steps}}
            for name, steps in GUEST_JOBS.items()
        ]
        mute = {"labels": ["demo", MUTE], **rootfs, "env": {"GUEST_TEST": "never-register"}}
        return _fleet(shared, working, mute)


def _fleet(shared: Mapping[str, Any], working: list[dict[str, Any]], mute: dict[str, Any]) -> dict[str, Any]:
    common = {**shared, "max_agents": 8, "stop_grace_s": 2}
    return {
        "version": 1,
        "global_max_agents": 8,
        "scalers": [
            {"name": "workers", **common, "beat_every_s": 1, "heartbeat_grace_s": 20, "label_sets": working},
            {"name": "silent", **common, "register_timeout_s": SILENT_S, "label_sets": [mute]},
        ],
    }


def _sources() -> dict[str, Path]:
    """Return guest, Firecracker and jailer; they are the tests', which a clone has, and kept once made."""
    try:
        build = importlib.import_module("tests.guest.build")
        binaries = importlib.import_module("tests.guest.binaries")
    except ImportError as error:
        raise NotHere(
            "the microVM demonstration needs the test guest: run it from a clone of the repository"
        ) from error
    try:
        found = binaries.fetch_binaries()
        guest = build.build_guest()
    except (binaries.FetchFailed, build.BuildFailed) as error:
        raise NotHere(str(error)) from error
    return {"firecracker_path": found.firecracker, "jailer_path": found.jailer, "kernel_path": guest}


def _images(directory: Path) -> dict[str, str]:
    """Put them and a root file system into the folder, for a jailed user to reach."""
    kept = {}
    for key, path in _sources().items():
        target = directory / key.removesuffix("_path")
        shutil.copy(path, target)
        target.chmod(0o755)
        kept[key] = str(target)
    rootfs = importlib.import_module("tests.guest.rootfs")
    rootfs.make_rootfs(directory / "rootfs.ext4").chmod(0o644)
    return kept


def program(name: str) -> str:
    """Return the path of one of our own commands, from the environment we run in."""
    beside = Path(sysconfig.get_path("scripts")) / name
    return str(beside if beside.exists() else Path(sys.argv[0]).with_name(name).absolute())

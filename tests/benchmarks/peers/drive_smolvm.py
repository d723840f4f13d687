"""Machines by smolvm's manager, in this process as its users have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from smolvm.types import VMConfig  # type: ignore[import-not-found]  # of an environment of its own
from smolvm.vm import SmolVMManager  # type: ignore[import-not-found]

from tests.benchmarks.peers.rounds import serve


class SmolvmMachines:
    """One manager, asked by several threads. Its state is in memory, as is its default."""

    def __init__(self, settings: dict[str, Any]) -> None:
        directory = Path(settings["directory"])
        sockets = directory / "sockets"
        sockets.mkdir()
        self._settings = settings
        self._manager = SmolVMManager(data_dir=directory / "data", socket_dir=sockets, backend="firecracker")

    def start(self, vm: str) -> None:
        """Create, which copies the root file system and makes the TAP, and start."""
        self._manager.create(
            VMConfig(
                vm_id=vm,
                vcpu_count=1,
                memory=self._settings["memory_mib"],
                kernel_path=Path(self._settings["kernel"]),
                rootfs_path=Path(self._settings["rootfs"]),
            )
        )
        self._manager.start(vm)

    def remove(self, vm: str) -> None:
        """Stop without patience, which kills it, and delete: a delete alone waits ten seconds for the guest."""
        self._manager.stop(vm, timeout=0)
        self._manager.delete(vm)

    def close(self) -> None:
        """Close the manager."""
        self._manager.close()


if __name__ == "__main__":
    serve(SmolvmMachines)

"""Bring one microVM up: chroot, jailer, TAP and rules meanwhile, configuration, start. Only the jailer is a process."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from actors.decisions.addresses import Lease
from actors.driver import Abort, SpawnOrder
from actors.errors import DriverError, FailureKind
from infra.drivers.firecracker import boot_failure, images, jailer, limits, machine, metadata
from infra.drivers.firecracker.api import Api, ApiError
from infra.drivers.firecracker.chroot import Chroot, Mark
from infra.drivers.firecracker.config import FirecrackerConfig, LabelSet
from infra.drivers.firecracker.paths import Paths
from infra.file_tail import last_lines
from infra.host_process.watcher import Watched, Watcher, describe

API_LOOK_S = 0.02
LOOSEN_EVERY_S = 0.1
TAP_BUSY_WAIT_S = 1.0
_STDERR_LINES = 5
_COLLECT_WAIT_S = 1.0
_BUSY = ("resource busy", "cannot allocate memory", "no space left", "too many open files")


class Wanted(NamedTuple):
    """Everything that is known before anything is touched. `document` has the secret and is never shown."""

    order: SpawnOrder
    lease: Lease
    label_set: LabelSet
    size: machine.Size
    boot_args: str
    document: dict[str, Any]

    def __repr__(self) -> str:
        return f"Wanted({self.order.vm!r})"

    def kernel(self, config: FirecrackerConfig) -> str:
        """Return the kernel: the label set's, else the scaler's."""
        return self.label_set.kernel_path or config.kernel_path


def wanted(config: FirecrackerConfig, order: SpawnOrder, label_set: LabelSet, lease: Lease) -> Wanted:
    """Return what the order comes to, with every file and size checked.

    Raises:
        DriverError: it can never come up like this.
    """
    found = Wanted(
        order=order,
        lease=lease,
        label_set=label_set,
        size=machine.size(order.limits, label_set, config),
        boot_args=machine.boot_args(lease, config.boot_args),
        document=metadata.document(
            order.environment,
            metadata.environment((config.forwarded, label_set.env)),
            config.extra_hosts,
            lease.gateway,
        ),
    )
    images.check_program(config.jailer_path, "jailer_path")
    images.check_program(config.firecracker_path, "firecracker_path")
    images.check_kernel(found.kernel(config), config.uid, config.gid)
    images.check_rootfs(label_set.rootfs_path, config.uid, config.gid)
    return found


class Bringup:
    """One attempt. Each step may raise DriverError; what is there by then is the teardown's."""

    def __init__(
        self,
        config: FirecrackerConfig,
        paths: Paths,
        what: Wanted,
        abort: Abort,
        reach: Callable[[str], None],
    ) -> None:
        self._config = config
        self._paths = paths
        self._what = what
        self._abort = abort
        self._reach = reach
        self._chroot = Chroot(paths, config.uid, config.gid, sudo=config.use_sudo)
        self._loosened_at = 0.0

    def make_chroot(self, template: Path) -> None:
        """Make the directory and fill it."""
        order = self._what.order
        mark = Mark(vm=order.vm, owner=self._config.owner, scaler=order.scaler, placement=order.placement)
        self._chroot.create(mark)
        self._reach("firecracker.spawn.directory")
        self._go_on()
        self._chroot.fill(
            self._what.kernel(self._config), self._what.label_set.rootfs_path, template, self._abort
        )
        self._reach("firecracker.spawn.filled")
        self._go_on()

    def start(self, watcher: Watcher, cgroups: limits.Cgroups) -> Watched:
        """Start the jailer and return the process that becomes the machine."""
        options = limits.options(cgroups, self._config.owner, self._what.order.limits, self._what.size)
        started = jailer.start(jailer.command(self._config, self._paths.vm, options), self._paths)
        watched = watcher.add(self._paths.vm, started.pid, started.start_ticks, started.pidfd)
        self._reach("firecracker.spawn.started")
        return watched

    def configure(self, api: Api, watched: Watched) -> None:
        """Wait for the API, tell it everything in one go, and start the guest."""
        if not api.wait(self._config.socket_wait_s, API_LOOK_S, lambda: self._hopeless(watched)):
            raise self._no_api(watched)
        self._reach("firecracker.spawn.api")
        try:
            self._tell(api)
            self._reach("firecracker.spawn.configured")
            self._go_on()
            api.start()
        except ApiError as error:
            raise self._refused(error, watched) from error
        self._reach("firecracker.spawn.running")

    def _tell(self, api: Api) -> None:
        """Tell it everything; again, for a short while, when its TAP is busy.

        We closed the TAP a moment ago, and a process that another thread was starting just then keeps a copy of our
        descriptor until its exec is through. Every request replaces what an earlier one said.
        """
        requests = machine.requests(
            self._what.size, self._what.boot_args, self._what.lease, self._what.document
        )
        deadline = time.monotonic() + TAP_BUSY_WAIT_S
        while True:
            try:
                api.call(*requests)
            except ApiError as error:
                if not _is_busy_tap(error) or time.monotonic() >= deadline:
                    raise
                time.sleep(API_LOOK_S)
            else:
                return

    def _hopeless(self, watched: Watched) -> bool:
        if self._config.use_sudo and time.monotonic() - self._loosened_at >= LOOSEN_EVERY_S:
            self._chroot.loosen()  # here and not in a thread: never two at once
            self._loosened_at = time.monotonic()
        return watched.over.is_set()

    def _no_api(self, watched: Watched) -> DriverError:
        if self._abort.is_set():
            return DriverError("aborted", "called off while Firecracker was starting", transient=True)
        if watched.over.is_set():
            return self._ended(watched)
        return DriverError(
            "timeout",
            f"Firecracker's API did not answer within {self._config.socket_wait_s:g} s{self._said()}",
            transient=True,
        )

    def _refused(self, error: ApiError, watched: Watched) -> DriverError:
        if self._abort.is_set():
            return DriverError("aborted", "called off while it was configured", transient=True)
        if error.status is None:
            if watched.over.wait(_COLLECT_WAIT_S):
                return self._ended(watched)
            return DriverError("unreachable", str(error), transient=True)
        busy = any(word in error.body.lower() for word in _BUSY)
        kind: FailureKind = "exhausted" if busy else "refused"
        return DriverError(kind, f"Firecracker refused {error}", transient=busy)

    def _ended(self, watched: Watched) -> DriverError:
        code = watched.end.exit_code if watched.end is not None else None
        found = boot_failure.classify_file(self._paths.serial_log)
        boot = f" ({found})" if found != "unknown" else ""
        said = self._said()
        killed = code is not None and code < 0 and code != -signal.SIGABRT  # by which both refuse bad input
        busy = any(word in said.lower() for word in _BUSY)
        return DriverError(
            "unknown" if killed else "exhausted" if busy else "refused",
            f"the jailer or Firecracker {describe(code)}{boot} before the machine ran{said}",
            transient=killed or busy,
        )

    def _said(self) -> str:
        lines = (
            *last_lines(self._paths.stderr_log, _STDERR_LINES),
            *last_lines(self._paths.vmm_log, _STDERR_LINES),
        )
        return f": {' | '.join(lines)[:1000]}" if lines else ""

    def _go_on(self) -> None:
        if self._abort.is_set():
            raise DriverError("aborted", "called off while it was made", transient=True)


def _is_busy_tap(error: ApiError) -> bool:
    return error.path.startswith("/network-interfaces/") and "resource busy" in error.body.lower()

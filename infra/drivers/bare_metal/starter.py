"""Bring one agent to life, the fast way where the kernel has it, and say whether it runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from actors.driver import Abort
from actors.errors import DriverError
from infra.drivers.bare_metal import launch, nursery
from infra.drivers.bare_metal.nursery import CannotBear, Nursery
from infra.drivers.bare_metal.rundir import RunDirectory
from infra.host_process.cgroup import Cgroup
from infra.host_process.watcher import Watched, Watcher

log = logging.getLogger(__name__)
_COLLECT_WAIT_S = 2.0


class Birth(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be started, and where. The environment has a credential: this is never logged."""

    vm: str
    run: RunDirectory
    cgroup: Cgroup | None
    joins: Sequence[Path]
    command: Sequence[str]
    environment: Mapping[str, str]
    working_dir: str


class Starter:
    """Starts agents and hands them to the watcher.

    With a cgroup they are born in it by the nursery; where the kernel cannot do that, or there is no cgroup, a shell
    puts itself where it belongs and becomes the agent.
    """

    def __init__(self, watcher: Watcher, reach: Callable[[str], None], *, cgroups: bool) -> None:
        self._watcher = watcher
        self._reach = reach
        self.nursery = Nursery() if cgroups else None
        if self.nursery is not None:
            self.nursery.start()

    def start(self, birth: Birth, shell: str, timeout_s: float, abort: Abort) -> Watched:
        """Return the process once it has become the agent; it may have ended since.

        Raises:
            DriverError: it did not become the agent. Whatever there is of it is `destroy`'s.
        """
        born = self._bear(birth, timeout_s, abort)
        if born is not None:
            return born
        process = launch.start(
            shell,
            birth.run,
            joins=[*([birth.cgroup.procs] if birth.cgroup is not None else []), *birth.joins],
            command=birth.command,
            environment=birth.environment,
            working_dir=birth.working_dir,
        )
        watched = self._watcher.add(birth.vm, process.pid, process.start_ticks, process.pidfd)
        self._reach("bare-metal.spawn.started")
        seen = launch.await_agent(watched.pid, watched.over, timeout_s, abort)
        if not seen and watched.over.wait(_COLLECT_WAIT_S) and watched.end is not None:
            refusal = launch.refusal(watched.end.exit_code, birth.command[0])
            if refusal is not None:
                raise refusal
        return watched

    def close(self) -> None:
        """End the nursery. Repeatable."""
        if self.nursery is not None:
            self.nursery.close()

    def _bear(self, birth: Birth, timeout_s: float, abort: Abort) -> Watched | None:
        if self.nursery is None or birth.cgroup is None:
            return None
        try:
            pid, step, number = self.nursery.bear(
                birth.cgroup,
                birth.run,
                joins=birth.joins,
                command=birth.command,
                environment=birth.environment,
                working_dir=birth.working_dir,
                timeout_s=timeout_s,
                abort=abort,
            )
        except CannotBear as error:
            log.info("agents join their cgroups after their start, as they cannot be born there: %s", error)
            self.nursery.close()
            self.nursery = None
            return None
        process = launch.started(pid)
        watched = self._watcher.add(birth.vm, process.pid, process.start_ticks, process.pidfd)
        self._reach("bare-metal.spawn.started")
        if step:
            raise nursery.refusal(step, number, birth.command[0], birth.working_dir)
        if abort.is_set():
            raise DriverError("aborted", "called off while the process was starting", transient=True)
        return watched

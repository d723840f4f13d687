"""Following the log: every fact once and in order, through servers that go and come back, until stopped."""

import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from events import subjects
from events.envelope import Recorded
from infra.journal.delivery import report_stopped_follow
from infra.journal.pull import Pull
from infra.journal.reading import UNANSWERED, decoded
from infra.journal.stream import stream_state
from infra.journal.wire import Wire, WireLost
from projections.vm import BrokenLog

_log = logging.getLogger("fleetlog.journal")
_BATCH = 1000
_HEARTBEAT_S = 0.5
_PAUSE_FIRST_S = 0.05
_PAUSE_MAX_S = 0.5
_STOP_S = 30.0


class Follow:
    """One thread, one wire. The wire is made anew whenever the server is silent for longer than 1.5 s.

    A gap that is still there on a new wire is a broken log. That, and whatever `deliver` raises, stops the follow:
    it is logged as critical and kept in `failure`.
    """

    def __init__(
        self,
        connect: Callable[[float], Wire],
        cluster: str,
        *,
        after: int,
        deliver: Callable[[Recorded], None],
        timeout_s: float,
    ) -> None:
        self._connect = connect
        self._cluster = cluster
        self._after = after
        self._deliver = deliver
        self._timeout_s = timeout_s
        self._stopped = threading.Event()
        self._wire: Wire | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="journal follow", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> BaseException | None:
        """What stopped it, None while it runs or when `stop` ended it."""
        return self._failure

    @property
    def running(self) -> bool:
        """Whether it may still call `deliver`."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End it; a running call of `deliver` is waited for. Repeatable."""
        self._stopped.set()
        if (wire := self._wire) is not None:
            wire.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(_STOP_S)
            if self._thread.is_alive():
                _log.error(
                    "a follow of the log does not end: its callback blocks for more than %g s", _STOP_S
                )

    def _run(self) -> None:
        pause_s = _PAUSE_FIRST_S
        while not self._stopped.is_set():
            before = self._after
            try:
                with self._connect(self._timeout_s) as wire:
                    self._wire = wire
                    self._pump(wire)
            except UNANSWERED as error:
                _log.debug("following the log after %d: %s", self._after, error)
            except Exception as error:  # noqa: BLE001 - whatever it is: a fact is never skipped
                report_stopped_follow(self._after, error)
                self._failure = error
                return
            pause_s = _PAUSE_FIRST_S if self._after > before else min(pause_s * 2, _PAUSE_MAX_S)
            self._stopped.wait(pause_s)

    def _pump(self, wire: Wire) -> None:
        end = stream_state(wire, self._cluster, self._timeout_s).last_sequence
        if end < self._after:
            raise BrokenLog(f"the log ends at {end}, and {self._after} was read before: it lost its tail")
        pull = Pull(
            wire,
            subjects.stream(self._cluster),
            after=self._after,
            subject=None,
            batch=_BATCH,
            heartbeat_s=_HEARTBEAT_S,
            timeout_s=self._timeout_s,
        )
        prefix = subjects.log_prefix(self._cluster)
        fresh = True
        while not self._stopped.is_set():
            for sequence, subject, payload in pull.facts():
                if self._stopped.is_set():
                    break
                if sequence <= self._after:
                    continue
                if sequence != self._after + 1:
                    if fresh:
                        raise BrokenLog(
                            f"the log goes from sequence {self._after} to {sequence}: facts are missing"
                        )
                    raise WireLost(f"sequence {sequence} came after {self._after}")
                self._deliver(decoded(payload, sequence, subject, prefix))
                self._after = sequence
                fresh = False
        with suppress(WireLost):
            pull.end()

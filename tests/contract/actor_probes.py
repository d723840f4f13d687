"""An actor that does what its messages say, once per runtime, for the actor contract tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import pykka

from actors.pooled import PooledActor

DEADLINE_S = 10.0


class Probe(pykka.Actor):
    """A message that is callable is called with the actor; any other is noted. Hooks note that they ran."""

    def __init__(
        self,
        *,
        on_start: Callable[[Probe], None] | None = None,
        on_stop: Callable[[Probe], None] | None = None,
        on_failure: Callable[[Probe], None] | None = None,
    ) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.value = 7
        self.nested = pykka.traversable(Nested())
        self.failed = threading.Event()
        self._hooks = {"start": on_start, "stop": on_stop, "failure": on_failure}

    def _run_hook(self, name: str) -> None:
        self.seen.append(name)
        hook = self._hooks[name]
        if hook is not None:
            hook(self)

    def on_start(self) -> None:
        self._run_hook("start")

    def on_stop(self) -> None:
        self._run_hook("stop")

    def on_failure(
        self,
        exception_type: type[BaseException] | None,
        exception_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.seen.append(exception_value)
        self.failed.set()
        self._run_hook("failure")

    def on_receive(self, message: Any) -> Any:
        if callable(message):
            return message(self)
        self.seen.append(message)
        return len(self.seen)

    def double(self, number: int) -> int:
        return 2 * number

    def note(self, item: Any) -> None:
        self.seen.append(item)

    def fail(self) -> None:
        raise LookupError("asked to fail")


class Nested:
    """Something an actor holds and a proxy may walk into."""

    def hello(self) -> str:
        return "hello from within"


class ThreadingProbe(Probe, pykka.ThreadingActor):
    """The probe with a thread of its own."""

    use_daemon_thread = True


class PooledProbe(Probe, PooledActor):
    """The probe on the default pool."""


class Latch:
    """A message that keeps its actor busy until `release`, and says when it has begun."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._released = threading.Event()

    def __call__(self, actor: Probe) -> None:
        self.entered.set()
        assert self._released.wait(DEADLINE_S), "nobody released the latch"

    def release(self) -> None:
        self._released.set()


def hold(ref: pykka.ActorRef[Any]) -> Latch:
    """Keep the actor busy; returns once it is."""
    latch = Latch()
    ref.tell(latch)
    assert latch.entered.wait(DEADLINE_S)
    return latch


def seen(actor: Probe) -> list[Any]:
    """As a message: what the actor has noted so far."""
    return list(actor.seen)


def fail(actor: Probe) -> None:
    """As a message: raise."""
    raise LookupError("told to fail")


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait for `condition` with a deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S} s in vain: {what}"
        time.sleep(0.001)

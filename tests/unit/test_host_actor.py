"""The host's actor: one task at a time, a failed one wedges nobody, and the living are safe from every race."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from actors.decisions.reclaim import Standing
from actors.errors import DriverError, LogUnavailable, Refused
from actors.host import WAITING_MOST, Caring, Host, HostActor, LogLedger, SweepNow
from actors.pooled import ActorPool
from actors.reclaiming import Leftover
from actors.sweep import Report, Sweeper
from actors.world import Router, World
from infra.clock import ThreadTimers
from infra.effects import ThreadEffects
from tests.acceptance.host import wait_until


def thing(vm: str, **changes: Any) -> Leftover:
    fields: dict[str, Any] = {"kind": "chroot", "name": vm, "owner": "me", "life": "dead", "evidence": "seen"}
    return Leftover(vm=vm, **(fields | changes))


class Source:
    """A host of things in memory. `during` is called in the middle of every call, with its name."""

    def __init__(self, *things: Leftover) -> None:
        self.things = {each.name: each for each in things}
        self.during: Callable[[str], None] = lambda _: None
        self.killed: list[str] = []

    def leftovers(self) -> tuple[Leftover, ...]:
        found = tuple(self.things.values())
        self.during("list")
        return found

    def reclaim(self, leftover: Leftover) -> str:
        self.during("reclaim")
        self.things.pop(leftover.name, None)
        return "gone"

    def stop(self, leftover: Leftover, accounted: Callable[[], str]) -> str:
        self.during("prove")
        if why := accounted():
            raise Refused("tracked", why)
        self.killed.append(leftover.name)
        self.things.pop(leftover.name, None)
        return "killed"


class Bench:
    """A host's actor on real threads, over a scripted log."""

    def __init__(self, source: Source, every_s: float = 900.0) -> None:
        self.source = source
        self.reports: list[Report] = []
        self.journal = SimpleNamespace(read=lambda _: ())
        self.pool = ActorPool(name="host-test")
        self.timers = ThreadTimers()
        self.router = Router()
        fields = {"router": self.router, "journal": self.journal, "pools": {}, "timers": self.timers}
        self.world = cast("World", SimpleNamespace(**fields))
        self.effects = ThreadEffects("reclaim-test", width=1)
        sweeper = Sweeper("me", [source])
        self.caring = Caring(sweeper, self.effects, self.reports.append, every_s)
        self.router.host = self.pool.start(HostActor, self.world, self.caring)
        self.host = Host(self.world, answer_s=10)

    def close(self) -> None:
        self.timers.stop()
        self.pool.stop()
        self.effects.stop()


@contextmanager
def bench(*things: Leftover, every_s: float = 900.0) -> Iterator[Bench]:
    made = Bench(Source(*things), every_s)
    try:
        yield made
    finally:
        made.close()


def test_sweeps_reaps_and_stops_never_interleave() -> None:
    living = [thing(f"vm-{number}", life="alive") for number in range(4)]
    with bench(*living, thing("dead")) as made, ThreadPoolExecutor(12) as askers:
        busy, most = 0, 0

        def during(_: str) -> None:
            nonlocal busy, most
            busy += 1
            most = max(most, busy)
            threading.Event().wait(0.002)
            busy -= 1

        made.source.during = during
        asked: list[Future[Any]] = []
        asked += [askers.submit(made.host.sweep, "test") for _ in range(4)]
        asked += [askers.submit(made.host.stop, f"vm-{number}", "me") for number in range(4)]
        asked += [askers.submit(made.host.reap_unowned, "dead") for _ in range(2)]
        for each in asked:
            each.result(10)
        assert most == 1
        assert sorted(made.source.killed) == [each.name for each in living]
        assert made.source.things == {}


def test_a_task_that_fails_is_told_to_who_asked_and_the_next_one_comes_through() -> None:
    with bench(thing("dead")) as made:

        def fail(_: str) -> None:
            made.source.during = lambda _: None
            raise ValueError("a bug of the source")

        made.source.during = fail
        with pytest.raises(ValueError, match="a bug"):
            made.host.sweep("test")
        assert [each.outcome for each in made.host.sweep("test").findings] == ["reaped"]


def test_what_cannot_be_taken_away_is_said_and_tried_again() -> None:
    with bench(thing("dead"), thing("other")) as made:

        def fail(step: str) -> None:
            if step == "reclaim":
                made.source.during = lambda _: None
                raise DriverError("still-there", "a mount is in it", transient=True)

        made.source.during = fail
        outcomes = {each.leftover.name: each.outcome for each in made.host.sweep("test").findings}
        assert sorted(outcomes.values()) == ["failed", "reaped"]
        assert [each.outcome for each in made.host.sweep("test").findings] == ["reaped"]


def test_a_listing_that_fails_concludes_nothing() -> None:
    with bench(thing("dead")) as made:

        def fail(_: str) -> None:
            raise DriverError("unknown", "half of it", transient=True)

        made.source.during = fail
        assert made.host.sweep("test") == Report(unlisted=("half of it",))
        with pytest.raises(DriverError, match="half of it"):
            made.host.live()
        assert made.host.stop("dead", "me").outcome == "not-found"


def test_a_machine_tracked_while_it_is_proven_is_not_killed() -> None:
    with bench(thing("vm", life="alive")) as made:

        def track(step: str) -> None:
            if step == "prove":
                made.router.slots["vm"] = "backend.me.metal"

        made.source.during = track
        stopped = made.host.stop("vm", "me")
        assert (stopped.outcome, made.source.killed) == ("tracked", [])


def test_what_ends_by_itself_between_two_looks_is_no_orphan() -> None:
    with bench(thing("vm")) as made:

        def end(_: str) -> None:
            made.source.things.pop("vm", None)

        made.source.during = end
        assert made.host.sweep("test") == Report()


def test_what_begins_after_the_first_look_is_not_even_looked_at() -> None:
    with bench(thing("dead")) as made:

        def begin(_: str) -> None:
            made.source.things["fresh"] = thing(
                "fresh"
            )  # its request is newer than what was asked of the log

        made.source.during = begin
        assert [each.leftover.name for each in made.host.sweep("test").findings] == ["dead"]
        assert "fresh" in made.source.things


@pytest.mark.parametrize("name", ["vm", "x/../vm", "..", "0", ""])
def test_a_log_that_does_not_answer_and_a_name_that_is_none_spare(name: str) -> None:
    with bench(thing(name), thing(f"{name}-living", life="alive")) as made:

        def silent(_: str) -> tuple[()]:
            raise LogUnavailable("no answer")

        made.journal.read = silent
        assert {each.outcome for each in made.host.sweep("test").findings} == {"spared"}
        assert {each.status for each in made.host.live()} == {"unverified"}
        assert made.host.stop(f"{name}-living", "me").outcome == "unverified"
        assert not made.host.reap_unowned(f"{name}-living")
        assert made.source.killed == []


def test_too_much_that_waits_is_refused_and_sweeps_by_the_clock_wait_once() -> None:
    with bench() as made:
        inside, go_on = threading.Event(), threading.Event()

        def hold(_: str) -> None:
            inside.set()
            assert go_on.wait(10)

        made.source.during = hold
        answers: list[Any] = []
        host = made.router.host
        assert host is not None
        host.tell(SweepNow("first", answers.append))
        assert inside.wait(10)
        for _ in range(3):
            host.tell(SweepNow("by the clock"))
        for _ in range(WAITING_MOST):
            host.tell(SweepNow("asked for", answers.append))
        wait_until(lambda: len(answers) == 1, "one is refused at once")
        (refused,) = answers
        assert (type(refused), refused.code) == (Refused, "overloaded")
        made.source.during = lambda _: None
        go_on.set()
        wait_until(lambda: len(answers) == WAITING_MOST + 1, "all others are served")
        wait_until(lambda: len(made.reports) == WAITING_MOST + 1, "and one sweep by the clock")


def test_it_sweeps_by_the_clock() -> None:
    with bench(every_s=0.01) as made:
        wait_until(lambda: len(made.reports) >= 3, "three sweeps nobody asked for")


def test_addresses_are_withheld_while_they_are_cleared_and_without_the_leases_nothing_is_known() -> None:
    with bench() as made:
        cast("Any", made.world).pools = {"allocator.h.b": object()}
        with LogLedger(made.world).withholding(frozenset({"10.0.0.2"})) as leased:
            assert leased is None, "there is no allocator to ask"
            assert made.router.withheld == {"10.0.0.2"}
        assert made.router.withheld == frozenset()


def test_a_living_actor_counts_as_tracked_without_a_look_at_the_log() -> None:
    with bench() as made:
        made.router.slots["vm"] = "backend.me.metal"
        made.journal.read = lambda _: pytest.fail("the log was asked")
        standing: Standing = LogLedger(made.world).standing("vm")
        assert standing == "live"

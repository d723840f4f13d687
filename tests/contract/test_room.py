"""Who may use what is left of the log, when two append to it at once: a scripted server says how full it is."""

import msgspec

from actors.ports import Decision
from infra.journal.exchange import Exchange
from infra.journal.headroom import demand_limit
from infra.journal.messages import Entry
from infra.journal.room import Room
from infra.journal.wire import WireLost
from tests.contract.journal_rigs import decide, fact

LIMIT_BYTES = 100_000


class Server(Exchange):
    """Answers how full the stream is, and counts how often it was asked; away while `used_bytes` is None."""

    def __init__(self, used_bytes: int | None) -> None:
        self.ack_timeout_s = 1.0
        self.used_bytes = used_bytes
        self.asked = 0

    def wire(self) -> "Server":  # type: ignore[override]
        """Return itself."""
        return self

    def drop(self) -> None:
        """Do nothing."""

    def request(self, _: str, __: bytes, ___: float) -> bytes:
        """Answer STREAM.INFO."""
        self.asked += 1
        if self.used_bytes is None:
            raise WireLost("away")
        state = {"bytes": self.used_bytes, "messages": 0, "first_seq": 1, "last_seq": 0}
        return msgspec.json.encode({"config": {"max_bytes": LIMIT_BYTES}, "state": state})


def entry(name: str, *, teardown: bool = False) -> Entry:
    decision: Decision = decide(fact(name, 1, 0), teardown=teardown)
    return Entry(decision, (b"x" * 600,), lambda _: None, 0.0)


def full_but_for(entries: float) -> Server:
    """Return a server where demand may still use so many entries."""
    return Server(int(demand_limit(LIMIT_BYTES, 0) - entries * entry("vm.a").stored_bytes))


def test_what_is_on_its_way_in_one_lane_is_taken_for_the_other() -> None:
    server, room = full_but_for(1.5), Room("test", lambda: 0)
    one, other = entry("vm.one"), entry("vm.other")
    assert room.take([one], server)[0] == [one]
    taken, refusal = room.take([other], server)
    assert taken == []
    assert "fleetlog log resize" in refusal


def test_what_was_not_stored_is_room_again_and_what_was_stored_is_not() -> None:
    server, room = full_but_for(1.5), Room("test", lambda: 0)
    one, other, third = entry("vm.one"), entry("vm.other"), entry("vm.third")
    room.take([one], server)
    room.settle([one], [])
    assert room.take([other], server)[0] == [other]
    room.settle([other], [other])
    assert room.take([third], server)[0] == []


def test_the_ends_of_lives_are_always_taken_and_count() -> None:
    server, room = full_but_for(1.5), Room("test", lambda: 0)
    ends = [entry(f"vm.{number}", teardown=True) for number in range(3)]
    assert room.take(ends, server)[0] == ends
    assert room.take([entry("vm.new")], server)[0] == []


def test_without_an_answer_all_are_taken_and_the_next_one_asks_again() -> None:
    server, room = Server(None), Room("test", lambda: 0)
    one, other = entry("vm.one"), entry("vm.other")
    assert room.take([one], server)[0] == [one]
    server.used_bytes = LIMIT_BYTES
    assert room.take([other], server)[0] == []


def test_a_look_is_good_for_a_while_unless_it_is_asked_for_again() -> None:
    server, room = full_but_for(0), Room("test", lambda: 0)
    assert room.take([entry("vm.one")], server)[0] == []
    server.used_bytes = 0
    room.measure_again()
    assert len(room.take([entry("vm.two")], server)[0]) == 1
    assert server.asked == 2

"""The stream that is the log: made once, foreign ones refused, losses found at the start, errors with a way out."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.ports import Appended
from events import subjects
from infra.journal.address import ConnectionRefusedByServer, NatsAddress
from infra.journal.jetstream import call
from infra.journal.nats import NatsJournal
from infra.journal.stream import LogRefused
from infra.journal.wire import Wire
from projections.vm import BrokenLog
from tests.conftest import NatsServer
from tests.contract.journal_rigs import NatsRig, append, append_all, appended, first, refused
from tests.contract.nats_tools import address_of


@pytest.fixture
def wire(own_nats_server: NatsServer) -> Iterator[Wire]:
    with Wire(address_of(own_nats_server), name="test") as one:
        yield one


@pytest.fixture
def rig(own_nats_server: NatsServer) -> Iterator[NatsRig]:
    made = NatsRig(own_nats_server)
    yield made
    made.close()


def test_several_coordinators_may_open_a_new_log_at_once(own_nats_server: NatsServer) -> None:
    opened: list[NatsJournal] = []
    failed: list[BaseException] = []

    def open_one(limit: int) -> None:
        try:
            opened.append(NatsJournal(address_of(own_nats_server), "together", limit_bytes=limit))
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=open_one, args=((1 << 26) + n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not failed
    assert len({journal.headroom().limit_bytes for journal in opened}) == 1
    for journal in opened:
        journal.close()


def test_the_stream_has_the_settings_that_keep_history(rig: NatsRig, wire: Wire) -> None:
    config = rig.stream_config()
    assert config["subjects"] == ["fleetlog.test.log.>"]
    assert (config["discard"], config["deny_delete"], config["deny_purge"]) == ("new", True, True)
    appended(rig.journal, first("vm.a"))
    name = subjects.stream(rig.cluster)
    for api, body in (("PURGE", {}), ("MSG.DELETE", {"seq": 1})):
        answer = wire.request(f"$JS.API.STREAM.{api}.{name}", str(body).replace("'", '"').encode(), 5)
        assert b"error" in answer
    assert len(rig.journal.read("vm.a")) == 1


def test_a_stream_with_foreign_settings_is_refused_naming_each_and_the_way_out(
    own_nats_server: NatsServer, wire: Wire
) -> None:
    foreign = {
        "name": "FLEETLOG_OTHER",
        "subjects": ["fleetlog.other.>"],
        "storage": "file",
        "retention": "limits",
        "discard": "old",
        "max_age": 10**12,
        "max_bytes": 1 << 20,
    }
    call(wire, "STREAM.CREATE.FLEETLOG_OTHER", foreign, 5)
    with pytest.raises(LogRefused) as raised:
        NatsJournal(address_of(own_nats_server), "other")
    message = str(raised.value)
    for part in (
        "stream FLEETLOG_OTHER at nats://127.0.0.1:",
        "discard is 'old', not 'new'",
        "max_age is 1000000000000, not 0",
        "subjects is ['fleetlog.other.>'], not ['fleetlog.other.log.>']",
        "deny_purge is False, not True",
        "nats stream edit",
    ):
        assert part in message
    assert "\n" not in message


def test_a_stream_of_somebody_else_on_our_subjects_is_refused(
    own_nats_server: NatsServer, wire: Wire
) -> None:
    call(wire, "STREAM.CREATE.THEIRS", {"name": "THEIRS", "subjects": ["fleetlog.>"], "storage": "memory"}, 5)
    with pytest.raises(
        LogRefused, match=r"FLEETLOG_MINE cannot be made.*overlap.*choose another cluster name"
    ):
        NatsJournal(address_of(own_nats_server), "mine")


def test_a_limit_the_server_has_no_room_for_is_refused(tmp_path: Path, own_nats_server: NatsServer) -> None:
    with pytest.raises(LogRefused, match=r"cannot be made.*insufficient storage resources.*give the server"):
        NatsJournal(address_of(own_nats_server), "huge", limit_bytes=1 << 60)


def test_a_stream_with_a_hole_is_refused_at_the_start(rig: NatsRig) -> None:
    rig.make_hole()
    with pytest.raises(BrokenLog, match="4 facts from 1 to 5, so some are missing; restore"):
        rig.another()


def test_something_that_is_no_fact_stops_a_replay_and_says_where(rig: NatsRig) -> None:
    rig.put_raw("vm.a", b"not a fact")
    with pytest.raises(BrokenLog, match="no fact: sequence 1: not JSON"):
        list(rig.journal.replay())


def test_a_fact_on_the_subject_of_another_aggregate_stops_a_replay(rig: NatsRig, wire: Wire) -> None:
    appended(rig.journal, first("vm.a"))
    stored = call(wire, f"STREAM.MSG.GET.{subjects.stream(rig.cluster)}", {"seq": 1}, 5)["message"]["data"]
    import base64  # noqa: PLC0415

    rig.put_raw("vm.b", base64.b64decode(stored))
    with pytest.raises(BrokenLog, match=r"sequence 2 says vm\.a and stands on fleetlog\.test\.log\.vm\.b"):
        list(rig.journal.replay())


def test_wrong_credentials_are_one_sentence_naming_the_file(
    own_nats_server: NatsServer, nats_server: NatsServer
) -> None:
    wrong = NatsAddress(url=own_nats_server.url, creds=nats_server.creds_path)
    with pytest.raises(
        ConnectionRefusedByServer, match=r"coordinator\.creds: Authorization Violation.*--nats-creds"
    ):
        NatsJournal(wrong, "test")


def test_a_user_without_the_right_to_the_log_is_told_which_right(
    own_nats_server: NatsServer, tmp_path: Path
) -> None:
    creds = tmp_path / "agent.creds"
    creds.write_text(own_nats_server.mint("agent", publish=["fleetlog.test.agent.x.>"]).creds_text())
    with pytest.raises(
        ConnectionRefusedByServer, match=r"Permissions Violation for Publish to .*STREAM\.INFO.*agent\.creds"
    ):
        NatsJournal(NatsAddress(url=own_nats_server.url, creds=creds), "test", read_timeout_s=1)


def test_resize_is_in_force_at_once_and_never_below_what_is_there(rig: NatsRig) -> None:
    append_all(rig.journal, [first(f"vm.{number}") for number in range(200)])
    used = rig.journal.headroom().used_bytes
    with pytest.raises(LogRefused, match="nothing is dropped"):
        rig.journal.resize(used - 1)
    rig.journal.resize(used + 10)
    assert refused(append(rig.journal, first("vm.x"))).code == "full"
    assert rig.journal.resize(1 << 20).limit_bytes == 1 << 20
    assert isinstance(append(rig.journal, first("vm.y")), Appended)
    with pytest.raises(LogRefused, match="stays as it is"):
        rig.journal.resize(1 << 60)


def test_settings_that_turned_foreign_under_us_are_told_as_foreign(rig: NatsRig, wire: Wire) -> None:
    name = subjects.stream(rig.cluster)
    config: dict[str, Any] = rig.stream_config() | {"max_msg_size": 300}
    call(wire, f"STREAM.UPDATE.{name}", config, 5)
    outcome = refused(append(rig.journal, first("vm.a")))
    assert (outcome.code, outcome.stored) == ("foreign", False)
    assert "doctor" in outcome.detail

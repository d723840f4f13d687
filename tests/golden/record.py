"""Records what has no golden file yet: `python -m tests.golden.record`. It never overwrites a file.

An event's file is `events/TAG.json`. When a released event gets a field, the next run adds `events/TAG.2.json` with
the field set; the first file stays for ever, because logs hold that form for ever.
"""

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from events.codec import EVENT_TYPES, TAGS, Form, encode
from events.envelope import Event, tag_of

HERE = Path(__file__).parent
EVENTS = HERE / "events"
LOGS = HERE / "logs"

_VALUES: dict[str, object] = {
    "address": "10.0.0.7",
    "agent": "a-01hzy0000000000000000000000",
    "answer_by": datetime(2026, 12, 1, 8, 35, 15, tzinfo=UTC),
    "claim_code": "6f" * 32,
    "claim_expires_at": datetime(2026, 12, 1, 8, 40, 15, tzinfo=UTC),
    "cluster": "default",
    "contract": 1,
    "expires_at": datetime(2026, 12, 1, 8, 40, 15, tzinfo=UTC),
    "mandatory_labels": ("gpu",),
    "nats_url": "tls://nats.example.com:4222",
    "offer": 2,
    "public_key": "UDXU4RCSJNZOIQHZNWXHXORDPRTGNJAHAHFRGZNEEJCPQTT2M7NLCNF4",
    "reference": "i-0123456789",
    "request_id": "a-01hzy0000000000000000000000.up",
    "resources": {"cpus": 2.0, "memory_bytes": 2147483648},
    "target": "acme-infra",
    "agent_labels": ("linux", "small", "x64"),
    "agent_version": "0.1.0",
    "backend": "bare-metal",
    "boot_id": "5f0c7a52-6f0b-4b52-9a0e-3d7f2b9c1d11",
    "by": "anna",
    "coordinator": "alpha",
    "data": {"pid": 4242, "start_ticks": 991, "cgroup": "fleetlog/a-01hzy"},
    "demand": "7d9f1b7f6c2e4a59b1c0d2e3f4a5b6c7",
    "detail": 'what there is to say about it: ünïcode, a tab\t and a quote "',
    "digest": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "driver": "bare-metal",
    "evidence": "no process of its cgroup, no folder",
    "exit_code": 3,
    "facts": {"os": "linux", "arch": "x64"},
    "gate": ("gpu",),
    "global_max_agents": 50,
    "host": "alpha-host",
    "job": "job-17",
    "labels": ("linux", "small"),
    "network": "allocator.alpha-host.default",
    "owner": "alpha",
    "pid": 4711,
    "placement": {"directory": "machines/a-01hzy", "cgroup": {"path": "fleetlog/a-01hzy"}},
    "reason": "heartbeat-timeout",
    "register_timeout_s": 120.5,
    "requests": {"cpus": 1.5, "memory_bytes": 1073741824},
    "limits": {"cpus": 2.0, "memory_bytes": 2147483648},
    "retry_in_s": 4.0,
    "run": "run-3",
    "scaler": "small",
    "scalers": {"small": {"backend": "bare-metal", "max_agents": 9, "label_sets": [["linux", "small"]]}},
    "session": "0f1e2d3c4b5a69788796a5b4c3d2e1f0",
    "slot": "backend.alpha.small",
    "spawn_timeout_s": 45.5,
    "targets": ("acme-infra",),
    "tries": 3,
    "version": 2,
    "vm": "a-01hzy0000000000000000000000",
    "vms": ("a-01hzy0000000000000000000000",),
    "handle": {
        "driver": "bare-metal",
        "version": 1,
        "data": {"pid": 4242, "start_ticks": 991, "cgroup": "fleetlog/a-01hzy"},
    },
}
"""A value for every field name; a field of a new event that is not here is asked for."""

_TYPED: dict[tuple[str, str], object] = {("coordinator.started", "version"): "0.1.0"}
"""Where a field's name means something else in one event."""


def sample(kind: type[Event]) -> Event:
    """Return the event with every field set to something that is not its default."""
    tag = str(kind.__struct_config__.tag)
    values: dict[str, object] = {}
    for field in kind.__struct_fields__:
        if (tag, field) not in _TYPED and field not in _VALUES:
            sys.exit(f"{tag}.{field}: add a value for it to {Path(__file__).name}")
        values[field] = _TYPED.get((tag, field), _VALUES.get(field))
    return msgspec.convert({"tag": tag, **values}, kind)


def aggregate_of(tag: str) -> str:
    """Return an aggregate that a fact of this tag could be of."""
    return {
        "vm": "vm.a-01hzy0000000000000000000000",
        "allocator": "allocator.alpha-host.default",
        "backend": "backend.alpha.small",
        "coordinator": "coordinator.alpha",
        "claim": "claim.9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "scale": f"{tag}.acme-infra.cloud.a-01hzy0000000000000000000000",
        "demand": "demand.7d9f1b7f6c2e4a59b1c0d2e3f4a5b6c7",
    }.get(tag.partition(".")[0], tag)


def form_of(event: Event) -> bytes:
    """Return the wire form of a sample."""
    tag = tag_of(event)
    return encode(
        Form(
            aggregate=aggregate_of(tag),
            version=2 if tag.startswith("vm.") and tag != "vm.requested" else 1,
            at=datetime(2026, 12, 1, 8, 30, 15, 250_000, UTC),
            writer="alpha",
            cause="demand:7d9f1b7f",
            correlation="7d9f1b7f6c2e4a59b1c0d2e3f4a5b6c7",
            attempt="00112233445566778899aabbccddeeff",
            epoch=7,
            event=event,  # type: ignore[arg-type] # every released class is one of the union
        )
    )


def files_of(tag: str) -> list[Path]:
    """Return the golden files of a tag, oldest first."""
    first = EVENTS / f"{tag}.json"
    later = [EVENTS / f"{tag}.{number}.json" for number in range(2, 100)]
    return [path for path in (first, *later) if path.exists()]


def fields_in(path: Path) -> set[str]:
    """Return the fields a golden file sets."""
    record: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    return set(record["event"]) - {"tag"}


def unrecorded(kind: type[Event]) -> set[str]:
    """Return the fields of an event class that no golden file of it sets."""
    files = files_of(str(kind.__struct_config__.tag))
    return set(kind.__struct_fields__).difference(*(fields_in(path) for path in files))


def main() -> None:
    """Write the missing files of events."""
    EVENTS.mkdir(exist_ok=True)
    for kind in EVENT_TYPES:
        tag = str(kind.__struct_config__.tag)
        there = files_of(tag)
        if there and not unrecorded(kind):
            continue
        path = EVENTS / (f"{tag}.{len(there) + 1}.json" if there else f"{tag}.json")
        with path.open("xb") as file:
            file.write(msgspec.json.format(form_of(sample(kind)), indent=1) + b"\n")
        print(f"recorded {path.relative_to(HERE)}")
    assert set(TAGS) == {str(kind.__struct_config__.tag) for kind in EVENT_TYPES}


if __name__ == "__main__":
    main()

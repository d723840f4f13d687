"""What a fleet file becomes: gates, roles, resources, warnings, digest, summary, schema, and never a crash."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.decisions.labels import Host, Match, match
from actors.decisions.resources import ResourceSpec
from events.envelope import Resources
from infra.config.bare_metal import BareMetalLabelSet
from infra.config.fleet import digest, json_schema
from infra.config.host_access import HostAccessEntry, parse_entry
from infra.config.load import check, load
from tests.unit.fleet_files import Write, fleet, metal


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str, name: str = "fleet.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write


def test_a_gate_may_be_met_by_declared_labels_in_any_case_or_by_the_declared_platform(write: Write) -> None:
    more = "    mandatory_labels: [GPU, arm64]\n    platform: {os: linux, arch: arm64}\n"
    (scaler,) = load(write(fleet(metal(labels="[Gpu, linux]", more=more)))).scalers
    found = match([scaler.routable(Host())], ["gpu", "ARM64"])
    assert isinstance(found, Match)
    assert found.route.gate == ("arm64", "gpu")


@pytest.mark.parametrize(
    ("roles", "loaded"),
    [("[builder, builder]", ("builder",)), ("[builder, all]", None), ("[]", ()), ("null", None)],
)
def test_roles_with_all_are_every_role_and_none_are_plain_execution(
    write: Write, roles: str, loaded: tuple[str, ...] | None
) -> None:
    (scaler,) = load(write(fleet(metal(more=f"    roles: {roles}\n")))).scalers
    assert scaler.roles == loaded
    assert scaler.routable(Host()).roles == loaded


def test_flat_and_nested_resources_load_to_the_same(write: Write) -> None:
    flat = load(write(fleet(metal(in_set="        resources: {cpus: 2, memory: 1.5g}\n"))))
    both = "{cpus: 2.0, memory: 1536m}"
    nested = load(write(fleet(metal(in_set=f"        resources: {{requests: {both}, limits: {both}}}\n"))))
    size = Resources(cpus=2, memory_bytes=1610612736)
    assert flat.scalers[0].label_sets[0].resources == ResourceSpec(requests=size, limits=size)
    assert digest(flat) == digest(nested)


def test_what_cannot_be_enforced_or_is_probably_not_meant_is_warned_of(write: Write) -> None:
    policy = "        network_policy: {deny_all: true, host_access: ['4000']}\n"
    path = write(fleet(metal(labels="[windows]", in_set=policy)))
    report = check(path)
    assert report.config is not None
    told = [str(warning).replace(str(path), path.name) for warning in report.warnings]
    assert told == [
        (
            "fleet.yaml:7 scalers[0].label_sets[0].labels (scaler metal): [windows] makes this set one for jobs that "
            "ask for it; accepted: a declared platform: {os: ..., arch: ...}"
        ),
        (
            "fleet.yaml:9 scalers[0].label_sets[0].network_policy (scaler metal): cannot be enforced: host processes "
            "have the host's network; accepted: no network_policy, or a backend with networks of its own"
        ),
    ]


def test_the_digest_changes_with_any_rule_and_with_secret_values_and_not_with_the_way_of_writing(
    write: Write,
) -> None:
    env = "        env: {A: one, B: two}\n"
    first = digest(load(write(fleet(metal(labels="[a, b]", in_set=env)))))
    assert len(first) == 64
    same = fleet(metal(labels="['B', a, a]", in_set="        env:\n          B: two\n          A: 'one'\n"))
    assert digest(load(write(same))) == first
    for other in (
        fleet(metal(labels="[a, b]", in_set=env.replace("two", "three"))),
        fleet(metal(labels="[a, b]", in_set=env, more="    stop_grace_s: 6\n")),
        fleet(metal(labels="[a, b, c]", in_set=env)),
    ):
        assert digest(load(write(other))) != first


def test_the_summary_is_plain_json_of_what_decisions_use(write: Write) -> None:
    summary = load(write(fleet(metal(more="    roles: [builder]\n")))).summary()
    assert msgspec.json.decode(msgspec.json.encode(summary)) == summary
    assert summary["metal"]["max_agents"] == 2
    assert summary["metal"]["label_sets"] == [
        {"labels": ["linux"], "resources": {"requests": {}, "limits": {}}}
    ]


def test_a_scaler_tells_admission_its_rules_and_finds_its_label_sets(write: Write) -> None:
    more = "    resource_cap: {max_cpu: 3, max_memory: 2g}\n    beat_every_s: 5\n"
    config = load(write(fleet(metal(more=more))))
    rules = config.scaler("metal").rules("c1")
    assert (rules.slot, rules.max_cpus, rules.max_memory_bytes) == ("backend.c1.metal", 3.0, 2 * 1024**3)
    assert (rules.beat_every_s, rules.heartbeat_grace_s) == (5, 120)
    label_set = config.scaler("metal").label_set(("linux",))
    assert isinstance(label_set, BareMetalLabelSet)
    assert label_set.binary_path == "/bin/agent"
    with pytest.raises(KeyError, match=r"metal has no label set \[other\]"):
        config.scaler("metal").label_set(("other",))
    with pytest.raises(KeyError, match="there are: metal"):
        config.scaler("other")


def test_the_schema_describes_files_and_not_what_they_become() -> None:
    schema = json_schema()
    metal_schema = schema["$defs"]["BareMetalScaler"]
    assert set(metal_schema["required"]) == {"name", "backend", "max_agents", "label_sets"}
    assert metal_schema["additionalProperties"] is False
    assert schema["$defs"]["ScalerConfig"] == {
        "anyOf": [
            {"$ref": "#/$defs/BareMetalScaler"},
            {"$ref": "#/$defs/EventScaler"},
            {"$ref": "#/$defs/FirecrackerScaler"},
        ]
    }
    assert set(schema["$defs"]["QuantityForm"]["properties"]) == {"cpus", "memory"}
    reachable, ahead = set[str](), [schema["$ref"]]
    while ahead:
        name = ahead.pop().removeprefix("#/$defs/")
        if name not in reachable:
            reachable.add(name)
            ahead += _references(schema["$defs"][name])
    assert "Resources" not in reachable
    assert "memory_bytes" not in str([schema["$defs"][name] for name in reachable])


def _references(part: Any) -> list[str]:
    if isinstance(part, list):
        return [found for each in part for found in _references(each)]
    if isinstance(part, dict):
        own = [part["$ref"]] if isinstance(part.get("$ref"), str) else []
        return own + [found for each in part.values() for found in _references(each)]
    return []


@pytest.mark.parametrize(
    ("text", "network", "port"),
    [
        ("4000", None, 4000),
        ("10.0.0.1:53", "10.0.0.1/32", 53),
        ("10.2.0.0/16", "10.2.0.0/16", None),
        ("10.2.0.0/16:*", "10.2.0.0/16", None),
        ("*", None, None),
        ("*:*", None, None),
        ("*:443", None, 443),
    ],
)
def test_host_access_entries_name_an_address_a_port_or_both(
    text: str, network: str | None, port: int | None
) -> None:
    assert parse_entry(text) == HostAccessEntry(network=network, port=port)


@pytest.mark.parametrize(
    "text",
    ["db.lan:5432", "1.2.3.400", "10.0.0.0/33", ":0", "*:70000", "", "0", "10.0.0.1:", "10.0.0.0/255.0.0.0", "::1"],
)  # fmt: skip
def test_other_host_access_entries_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"does not name|has no port"):
        parse_entry(text)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KEYS = ("name", "backend", "max_agents", "label_sets", "platform", "roles", "resource_cap", "mandatory_labels", "nats_url")  # fmt: skip
SET_KEYS = ("labels", "binary_path", "args", "env", "resources", "network_policy")


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_whatever_stands_in_a_file_it_loads_or_is_refused_with_places(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    good: dict[str, Any] = {"name": "metal", "backend": "bare-metal", "max_agents": 1}
    label_set = {"labels": ["x"], "binary_path": "/x"}
    label_set |= data.draw(st.dictionaries(st.sampled_from(SET_KEYS), anything, max_size=2))
    entry = good | {"label_sets": [label_set]}
    entry |= data.draw(st.dictionaries(st.sampled_from(KEYS), anything, max_size=2))
    path = tmp_path_factory.mktemp("any") / "fleet.yaml"
    path.write_text(yaml.safe_dump({"version": 1, "scalers": [entry]}), encoding="utf-8")
    report = check(path)
    assert (report.config is None) == bool(report.problems)
    for problem in report.problems:
        assert problem.line > 0
        assert problem.accepted
        assert "\n" not in str(problem)

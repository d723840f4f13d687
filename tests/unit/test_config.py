"""The fleet file: what loads, what is refused, and how the refusal reads."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from actors.decisions.resources import ResourceSpec
from infra.config.backends import WITH_SCRIPTED
from infra.config.bare_metal import BareMetalScaler
from infra.config.load import check, load
from infra.config.problems import ConfigError
from tests.unit.fleet_files import Write, fleet, lines, metal, only

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str, name: str = "fleet.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write


def test_the_examples_load_clean() -> None:
    report = check(EXAMPLES / "fleet.yaml", EXAMPLES / "scalers.d")
    assert report.problems == ()
    assert report.warnings == ()
    assert report.config is not None
    assert [scaler.name for scaler in report.config.scalers] == ["metal-linux", "gpu-box", "microvms"]


def test_a_small_file_gets_the_defaults(write: Write) -> None:
    config = load(write(fleet(metal())))
    assert config.global_max_agents == 50
    (scaler,) = config.scalers
    assert isinstance(scaler, BareMetalScaler)
    assert scaler.max_concurrent_spawns == 8
    assert (scaler.spawn_timeout_s, scaler.register_timeout_s) == (300, 300)
    assert (scaler.heartbeat_grace_s, scaler.stop_grace_s) == (120, 5)
    assert scaler.roles is None
    assert scaler.enforce_cgroups is False
    assert scaler.label_sets[0].resources == ResourceSpec()


def test_no_scalers_at_all_is_valid_when_it_is_said(write: Write) -> None:
    assert load(write("version: 1\nscalers: []\n")).scalers == ()
    path = write("version: 1\n")
    assert only(check(path), path) == (
        "fleet.yaml scalers: missing; accepted: a list of scalers, which may be empty: []"
    )


def test_every_problem_is_reported_at_once_with_its_line_its_path_and_the_accepted_form(write: Write) -> None:
    path = write(
        fleet(
            metal("one", in_set="        resources: {cpus: many}\n"),
            metal("two", "[gpu]", in_set="        resources:\n          memory: 4Gi\n"),
            more="global_max_agents: 0\n",
        )
    )
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value).replace(str(path), path.name).splitlines() == [
        "fleet.yaml:2 global_max_agents: found the number 0; accepted: a whole number from 1 to 100000",
        (
            "fleet.yaml:10 scalers[0].label_sets[0].resources.cpus (scaler one): "
            'found "many"; accepted: a number of cores above 0, at most 256'
        ),
        (
            "fleet.yaml:18 scalers[1].label_sets[0].resources.memory (scaler two): "
            'found "4Gi"; accepted: a number and one of k, m, g (powers of 1024), such as 512m or 1.5g'
        ),
    ]


def test_problems_of_whole_scalers_are_found_beside_problems_of_single_values(write: Write) -> None:
    path = write(
        fleet(
            metal("one", more="    max_concurrent_spawns: x\n    heartbeat_grace_s: 29\n"),
            metal("one", "[other]", more="    mandatory_labels: [gpu]\n"),
        )
    )
    told = "\n".join(lines(check(path), path))
    for part in (
        "max_concurrent_spawns (scaler one): found",
        "fewer than 3 beats; accepted: 30 or more",
        "already at",
        "no job can reach it: it must ask for [gpu], which label set 0 lacks",
    ):
        assert part in told
    assert len(told.splitlines()) == 4


def test_problems_come_in_the_order_of_the_files_and_their_lines(write: Write) -> None:
    main = write(
        fleet(metal("one", more="    heartbeat_grace_s: 1\n"), metal("two", "[two]", more="    x: 1\n"))
    )
    write("scalers:\n" + metal("one", "[b]"), "d/b.yaml")
    write("more: 1\n", "d/a.yaml")
    problems = check(main, main.parent / "d").problems
    places = [(Path(problem.file).name, problem.line) for problem in problems]
    assert places == [("fleet.yaml", 6), ("fleet.yaml", 13), ("a.yaml", 1), ("b.yaml", 2)]


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "null\n"])
def test_an_empty_main_file_is_an_error_and_not_a_crash(write: Write, text: str) -> None:
    path = write(text)
    accepted = "at least `version: 1` and `scalers: []`"
    assert only(check(path), path) == f"fleet.yaml: the file is empty; accepted: {accepted}"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("scalers: []\n", "fleet.yaml:1 version: missing; accepted: 1"),
        ("version: 2\nscalers: []\n", "fleet.yaml:1 version: found the number 2; accepted: 1"),
        ("version: true\nscalers: []\n", "fleet.yaml:1 version: found the truth value true; accepted: 1"),
        ("version: '1'\nscalers: []\n", 'fleet.yaml:1 version: found "1"; accepted: 1'),
        ("- 1\n", "fleet.yaml:1: not a mapping; accepted: a mapping with `version: 1` and `scalers`"),
        (
            "version: 1\nscalers: {}\n",
            "fleet.yaml:2 scalers: not a list; accepted: a list of scalers, which may be empty: []",
        ),
        ("version: 1\nscalers: [a\n", ("fleet.yaml:3: not YAML: expected ',' or ']', but got '<stream end>'; "
         "accepted: one YAML document")),
        ("version: 1\n---\nversion: 1\n", ("fleet.yaml:2: not YAML: but found another document; "
         "accepted: one YAML document")),
        ("version: 1\nversion: 1\nscalers: []\n",
         "fleet.yaml:2 version: the key is given twice, first in line 1; accepted: each key once"),
        ("version: 1\nscalers: []\ncluster: A_b\n",
         ('fleet.yaml:3 cluster: found "A_b"; '
         "accepted: 1 to 63 lowercase letters, digits and dashes, not starting with a dash")),
        ("version: !!python/name:os.system x\nscalers: []\n",
         "fleet.yaml:1 version: the YAML tag tag:yaml.org,2002:python/name:os.system; accepted: plain YAML values"),
        ('version: 1\nscalers: []\nhost: "\\e[31mred\\nx"\n',
         ('fleet.yaml:3 host: found "\\u001b[31mred\\u000ax"; '
         "accepted: 1 to 63 lowercase letters, digits and dashes, not starting with a dash")),
    ],
)  # fmt: skip
def test_a_bad_main_file_is_refused(write: Write, text: str, line: str) -> None:
    path = write(text)
    assert line in lines(check(path), path)


@pytest.mark.parametrize(
    ("more", "in_set", "line"),
    [
        ("    maxAgents: 2\n", "", "scalers[0].maxAgents (scaler metal): unknown key; accepted: perhaps max_agents; "),
        ("    type: x\n", "", "scalers[0].type (scaler metal): unknown key; accepted: perhaps backend; "),
        ("    claim_ttl_s: 3\n", "", "claim_ttl_s (scaler metal): unknown key; accepted: the keys name, backend"),
        ("    <<: {}\n", "", "scalers[0].<< (scaler metal): unknown key"),
        ("    platform: {os: linux, arch: mips}\n", "", 'platform.arch (scaler metal): found "mips"; accepted: one of '),
        ("    platform: {os: linux, arch: x64, libc: musl}\n", "", "platform.libc (scaler metal): unknown key"),
        ("    platform: {os: linux}\n", "", "platform.arch (scaler metal): missing; accepted: one of "),
        ("    roles: [cook]\n", "", 'roles[0] (scaler metal): found "cook"; accepted: one of '),
        ("    mandatory_labels: [FleetLog:x]\n", "", "begins with fleetlog:, which only fleetlog gives out"),
        ("    resource_cap: {max_cpu: 2, max_memory: 5t}\n", "", 'resource_cap.max_memory (scaler metal): found "5t"'),
        ("    resource_cap: {max_cpu: .inf}\n", "", "resource_cap.max_cpu (scaler metal): found the number .inf"),
        ("    resource_cap: {max_cpus: 1}\n", "", "accepted: perhaps max_cpu; "),
        ("    spawn_timeout_s: 0.5\n", "", "spawn_timeout_s (scaler metal): found the number 0.5; accepted: a number from 1 "),
        ("    max_concurrent_spawns: 2.5\n", "", "found the number 2.5; accepted: a whole number"),
        ("    max_concurrent_spawns: true\n", "", "found the truth value true; accepted: a whole number"),
        ("    spawn_timeout_s: yes\n", "", "found the truth value yes; accepted: a number from 1 "),
        ("    enforce_cgroups: 1\n", "", "found the number 1; accepted: true or false"),
        ("    nats_url: http://x\n", "", "not the address of a NATS server; accepted: nats://host:port"),
        ("    nats_url: nats://x:99999\n", "", "not the address of a NATS server"),
        ("", "        resources: {cpus: 257}\n", "resources.cpus (scaler metal): found the number 257"),
        ("", "        resources: {cpus: .nan}\n", "resources.cpus (scaler metal): found the number .nan"),
        ("", "        resources: {memory: 512}\n", "resources.memory (scaler metal): found the number 512"),
        ("", "        resources: {memory: 0m}\n", "less than a byte: leave the key out for no limit"),
        ("", "        resources: {cpus: 1, limits: {cpus: 1}}\n", "it is not clear which side they mean"),
        ("", "        resources: {requests: {cpus: 2}, limits: {cpus: 1}}\n", "requests 2 cpus, limit 1"),
        ("", "        resources: {requests: {cores: 2}}\n", "resources.requests.cores (scaler metal): unknown key"),
        ("", "        args: [1]\n", 'args[0] (scaler metal): found the number 1; accepted: text, in quotes: "1"'),
        ("", "        args: x\n", 'args (scaler metal): found "x"; accepted: a list of any number, each text'),
        ("", "        working_directory: here\n", 'found "here"; accepted: an absolute path'),
        ("", "        env: {BAD-KEY: x}\n", "accepted: a name of letters, digits and underscores"),
        ("", "        env: {fleetlog_token: x}\n", "begins with FLEETLOG_, which fleetlog sets itself"),
        ("", "        image: x\n", "label_sets[0].image (scaler metal): unknown key"),
        ("", "        network_policy: {host_access: ['db.lan:5432']}\n", "does not name an IPv4 address or network"),
        ("", "        network_policy: {allowlist: [10.0.0.0/33]}\n", '"10.0.0.0/33" is not an IPv4 network'),
    ],
)  # fmt: skip
def test_a_bad_value_in_a_scaler_is_refused_alone(write: Write, more: str, in_set: str, line: str) -> None:
    path = write(fleet(metal(more=more, in_set=in_set)))
    assert line in only(check(path), path)


@pytest.mark.parametrize("key", ["name", "backend", "max_agents", "label_sets", "labels", "binary_path"])
def test_a_missing_required_key_is_named_with_its_scaler(write: Write, key: str) -> None:
    entry: dict[str, Any] = {
        "name": "metal",
        "backend": "bare-metal",
        "max_agents": 1,
        "label_sets": [{"labels": ["x"], "binary_path": "/x"}],
    }
    where = entry if key in entry else entry["label_sets"][0]
    del where[key]
    path = write(yaml.safe_dump({"version": 1, "scalers": [entry]}))
    place = f"scalers[0].{key}" if where is entry else f"scalers[0].label_sets[0].{key}"
    subject = "" if key == "name" else " (scaler metal)"
    assert f" {place}{subject}: missing; accepted: " in only(check(path), path)


@pytest.mark.parametrize(
    "labels", ["[]", "['']", "['a b']", "['a,b']", "[7]", "[fleetlog:agent:x]", "linux", "null"]
)
def test_labels_that_could_not_be_compared_or_are_ours_are_refused(write: Write, labels: str) -> None:
    path = write(fleet(metal(labels=labels)))
    assert "label_sets[0].labels" in only(check(path), path)


def test_a_backend_that_is_not_there_is_told_which_there_are_and_its_shared_keys_are_still_checked(
    write: Write,
) -> None:
    text = metal(in_set="        resources: {memory: 4Gi}\n        image: x\n", more="    kernel_path: /x\n")
    path = write(fleet(text.replace("bare-metal", "kubernetes")))
    backend, memory = lines(check(path), path)
    assert backend == (
        "fleet.yaml:4 scalers[0].backend (scaler metal): "
        '"kubernetes" is not a backend of this release; accepted: one of bare-metal, event, firecracker'
    )
    assert 'found "4Gi"' in memory


def test_the_scripted_backend_is_there_only_for_those_who_ask(write: Write) -> None:
    text = metal().replace("bare-metal", "scripted").replace("        binary_path: /bin/agent\n", "")
    path = write(fleet(text))
    assert (
        '"scripted" is not a backend of this release; accepted: one of bare-metal, event, firecracker'
        in only(check(path), path)
    )
    assert load(path, backends=WITH_SCRIPTED).scalers[0].backend == "scripted"
    other = write(fleet(metal().replace("bare-metal", "x")))
    assert "accepted: one of bare-metal, event, firecracker, scripted" in only(
        check(other, backends=WITH_SCRIPTED), other
    )


def test_no_secret_of_the_file_is_repeated_in_an_error_or_a_representation(write: Write) -> None:
    secret = "hunter2"
    for text in (
        fleet(metal(in_set=f"        env: {{TOKEN: [{secret}]}}\n")),
        fleet(metal(in_set=f"        env: {{TOKEN: {{{secret}x: 1}}}}\n")),
        fleet(metal(more=f"    nats_url: nats://user:{secret}@x:4222\n")),
        fleet(metal(in_set=f"        env: {{TOKEN: {secret}, ]\n")),
        fleet(metal(in_set="        env: {TOKEN: 4711}\n")),
    ):
        path = write(text)
        told = only(check(path), path)
        assert secret not in told
        assert "4711" not in told
    config = load(write(fleet(metal(in_set=f"        env: {{TOKEN: {secret}}}\n"))))
    assert config.scalers[0].environment(("linux",)) == {"TOKEN": secret}
    assert secret not in repr(config)
    assert secret not in repr(config.summary())


def test_drop_ins_are_appended_in_the_order_of_their_names(write: Write) -> None:
    main = write(fleet(metal("main", "[m]")))
    write(fleet(metal("late", "[l]")).removeprefix("version: 1\n"), "d/20.yml")
    write(fleet(metal("early", "[e]")).removeprefix("version: 1\n"), "d/10.yaml")
    write("", "d/15.yaml")
    write("not yaml: [", "d/notes.txt")
    (main.parent / "d" / "dir.yaml").mkdir()
    assert [scaler.name for scaler in load(main, main.parent / "d").scalers] == ["main", "early", "late"]


def test_a_main_file_without_scalers_is_valid_when_a_drop_in_has_them(write: Write) -> None:
    main = write("version: 1\n")
    write(fleet(metal()).removeprefix("version: 1\n"), "d/a.yaml")
    assert len(load(main, main.parent / "d").scalers) == 1


def test_a_drop_in_may_only_have_scalers(write: Write) -> None:
    main = write("version: 1\nscalers: []\n")
    path = write("version: 1\nscalers:\n" + metal(more="    roles: [cook]\n"), "d/a.yaml")
    version, roles = lines(check(main, main.parent / "d"), path)
    assert version == "a.yaml:1 version: a drop-in file may only have scalers; accepted: it in fleet.yaml"
    assert roles.startswith("a.yaml:6 scalers[0].roles[0] (scaler metal): ")


def test_files_that_cannot_be_read_are_named(write: Write, tmp_path: Path) -> None:
    main = write("version: 1\nscalers: []\n")
    missing = tmp_path / "missing.yaml"
    assert "missing.yaml: cannot be read: No such file or directory; accepted: a readable" in only(
        check(missing), missing
    )
    gone = tmp_path / "gone.d"
    assert "gone.d: cannot be listed: No such file or directory; accepted: a readable directory" in only(
        check(main, gone), gone
    )
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "link.yaml").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "d" / "pipe.yaml")
    (tmp_path / "d" / "raw.yaml").write_bytes(b"scalers:\n  - \xff\n")
    (tmp_path / "d" / "odd.yaml").write_bytes(b"scalers:\n  - \x07\n")
    told = "\n".join(lines(check(main, tmp_path / "d"), main))
    assert "link.yaml: cannot be read: No such file" in told
    assert "pipe.yaml: not a regular file" in told
    assert "raw.yaml:2: not UTF-8" in told
    assert "odd.yaml:2: the control character U+0007" in told
    assert only(check(tmp_path), tmp_path).endswith("a readable YAML file in UTF-8, at most 1024 KiB")


def test_a_file_that_is_too_big_too_deep_or_unfolds_without_end_is_refused(write: Write) -> None:
    big = write("#" + "x" * 1024 * 1024)
    assert "the file is too big" in only(check(big), big)
    deep = write("scalers: " + "[" * 5000)
    assert "nested too deeply" in only(check(deep), deep)
    bomb = "".join(f"k{n}: &k{n} [{', '.join([f'*k{n - 1}'] * 10) if n else 1}]\n" for n in range(9))
    path = write("version: 1\nscalers: []\n" + bomb)
    assert sum("too much for a fleet file" in line for line in lines(check(path), path)) == 1
    loop = write("version: 1\nscalers: &a [*a]\n")
    assert any("too much for a fleet file" in line for line in lines(check(loop), loop))


def test_two_scalers_may_not_have_the_same_name_or_label_set_also_across_files(write: Write) -> None:
    main = write(fleet(metal("one", "[Linux, x]")))
    path = write("scalers:\n" + metal("one", "[x, linux, X]"), "d/a.yaml")
    name, labels = lines(check(main, main.parent / "d"), path)
    assert name == (
        f"a.yaml:2 scalers[0].name (scaler one): scaler one is already at {main}:3 scalers[0].name; "
        "accepted: a name of its own"
    )
    assert labels == (
        f"a.yaml:6 scalers[0].label_sets[0].labels (scaler one): [linux, x] is already at {main}:7 "
        "scalers[0].label_sets[0].labels; accepted: a label set that no other scaler has"
    )


def test_every_pair_of_overlapping_scalers_is_told_and_one_scaler_may_repeat_itself(write: Write) -> None:
    again = "      - {labels: [b], binary_path: /b}\n"
    path = write(
        fleet(metal("one", "[a]", in_set=again * 2), metal("two", "[a]", in_set=again), metal("three", "[c]"))
    )
    told = lines(check(path), path)
    assert len(told) == 2
    assert all("(scaler two)" in line and "already at" in line for line in told)

"""What may be taken away from a host: what the log says of it, times what the host shows. Doubt spares, always."""

from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from actors.reclaiming import Leftover, Life

Standing = Literal[
    "live",  # the log has it, and may still owe its teardown
    "reaped",  # the log says that nothing is left of it
    "absent",  # the log never heard of it
    "unread",  # the log could not be asked
]
Action = Literal[
    "keep",  # accounted for, or somebody else's: no orphan
    "reap",  # provably ours, dead and owed to nobody: take it away
    "spare",  # an orphan, or perhaps one, that is left alone
]

NETWORK_KINDS = frozenset({"tap", "rules"})
"""What belongs to an address and not to a machine."""

TABLE: dict[tuple[Standing, Life], tuple[Action, str]] = {
    ("live", "dead"): ("keep", "the log accounts for it, and its own life takes it down"),
    ("live", "alive"): ("keep", "the log accounts for it"),
    ("live", "doubt"): ("keep", "the log accounts for it"),
    ("reaped", "dead"): ("reap", "the log says that its life is over, and nothing runs in it"),
    ("reaped", "alive"): ("spare", "it runs although the log says that its life is over"),
    ("reaped", "doubt"): ("spare", "something may run in it"),
    ("absent", "dead"): ("reap", "the log does not know it, and nothing runs in it"),
    ("absent", "alive"): ("spare", "it runs, and the log does not know it"),
    ("absent", "doubt"): ("spare", "something may run in it"),
    ("unread", "dead"): ("spare", "the log could not be asked about it"),
    ("unread", "alive"): ("spare", "the log could not be asked about it"),
    ("unread", "doubt"): ("spare", "the log could not be asked about it"),
}
"""For what bears our name. A living machine is ended by nobody but an operator who names it."""

_WORST: dict[Life, int] = {"dead": 0, "alive": 1, "doubt": 2}


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What to do with one thing, and why."""

    leftover: Leftover
    action: Action
    why: str


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """What we go by. `standing` is by machine; `leased` the addresses held, None when that is not known.

    `whole`: every source could be listed, so that what is not in the listing is not there.
    """

    owner: str
    standing: Mapping[str, Standing]
    leased: frozenset[str] | None
    whole: bool = True


def judge(listing: Iterable[Leftover], known: Known) -> tuple[Verdict, ...]:
    """Return a verdict for each thing listed, in the order in which they are to be taken away.

    A machine's directory comes last: as long as it is there, the rest is found again.
    """
    things = tuple(listing)
    lives: dict[str, Life] = {}
    for each in things:
        for key in _keys(each):
            if _WORST[each.life] >= _WORST[lives.get(key, "dead")]:
                lives[key] = each.life
    machines = [_of_machine(each, lives, known) for each in things if each.kind not in NETWORK_KINDS]
    holders = {
        verdict.leftover.address: verdict.leftover.vm or verdict.leftover.name
        for verdict in machines
        if verdict.leftover.address and verdict.action != "reap"
    }
    network = [_of_network(each, lives, holders, known) for each in things if each.kind in NETWORK_KINDS]
    rank = {"rules": 0, "tap": 1, "cgroup": 2}
    return tuple(sorted((*network, *machines), key=lambda verdict: rank.get(verdict.leftover.kind, 3)))


def _keys(leftover: Leftover) -> tuple[str, ...]:
    """Return what it shares its life with: other things of its machine, or of its address."""
    if leftover.kind in NETWORK_KINDS:
        return (f"address {leftover.address}",)
    return () if leftover.vm is None else (f"vm {leftover.vm}",)


def _of_machine(leftover: Leftover, lives: Mapping[str, Life], known: Known) -> Verdict:
    life = leftover.life if leftover.vm is None else lives[f"vm {leftover.vm}"]
    standing = "absent" if leftover.vm is None else known.standing.get(leftover.vm, "unread")
    if leftover.owner not in (known.owner, None):
        return _verdict(leftover, "keep", f"it belongs to coordinator {leftover.owner}")
    action, why = TABLE[(standing, life)]
    if action != "keep" and leftover.owner is None:
        return _verdict(leftover, "spare", "nobody can say whose it is")
    return _verdict(leftover, action, why)


def _of_network(
    leftover: Leftover, lives: Mapping[str, Life], holders: Mapping[str, str], known: Known
) -> Verdict:
    if leftover.owner not in (known.owner, None):
        return _verdict(leftover, "keep", f"it belongs to {leftover.owner}")
    if known.leased is not None and leftover.address in known.leased:
        return _verdict(leftover, "keep", f"{leftover.address} is leased")
    if leftover.owner is None:
        return _verdict(leftover, "spare", "nobody can say whose it is")
    if leftover.address in holders:
        return _verdict(
            leftover, "spare", f"{leftover.address} is the address of {holders[leftover.address]}"
        )
    life = lives[f"address {leftover.address}"]
    if life != "dead":
        return _verdict(leftover, "spare", f"{leftover.address} is in use, and nobody accounts for it")
    if known.leased is None or not known.whole:
        return _verdict(leftover, "spare", "it is not known what else is on this host or in the log")
    return _verdict(leftover, "reap", f"{leftover.address} is leased to nobody, and nothing uses it")


def _verdict(leftover: Leftover, action: Action, why: str) -> Verdict:
    return Verdict(leftover=leftover, action=action, why=why)


Status = Literal[
    "tracked",  # somebody accounts for it
    "orphaned",  # provably ours, and nobody accounts for it
    "unverified",  # something of it is in doubt: listed, never stopped
]


class LiveMachine(msgspec.Struct, frozen=True, kw_only=True):
    """One machine that runs on this host, and whether anybody accounts for it."""

    vm: str
    scaler: str
    owner: str | None
    status: Status
    why: str
    place: str
    pid: int | None = None
    age_s: float | None = None


def machine_places(listing: Iterable[Leftover]) -> tuple[Leftover, ...]:
    """Return the living machines, each once however many sources and things show it, by what says most of it."""
    found: dict[str, Leftover] = {}
    for each in listing:
        if each.vm is None or each.kind in NETWORK_KINDS or each.life == "dead":
            continue
        before = found.get(each.vm)
        if before is None or (before.kind == "cgroup" and each.kind != "cgroup"):
            found[each.vm] = each
    return tuple(found[vm] for vm in sorted(found))


def classify(leftover: Leftover, known: Known) -> LiveMachine:
    """Return how a living machine stands."""
    assert leftover.vm is not None, "a machine has an id"
    standing = known.standing.get(leftover.vm, "unread")
    status: Status = "orphaned"
    action, why = TABLE[(standing, leftover.life)]
    if leftover.owner not in (known.owner, None):
        status, why = "tracked", f"it belongs to coordinator {leftover.owner}"
    elif action == "keep":
        status = "tracked"
    elif standing == "unread":
        status = "unverified"
    elif leftover.owner is None:
        status, why = "unverified", "nobody can say whose it is"
    elif leftover.life == "doubt" or leftover.kind == "cgroup":
        status, why = "unverified", leftover.evidence
    return LiveMachine(
        vm=leftover.vm,
        scaler=leftover.scaler,
        owner=leftover.owner,
        status=status,
        why=why,
        place=leftover.name,
        pid=leftover.pid,
        age_s=leftover.age_s,
    )

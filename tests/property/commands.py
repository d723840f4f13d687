"""Commands to one machine, in any order, with sessions and times that fit and that do not."""

from datetime import timedelta

from hypothesis import strategies as st

from actors.commands import AgentDone, RegisterAgent, RemoveAgent
from actors.decisions.vm import (
    End,
    NoteConfigAcked,
    NoteDeadline,
    NoteExit,
    NoteGone,
    NoteSilence,
    NoteSpawned,
    NoteSpawnFailed,
    NoteTeardownFailed,
    NoteTornDown,
    StartSpawn,
    TakeUp,
    VmCommand,
)
from tests.given import AT, HANDLE, VM

sessions = st.sampled_from(["session-1", "session-2"])
texts = st.sampled_from(["", "busy", "ü" * 700])
codes = st.sampled_from([None, 0, 1, -9])

commands: st.SearchStrategy[VmCommand] = st.one_of(
    st.just(StartSpawn()),
    st.just(NoteSpawned(handle=HANDLE)),
    st.builds(NoteSpawnFailed, kind=st.just("timeout"), detail=texts, transient=st.booleans()),
    st.builds(RegisterAgent, vm=st.just(VM), session=sessions),
    st.builds(NoteConfigAcked, session=sessions),
    st.builds(AgentDone, vm=st.just(VM), session=sessions, exit_code=codes, detail=texts),
    st.builds(NoteExit, exit_code=codes, detail=texts),
    st.builds(NoteDeadline, now=st.integers(0, 400).map(lambda seconds: AT + timedelta(seconds=seconds))),
    st.builds(NoteSilence, silent_s=st.just(130.0), grace_s=st.just(120.0)),
    st.builds(NoteGone, reason=st.sampled_from(["exited", "host-rebooted"]), detail=texts),
    st.builds(TakeUp, coordinator=st.just("alpha"), handle=st.just(HANDLE), evidence=texts),
    st.builds(NoteTornDown, evidence=texts),
    st.builds(NoteTeardownFailed, detail=texts),
    st.builds(End, reason=st.just("drain"), detail=texts, failed=st.booleans()),
    st.builds(RemoveAgent, vm=st.just(VM), by=st.just("anna"), force=st.booleans()),
)

forward: st.SearchStrategy[VmCommand] = st.sampled_from(
    [
        StartSpawn(),
        StartSpawn(),
        NoteSpawned(handle=HANDLE),
        NoteSpawnFailed(kind="timeout", detail="", transient=True),
        RegisterAgent(vm=VM, session="session-1"),
        AgentDone(vm=VM, session="session-1", exit_code=0),
        NoteExit(exit_code=1),
        NoteTornDown(evidence="nothing left"),
    ]
)
"""Those that move a usual life on: among all commands they would rarely meet in their order."""

# SPDX-License-Identifier: Apache-2.0
"""Who goes on together: the eras of a job, seen from one of its processes.

An era begins where the processes have agreed on who they are (`shrink`) or have all come to one
point (`join`). Everything here but what says otherwise runs on the thread that connects.
"""

import concurrent.futures
import json
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from jax_dfccl._agreement import Agreement, Members, pack

_TICK_S = 0.02
_MARGIN_S = 10.0  # how long an agreement may take once nobody is waited for

_log = logging.getLogger("jax_dfccl")

Waiting = concurrent.futures.Future[Any]
_TELL_S = 10.0  # at most, until the thread that connects has told others


class Runtime(Protocol):
    """What processes talk through: `_core`."""

    def note_send(self, process: int, text: str) -> None:
        """Words for the same part of another process; they come in order."""
        ...

    def notes_ready(self) -> int:
        """A descriptor that is readable when there are notes."""
        ...

    def notes_take(self) -> list[tuple[int, bool, bool, str]]:
        """Notes that came: process, whether it has ended, whether in order, text."""
        ...

    def give_up_before(self, era: int, reason: str) -> None:
        """Ends calls between processes that were, or will be, launched in an earlier era."""
        ...

    def begin_era(self, era: int) -> None:
        """Launches are counted anew from here on."""
        ...


class Connections(Protocol):
    """The connections to others: `_cluster.Cluster`."""

    def call(self, function: Callable[..., Any], *arguments: object, after_s: float = 0) -> None:
        """Calls a function on the thread that connects."""
        ...

    def answer(self, question: int, reply: Callable[[], None]) -> None:
        """Calls `reply` whenever the descriptor `question` is readable."""
        ...

    def want(self, processes: Members) -> None:
        """Asks for connections."""
        ...

    def is_linked(self, process: int) -> bool:
        """Whether there is, or was, a connection."""
        ...

    def has_ended(self, process: int) -> bool:
        """Whether it is certain that a process has ended."""
        ...

    def leave_out(self, process: int, reason: str) -> None:
        """Breaks with a process."""
        ...


class Membership:
    """The processes that go on together with this one.

    Attributes:
        era: the number of the era.
        members: who is in it.
    """

    def __init__(self, me: int, members: Members, connections: Connections, runtime: Runtime):
        self.era = 0
        self.members = members
        self._me = me
        self._connections = connections
        self._runtime = runtime
        self._lost: dict[int, str] = {}
        self._dead: set[int] = set()
        self._left_out = ""  # why this process is on its own
        self._decided: dict[int, Members] = {}  # by era
        self._agreement = self._next_agreement()
        self._shrinking: Waiting | None = None
        self._outcome: tuple[int, Members, Members] | None = None  # not returned by `shrink` yet
        self._came: dict[str, list[int]] = {}  # by meeting, in order; of the first member
        self._meetings: dict[str, Waiting] = {}
        self._early: list[tuple[int, dict[str, Any]]] = []
        self._ticking = False
        connections.answer(runtime.notes_ready(), self._read_notes)

    # Any thread.

    def shrink(self, timeout: float) -> tuple[int, Members, Members]:
        """Agrees with the others on who goes on: the new era, its members, and who is lost."""
        future: Waiting = concurrent.futures.Future()
        self._connections.call(self._begin_shrink, future, timeout)
        return future.result()

    def meet(self, point: str) -> Waiting:
        """Comes to a point to which all members come once in an era.

        The result, once all have come, is who came last; or an error if some cannot come.
        """
        future: Waiting = concurrent.futures.Future()
        told: Waiting = concurrent.futures.Future()
        self._connections.call(self._come, f"{point} {self.era}", future, told)
        # What this process does from here on is seen by others after its coming.
        concurrent.futures.wait([told], timeout=_TELL_S)
        return future

    def advance(self) -> None:
        """Begins the next era with the same members; called once all have come to one point."""
        future: Waiting = concurrent.futures.Future()
        self._connections.call(self._advance, future)
        future.result()

    # The thread that connects.

    def _next_agreement(self) -> Agreement:
        era = self.era + 1
        agreement = Agreement(
            self._me, self.members, lambda to, text: self._send(to, "shrink", era, **text)
        )
        for process in self.members & set(self._lost):
            agreement.lose(process, process in self._dead)
        return agreement

    def _send(self, process: int, about: str, era: int, **fields: Any) -> None:
        self._runtime.note_send(process, json.dumps({"about": about, "era": era, **fields}))

    def _read_notes(self) -> None:
        for process, ended, in_order, text in self._runtime.notes_take():
            if ended:
                self._lose(process, in_order or self._connections.has_ended(process), text)
                continue
            try:
                self._hear(process, json.loads(text))
            except (ValueError, KeyError, TypeError, IndexError) as error:
                _log.warning("process %d says what this version does not know: %r", process, error)
        self._look()

    def _lose(self, process: int, dead: bool, how: str) -> None:
        self._lost[process] = how
        if dead:
            self._dead.add(process)
        if process in self.members:
            self._agreement.lose(process, dead)
            for point in list(self._meetings):
                self._fail(point, f"process {process} cannot come: {how}")

    def _hear(self, process: int, message: dict[str, Any]) -> None:
        era = message["era"]
        if message["about"] == "meet":
            self._hear_of_meeting(process, message)
        elif era <= self.era:
            if message["kind"] in ("here", "prepare", "accept"):
                value = pack(self._decided[era])
                self._send(process, "shrink", era, kind="decide", dead="0", value=value)
        elif process not in self.members:
            return
        elif era == self.era + 1:
            self._agreement.hear(process, message, time.monotonic())
            if message["kind"] == "here":
                for point in list(self._meetings):
                    self._fail(point, f"process {process} has called jax_dfccl.shrink()")
        elif len(self._early) < 16 * len(self.members):
            self._early.append((process, message))  # of an era that this process enters soon

    # Shrinking.

    def _begin_shrink(self, future: Waiting, timeout: float) -> None:
        if self._left_out:
            future.set_exception(RuntimeError(f"shrink: {self._left_out}"))
        elif self._shrinking is not None:
            future.set_exception(RuntimeError("shrink: another thread of this process is in it"))
        elif self._outcome is not None:
            future.set_result(self._outcome)
            self._outcome = None
        else:
            self._shrinking = future
            self._runtime.give_up_before(
                self.era + 1,
                f"process {self._me} has called jax_dfccl.shrink(), which gives up what was "
                "launched before; the processes that go on must call it, too",
            )
            self._connections.want(self.members)
            now = time.monotonic()
            self._agreement.call(now, timeout)
            self._connections.call(self._give_up, future, after_s=timeout + _MARGIN_S)
            self._look()

    def _look(self) -> None:
        """Sees whether the agreement has come about."""
        agreement = self._agreement
        if self._shrinking is not None:
            for process in self.members - {self._me}:
                if not agreement.is_dead(process) and self._connections.has_ended(process):
                    self._dead.add(process)
                    agreement.lose(process, dead=True)
            agreement.tick(time.monotonic())
        if agreement.decision is not None and not self._left_out:
            self._begin_era(agreement.decision)
        if self._shrinking is not None and not self._ticking:
            self._ticking = True
            self._connections.call(self._tick, after_s=_TICK_S)

    def _tick(self) -> None:
        self._ticking = False
        self._look()

    def _begin_era(self, members: Members) -> None:
        before = self.members
        future, self._shrinking = self._shrinking, None
        if self._me not in members:
            self._left_out = (
                f"this process was left out when processes {_listed(members)} agreed to go on "
                f"without it (era {self.era + 1})"
            )
            for process in before - {self._me}:
                self._connections.leave_out(process, self._left_out)
            if future is not None:
                future.set_exception(RuntimeError(f"shrink: {self._left_out}"))
            return
        for process in before - members:
            self._connections.leave_out(
                process,
                f"processes {_listed(members)} have agreed to go on without process {process} "
                f"(era {self.era + 1})",
            )
        self._enter_era(members)
        for point in list(self._meetings):
            self._fail(point, "the processes have agreed to go on without some")
        outcome = (self.era, members, before - members)
        if future is not None:
            future.set_result(outcome)
        else:
            self._outcome = outcome

    def _enter_era(self, members: Members) -> None:
        self.era += 1
        self.members = self._decided[self.era] = members
        self._runtime.begin_era(self.era)
        self._agreement = self._next_agreement()
        early, self._early = self._early, []
        for process, message in early:
            self._hear(process, message)

    def _give_up(self, future: Waiting) -> None:
        if self._shrinking is not future:
            return
        self._shrinking = None
        agreement = self._agreement
        silent = self.members - agreement.here - agreement.lost
        dead = {process for process in self.members if agreement.is_dead(process)}
        unsure = agreement.lost - dead
        parts = [f"processes {_listed(agreement.here - agreement.lost)} of {_listed(self.members)}"]
        parts[0] += " have called it"
        if silent:
            parts.append(f"{_listed(silent)} are silent, or have not called it yet")
        if unsure:
            parts.append(f"{_listed(unsure)} cannot be reached, but may be alive")
        future.set_exception(
            RuntimeError(
                f"shrink: the processes that are left cannot agree: {'; '.join(parts)}. Those who "
                "go on must be more than half of all whose end is not certain, or a half with "
                f"process {min(self.members)}; else the others might go on, too"
            )
        )

    # Meetings.

    def _come(self, point: str, future: Waiting, told: Waiting) -> None:
        try:
            self._read_notes()  # who has come before
            self._meetings[point] = future
            self._tell_of_coming(point)
        finally:
            told.set_result(None)

    def _tell_of_coming(self, point: str) -> None:
        gone = self.members & set(self._lost)
        if self._left_out:
            self._fail(point, self._left_out)
        elif gone:
            self._fail(point, f"process {min(gone)} cannot come: {self._lost[min(gone)]}")
        elif self._agreement.here:
            caller = min(self._agreement.here)
            self._fail(point, f"process {caller} has called jax_dfccl.shrink()")
        elif self._me == min(self.members):
            self._count_in(point, self._me)
        else:
            self._connections.want(self.members)
            self._send(min(self.members), "meet", self.era, point=point, kind="come")

    def _hear_of_meeting(self, process: int, message: dict[str, Any]) -> None:
        point = message["point"]
        if message["kind"] == "come":
            self._count_in(point, process)
        elif point in self._meetings and process == min(self.members):
            self._meetings.pop(point).set_result(message["last"])

    def _count_in(self, point: str, process: int) -> None:
        came = self._came.setdefault(point, [])
        came.append(process)
        if set(came) != self.members:
            return
        del self._came[point]
        for member in self.members - {self._me}:
            self._send(member, "meet", self.era, point=point, kind="all", last=process)
        self._meetings.pop(point).set_result(process)

    def _fail(self, point: str, reason: str) -> None:
        self._meetings.pop(point).set_exception(RuntimeError(reason))

    def _advance(self, future: Waiting) -> None:
        self._enter_era(self.members)
        future.set_result(None)


def _listed(processes: "Members | set[int]") -> str:
    return ", ".join(map(str, sorted(processes))) or "none"

# SPDX-License-Identifier: Apache-2.0
"""How processes agree on those of them that go on: one process's part, without threads or clocks.

Everyone who calls for it says so. Once nobody else is to be expected, the first of them proposes
those who answer, by Paxos with all members of the era before as acceptors: it asks for promises,
takes over what may have been decided before, and has the set accepted. If it falls silent, the next
one proposes. So whatever is lost or late, no two processes take different sets for decided.

A quorum is a majority of the members; a half with the first of them; or all whose end is not
certain, as the dead vote for nothing. Two quorums have a process in common that lives, or nobody
lives who knows what the first one decided.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

Members = frozenset[int]
Ballot = tuple[int, int]  # a round, and whose it is

TURN_S = 1.0  # a process that proposes may be silent for so long


def pack(members: Iterable[int]) -> str:
    """A set of processes in a message: bits in hexadecimal."""
    return f"{sum(1 << member for member in members):x}"


def unpack(text: str) -> Members:
    """The set that `pack` wrote."""
    bits = int(text, 16)
    return frozenset(member for member in range(bits.bit_length()) if bits >> member & 1)


@dataclasses.dataclass
class _Proposal:
    ballot: Ballot
    begun: float
    promises: dict[int, tuple[Ballot, Members] | None] = dataclasses.field(default_factory=dict)
    value: Members | None = None  # once it is up for acceptance
    accepted: set[int] = dataclasses.field(default_factory=set)


class Agreement:
    """One process's part in the agreement on the members of an era.

    Attributes:
        here: who has called for it.
        lost: who cannot be heard any more.
        decision: who goes on, once that is known.
    """

    def __init__(self, me: int, members: Members, send: Callable[[int, dict[str, Any]], None]):
        self.me = me
        self.members = members
        self.here: set[int] = set()
        self.lost: set[int] = set()
        self.decision: Members | None = None
        self._send = send
        self._dead: set[int] = set()  # of whom it is certain
        self._promised: Ballot = (0, -1)
        self._accepted: tuple[Ballot, Members] | None = None
        self._proposal: _Proposal | None = None
        self._round = 0  # the largest heard of
        self._deadline = 0.0  # from then on, those who are silent are not waited for
        self._turn_since: float | None = None

    def call(self, now: float, timeout: float) -> None:
        """This process calls for it, and waits so long for those who may be late."""
        self._deadline = now + timeout
        self._turn_since = None
        if self.me not in self.here:
            self.here.add(self.me)
            self._tell("here")
        self.tick(now)

    def lose(self, process: int, dead: bool) -> None:
        """A process cannot be heard any more; `dead`: it has certainly ended."""
        self.lost.add(process)
        if dead and process not in self._dead:
            self._dead.add(process)
            self._tell("dead")

    def is_dead(self, process: int) -> bool:
        """Whether the end of a process is certain."""
        return process in self._dead

    def is_quorum(self, processes: Iterable[int]) -> bool:
        """Whether what these say cannot be contradicted by others."""
        inside = self.members.intersection(processes)
        if self.members - inside <= self._dead:
            return True
        if 2 * len(inside) == len(self.members):
            return min(self.members) in inside
        return 2 * len(inside) > len(self.members)

    def hear(self, process: int, message: dict[str, Any], now: float) -> None:
        """Takes a message of another member."""
        kind = message["kind"]
        self._dead |= unpack(message["dead"]) & self.members
        self.lost |= self._dead
        if kind == "decide":
            self._decide(unpack(message["value"]))
            return
        if self.decision is not None:
            if kind in ("here", "prepare", "accept"):
                self._reply(process, "decide", value=pack(self.decision))
            return
        if kind == "here":
            self.here.add(process)
        elif kind in ("prepare", "accept"):
            self._vote(process, kind, message)
        elif kind == "refuse":
            self._round = max(self._round, message["round"])
            self._proposal = None  # and again at this process's next turn
            self._turn_since = now
        elif kind in ("promise", "accepted"):
            self._count(process, kind, message)
        self.tick(now)

    def tick(self, now: float) -> None:
        """To be called after everything that happens, and from time to time."""
        if self.decision is not None or self.me not in self.here:
            return
        expected = self.members - self.here - self.lost
        if expected and now < self._deadline:
            return
        if self._turn_since is None:
            self._turn_since = now
        candidates = sorted((self.here - self.lost) | {self.me})
        turn = TURN_S * candidates.index(self.me)
        proposal = self._proposal
        if proposal is None:
            if now >= self._turn_since + turn:
                self._propose(now)
        elif proposal.value is None:
            silent = set(candidates) - set(proposal.promises)
            if not silent or now >= max(proposal.begun + TURN_S, self._deadline):
                self._put_up(proposal)
        if proposal is not None and proposal is self._proposal:
            if now >= proposal.begun + 4 * TURN_S + turn:
                self._propose(now)

    def _vote(self, process: int, kind: str, message: dict[str, Any]) -> None:
        ballot = (message["round"], process)
        self._round = max(self._round, ballot[0])
        if ballot < self._promised:
            self._reply(process, "refuse", round=self._promised[0])
            return
        self._promised = ballot
        if kind == "accept":
            self._accepted = (ballot, unpack(message["value"]))
            self._reply(process, "accepted", round=ballot[0])
        elif self._accepted is None:
            self._reply(process, "promise", round=ballot[0])
        else:
            (round_, owner), value = self._accepted
            was = {"was": [round_, owner, pack(value)]}
            self._reply(process, "promise", round=ballot[0], **was)

    def _propose(self, now: float) -> None:
        self._round += 1
        self._proposal = _Proposal((self._round, self.me), now)
        self._tell("prepare", round=self._round)
        self._vote(self.me, "prepare", {"round": self._round})

    def _count(self, process: int, kind: str, message: dict[str, Any]) -> None:
        proposal = self._proposal
        if proposal is None or message["round"] != proposal.ballot[0]:
            return
        if kind == "promise":
            was = message.get("was")
            accepted = None if was is None else ((was[0], was[1]), unpack(was[2]))
            proposal.promises[process] = accepted
        elif proposal.value is not None:
            proposal.accepted.add(process)
            if self.is_quorum(proposal.accepted):
                self._decide(proposal.value)

    def _put_up(self, proposal: _Proposal) -> None:
        """Has a set accepted, if enough have promised."""
        if not self.is_quorum(proposal.promises):
            return
        before = [accepted for accepted in proposal.promises.values() if accepted is not None]
        value = frozenset(self.here.intersection(proposal.promises) - self.lost)
        if before:
            value = max(before, key=lambda accepted: accepted[0])[1]
        elif not self.is_quorum(value):
            return  # those who have not called are too many
        proposal.value = value
        self._tell("accept", round=proposal.ballot[0], value=pack(value))
        self._vote(self.me, "accept", {"round": proposal.ballot[0], "value": pack(value)})

    def _decide(self, value: Members) -> None:
        if self.decision is None:
            self.decision = value
            # So that whoever hears later of what comes after it has heard of this.
            self._tell("decide", value=pack(value))

    def _tell(self, kind: str, **fields: Any) -> None:
        for member in sorted(self.members - self.lost - {self.me}):
            self._reply(member, kind, **fields)

    def _reply(self, process: int, kind: str, **fields: Any) -> None:
        if process != self.me:
            self._send(process, {"kind": kind, "dead": pack(self._dead), **fields})
        elif kind in ("promise", "accepted"):
            self._count(self.me, kind, fields)

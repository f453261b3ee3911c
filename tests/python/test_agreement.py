# SPDX-License-Identifier: Apache-2.0
"""Agreements on who goes on, over simulated networks that lose, delay and split."""

import functools
import heapq
import itertools

import numpy as np
import pytest

from jax_dfccl._agreement import TURN_S, Agreement, pack, unpack

TIMEOUT_S = 5.0


class Network:
    """Processes with messages that take random times, in order between two of them."""

    def __init__(self, members, seed=0, longest_s=0.05):
        self.random = np.random.default_rng(seed)
        self.longest_s = longest_s
        self.now = 0.0
        self.events: list = []
        self.number = itertools.count()
        self.dead: set[int] = set()
        self.asleep: dict[int, list] = {}  # what they will do once they wake
        self.apart: set[frozenset[int]] = set()  # pairs
        self.latest: dict[tuple[int, int], float] = {}
        self.parts = {}
        for me in members:
            self.parts[me] = Agreement(me, frozenset(members), functools.partial(self.send, me))

    def at(self, delay, function):
        heapq.heappush(self.events, (self.now + delay, next(self.number), function))

    def send(self, source, target, message):
        if source in self.dead:
            return
        due = self.now + self.random.uniform(0, self.longest_s)
        due = self.latest[source, target] = max(due, self.latest.get((source, target), 0))

        def arrive():
            if frozenset((source, target)) not in self.apart and source not in self.cut(target):
                self.on(target, lambda part: part.hear(source, message, self.now))

        self.at(due - self.now, arrive)

    def cut(self, target):
        """Whom `target` takes for lost, as their link has been brought down."""
        return self.parts[target].lost

    def on(self, process, function):
        if process in self.asleep:
            self.asleep[process].append(function)
        elif process not in self.dead:
            function(self.parts[process])

    def kill(self, process, proven=True):
        self.dead.add(process)
        for other in self.parts:
            delay = self.random.uniform(0, self.longest_s)
            self.at(delay, lambda o=other: self.on(o, lambda part: part.lose(process, proven)))

    def split(self, side):
        for a in side:
            for b in set(self.parts) - set(side):
                self.apart.add(frozenset((a, b)))
                for one, other in ((a, b), (b, a)):
                    delay = self.random.uniform(0, 1)
                    self.at(
                        delay,
                        lambda one=one, other=other: self.on(
                            one, lambda part: part.lose(other, dead=False)
                        ),
                    )

    def wake(self, process):
        for function in self.asleep.pop(process):
            self.on(process, function)

    def call(self, process):
        self.on(process, lambda part: part.call(self.now, TIMEOUT_S))

    def run(self, seconds):
        end = self.now + seconds
        for step in range(int(seconds / 0.02)):
            for process in self.parts:
                self.at(step * 0.02, lambda p=process: self.on(p, lambda a: a.tick(self.now)))
        while self.events and self.events[0][0] <= end:
            self.now, _, function = heapq.heappop(self.events)
            function()
        self.now = end

    def decisions(self, among=None):
        """Of those that are alive, or of some."""
        return {
            process: part.decision
            for process, part in self.parts.items()
            if process not in self.dead and (among is None or process in among)
        }


def test_sets_in_messages():
    for members in ((), (0,), (3, 0, 70), range(4096)):
        assert unpack(pack(members)) == frozenset(members)
    assert len(pack(range(4096))) == 1024


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_all_call(count):
    network = Network(range(count))
    for process in range(count):
        network.call(process)
    network.run(1)
    assert set(network.decisions().values()) == {frozenset(range(count))}


@pytest.mark.parametrize(("count", "lost"), [(2, {0}), (2, {1}), (4, {0, 1, 2}), (5, {1, 3})])
def test_those_that_have_certainly_ended_do_not_count(count, lost):
    network = Network(range(count))
    for process in lost:
        network.kill(process)
    for process in set(range(count)) - lost:
        network.call(process)
    network.run(1)  # nobody is waited for
    assert set(network.decisions().values()) == {frozenset(range(count)) - lost}


@pytest.mark.parametrize(
    ("count", "lost", "agree"),
    [(2, {1}, True), (2, {0}, False), (3, {0}, True), (3, {0, 1}, False), (4, {2, 3}, True),
     (4, {0, 3}, False), (5, {0, 1}, True), (5, {0, 1, 2}, False)],
)  # fmt: skip
def test_those_whose_end_is_not_certain_count(count, lost, agree):
    network = Network(range(count))
    for process in lost:
        network.kill(process, proven=False)
    rest = frozenset(range(count)) - lost
    for process in rest:
        network.call(process)
    network.run(30)
    assert set(network.decisions().values()) == ({rest} if agree else {None})


def test_the_silent_are_waited_for_then_left_out():
    network = Network(range(4))
    network.asleep[3] = []
    for process in range(4):
        network.call(process)
    network.run(TIMEOUT_S - 0.5)
    assert set(network.decisions({0, 1, 2}).values()) == {None}
    network.run(5)
    assert set(network.decisions({0, 1, 2}).values()) == {frozenset({0, 1, 2})}
    network.wake(3)
    network.run(1)
    assert network.parts[3].decision == frozenset({0, 1, 2})  # it hears that it is not among them


def test_the_late_are_waited_for():
    network = Network(range(3))
    for process in range(2):
        network.call(process)
    network.run(TIMEOUT_S - 1)
    network.call(2)
    network.run(1)
    assert set(network.decisions().values()) == {frozenset(range(3))}


@pytest.mark.parametrize("seed", range(20))
def test_who_proposes_falls_silent(seed):
    """The first, at a random point of the agreement; it has ended, or stands still."""
    network = Network(range(5), seed)
    for process in range(5):
        network.call(process)
    network.run(network.random.uniform(0, 0.2))
    if seed % 2:
        network.kill(0)
    else:
        network.asleep[0] = []
    network.run(TIMEOUT_S + 8 * TURN_S)
    found = set(network.decisions({1, 2, 3, 4}).values())
    assert found in ({frozenset(range(5))}, {frozenset(range(1, 5))}), found


@pytest.mark.parametrize("seed", range(300))
def test_nobody_ever_disagrees(seed):
    """Ends, naps and splits at random times: one set at most, and never lost without need."""
    random = np.random.default_rng(seed)
    count = int(random.integers(2, 8))
    network = Network(range(count), seed, longest_s=float(random.choice([0.01, 0.3, 2.0])))
    for process in range(count):
        if random.random() < 0.9:
            network.at(random.uniform(0, 3), lambda p=process: network.call(p))

    def happen():
        kind, process = random.integers(3), int(random.integers(count))
        if kind == 0:
            network.kill(process, proven=bool(random.random() < 0.7))
        elif kind == 1 and process not in network.asleep:
            network.asleep[process] = []
            network.at(random.uniform(0, 12), lambda: network.wake(process))
        elif kind == 2:
            network.split([p for p in range(count) if random.random() < 0.5])

    for _ in range(random.integers(0, 4)):
        network.at(random.uniform(0, 6), happen)
    network.run(60)
    found = {part.decision for part in network.parts.values()} - {None}
    assert len(found) <= 1, found
    for members in found:
        assert members <= frozenset(range(count))


def test_a_decision_that_one_has_heard_is_taken_over():
    """The first has its set accepted, decides, and ends before it can tell anybody."""
    network = Network(range(3))
    sent = network.parts[0]._send
    network.parts[0]._send = lambda to, m: None if m["kind"] == "decide" else sent(to, m)
    for process in range(3):
        network.call(process)
    while network.parts[0].decision is None:
        network.run(0.02)
    network.kill(0)
    network.run(5)
    # It has 0 among them, as 0 may have told somebody.
    assert set(network.decisions().values()) == {frozenset(range(3))}

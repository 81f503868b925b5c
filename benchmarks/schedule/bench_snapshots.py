"""Which snapshots of recurrent states to keep: shares of prompt tokens that have to be computed.

    python -m benchmarks.schedule.bench_snapshots

Requests of four kinds of traffic, one after the other, against a table of 16, 54 or 200 snapshots
(54 are 4 GiB of Qwen3.5-27B): the server's order of eviction beside least recently used.  A prompt
leaves snapshots as the server takes them: every 4,096 tokens, at its end, and at the end of its
answer if that has 256 tokens.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from runtime.scheduler.states.eviction import EvictionOrder

EVERY, LEAST = 4096, 256
REQUESTS = 4000


class Place(NamedTuple):
    """A prefix: the conversation, or document, and its length in tokens."""

    owner: int
    tokens: int


class Prompt(NamedTuple):
    found: list[Place]  # prefixes that may be cached, the shortest first
    left: list[Place]  # prefixes of which snapshots are taken
    tokens: int


class Order(Protocol):
    def use(self, place: Place) -> None: ...
    def evict(self) -> Place: ...


class LeastRecentlyUsed:
    def __init__(self) -> None:
        self._places: OrderedDict[Place, None] = OrderedDict()

    def use(self, place: Place) -> None:
        self._places[place] = None
        self._places.move_to_end(place)

    def evict(self) -> Place:
        return self._places.popitem(last=False)[0]


class Served:
    """The server's."""

    def __init__(self) -> None:
        self._order: EvictionOrder[Place] = EvictionOrder()

    def use(self, place: Place) -> None:
        self._order.use(place, place.tokens)

    def evict(self) -> Place:
        place = self._order.evict(lambda place: True)
        assert place is not None
        return place


def snapshots_of(owner: int, start: int, end: int) -> list[Place]:
    regular = range((start // EVERY + 1) * EVERY, end, EVERY)
    return [*(Place(owner, tokens) for tokens in regular), Place(owner, end)]


class Conversations:
    """So many at a time, each of which begins anew when it is long enough."""

    def __init__(self, rng: random.Random, count: int, first: range, longest: int) -> None:
        self._rng, self._count, self._first, self._longest = rng, count, first, longest
        self._open: dict[int, tuple[int, int, list[Place]]] = {}
        self._serial = 0

    def prompt(self) -> Prompt:
        rng, number = self._rng, self._rng.randrange(self._count)
        owner, before, places = self._open.get(number, (0, self._longest, []))
        if before >= self._longest:
            self._serial += 1
            owner, before, places = hash((self._count, self._serial)), 0, []
        length = before + rng.randrange(200, 1500) if before else rng.choice(self._first)
        left, answer = snapshots_of(owner, before, length), rng.randrange(100, 600)
        if answer >= LEAST:
            left.append(Place(owner, length + answer))
        self._open[number] = owner, length + answer, [*places, *left]
        return Prompt(places, left, length)


def once(rng: random.Random, serial: int, lengths: range, shared: int = 0) -> Prompt:
    """A prompt that does not come again, perhaps behind one that all have."""
    length = shared + rng.choice(lengths)
    system = [Place(-1, shared)] if shared else []
    return Prompt(system, [*system, *snapshots_of(serial, shared, length)], length)


def traffic(kind: str) -> Iterator[Prompt]:
    rng = random.Random(0)
    agents = Conversations(rng, 12, range(20_000, 20_001), 40_000)
    chats = Conversations(rng, 60, range(300, 2000), 6000)
    for serial in range(REQUESTS):
        draw = rng.random()
        if kind == "agents":
            yield agents.prompt()
        elif kind == "chats":
            yield chats.prompt()
        elif kind == "agents among short questions":
            yield agents.prompt() if draw < 0.15 else once(rng, serial, range(300, 3000))
        elif draw < 0.3:  # documents among questions behind one system prompt
            yield once(rng, serial, range(30_000, 30_001))
        else:
            yield once(rng, serial, range(100, 800), 2000)


def computed(order: Order, count: int, prompts: Iterator[Prompt]) -> float:
    """Prompt tokens that are computed, of all."""
    kept: set[Place] = set()
    done = total = 0
    for prompt in prompts:
        hit = next((place for place in reversed(prompt.found) if place in kept), None)
        if hit is not None:
            order.use(hit)
        start = hit.tokens if hit else 0
        for place in prompt.left:
            if place.tokens > start:
                if place not in kept and len(kept) == count:
                    kept.remove(order.evict())
                order.use(place)
                kept.add(place)
        done, total = done + prompt.tokens - start, total + prompt.tokens
    return done / total


def main() -> None:
    kinds = ("agents", "chats", "agents among short questions", "documents among questions")
    print("| share of prompt tokens computed | snapshots | least recently used | the server's |")
    print("|---|---|---|---|")
    for kind in kinds:
        for count in (16, 54, 200):
            shares = [
                computed(order(), count, traffic(kind)) for order in (LeastRecentlyUsed, Served)
            ]
            print(f"| {kind} | {count} | {shares[0]:.1%} | {shares[1]:.1%} |")


if __name__ == "__main__":
    main()

"""The order in which snapshots are overwritten: what saves least, and was used least lately."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from runtime.scheduler.states.eviction import EvictionOrder


def anything(name: object) -> bool:
    return True


def evicted(order: EvictionOrder[str]) -> list[str]:
    names = []
    while (name := order.evict(anything)) is not None:
        names.append(name)
    return names


def test_the_shorter_prefix_goes_first_and_of_equal_ones_the_older():
    order: EvictionOrder[str] = EvictionOrder()
    for name, tokens in (("long", 900), ("old", 300), ("new", 300), ("short", 100)):
        order.use(name, tokens)
    assert evicted(order) == ["short", "old", "new", "long"]
    assert len(order) == 0


def test_each_use_counts_as_much_as_the_first():
    order: EvictionOrder[str] = EvictionOrder()
    order.use("thrice", 100)
    order.use("once", 250)
    order.use("thrice", 100)
    order.use("thrice", 100)
    assert evicted(order) == ["once", "thrice"]


def test_a_long_prefix_outlives_many_short_ones_and_goes_when_it_is_not_used():
    order: EvictionOrder[str] = EvictionOrder()
    order.use("agent", 30_000)
    for number in range(20):
        order.use(f"chat {number}", 500)
    gone = []
    while "agent" not in gone:
        order.use(f"chat {20 + len(gone)}", 500)
        gone.append(order.evict(anything))
        assert len(order) == 21
    # The level rises by 500 with every 21 evictions, up to 30,000.
    assert 21 * 58 < len(gone) < 21 * 60


def test_one_that_may_not_go_stays_and_keeps_its_place():
    order: EvictionOrder[str] = EvictionOrder()
    for name, tokens in (("first", 100), ("second", 200), ("third", 300)):
        order.use(name, tokens)
    assert order.evict(lambda name: name != "first") == "second"
    assert order.evict(lambda name: False) is None
    assert evicted(order) == ["first", "third"]


@given(st.lists(st.tuples(st.integers(0, 7), st.sampled_from(("use", "evict"))), max_size=200))
def test_it_agrees_with_a_search_of_all(actions: list[tuple[int, str]]):
    order: EvictionOrder[int] = EvictionOrder()
    entries: dict[int, tuple[int, int, int]] = {}  # priority, time, uses
    level = 0
    for time, (name, action) in enumerate(actions):
        tokens = 100 * (name + 1)
        if action == "use":
            uses = entries[name][2] + 1 if name in entries else 1
            entries[name] = (level + uses * tokens, time, uses)
            order.use(name, tokens)
        else:
            candidates = [one for one in entries if one != name]
            expected = min(candidates, key=lambda one: entries[one], default=None)
            assert order.evict(lambda one, other=name: one != other) == expected
            if expected is not None:
                level = entries.pop(expected)[0]
        assert len(order) == len(entries)

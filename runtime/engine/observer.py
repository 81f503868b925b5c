"""Observer: makes a Snapshot of the engine when an API process asks for one.

An API process with an open dashboard asks once a second.  All API processes get the snapshot: those
without an open page answer with their share of the requests, which the next snapshot carries.  An
engine that no page watches does nothing of this.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from msgspec import structs

from runtime.engine.loop import Engine
from runtime.messages import FromEngine, Observe
from runtime.scheduler.snapshot import page_maps, running_states, step_samples, waiting_states
from runtime.snapshot import Snapshot, WavePicture

log = logging.getLogger("wavefill.dashboard")

# KV positions of the rows that decode -> what the programs of the device read; None: unknown.
WavePlanner = Callable[[list[int]], WavePicture | None]

INTERVAL_SECONDS = 0.9  # between two snapshots, at least: pages ask every second
MAX_SHARE = 0.01  # of a core, that snapshots take
FAILED_SECONDS = 60.0  # without snapshots after one that failed
SHARE_SECONDS = 5.0  # that a share is passed on: its process may have ended


class Observer:
    def __init__(
        self,
        engine: Engine,
        send: Callable[[FromEngine], None],
        plan_waves: WavePlanner | None = None,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """`send` reaches all API processes."""
        self._engine = engine
        self._send = send
        self._plan_waves = plan_waves
        self._clock, self._cpu_clock = clock, cpu_clock
        self._shares: dict[int, tuple[float, bytes]] = {}
        self._next_at = 0.0

    def observe(self, message: Observe) -> None:
        """Keep the share; send a snapshot if a page is open and the last one is old enough."""
        now = self._clock()
        if message.share:
            self._shares[message.client] = (now, message.share)
        if not message.watching or now < self._next_at:
            return
        began = self._cpu_clock()
        try:
            snapshot = self._snapshot(now)
        except Exception:  # requests go on without a picture of them
            log.exception("no snapshot for the dashboard for %g s", FAILED_SECONDS)
            self._next_at = now + FAILED_SECONDS
            return
        took = self._cpu_clock() - began
        self._next_at = now + max(INTERVAL_SECONDS, took / MAX_SHARE)
        self._send(structs.replace(snapshot, build_seconds=took))

    def _snapshot(self, now: float) -> Snapshot:
        requests, times = self._engine.requests, self._engine.scheduler.times
        sequences, states = running_states(requests)
        decoding = [state for state in states if state.state == "decode"]
        wave = None
        if decoding and self._plan_waves is not None:
            wave = self._plan_waves([state.known_tokens for state in decoding])
            if wave is not None:
                wave = structs.replace(wave, rows=[state.id for state in decoding])
        shares = [
            (client, share)
            for client, (at, share) in self._shares.items()
            if now - at < SHARE_SECONDS
        ]
        pages, page_groups = page_maps(requests.pool, [one.pages.held() for one in sequences])
        return Snapshot(
            now,
            self._engine.stats(),
            states,
            waiting_states(requests),
            pages,
            step_samples(times),
            tuple(times.parts()),
            wave,
            shares,
            0.0,
            page_groups,
        )

"""VarlenHopperConfig: tile size, stages and registers of varlen_hopper."""

from __future__ import annotations

from dataclasses import dataclass

CONSUMER_ROWS = 64  # of a tile, as wgmma multiplies


@dataclass(frozen=True, slots=True)
class VarlenHopperConfig:
    consumers: int  # warpgroups: 2 or 3
    block_n: int
    stages: int  # blocks of K, and of V, in shared memory
    q_stages: int = 2

    @property
    def rows(self) -> int:
        """Queries of a tile."""
        return self.consumers * CONSUMER_ROWS

    @property
    def registers(self) -> int:
        """Per thread of a consumer."""
        return 240 if self.consumers == 2 else 160

    @property
    def load_registers(self) -> int:
        """Per thread of the warp that loads, and of the three beside it that do nothing."""
        return 24 if self.consumers == 2 else 32

    @property
    def entry_registers(self) -> int:
        """Per thread at the launch, before the warps exchange them: 12 or 16 warps."""
        return 168 if self.consumers == 2 else 128


# Three consumers with blocks of 128 keys spill registers.
TWO_CONSUMERS = VarlenHopperConfig(consumers=2, block_n=128, stages=4)
THREE_CONSUMERS = VarlenHopperConfig(consumers=3, block_n=64, stages=6)

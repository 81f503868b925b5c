"""Values of options that were renamed."""

from __future__ import annotations

import argparse

from server.cli.flags import add_engine_flags, read_engine_flags

NAMES = ("split_planner", "attention")


def test_old_values_are_taken_as_the_new_ones_from_commands_and_environments():
    parser = argparse.ArgumentParser()
    add_engine_flags(parser, NAMES)
    args = parser.parse_args(["--split-planner", "uneven"])
    found = read_engine_flags(args, {"WAVEFILL_ATTENTION": "fixed"}, NAMES)
    assert found == {"split_planner": "stream-k", "attention": "batch-invariant"}

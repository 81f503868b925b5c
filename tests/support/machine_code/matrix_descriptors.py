"""Where a kernel's machine code takes the descriptors of matrices in shared memory from.

A wgmma instruction reads a matrix in shared memory through a descriptor in uniform registers: its
address, which is a constant of the program, and its layout.  ptxas 12.8 loses the register of an
address in some kernels, and reads another one in its place, which holds a kernel's argument.
"""

from __future__ import annotations

import re

INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)\s+([^;]*);")
ARGUMENT, NOTHING = "argument", "nothing"
FIRST_ARGUMENT = 0x210  # of constant bank 0, on Hopper


def stray_descriptors(sass: str) -> list[str]:
    """The matrix products of a kernel for sm_90a that read a descriptor which depends on an
    argument, or on a register that nothing has written, as "address: operands".

    Instructions are followed in the order of their addresses.  What comes from a thread's own
    registers is taken for right.
    """
    sources: dict[int, set[str]] = {}
    found = []
    for address, operation, rest in INSTRUCTION.findall(sass):
        operands = [operand.strip() for operand in rest.split(",")]
        if operation.startswith(("HGMMA", "QGMMA")):
            read = set().union(*(sources.get(at, {NOTHING}) for at in _descriptors(rest, operands)))
            if read & {ARGUMENT, NOTHING}:
                found.append(f"{address}: {rest.strip()}")
        elif written := re.fullmatch(r"UR(\d+)", operands[0]):
            wide = ".64" in operation or ".WIDE" in operation
            source = _source(operation, operands, wide, sources)
            for at in range(int(written[1]), int(written[1]) + 1 + wide):
                sources[at] = source
    return found


def _descriptors(rest: str, operands: list[str]) -> range:
    """The uniform registers of both matrices, or of the second where the first is in registers."""
    named = re.search(r"gdesc\[UR(\d+)\]", rest)
    assert named, rest
    first = int(named[1])
    return range(first if operands[1].startswith("gdesc") else first + 2, first + 4)


def _source(
    operation: str, operands: list[str], wide: bool, sources: dict[int, set[str]]
) -> set[str]:
    """What the result of an instruction on uniform registers depends on."""
    if operation.startswith("ULDC"):
        constant = re.search(r"c\[0x0\]\[0x([0-9a-f]+)\]", operands[1])
        return {ARGUMENT} if constant and int(constant[1], 16) >= FIRST_ARGUMENT else set()
    if operation.startswith(("S2UR", "R2UR")):
        return set()
    read = {int(number) for operand in operands[1:] for number in re.findall(r"\bUR(\d+)", operand)}
    if wide:
        read |= {number + 1 for number in read}
    return set().union(*(sources.get(number, {NOTHING}) for number in read))

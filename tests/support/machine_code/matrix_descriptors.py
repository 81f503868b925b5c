"""Where a kernel's machine code takes the descriptors of matrices in shared memory from.

A wgmma instruction reads a matrix in shared memory through a descriptor in uniform registers: its
address, which is where the block's shared memory begins and more, and its layout.  ptxas 12.8 loses
the register of an address in some kernels, and reads another one in its place, which holds a
kernel's argument, or what was left in it.
"""

from __future__ import annotations

import re

INSTRUCTION = re.compile(
    r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]*)\s+([^;]*);"
)
MULTIPLICATIONS = ("HGMMA", "QGMMA", "IGMMA")
# From 0x210 on, constant bank 0 has the arguments on Hopper.
ARGUMENT = re.compile(r"c\[0x0\]\[0x(2[1-9a-f]|[3-9a-f][0-9a-f])[0-9a-f]\]")


def stray_descriptors(sass: str) -> list[str]:
    """The matrix products of a kernel for sm_90a that read a descriptor whose address does not come
    from that of the block's shared memory, as "address: operands".

    Instructions are followed in the order of their addresses, which is not always that in which
    they run.  So a product is one of these if the last write of the register in that order is an
    argument's, or if no write of it has the address of shared memory.  What comes from a
    thread's own registers is taken for right.
    """
    instructions = [
        (address, operation, [operand.strip() for operand in rest.split(",")], rest.strip())
        for address, operation, rest in INSTRUCTION.findall(sass)
    ]
    ever = _ever_shared(instructions)
    argument: set[int] = set()  # uniform registers with an argument and no address
    shared: set[int] = set()  # with an address
    found: list[str] = []
    for address, operation, operands, text in instructions:
        if operation.startswith(MULTIPLICATIONS):
            read = set(_addresses(text, operands))
            if not read <= ever or read & argument:
                found.append(f"{address}: {text}")
        elif written := re.fullmatch(r"UR(\d+)", operands[0]):
            number, read = int(written[1]), _uniform(operands[1:])
            is_shared = _begins(operation, operands) or bool(read & shared)
            is_argument = bool(ARGUMENT.search(text) or read & argument) and not is_shared
            (shared.add if is_shared else shared.discard)(number)
            (argument.add if is_argument else argument.discard)(number)
    return found


def _ever_shared(instructions: list[tuple[str, str, list[str], str]]) -> set[int]:
    """The uniform registers that some instruction gives an address of shared memory."""
    found: set[int] = set()
    while True:
        before = len(found)
        for _, operation, operands, _ in instructions:
            written = re.fullmatch(r"UR(\d+)", operands[0])
            if written and (_begins(operation, operands) or _uniform(operands[1:]) & found):
                found.add(int(written[1]))
        if len(found) == before:
            return found


def _addresses(text: str, operands: list[str]) -> list[int]:
    """The uniform registers of the addresses: of both matrices, or of the second where the first is
    in a thread's registers."""
    named = re.search(r"gdesc\[UR(\d+)\]", text)
    assert named, text
    first = int(named[1])
    return [first, first + 2] if operands[1].startswith("gdesc") else [first + 2]


def _begins(operation: str, operands: list[str]) -> bool:
    """Whether an instruction's result is what addresses of shared memory are made of."""
    return operation.startswith("R2UR") or "SR_CgaCtaId" in operands[1:]


def _uniform(operands: list[str]) -> set[int]:
    return {int(number) for operand in operands for number in re.findall(r"\bUR(\d+)", operand)}

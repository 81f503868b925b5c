"""Which numbers that a kernel's loop carries Triton loses.

Triton's pass remove-layout-conversions, up to 3.7, drops what a loop carries if the value that is
carried on reaches nothing but the bounds of loops within it (ForOpDeadArgElimination does not count
these as uses).  Each iteration has the number from before the loop then, without a warning:

    for part in range(2):
        for chunk in range(begin, end[part]):  # begins where the first part did, both times
            ...
        begin = end[part]
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

LOCATION = re.compile(r"\s+loc\(.*$")
VALUE = re.compile(r"%[\w.-]+(?:#\d+)?")
OPERATION = re.compile(r"%|\w+\.\w+")
RESULTS = re.compile(r"^((?:%[\w.-]+(?::\d+)?(?:, )?)+) = ")
LOOP = re.compile(r"scf\.for (%\S+) = (%\S+) to (%\S+) step (%\S+)(?: iter_args\((.*?)\) ->)?")


@dataclass(eq=False)
class Op:
    """An operation, with values as numbers, and those that contain it, the outermost first."""

    name: str
    results: list[int]
    operands: list[int]
    within: list[Op]
    carried: list[tuple[int, int]] = field(default_factory=list)  # of a loop: (in it, before it)
    yields: list[list[int]] = field(default_factory=list)  # of a loop, or of each branch


class Parser:
    """The text of a module's IR, whose names may be those of other values in other regions."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.scopes: list[dict[str, int]] = [{}]
        self.open: list[Op | None] = []
        self.count = 0

    def read(self, text: str) -> list[Op]:
        for line in text.splitlines():
            self._line(LOCATION.sub("", line.strip()))
        return self.ops

    def _line(self, line: str) -> None:
        if line.startswith("}"):
            if self.open:
                self.scopes.pop()
                owner = self.open.pop()
                if line.endswith("{"):  # of } else {
                    self.open.append(owner)
                    self.scopes.append({})
            return
        op = self._op(line) if OPERATION.match(line) else None
        if line.endswith("{"):
            opens = op if op and op.name in ("scf.for", "scf.if") else None
            self.open.append(opens)
            self.scopes.append({})
            if opens and opens.name == "scf.for":
                self._carry(opens, line)

    def _op(self, line: str) -> Op | None:
        if line.startswith("tt.func") or line.startswith("tt.reduce.return"):
            return None
        found = RESULTS.match(line)
        rest = line[found.end() :] if found else line
        name = rest.split(" ", 1)[0].split("(")[0]
        if loop := LOOP.search(rest):
            operands = [self._value(each) for each in loop.groups()[1:4]]
        else:
            operands = [self._value(each) for each in VALUE.findall(rest)]
        within = [each for each in self.open if each]
        op = Op(name, self._define(found.group(1)) if found else [], operands, within)
        if name == "scf.yield" and within:
            within[-1].yields.append(operands)
        self.ops.append(op)
        return op

    def _define(self, names: str) -> list[int]:
        numbers = []
        for each in names.split(", "):
            name, _, count = each.partition(":")
            for i in range(int(count or 1)):
                numbers.append(self._new(f"{name}#{i}" if count else name))
        return numbers

    def _new(self, name: str) -> int:
        self.count += 1
        self.scopes[-1][name] = self.count
        return self.count

    def _value(self, name: str) -> int:
        found = (scope[name] for scope in reversed(self.scopes) if name in scope)
        number = next(found, None)
        if number is None:  # an argument of the function
            self.count += 1
            number = self.scopes[0][name] = self.count
        return number

    def _carry(self, loop: Op, line: str) -> None:
        found = LOOP.search(line)
        assert found, line
        pairs = [each.split(" = ") for each in (found[5] or "").split(", ") if each]
        before = [self._value(init) for _, init in pairs]
        self._new(found[1])
        loop.carried = [
            (self._new(name), init) for (name, _), init in zip(pairs, before, strict=True)
        ]


def lost_bounds(ir: str) -> list[str]:
    """The loops of a module, before its passes, that carry such numbers, as "loop i: number j"."""
    ops = Parser().read(ir)
    loops = [op for op in ops if op.name == "scf.for"]
    return [
        f"loop {i}: number {j}"
        for i, loop in enumerate(loops)
        if loop.carried
        for j in _lost(loop, [op for op in ops if loop in op.within], ops)
    ]


def _lost(loop: Op, inside: list[Op], ops: list[Op]) -> list[int]:
    """What is needed for bounds alone: live with them, and to that pass not."""
    (last,) = loop.yields
    used = {value for op in set(ops) - set(inside) for value in op.operands}
    results = [last[i] for i, value in enumerate(loop.results) if value in used]
    kept = [
        # What has no result is kept for what it does.
        value
        for op in inside
        if op.name in ("scf.if", "tt.call")
        or (not op.results and op.name not in ("scf.yield", "scf.for"))
        for value in op.operands
    ]
    bounds = [value for op in inside if op.name == "scf.for" for value in op.operands]
    live = _live([*results, *kept], loop, inside)
    needed = _live([*results, *kept, *bounds], loop, inside)
    return [
        i
        for i, (value, _) in enumerate(loop.carried)
        if last[i] not in live and last[i] != value and value in needed
    ]


def _live(values: list[int], loop: Op, inside: list[Op]) -> set[int]:
    """These and all that they are computed from in the loop."""
    made = {value: (op, i) for op in inside for i, value in enumerate(op.results)}
    carried = {value: (op, i) for op in [loop, *inside] for i, (value, _) in enumerate(op.carried)}
    seen: set[int] = set()
    while values:
        value = values.pop()
        if value in seen:
            continue
        seen.add(value)
        if value in carried:
            owner, i = carried[value]
            values += [owner.carried[i][1], owner.yields[0][i]]
        elif value in made:
            op, i = made[value]
            if op.name == "scf.for":
                values += [op.carried[i][1], op.yields[0][i]]
            elif op.name == "scf.if":
                values += [branch[i] for branch in op.yields]
            else:
                values += op.operands
    return seen

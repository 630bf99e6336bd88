"""Reading SASS, a GPU's machine code, as nvdisasm prints it: are registers left alone that tensor cores still use, and
is what a stage holds read before it is released?

`wgmma`, HGMMA in SASS, QGMMA where it is of FP8 and IGMMA where it is of integers, runs on after it was issued, until a
WARPGROUP.DEPBAR waits for it. Meanwhile the registers of its A operand must not be written, and those of its
accumulator not be touched but by other such. ptxas ensures that, but has been seen not to where a branch was in
between, without a message.

An instruction that takes a variable time sets one of six *scoreboards*, and another one waits for these: that is in the
instructions' control bits. Loads from shared memory read in the order in which they were issued, so what waits for one
waits for those before it.
"""

import re
from typing import NamedTuple

_LABEL = re.compile(r"\s*(\.L_\w+|\$[\w$]+):")
_LINE = re.compile(r".*?/\*([0-9a-f]{4,})\*/\s+(@\S+\s+)?([A-Z][\w.]*)\s*([^;]*)")
_CONTROL = re.compile(r"\s*([0-5&]+|-):([0-5-]):([0-5-]):")  # as Mosaic GPU prints it: waited for, set by reads, set
_WORD = re.compile(r"/\* 0x([0-9a-f]{16}) \*/")  # as `nvdisasm -hex` does: half an instruction, behind it and below
_TARGET = re.compile(r"`\((\.L_\w+|\$[\w$]+)\)")
_PREDICATE = re.compile(r"!?U?P[0-9T]")
# Those whose first operand, predicates apart, is a register that they read.
_READERS = re.compile(r"\w*SETP\b|FCHK|BAR\b|NANOSLEEP|WARPSYNC")
_OTHER_JUMPS = ("BRX", "JMP", "JMX")  # BREAK is none: it takes threads out of those that a BSYNC waits for
_ENDS = ("EXIT", "BSYNC", "RET")  # a call goes into its function, and on: so that this one need not come back
_ARRIVAL = "SYNCS.ARRIVE.TRANS64.A1T0"  # of a thread that waits for no bytes
_MANY_GROUPS = 8  # more than a wait lets run on


class Control(NamedTuple):
    """The scoreboards that an instruction waits for, and those that it sets: until its operands are read, and until its
    results are there."""

    waits: frozenset[int] = frozenset()
    read: int | None = None
    written: int | None = None


class Instruction(NamedTuple):
    """One instruction, and the numbers of those that may run next. `control` is None where it was not printed."""

    text: str
    opcode: str
    operands: tuple[str, ...]
    following: tuple[int, ...]
    control: Control | None = None


def parse(text: str) -> list[Instruction]:
    """One kernel. ValueError where it jumps in a way that is not followed here."""
    labels: dict[str, int] = {}
    lines: list[tuple[str, str, str, tuple[str, ...], Control | None]] = []
    every = text.splitlines()
    for line, below in zip(every, [*every[1:], ""], strict=True):
        if label := _LABEL.match(line):
            labels[label[1]] = len(lines)
        elif found := _LINE.match(line):
            address, guard, opcode, rest = found.groups(default="")
            lines.append((address, guard, opcode, tuple(rest.strip().split(", ")), _control(line, below)))
    program = []
    for number, (address, guard, opcode, operands, control) in enumerate(lines):
        said = f"{address}: {guard}{opcode} {', '.join(operands)}"
        targets = _TARGET.findall(said)
        if opcode in ("BSSY", "BSYNC", "WARPSYNC.COLLECTIVE"):  # these go on; `_meet` adds where BSYNC goes
            targets = []
        elif opcode.startswith(_OTHER_JUMPS) or bool(targets) != opcode.startswith(("BRA", "CALL")):
            raise ValueError(f"{said!r}: this jump is not followed")
        jumps = opcode == "BRA" and len(operands) == 1
        goes_on = guard or not (jumps or opcode.startswith(_ENDS))
        following = [number + 1] if goes_on and number + 1 < len(lines) else []
        following += [labels[target] for target in targets]
        program.append(Instruction(said, opcode, operands, tuple(following), control))
    return _meet(program, labels)


def _meet(program: list[Instruction], labels: dict[str, int]) -> list[Instruction]:
    """`program` with what follows each BSYNC: the label that was named by a BSSY of its barrier, the last one on some
    path. ValueError where a barrier is written otherwise."""
    named: list[dict[str, set[int]]] = [{} for _ in program]  # of each barrier, before each instruction
    program, todo, reached = [*program], [0], {0}
    while todo:
        number = todo.pop()
        instruction, after = program[number], {barrier: {*at} for barrier, at in named[number].items()}
        barrier = instruction.operands[0]
        if instruction.opcode == "BSSY":
            after[barrier] = {labels[target] for target in _TARGET.findall(instruction.text)}
        elif instruction.opcode == "BSYNC":
            goes_on = tuple(n for n in instruction.following if n == number + 1)
            met = after.get(barrier, set())
            instruction = program[number] = instruction._replace(following=(*goes_on, *sorted(met)))
        elif instruction.opcode.startswith("BMOV") and barrier.startswith("B"):
            raise ValueError(f"{instruction.text!r}: this barrier is not followed")
        for next_ in instruction.following:
            known = named[next_]
            grown = {one: known.get(one, set()) | at for one, at in after.items()}
            if next_ not in reached or any(grown[one] != known.get(one) for one in grown):
                known.update(grown)
                reached.add(next_)
                todo.append(next_)
    return program


def _control(line: str, below: str) -> Control | None:
    """That of an instruction: at the line's beginning, or in the word in the line below it."""
    if printed := _CONTROL.match(line):
        read, written = (None if number == "-" else int(number) for number in printed.groups()[1:])
        return Control(frozenset(int(n) for n in re.findall(r"\d", printed[1])), read, written)
    if not (_WORD.search(line) and (upper := _WORD.search(below))):
        return None
    bits = int(upper[1], 16) >> 46  # after the clocks to wait
    written, read = (None if number == 7 else number for number in (bits & 7, bits >> 3 & 7))
    return Control(frozenset(n for n in range(6) if bits >> (6 + n) & 1), read, written)


def is_wgmma(instruction: Instruction) -> bool:
    return instruction.opcode.startswith(("HGMMA", "QGMMA", "IGMMA"))


def hazards(program: list[Instruction]) -> list[str]:
    """Instructions that may, on some path, touch registers that an HGMMA still uses: both instructions' texts."""
    found = []
    for number, wgmma in enumerate(program):
        if is_wgmma(wgmma):
            found += [f"{wgmma.text} | {program[other].text}" for other in sorted(_clashes(program, number))]
    return found


def _clashes(program: list[Instruction], start: int) -> set[int]:
    a, sums = _a(program[start]), _written(program[start])
    clashes, seen = set(), set()
    closed = int(_closes_group(program[start]))  # groups since, with its own: a wait says how many may run on
    todo = [(next_, closed) for next_ in program[start].following]
    while todo:
        number, closed = here = todo.pop()
        instruction = program[number]
        if here in seen:
            continue
        seen.add(here)
        if instruction.opcode.startswith("WARPGROUP.DEPBAR") and closed > int(instruction.operands[-1], 16):
            continue
        if _written(instruction) & a or (not is_wgmma(instruction) and _named(instruction) & sums):
            clashes.add(number)
        closed = min(closed + _closes_group(instruction), _MANY_GROUPS)
        todo += [(next_, closed) for next_ in instruction.following]
    return clashes


def register_limits(program: list[Instruction]) -> list[tuple[int, int]]:
    """Of each `setmaxnreg`: the registers that a thread has from there on, and those that it uses."""
    return [(int(i.operands[-1], 16), _most(program, n)) for n, i in enumerate(program) if _sets_limit(i)]


def _most(program: list[Instruction], start: int) -> int:
    seen, todo = set(), [*program[start].following]
    while todo:
        number = todo.pop()
        if number not in seen and not _sets_limit(program[number]):
            seen.add(number)
            todo += program[number].following
    return 1 + max((register for number in seen for register in _named(program[number])), default=-1)


def _sets_limit(instruction: Instruction) -> bool:
    return instruction.opcode.startswith("USETMAXREG")


def _closes_group(instruction: Instruction) -> bool:
    return is_wgmma(instruction) and instruction.operands[-1] == "gsb0"


def _a(wgmma: Instruction) -> set[int]:
    """Registers of the A operand, 64 rows of 32 bytes by 128 threads; none if it is in shared memory."""
    return _registers(wgmma.operands[1], 4)


def _written(instruction: Instruction) -> set[int]:
    opcode, operands = instruction.opcode, instruction.operands
    if is_wgmma(instruction):
        n, kind = re.findall(r"\.64x(\d+)x\d+\.(F32|F16|S8)", opcode)[0]  # of sums; those of S8 are S32
        return _registers(operands[0], int(n) // (4 if kind == "F16" else 2))
    if _READERS.match(opcode):
        return set()
    first = next((operand for operand in operands if not _PREDICATE.fullmatch(operand)), "")
    matrices = re.fullmatch(r"LDSM\.16\.\w+\.([24])", opcode)
    if matrices:
        width = int(matrices[1])
    elif ".128" in opcode or opcode.startswith("HMMA.16816.F32"):
        width = 4
    else:
        width = 2 if re.search(r"\.(64|WIDE)\b|^CS2R$", opcode) else 1
    return _registers(first, width)


def _named(instruction: Instruction) -> set[int]:
    named = {int(n) for operand in instruction.operands for n in re.findall(r"\bR(\d+)\b", operand)}
    return named | _written(instruction) | (_a(instruction) if is_wgmma(instruction) else set())


def _registers(operand: str, width: int) -> set[int]:
    register = re.fullmatch(r"R(\d+)(\.\w+)*", operand)
    return set(range(int(register[1]), int(register[1]) + width)) if register else set()


def early_releases(program: list[Instruction], loads: str = "LDS") -> list[str]:
    """Where a thread may arrive at a barrier before what it has loaded from shared memory is there: both texts.

    TMA might then write what is being read.

    Args:
        program: with control bits, else ValueError.
        loads: how their opcodes begin: "LDSM" for matrices alone, where other loads come before arrivals that no copy
            waits for, such as those of partial sums.
    """
    found = []
    for number, load in enumerate(program):
        if load.opcode.startswith(loads):
            found += [f"{load.text} | {program[other].text}" for other in sorted(_arrivals_before(program, number))]
    return found


def _arrivals_before(program: list[Instruction], start: int) -> set[int]:
    """The arrivals that may follow a load before anything has waited for it."""
    arrivals, seen = set(), set()
    todo = [(next_, _signals(program[start])) for next_ in program[start].following]
    while todo:
        number, signals = here = todo.pop()
        instruction = program[number]
        if here in seen or _waits(instruction) & signals:
            continue
        seen.add(here)
        if instruction.opcode.startswith(_ARRIVAL):
            arrivals.add(number)
        else:
            todo += [(next_, signals | _signals(instruction)) for next_ in instruction.following]
    return arrivals


def _signals(instruction: Instruction) -> frozenset[int]:
    """The scoreboards that are set until all loads so far have read: a load's, and that of a fence, which waits."""
    control, number = _control_of(instruction), None
    if instruction.opcode.startswith("MEMBAR.ALL"):
        number = control.read
    elif instruction.opcode.startswith(("LDS", "FENCE.VIEW.ASYNC.S")):
        number = control.written
    return frozenset() if number is None else frozenset({number})


def _waits(instruction: Instruction) -> frozenset[int]:
    waits = _control_of(instruction).waits
    if instruction.opcode == "DEPBAR.LE" and instruction.operands[1] == "0x0":
        waits |= {int(instruction.operands[0].removeprefix("SB"))}
    return waits


def _control_of(instruction: Instruction) -> Control:
    if instruction.control is None:
        raise ValueError(f"{instruction.text!r}: control bits are not printed")
    return instruction.control

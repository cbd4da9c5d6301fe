"""Machine code as nvdisasm prints it: blocks, the path that a loop usually takes, and what its instructions ask of which unit.

A kernel's inner loop has rare ways beside the usual one: waits that fail, tiles done again, masks. The usual way round is the
shortest one that still does the work, so many exponentials and products: of paths over blocks, Dijkstra's with what has been
done so far as part of the state.
"""

import heapq
import re
from collections import Counter
from dataclasses import dataclass, field

_LINE = re.compile(r"^\s*/\*(?P<at>[0-9a-f]+)\*/\s*(?P<guard>@!?U?P\w+\s+)?(?P<op>[A-Z][\w.]*)\s*(?P<rest>[^;]*);?")
_TARGET = re.compile(r"`\((?P<label>\.L_x?_?\w+)\)")


@dataclass
class Instruction:
    op: str  # with its modifiers: "HGMMA.64x128x16.F32.BF16"
    operands: str
    is_guarded: bool

    @property
    def name(self):
        return self.op.split(".")[0]


@dataclass
class Block:
    instructions: list = field(default_factory=list)
    next: list = field(default_factory=list)  # blocks, by number


def functions(text):
    """{name: lines} of what nvdisasm -c prints."""
    found, current = {}, None
    for line in text.splitlines():
        if line.startswith(".text."):
            current = found.setdefault(line[len(".text."):].rstrip(":"), [])
        elif current is not None:
            current.append(line)
    return found


def blocks(lines):
    """The basic blocks of a function, in the order of their addresses."""
    found, labels, targets = [Block()], {}, {}
    for line in lines:
        if line.startswith(".L_"):
            if found[-1].instructions:
                found.append(Block())
            labels[line.split(":")[0]] = len(found) - 1
            continue
        match = _LINE.match(line)
        if match is None:
            continue
        instruction = Instruction(match["op"], match["rest"].strip(), match["guard"] is not None)
        found[-1].instructions.append(instruction)
        if instruction.name in ("BRA", "EXIT", "RET", "BRX", "JMP"):
            target = _TARGET.search(instruction.operands)
            targets[len(found) - 1] = (target["label"] if target else None, _falls_through(instruction))
            found.append(Block())
    for i, block in enumerate(found):
        label, falls = targets.get(i, (None, True))
        if label in labels:
            block.next.append(labels[label])
        if falls and i + 1 < len(found):
            block.next.append(i + 1)
    return found


def _falls_through(instruction):
    """A branch with a guard, or with a predicate among its operands (BRA P6, `(.L_x_40); BRA.U UP0; BRA.DIV), may not be taken."""
    if instruction.is_guarded or instruction.op.startswith("BRA.DIV"):
        return True
    return re.match(r"!?U?P\d", instruction.operands) is not None


def usual_path(found, needs, least=1):
    """The instructions of the shortest way from a block back to it that has at least so many of each: {"MUFU.EX2": 64, ...}, by
    the beginnings of their names. Empty where there is none. least: instructions, against loops that wait."""
    names = list(needs)
    has = [tuple(sum(x.op.startswith(name) for x in block.instructions) for name in names) for block in found]
    goal = tuple(needs.values())
    heads = sorted({target for i, block in enumerate(found) for target in block.next if target <= i})
    best = None
    for head in heads:
        path = _shortest_way_round(found, has, goal, head, best and best[0])
        if path and (best is None or path[0] < best[0]) and path[0] >= least:
            best = path
    return [x for i in best[1] for x in found[i].instructions] if best else []


def _shortest_way_round(found, has, goal, head, limit):
    capped = lambda done, i: tuple(min(a + b, g) for a, b, g in zip(done, has[i], goal))  # noqa: E731
    start = (head, capped((0,) * len(goal), head))
    length = {start: len(found[head].instructions)}
    came_from, queue = {}, [(length[start], start)]
    while queue:
        so_far, state = heapq.heappop(queue)
        if so_far > length[state] or (limit and so_far >= limit):
            continue
        block, done = state
        for following in found[block].next:
            if following == head and done == goal:
                way = [block]
                while state in came_from:
                    state = came_from[state]
                    way.append(state[0])
                # Round an inner loop more than once, to have done enough: not a way that is usual.
                return (so_far, way[::-1]) if len(set(way)) == len(way) else None
            if following <= head:  # of a loop around this one
                continue
            new = (following, capped(done, following))
            if so_far + len(found[following].instructions) < length.get(new, 1 << 30):
                length[new] = so_far + len(found[following].instructions)
                came_from[new] = state
                heapq.heappush(queue, (length[new], new))
    return None


# Which unit an instruction of a warp keeps busy, by the beginning of its name; the longest one that fits counts. What is in no
# row is issued and keeps nothing busy that a budget counts: uniform instructions, branches, barriers.
UNITS = {
    "FFMA": "fma", "FADD": "fma", "FMUL": "fma", "IMAD": "fma", "HFMA2": "fma", "HADD2": "fma", "HMUL2": "fma",
    "FFMA2": "fma2", "FADD2": "fma2", "FMUL2": "fma2",
    "MUFU": "mufu",
    "FMNMX": "alu", "FMNMX3": "alu", "FSETP": "alu", "FSEL": "alu", "ISETP": "alu", "LOP3": "alu", "IADD3": "alu", "VIADD": "alu",
    "SEL": "alu", "SHF": "alu", "PRMT": "alu", "F2FP": "alu", "LEA": "alu", "MOV": "alu", "VIMNMX": "alu", "I2FP": "alu",
    "PLOP3": "alu", "IADD": "alu", "IABS": "alu",
    "SHFL": "shuffle",
    "HGMMA": "wgmma", "UTCHMMA": "tcgen05",
    "LDS": "lds", "STS": "sts", "LDSM": "lds", "STSM": "sts",
    "LDTM": "ldtm", "STTM": "sttm",
    "LDG": "global", "STG": "global", "RED": "global", "REDG": "global", "ATOMG": "global",
}


def unit_of(instruction):
    return UNITS.get(instruction.name, "none")


def counts(instructions):
    """Of a path, how many of each unit, and in all as "issue"."""
    found = Counter(unit_of(x) for x in instructions if x.name != "NOP")
    found["issue"] = sum(found.values())
    return found

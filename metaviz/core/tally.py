"""Sums over the tensors below a row, and what makes them count every storage once.

A form's own tally is a plain sum over slots: it is the count by path. Where slots share a storage (ties,
views) or a module sits in two slots, the sums of the rows above them are corrected; such groups are few,
everything else is free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator


class Tally:
    """Sums over tensors.

    Attributes:
        numel: Elements of parameters; buffers and attributes are no parameters.
        frozen: Those of them that do not require grad.
        nbytes: Bytes of all tensors.
        tensors: How many there are; `real`, `ready` and `blocked` of them have that mark.
        stale: How many without values are in plain attributes, where `Module.to` and `to_empty` never see
            them.
        where: (device, dtype) → bytes.
    """

    __slots__ = ("blocked", "frozen", "nbytes", "numel", "ready", "real", "stale", "tensors", "where")

    def __init__(self, numel=0, frozen=0, nbytes=0, tensors=0, blocked=0):
        self.numel: int = numel
        self.frozen: int = frozen
        self.nbytes: int = nbytes
        self.tensors: int = tensors
        self.blocked: int = blocked
        self.real = self.ready = self.stale = 0
        self.where: dict[tuple[str, str], int] = {}

    def add(self, other: Tally, sign: int = 1) -> None:
        """Add another tally to this one, or take it away with `sign=-1`."""
        self.numel += sign * other.numel
        self.frozen += sign * other.frozen
        self.nbytes += sign * other.nbytes
        self.tensors += sign * other.tensors
        self.real += sign * other.real
        self.ready += sign * other.ready
        self.blocked += sign * other.blocked
        self.stale += sign * other.stale
        for place, nbytes in other.where.items():
            self.where[place] = self.where.get(place, 0) + sign * nbytes

    @property
    def mark(self) -> str:
        """What the marks of the tensors make of the module above them."""
        if not self.tensors:
            return "empty"
        if self.real == self.tensors:
            return "real"
        if not self.blocked:
            return "ready"
        return "partial" if self.ready or self.real else "blocked"


def total(tallies: Iterable[Tally]) -> Tally:
    """The sum of some tallies, as a new one."""
    result = Tally()
    for tally in tallies:
        result.add(tally)
    return result


def by_source(columns, root: int) -> Counter[str]:
    """How many tensors below a row each source would give values, a tied one counted once."""
    found: dict[int, str] = {}
    root = _storage(columns, root)
    for row in (root,) if columns.forms[root].source else _below(columns, root):
        tie, first = columns.links.get(row, (None, row))
        if source := columns.forms[row].source:
            found[first if tie == "tie" else row] = source
    return Counter(found.values())


def corrections(columns) -> dict[int, Tally]:
    """Row → what to add to its form's tally so that each storage below it counts once."""
    # A storage is named by the first row that views it.
    groups: dict[int, list[tuple[int, int]]] = {}
    for row, (what, first) in columns.links.items():
        if what == "shared":
            for tensor in _below(columns, first):
                groups.setdefault(_storage(columns, tensor), []).append((row, tensor))
        elif what != "cycle":
            groups.setdefault(_storage(columns, row), []).append((columns.parents[row], row))
    fixes: dict[int, Tally] = {}
    for first, group in groups.items():
        for row, fix in _fixes(columns, [(columns.parents[first], first), *group]):
            fixes.setdefault(row, Tally()).add(fix)
    return fixes


def _storage(columns, tensor: int) -> int:
    while tensor in columns.links:
        tensor = columns.links[tensor][1]
    return tensor


def _below(columns, module: int) -> Iterator[int]:
    """The tensor rows below a module, also through modules below it that are shared, each once."""
    todo, seen = [module], {module}
    while todo:
        start = todo.pop()
        for row in range(start + 1, columns.ends[start]):
            what, first = columns.links.get(row, (None, -1))
            if columns.forms[row].kind != "module":
                if row not in seen:
                    seen.add(row)
                    yield row
            elif what == "shared" and first not in seen:
                seen.add(first)
                todo.append(first)


def _fixes(columns, group: list[tuple[int, int]]) -> Iterator[tuple[int, Tally]]:
    """For each row above a group of tensors with one storage: its true tally, less the plain sum."""
    seen: dict[int, dict[int, int]] = {}
    plain: dict[int, Tally] = {}
    for start, tensor in group:
        tie, first = columns.links.get(tensor, (None, tensor))
        same = first if tie == "tie" else tensor
        own = start == columns.parents[tensor]
        row = start
        while row >= 0:
            seen.setdefault(row, {})[same] = tensor
            if own:
                plain.setdefault(row, Tally()).add(columns.forms[tensor].tally)
            row = columns.parents[row]
    for row, tensors in seen.items():
        fix = _once([columns.forms[tensor] for tensor in tensors.values()])
        if row in plain:
            fix.add(plain[row], -1)
        if fix.numel or fix.nbytes or fix.tensors:
            yield row, fix


def _once(forms: list) -> Tally:
    """The tally of different tensors that view one storage: never more than the storage holds."""
    tally = total(form.tally for form in forms)
    held, room = max(form.facts.held for form in forms), max(form.facts.room for form in forms)
    if tally.nbytes > held:
        place = next(iter(tally.where))
        tally.where = {place: held}
        tally.nbytes = held
    tally.numel = min(tally.numel, room)
    tally.frozen = min(tally.frozen, tally.numel)
    return tally


def by_path(columns) -> dict[int, tuple[int, int]]:
    """Row → (numel, nbytes) to add to its form's tally to count a shared module at each of its paths."""
    extras: dict[int, tuple[int, int]] = {}
    # A shared module comes after the first one it points to, whose own extras are complete by then.
    for row, (what, first) in sorted(columns.links.items()):
        if what != "shared":
            continue
        tally, (numel, nbytes) = columns.forms[first].tally, extras.get(first, (0, 0))
        numel, nbytes = numel + tally.numel, nbytes + tally.nbytes
        while row >= 0:
            old = extras.get(row, (0, 0))
            extras[row] = (old[0] + numel, old[1] + nbytes)
            row = columns.parents[row]
    return extras

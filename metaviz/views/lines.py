"""What one line of a tree says, in words; the text and the HTML view lay the same words out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from math import prod
from typing import NamedTuple

from metaviz.core import causes, reasons
from metaviz.core.columns import Columns, Form
from metaviz.core.fold import Branch
from metaviz.core.tally import Tally, by_source
from metaviz.core.tree import ModuleTree
from metaviz.core.units import format_bytes, format_count, format_exact, format_shape, plural
from metaviz.errors import UnknownPath, spelled_out

SYMBOLS = {"real": "●", "ready": "○", "partial": "◐", "blocked": "✗", "empty": "·"}
DOUBTS = {"wrong": "≠", "untold": "?"}
MEANINGS = {"real": "hold values", "ready": "can be given values", "blocked": "cannot yet"}
# Beyond this, a whole model is no thing to materialize in passing, and one block is named instead.
LARGE = 1024**3
# How many blocked tensors to look at for their reasons, and how many reasons to tell.
MAX_BLOCKED = 500
MAX_REASONS = 3
MAX_NAMES = 3


class Line(NamedTuple):
    """The words of one line; all text that comes from the model is clean.

    Attributes:
        label: Name, or names of a run.
        cls: `"Linear"`, `"80 × LlamaDecoderLayer"`; `""` for a plain tensor.
        note: What is special: `"= embed.weight"`, `"buffer, not saved"`.
        amount: Shape of a tensor, number of parameters of a module.
        size: Bytes as text.
        dtype: `"bfloat16"`, `"bfloat16 +1"`.
        device: `"meta"`, `"meta +1"`.
        mark: Word.
    """

    label: str
    cls: str
    note: str
    amount: str
    size: str
    dtype: str
    device: str
    mark: str


def clean(text: str, limit: int = 120) -> str:
    r"""A text as one harmless line: control characters, escapes and direction marks are spelled out.

    Args:
        text: Anything that a model's author wrote.
        limit: How many characters of it to keep; of a longer text the middle is left out.

    Example:
        >>> print(clean("a\nb"))
        a\nb
    """
    if len(text) > limit:
        text = f"{text[: limit * 2 // 3]}…{text[-(limit // 3) :]}"
    return spelled_out(text)


def describe(columns: Columns, branch: Branch, label: str | None = None) -> Line:
    """The words for one line of an outline."""
    row = branch.shown
    form, outer = columns.forms[row], columns.forms[branch.row]
    cls = outer.cls if outer.kind == "module" or outer.cls not in ("Parameter", "Tensor") else ""
    if branch.count > 1 and cls:
        cls = f"{branch.count} × {cls}"
    amount, size, dtype, device = _tensor(form) if form.facts else _module(columns, row)
    if branch.pair:
        amount = f"{format_shape(columns.forms[row + 1].facts.shape)} + bias"
    link = columns.links.get(row, ("", -1))[0]
    if link in ("tie", "shared", "cycle"):
        size = {"tie": "tied"}.get(link, link)
    elif branch.count > 1 and amount:
        amount = f"{branch.count} × {amount}"
        # What each member of a run shares with a tensor outside counts once, so there is no sum to show.
        each = columns.tally(branch.row).nbytes
        size = (
            f"{branch.count} × {size}" if branch.row in columns.outward else format_bytes(branch.count * each)
        )
    note = ", ".join(notes(columns, row, branch.count))
    return Line(
        clean(branch.label or '""') if label is None else clean(label),
        clean(cls),
        clean(note),
        amount,
        size,
        dtype,
        device,
        columns.mark(row),
    )


def _tensor(form: Form) -> tuple[str, str, str, str]:
    facts = form.facts
    return format_shape(facts.shape), format_bytes(facts.nbytes), facts.dtype, facts.device


def _module(columns: Columns, row: int) -> tuple[str, str, str, str]:
    tally = columns.tally(row)
    if not tally.tensors:
        return "", "", "", ""
    dtypes: dict[str, int] = {}
    devices: dict[str, int] = {}
    for (device, dtype), nbytes in tally.where.items():
        dtypes[dtype] = dtypes.get(dtype, 0) + nbytes
        devices[device] = devices.get(device, 0) + nbytes
    return format_count(tally.numel), format_bytes(tally.nbytes), _most(dtypes), _most(devices)


def _most(sizes: dict[str, int]) -> str:
    """The one with most bytes, and how many others there are."""
    first = max(sizes, key=sizes.__getitem__, default="")
    return f"{first} +{len(sizes) - 1}" if len(sizes) > 1 else first


def notes(columns: Columns, row: int, count: int = 1) -> list[str]:
    """What is special about a row, or about each of ``count`` that look alike."""
    form, facts = columns.forms[row], columns.forms[row].facts
    found = []
    link, first = columns.links.get(row, ("", -1))
    if link:
        words = {"tie": "= ", "alias": "views ", "shared": "shared with ", "cycle": "leads back to "}
        found.append(words[link] + (columns.path(first) or "the root"))
    if row in columns.troubles:
        found.append(columns.troubles[row])
    elif form.kind == "attribute":
        found.append("stale attribute" if facts.device == "meta" else "attribute")
    elif form.kind == "buffer":
        found.append("buffer" if form.persistent else "buffer, not saved")
    elif form.kind == "parameter" and not facts.requires_grad:
        found.append("frozen")
    elif form.kind == "module" and not link:
        tally, (numel, _) = columns.tally(row), columns.by_path(row)
        if 0 < tally.real < tally.tensors:
            found.append(_places(tally) + (" each" if count > 1 else ""))
        if tally.numel and tally.frozen == tally.numel:
            found.append("frozen")
        if numel != tally.numel and row:
            found.append(f"{format_count(numel)} by path")
    return found


def _places(tally: Tally) -> str:
    """Where the values of a module are that has some: `"3.00 GiB on cuda:0"`."""
    sizes: dict[str, int] = {}
    for (device, _), nbytes in tally.where.items():
        if device != "meta":
            sizes[device] = sizes.get(device, 0) + nbytes
    return ", ".join(f"{format_bytes(nbytes)} on {device}" for device, nbytes in sizes.items())


def summary(tree: ModuleTree) -> list[str]:
    """The lines below a tree: totals, where the bytes are, how many tensors have which mark."""
    totals = tree.totals
    text = plural(totals.numel, "parameter")
    if totals.frozen:
        text += f" ({'all' if totals.frozen == totals.numel else format_exact(totals.frozen)} frozen)"
    text += f", {format_bytes(totals.nbytes)}"
    if (totals.numel, totals.nbytes) != (totals.numel_by_path, totals.nbytes_by_path):
        text += (
            f"; counted by path {format_exact(totals.numel_by_path)}, {format_bytes(totals.nbytes_by_path)}"
        )
    lines = [text]
    several = [sizes for sizes in (totals.devices, totals.dtypes) if len(sizes) > 1]
    if several:
        lines.append("; ".join(map(_sizes, several)))
    if totals.stale:
        places = "a plain attribute" if totals.stale == 1 else "plain attributes"
        lines.append(f"{plural(totals.stale, 'tensor')} in {places}, which Module.to and to_empty never see")
    return lines


def _sizes(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in sizes.items())


def marks(tree: ModuleTree) -> list[tuple[str, str]]:
    """(mark, words) for each mark that tensors of the tree have, such as `("ready", "12 ready")`."""
    return [(mark, f"{format_exact(number)} {mark}") for mark, number in tree.totals.marks.items()]


def origins(tree: ModuleTree) -> str:
    """Where the tensors that are ready would get their values, if a checkpoint is among the sources."""
    if tree.columns.checkpoint is None:
        return ""
    words = {"checkpoint": "the checkpoint"}
    counts = by_source(tree.columns, tree.root).most_common()
    return ", ".join(f"{format_exact(number)} from {words.get(source, source)}" for source, number in counts)


class Obstacle(NamedTuple):
    """Why some tensors are blocked or in doubt: the first of them, the reason, and the next step as code."""

    mark: str
    names: str
    reason: str
    step: str | None


def obstacles(tree: ModuleTree) -> list[Obstacle]:
    """The first reasons why tensors are blocked, and a line each for those that may come out otherwise."""
    columns = tree.columns
    stuck = causes.by_cause(columns, "blocked", islice(reasons.blocked(columns, tree.root), MAX_BLOCKED))
    found = [
        Obstacle("blocked", named(each.paths), clean(each.reason, 400), each.fix and clean(each.fix, 400))
        for each in stuck[:MAX_REASONS]
    ]
    if len(stuck) > MAX_REASONS:
        found.append(Obstacle("blocked", "", "others for other reasons", _trouble(tree)))
    found += _doubts(tree)
    # A step that helps several is said once, below the last of them.
    following = [each.step for each in found[1:]] + [None]
    return [
        each._replace(step=None) if each.step == after else each
        for each, after in zip(found, following, strict=False)
    ]


def _doubts(tree: ModuleTree) -> Iterator[Obstacle]:
    """Marks alone would mislead where reset gives other values than an ordinary build, or may do so."""
    columns, root = tree.columns, tree.root
    if wrong := list(causes.wrong(columns, root)):
        names = named([columns.path(row) for row in wrong])
        reason = f"{_by_reset(wrong)}, with other values than in an ordinary build"
        yield Obstacle("wrong", names, reason, _trouble(tree))
    try:
        model = tree.model
    except UnknownPath:
        model = None
    if untold := list(causes.untold(columns, root, model)):
        reason = f"{_by_reset(untold)}; whether as in an ordinary build, only a tape tells"
        step = "model = metaviz.build(type(model), *args)"
        if columns.source != "auto":
            reason, step = f"{_by_reset(untold)}; not known whether as in an ordinary build", _trouble(tree)
        yield Obstacle("untold", "", reason, step)


def _by_reset(rows: list[int]) -> str:
    return f"{format_exact(len(rows))} by reset"


def named(paths: Sequence[str]) -> str:
    """Some paths, those that differ in a number only as one.

    Example:
        >>> named(("layers.0.norm.weight", "layers.1.norm.weight", "head.bias"))
        'layers.*.norm.weight, head.bias'
    """
    listed = []
    for alike in _numbered(paths, every=True):
        values = [set(parts) for parts in zip(*alike, strict=True)]
        # Two stars where not every number of the one goes with every number of the other would say too much.
        whole = len(set(map(tuple, alike))) == prod(map(len, values))
        for group in [alike] if whole else _numbered(map(".".join, alike), every=False):
            listed.append(clean(".".join(map(_same, zip(*group, strict=True)))))
    return ", ".join(listed[:MAX_NAMES]) + (", …" if len(listed) > MAX_NAMES else "")


def _numbered(paths: Iterable[str], every: bool) -> Iterable[list[list[str]]]:
    """The parts of paths, those together that differ in numbers only; in the first number unless `every`."""
    groups: dict[tuple[str, ...], list[list[str]]] = {}
    for path in paths:
        parts = path.split(".")
        numbers = [index for index, part in enumerate(parts) if part.isdecimal()]
        starred = numbers if every else numbers[:1]
        key = tuple("*" if index in starred else part for index, part in enumerate(parts))
        groups.setdefault(key, []).append(parts)
    return groups.values()


def _same(parts: tuple[str, ...]) -> str:
    return parts[0] if len(set(parts)) == 1 else "*"


def _trouble(tree: ModuleTree) -> str:
    """The code that shows all trouble of a tree."""
    source = "" if tree.columns.source == "auto" else f', source="{tree.columns.source}"'
    part = f"[{clean(reasons.quoted(tree.path), 400)}]" if tree.path else ""
    return f"metaviz.tree(model{source}){part}.trouble()"


def next_step(tree: ModuleTree, top: Branch) -> str | None:
    """The next command to try, as code; what helps blocked tensors is said with their reasons."""
    columns, root = tree.columns, tree.root
    mark = columns.mark(root)
    if mark == "ready" and columns.tally(root).nbytes > LARGE:
        block = _first_block(top) or top
        return reasons.step(columns, block.row)
    return reasons.step(columns, root) if mark == "ready" else None


def _first_block(branch: Branch) -> Branch | None:
    """The first line that stands for several blocks."""
    todo = [branch]
    while todo:
        branch = todo.pop(0)
        if branch.count > 1:
            return branch
        todo += branch.branches or []
    return None

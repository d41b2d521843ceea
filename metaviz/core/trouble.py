"""What is wrong with a model: one entry for each cause, however many tensors it concerns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from metaviz.core.around import Finding, findings
from metaviz.core.asking import tensor_at
from metaviz.core.causes import Trouble, by_cause, replayed, untold, wrong
from metaviz.core.lightning import Outcome
from metaviz.core.reasons import blocked, step
from metaviz.core.replayable import replay_verdict
from metaviz.core.units import plural

# What is found around a model says more than the reason of a blocked tensor.
_SAID_ELSEWHERE = {"lazy", "offloaded", "uninitialized"}
_GROUPS = 3


def troubles(tree: Any, *, search: bool = False) -> tuple[Trouble, ...]:
    """All trouble of a tree, the worst first.

    Args:
        tree: The :class:`metaviz.ModuleTree`.
        search: Whether to look for optimizers among all objects of the process.

    Raises:
        UnknownPath: The model of the tree is gone.
    """
    columns, root = tree.columns, tree.root
    around = [
        Trouble(found.kind, found.reason, found.paths, found.fix)
        for found in findings(tree.model, search=search)
        if _concerns(tree.path, found.paths) and not _is_note(found)
    ]
    said = {path for entry in around if entry.kind in _SAID_ELSEWHERE for path in entry.paths}
    stuck = by_cause(columns, "blocked", blocked(columns, root))
    return (
        *(entry for entry in stuck if not said.issuperset(entry.paths)),
        *by_cause(columns, "silent", wrong(columns, root)),
        *_untold(tree),
        *around,
        *_lightning(tree),
    )


def _is_note(found: Finding) -> bool:
    """Whether a finding is good to know and nothing to mend: ties, and a cast that all parameters took part in."""
    return found.kind == "tied" or (found.kind == "cast" and found.fix is None)


def _untold(tree: Any) -> Iterator[Trouble]:
    """Tensors that reset fills, with nobody knows whether the right values."""
    columns, model = tree.columns, tree.model
    taped: list[int] = []
    others: list[int] = []
    for row in untold(columns, tree.root, model):
        tensor, slot = tensor_at(model, columns, row)
        (taped if replay_verdict(tensor, *slot).can else others).append(row)
    for entry in by_cause(columns, "untold", taped):
        yield entry._replace(fix=replayed(entry.paths))
    if others:
        yield Trouble(
            "untold",
            "Reset runs the init methods that the model has. Whether its constructors give other values, only a "
            "tape can tell",
            tuple(map(columns.path, others)),
            "model = metaviz.build(type(model), *args)",
        )


def _lightning(tree: Any) -> Iterator[Trouble]:
    """What goes wrong where Lightning gives the model its values."""
    if "meta" not in tree.totals.devices:
        return
    predicted = tree.lightning
    fix = "metaviz.materialize(model)  # before Lightning's setup"
    first = next(blocked(tree.columns, 0), None)
    build = None if first is None else step(tree.columns, first)
    if build and build.startswith("model ="):
        fix = f"{build}; {fix}"
    own, torch, parallel = predicted.fsdp, predicted.torch_fsdp, predicted.model_parallel
    # FSDPStrategy of Lightning 2.6 leaves the job to torch, which mostly stops at the same module.
    same = torch.right or (torch.error is not None and torch.at == own.at)
    more = f". Where it is left to torch: {torch.error}: {torch.message}" if same and torch.error else ""
    for name, outcome, end in (
        ("recipe for FSDP", own, more),
        *(() if same else (("FSDPStrategy, which leaves it to torch,", torch, ""),)),
        ("ModelParallelStrategy", parallel, ""),
    ):
        paths = tuple(dict.fromkeys(_concerned(outcome)))
        stops = outcome.error is not None and _concerns(tree.path, (outcome.at or "",))
        if stops or (not outcome.right and _concerns(tree.path, paths)):
            yield Trouble("lightning", f"Lightning's {name} {_said(outcome)}{end}", paths, fix)


def _concerned(outcome: Outcome) -> Iterator[str]:
    for paths in (
        outcome.uninitialized,
        outcome.overwritten,
        outcome.left,
        *outcome.untied,
        outcome.otherwise,
    ):
        yield from paths


def _said(outcome: Outcome) -> str:
    others = _others(outcome)
    if outcome.error is None:
        return _and(list(others))
    moved = plural(len(outcome.moved), "tensor")
    end = "" if (outcome.message or "").endswith((".", "!", "?")) else "."
    words = f"stops at {outcome.at or 'the root'} with {outcome.error}: {outcome.message}{end}"
    return f"{words} By then it {_and([f'moves {moved} off meta', *others])}"


def _and(parts: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))


def _others(outcome: Outcome) -> Iterator[str]:
    for words, paths in (
        ("leaves {} uninitialized", outcome.uninitialized),
        ("empties {} of their values", outcome.overwritten),
        ("leaves {} of plain attributes on meta", outcome.left),
        ("gives {} other values than an ordinary build", outcome.otherwise),
    ):
        if paths:
            yield words.format(plural(len(paths), "tensor"))
    if outcome.untied:
        more = ", …" if len(outcome.untied) > _GROUPS else ""
        yield f"unties {', '.join(' = '.join(group) for group in outcome.untied[:_GROUPS])}{more}"
    if outcome.unknown:
        yield f"calls methods with an outcome that cannot be told in {plural(len(outcome.unknown), 'module')}"


def _concerns(path: str, paths: tuple[str, ...]) -> bool:
    """Whether one of some paths is at or below another."""
    return not path or any(f"{each}.".startswith(f"{path}.") for each in paths)

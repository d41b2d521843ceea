"""What a finding is, and the one look at a model that all findings are made from."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from metaviz.core.origin import Origin, origin_of
from metaviz.core.paths import Model, Place
from metaviz.core.reasons import quoted

_LISTED = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """Something around a model that will hurt, or that is worth knowing.

    Attributes:
        kind: ``"cast"``, ``"escaped"``, ``"lazy"``, ``"loaded"``, ``"offloaded"``, ``"optimizer"``, ``"stale"``,
            ``"tied"`` or ``"uninitialized"``.
        paths: The tensors concerned, the first path of each.
        reason: What it is and why it matters, in a sentence or two.
        fix: The next step as code, None where there is nothing to do.
    """

    kind: str
    paths: tuple[str, ...]
    reason: str
    fix: str | None = None


class Look:
    """One pass over the slots of a model, sorted by what a finding may ask. Lives as long as one call.

    Attributes:
        modules: Every module by path.
        empty: The first place of each tensor on meta, by id.
        real: The first place of each tensor that holds values, by id.
        lazy: The first place of each tensor that has no shape yet, by id.
        ties: For tensors that several registered slots hold: the places of all those slots, by id.
        references: Places outside of the registered slots that hold a tensor which is registered, too.
    """

    def __init__(self, model: nn.Module) -> None:
        view = Model(model)
        self.modules = view.modules
        self.empty: dict[int, Place] = {}
        self.real: dict[int, Place] = {}
        self.lazy: dict[int, Place] = {}
        self.ties: dict[int, list[Place]] = {}
        self.references: list[Place] = []
        first: dict[int, Place] = {}
        for place in view.places:
            slot = place.slot
            tensor = slot.tensor
            if slot.reference:
                self.references.append(place)
                continue
            known = first.setdefault(id(tensor), place)
            if known is place:
                kind = self.lazy if is_lazy(tensor) else self.empty if is_empty(tensor) else self.real
                kind[id(tensor)] = place
            # A module at several paths has one slot there, and no tie.
            elif slot is not known.slot and "attribute" not in (slot.kind, known.slot.kind):
                tied = self.ties.setdefault(id(tensor), [known])
                if all(slot is not other.slot for other in tied):
                    tied.append(place)

    def known(self) -> Iterator[tuple[Place, Origin]]:
        """The tensors on meta that a tape knows, with where they come from. Made anew: keeping all takes longer."""
        for place in self.empty.values():
            origin = where_from(place)
            if origin is not None:
                yield place, origin


def where_from(place: Place) -> Origin | None:
    """Where the meta tensor at ``place`` comes from; None if no tape knows it."""
    slot = place.slot
    return origin_of(slot.tensor, place.module, slot.name if slot.kind != "attribute" else None)


def is_empty(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is on meta. What refuses the question is not."""
    try:
        return tensor.is_meta
    except Exception:
        return False


def paths_of(places: Iterable[Place]) -> tuple[str, ...]:
    """The path of each place."""
    return tuple(place.path for place in places)


def fill(paths: tuple[str, ...], **options: str) -> str:
    """The code that gives the tensors at ``paths`` their values; all of the model where they are many."""
    listed = ", ".join(map(quoted, paths))
    chosen = [] if len(paths) > _LISTED else [listed if len(paths) == 1 else f"[{listed}]"]
    given = [f'{name}="{value}"' for name, value in {"device": "cpu", **options}.items()]
    return f"metaviz.materialize({', '.join(['model', *chosen, *given])})"

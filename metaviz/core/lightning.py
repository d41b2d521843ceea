"""What Lightning would do with a model on meta: told by rule, without Lightning and without moving anything.

Three recipes take the tensors of a model off meta and call `reset_parameters` on its modules. They differ in what they
visit, in which order, and in what they say to a module that has no such method.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from metaviz.core.recipes import Fsdp, Look, ModelParallel, TorchFsdp
from metaviz.core.reset import Resets
from metaviz.core.units import plural


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Outcome:
    """What one recipe does with a model. Names are paths, in the order of the model.

    Attributes:
        strategy: `"FSDPStrategy"`, `"ModelParallelStrategy"`, or the name of Lightning's own recipe for FSDP:
            `"_materialize_meta_tensors"`.
        error: Type name of what is raised, None if the recipe gets through.
        message: Its message, on CPU.
        at: Path of the module at which it stops.
        moved: Tensors that have left meta by the end.
        uninitialized: Tensors whose memory holds what nobody has written, if only in part.
        overwritten: Tensors that held values before and have lost them.
        untied: Tensors that were one and are several now.
        left: Tensors in plain attributes that stay on meta.
        warns: Names of the classes that the warning of ModelParallelStrategy names; of theirs the order varies.
        otherwise: Tensors that get other values, or another distribution, than in the build that the tape is of.
        unknown: Modules of which nothing can be told: their method asks for an accelerator, or does not end.
        never: Tensors on meta that are not reached before the error.
    """

    strategy: str
    error: str | None = None
    message: str | None = None
    at: str | None = None
    moved: tuple[str, ...] = ()
    uninitialized: tuple[str, ...] = ()
    overwritten: tuple[str, ...] = ()
    untied: tuple[tuple[str, ...], ...] = ()
    left: tuple[str, ...] = ()
    warns: tuple[str, ...] = ()
    otherwise: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    _counts: dict[str, Counter[str]] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def right(self) -> bool:
        """Whether all tensors get values, and none loses any."""
        return self.error is None and not any(paths for _, paths in self._troubles())

    def words(self, path: str = "") -> str:
        """One short sentence about the tensor or module at a path; `"ok"` where all is well.

        Args:
            path: The first path of a tensor or module of the model.
        """
        if self.at == path and self.error is not None:
            return f"{self._short} stops here: {self.cause}"
        here = self._counted().get(path, Counter())
        trouble = next((name for name, _ in self._troubles() if here[name]), None)
        if trouble is not None:
            return f"{self._short} {_SAID[trouble]}"
        if self.at is not None and (not path or self.at.startswith(f"{path}.")):
            return f"{self._short} stops at {self.at}: {self.cause}"
        trouble = next((name for name, _ in self._troubles() if here[f"below {name}"]), None)
        if trouble is None:
            return "ok"
        number = here[f"below {trouble}"]
        things = "module" if trouble == "unknown" else "tensor"
        words = re.sub(r"\bit\b", f"{number:,} {things}{'s' * (number > 1)}", _SAID[trouble], count=1)
        return f"{self._short} {words}"

    @property
    def cause(self) -> str:
        """Why it stops, in a few words."""
        message = (self.message or "").strip().partition("\n")[0]
        if message.startswith("Materialization requires"):
            return f"{message.partition('`')[2].partition('.reset_parameters')[0]} has no reset_parameters"
        return f"{self.error}: {message[:120]}"

    @property
    def _short(self) -> str:
        return {"FSDPStrategy": "torch's FSDP", "ModelParallelStrategy": "ModelParallel"}.get(
            self.strategy, "FSDP"
        )

    def _counted(self) -> dict[str, Counter[str]]:
        """How often there is which trouble at and below a path; counted when it is first asked for."""
        counts = self._counts
        if not counts:
            counts[""] = Counter()
            for trouble, paths in self._troubles():
                for path in paths:
                    counts.setdefault(path, Counter())[trouble] += 1
                    while path:
                        path = path.rpartition(".")[0]
                        counts.setdefault(path, Counter())[f"below {trouble}"] += 1
        return counts

    def _troubles(self) -> Iterator[tuple[str, Iterable[str]]]:
        for name in ("uninitialized", "overwritten", "left", "otherwise", "unknown", "never"):
            yield name, getattr(self, name)
            if name == "left":
                yield "untied", [path for group in self.untied for path in group]

    def __str__(self) -> str:
        moved = f"{plural(len(self.moved), 'tensor')} off meta"
        if self.error is None:
            lines = [f"{self.strategy} gets through, with {moved}."]
        else:
            where = self.at or "the root"
            lines = [
                f"{self.strategy} stops at {where}, with {moved}.",
                f"  {self.error}: {self.message}",
            ]
        for name, paths in self._troubles():
            paths = list(paths)
            if paths:
                more = f" and {len(paths) - 5:,} more" if len(paths) > 5 else ""
                lines.append(
                    f"  {_TITLES[name]}: {', '.join(path or 'the root' for path in paths[:5])}{more}"
                )
        if self.warns:
            lines.append(f"  It warns of: {', '.join(self.warns)}")
        return "\n".join(lines)

    __repr__ = __str__


_SAID = {
    "uninitialized": "leaves it uninitialized",
    "overwritten": "empties it of the values it has",
    "left": "leaves it on meta",
    "untied": "unties it",
    "otherwise": "gives it other values than an ordinary build",
    "unknown": "calls it with an outcome that cannot be told",
    "never": "stops before it",
}
_TITLES = {
    "uninitialized": "uninitialized memory",
    "overwritten": "lose their values",
    "left": "stay on meta",
    "untied": "no longer tied",
    "otherwise": "other values than in an ordinary build",
    "unknown": "cannot be told",
    "never": "never reached",
}


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Prediction:
    """What Lightning would do with a model.

    Attributes:
        fsdp: Lightning's own recipe for FSDP, which its strategies called before they left the job to torch. Source:
            lightning 2.6, lightning/fabric/utilities/init.py, `_materialize_meta_tensors`.
        model_parallel: `ModelParallelStrategy`. Source: the same file, `_materialize_distributed_module`.
        torch_fsdp: What torch's wrapper does, to which `FSDPStrategy` of lightning 2.6 leaves a model on meta; here
            for one wrapper around the whole model. Source: torch 2.13, torch/distributed/fsdp/_init_utils.py,
            `_materialize_meta_module`.
    """

    fsdp: Outcome
    model_parallel: Outcome
    torch_fsdp: Outcome

    def words(self, path: str = "") -> str:
        """What both strategies do with a tensor or module, in one short line; `"ok"` where both do right."""
        fsdp, parallel = self.fsdp.words(path), self.model_parallel.words(path)
        if fsdp == parallel == "ok":
            return "ok"
        both = fsdp.removeprefix("FSDP "), parallel.removeprefix("ModelParallel ")
        if both[0] == both[1]:
            return f"both: {both[0]}"
        return f"{fsdp}; {parallel}".replace("ok; ", "FSDP ok; ").replace("; ok", "; ModelParallel ok")

    def __str__(self) -> str:
        return f"{self.fsdp}\n{self.torch_fsdp}\n{self.model_parallel}"

    __repr__ = __str__


def predict(model: nn.Module, resets: Resets | None = None) -> Prediction:
    """What Lightning would do with a model on meta, if it were handed over as it is now.

    Nothing of the model changes: methods are tried on copies, equal modules once. Messages are those on CPU.

    Args:
        model: The model, whole or in part on meta.
        resets: What is known of its init methods already.

    Raises:
        TypeError: `model` is not an `nn.Module`.

    Example:
        >>> predict(nn.Sequential(nn.Linear(2, 2), nn.PReLU()).to("meta")).fsdp.error is None
        True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"predict() looks at a torch.nn.Module, and {type(model).__name__} is none. "
            "Pass the model itself: metaviz.tree(model).lightning"
        )
    with torch._C.DisableTorchFunction():
        look = Look(model, resets or Resets(model))
        recipes = {
            "_materialize_meta_tensors": Fsdp,
            "ModelParallelStrategy": ModelParallel,
            "FSDPStrategy": TorchFsdp,
        }
        return Prediction(*(Outcome(name, **recipe(look).told()) for name, recipe in recipes.items()))

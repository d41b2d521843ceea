"""Loading: a checkpoint as a source for the tensors of one model.

A load is a recording, too: each stored tensor is an op on a tape that reads it. What a library makes of several of
them, and what load hooks change, is done to their twins on meta and is on the tape as well. So giving values is the
replay of that tape: only what the chosen tensors need is read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn

from metaviz.core.ahead import Ahead
from metaviz.core.checkpoint import Checkpoint
from metaviz.core.conversion import Made, conversions
from metaviz.core.loadhooks import has_hooks, hooked
from metaviz.core.naming import Places, mapped, without_prefix
from metaviz.core.origin import origin_of
from metaviz.core.paths import Model, some
from metaviz.core.record import recorded
from metaviz.core.recorder import Recorder
from metaviz.core.replay import order, values_of_another
from metaviz.core.stored import Stored
from metaviz.core.tape import Op, Storage, Tape, Window, window, window_of
from metaviz.core.units import format_shape, plural
from metaviz.core.verdict import Verdict

aten = torch.ops.aten


class Entry(NamedTuple):
    """What a checkpoint has for a tensor of a model.

    Attributes:
        name: Its name in the model.
        sources: The names that it is stored under, or made of.
        shape: Its shape; None where that is not known.
        dtype: Its dtype; None where torch has none like it.
        stored: What is stored; None where it is made of something.
        made: What is made, on meta, and on the tape.
        words: How it is made.
    """

    name: str
    sources: tuple[str, ...]
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    stored: Stored | None = None
    made: torch.Tensor | None = None
    words: str = ""


class Loading:
    """A checkpoint, named as a model names its tensors, on a tape.

    Args:
        model: The model. It stays as it is.
        checkpoint: The checkpoint.

    Attributes:
        checkpoint: The same.
        tape: Reads what is stored, and makes what is made.
        unexpected: Names in the checkpoint that the model has no place for.
        put_together: The storages on the tape that several tensors of the model share.
        ignored: Names of buffers that are not persistent in the model: a state dict of it would not have them.
        notes: What was done to names, in sentences.
    """

    def __init__(self, model: nn.Module, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.tape = Tape()
        self.notes: list[str] = []
        self.put_together: set[int] = set()
        self._ahead: Ahead | None = None
        self._twins: dict[str, torch.Tensor] = {}
        self._entries: dict[int, list[Entry]] = {}
        places, used, ignored = Places(model), set(), set()
        for entry in self._named(model).values():
            found = places.find(entry.name)
            if found is not None:
                self._entries.setdefault(id(found[2]), []).append(entry)
                used.update(entry.sources)
            elif places.find(entry.name, saved=False) is not None:
                ignored.update(entry.sources)
        if any(len(found) > 1 for found in self._entries.values()):
            order = {place.path: number for number, place in enumerate(Model(model).places)}
            for found in self._entries.values():
                # Values under one of its names are enough: of the others a file may be missing.
                found.sort(key=lambda entry: (_troubled(entry), order.get(entry.name, len(order))))
                found[1:] = [entry for entry in found[1:] if not _troubled(entry)]
        self.unexpected = tuple(name for name in checkpoint if name not in used and name not in ignored)
        self.ignored = tuple(name for name in checkpoint if name in ignored)

    def entries(self, tensor: torch.Tensor) -> list[Entry]:
        """What there is for a tensor of the model: more than one where it has several names."""
        return self._entries.get(id(tensor), [])

    def verdict(self, tensor: torch.Tensor, persistent: bool = True) -> Verdict:
        """What the checkpoint can do for a tensor on meta.

        Args:
            tensor: A tensor of the model.
            persistent: Whether the model saves it at all.
        """
        found = self.entries(tensor)
        called = self.checkpoint.called
        if not found:
            reason = f"{called} does not have it" if persistent else "Not saved: it is in no checkpoint"
            return Verdict(False, None, reason, None, kind="missing")
        refusal = self.refusal(tensor)
        if refusal is not None:
            return refusal
        first = found[0]
        what = first.words or ", ".join(first.sources)
        cast = "" if first.dtype == tensor.dtype else f", {_word(first.dtype)} there"
        return Verdict(True, True, f"{what} of {called}{cast}", None, "checkpoint", "checkpoint")

    def refusal(self, tensor: torch.Tensor) -> Verdict | None:
        """Why what there is for a tensor is of no use; None if it is, or there is nothing."""
        found = (self._refusal(entry, tensor) for entry in self.entries(tensor))
        return next(filter(None, found), None)

    def _refusal(self, entry: Entry, tensor: torch.Tensor) -> Verdict | None:
        shape, dtype = tuple(tensor.shape), tensor.dtype
        if entry.shape == shape and entry.dtype == dtype and not _troubled(entry):
            return None
        there = self.checkpoint.called
        if entry.sources != (entry.name,):
            there += f", as {some(entry.sources)}"
        if _troubled(entry):
            reason = f"It has no values in {there}: {entry.stored.trouble}"
            return Verdict(False, None, reason, kind="no_values")
        if entry.shape != shape and not (shape == () and entry.shape == (1,)):
            transposed = ", the transpose" if entry.shape == shape[::-1] else ""
            shapes = format_shape(entry.shape), format_shape(shape)
            reason = f"It has the shape {shapes[0]} in {there}, and {shapes[1]} is wanted{transposed}"
            return Verdict(False, None, reason, kind="shape")
        if not _goes_into(entry.dtype, dtype):
            words = f"{_word(entry.dtype)} in {there}, and {_word(dtype)} is wanted"
            return Verdict(False, None, f"It is {words}: its numbers mean something else", kind="dtype")
        return None

    def dtype(self, tensor: torch.Tensor) -> torch.dtype:
        """The dtype of a tensor in the checkpoint; its own where only what it shares its memory with is there."""
        found = self.entries(tensor)
        return found[0].dtype if found else tensor.dtype

    def window(self, tensor: torch.Tensor) -> Window:
        """Where on the tape the values of a tensor are."""
        found = self._window(self.entries(tensor)[0])
        return found._replace(size=(), stride=()) if tensor.dim() == 0 else found

    def shared(self, tensors: Iterable[torch.Tensor]) -> int:
        """Put memory on the tape that several tensors of the model share, and what is stored for each into it.

        Args:
            tensors: All that share it, in the order of the model.

        Returns:
            The number of the storage on the tape. Not all of it has to be written.
        """
        tensors = list(tensors)
        memory = tensors[0].untyped_storage()
        number = self._new_storage(memory.nbytes())
        self.put_together.add(number)
        whole = Window(number, torch.uint8, (memory.nbytes(),), (1,), 0)
        origins = [origin_of(tensor) for tensor in tensors]
        base = next((each for each in origins if each is not None and each.exact), None)
        if base is not None and not base.tape.unwritten(whole._replace(storage=base.window.storage)):
            before = (base.tape, base.window.storage)
            self.tape.append(Op(values_of_another, before, {}, (), (whole,), (whole,)))
        # Where parts contradict each other, the first has the last word, as among names of one tensor.
        for tensor in reversed(tensors):
            if self.entries(tensor) and self.refusal(tensor) is None:
                target, source = window(number, tensor), self.window(tensor)
                reads = (number, source.storage)
                self.tape.append(Op(aten.copy_.default, (target, source), {}, reads, (target,), ()))
        return number

    def _named(self, model: nn.Module) -> dict[str, Entry]:
        """What the checkpoint has, by the names of the model."""
        entries = self._converted(model, self._mapped())
        renamed, said = without_prefix({name: each.shape for name, each in entries.items()}, model)
        if said:
            self.notes.append(f"{said[0].upper()}{said[1:]}.")
        taken: dict[str, Entry] = {}
        for name, entry in entries.items():
            new = renamed[name]
            # Who has the name as it is goes before who gets it.
            if new not in taken or name == new:
                taken[new] = entry._replace(name=new)
        return self._hooked(model, taken) if has_hooks(model) else taken

    def _mapped(self) -> dict[str, Stored]:
        """What is stored, by the names that the user's ``key_map`` gives."""
        named = mapped(self.checkpoint, self.checkpoint.key_map)
        stored: dict[str, Stored] = {}
        for old, new in named.items():
            # What the user renames goes before what has the name as it is, else the first of the file.
            if new not in stored or (old != new and stored[new].name == new):
                stored[new] = self.checkpoint[old]
        out, twice = len(self.checkpoint) - len(named), len(named) - len(stored)
        if out:
            self.notes.append(f"key_map leaves {out:,} of its tensors out.")
        if twice:
            kept = {each.name for each in stored.values()}
            lost = [old for old in named if old not in kept]
            self.notes.append(f"key_map gives {some(lost)} a name that another has, which goes before.")
        return stored

    def _converted(self, model: nn.Module, stored: Mapping[str, Stored]) -> dict[str, Entry]:
        """The entries, those made as the model's library makes them included."""
        entries = {
            name: Entry(name, (each.name,), each.shape, each.dtype, each) for name, each in stored.items()
        }
        found = conversions(model, stored)
        if found.note:
            self.notes.append(found.note)
        if not found.renamed and not found.made:
            return entries
        named = {
            found.renamed.get(name, name): entry._replace(name=found.renamed.get(name, name))
            for name, entry in entries.items()
        }
        with recorded(lambda: Recorder(self.tape, 0)):
            for made in found.made:
                for name in made.sources:
                    named.pop(found.renamed.get(name, name), None)
                named.update(self._made(made, [stored[name] for name in made.sources]))
        return named

    def _made(self, made: Made, parts: list[Stored]) -> dict[str, Entry]:
        """The entries of what is made of some stored tensors."""
        sources = tuple(part.name for part in parts)
        trouble = next((part.trouble for part in parts if part.trouble), "")
        try:
            twins = {} if trouble else dict(zip(made.sources, map(self.twin, parts), strict=True))
            tensors = {} if trouble else made.make(twins)
        except Exception as error:
            trouble = f"{made.words} fails with {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if trouble:
            lost = Stored(made.target, None, None, trouble=trouble)
            return {made.target: Entry(made.target, sources, None, None, lost)}
        return {
            name: Entry(name, sources, tuple(tensor.shape), tensor.dtype, None, tensor, made.words)
            for name, tensor in tensors.items()
        }

    def _hooked(self, model: nn.Module, entries: dict[str, Entry]) -> dict[str, Entry]:
        """The entries after the modules' own load hooks."""
        given = {name: self._tensor(entry) for name, entry in entries.items() if not _troubled(entry)}
        found = hooked(model, given, self.tape)
        self.notes += found.notes
        known = {id(tensor): entries[name] for name, tensor in given.items()}
        result = {name: entry for name, entry in entries.items() if _troubled(entry)}
        for name, tensor in found.tensors.items():
            if id(tensor) in known:
                result[name] = known[id(tensor)]._replace(name=name)
            elif isinstance(tensor, torch.Tensor) and window_of(tensor, self.tape) is not None:
                sources = self._sources(tensor)
                words = (
                    f"{some(sources)} by a load hook of the model" if sources else "a load hook of the model"
                )
                shape, dtype = tuple(tensor.shape), tensor.dtype
                result[name] = Entry(name, sources, shape, dtype, None, tensor, words)
        renamed = sum(name not in entries for name in result)
        if renamed:
            self.notes.append(f"Load hooks of the model gave {plural(renamed, 'tensor')} another name.")
        return result

    def _sources(self, tensor: torch.Tensor) -> tuple[str, ...]:
        """The names that what is made on the tape is stored under."""
        ops = (self.tape.ops[k] for k in self.tape.slice([window_of(tensor).storage]))
        return tuple(op.args[0].name for op in ops if op.func == self.read)

    def _tensor(self, entry: Entry) -> torch.Tensor:
        return entry.made if entry.stored is None else self.twin(entry.stored)

    def _window(self, entry: Entry) -> Window:
        return window_of(self._tensor(entry), self.tape)

    def twin(self, stored: Stored) -> torch.Tensor:
        """The tensor on meta that stands for a stored one; the op that reads it is on the tape."""
        if stored.name not in self._twins:
            twin = torch.empty_strided(stored.shape, stored.stride, dtype=stored.dtype, device="meta")
            self.tape.tag(twin.untyped_storage())
            place = window_of(twin)
            self.tape.append(Op(self.read, (stored,), {}, (), (place,), (place,)))
            self._twins[stored.name] = twin
        return self._twins[stored.name]

    def read(self, stored: Stored) -> torch.Tensor:
        """The op of a stored tensor: its values."""
        return stored.load() if self._ahead is None else self._ahead.load(stored)

    @contextlib.contextmanager
    def reading(self, storages: Iterable[int]) -> Iterator[None]:
        """Read ahead, in this context, what some storages of the tape need.

        Args:
            storages: Those that are about to be replayed.
        """
        ops = (self.tape.ops[number] for number in order(self.tape, storages))
        with Ahead(op.args[0] for op in ops if op.func == self.read) as self._ahead:
            try:
                yield
            finally:
                self._ahead = None

    def _new_storage(self, nbytes: int) -> int:
        self.tape.storages.append(Storage(nbytes))
        return len(self.tape.storages) - 1


def _troubled(entry: Entry) -> bool:
    return entry.stored is not None and bool(entry.stored.trouble)


def _goes_into(there: torch.dtype | None, here: torch.dtype) -> bool:
    """Whether numbers of one dtype mean the same in the other."""
    return there == here or (there is not None and _kind(there) == _kind(here))


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "complex"
    # Numbers of eight bits and less have scales beside them.
    if dtype.is_floating_point:
        return "float" if dtype.itemsize > 1 else str(dtype)
    return "bool" if dtype is torch.bool else "integer"


def _word(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")

"""Checkpoints: what tensors a file or folder holds, from its headers alone."""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch

from metaviz.core.archive import Archive, dicts_of_tensors, is_legacy, load_legacy
from metaviz.core.distributed import distributed
from metaviz.core.folder import Found, find
from metaviz.core.headers import safetensors
from metaviz.core.paths import some
from metaviz.core.stored import File, Stored
from metaviz.core.units import format_bytes, plural
from metaviz.errors import BadCheckpoint, UnknownPath

KeyMap = Mapping[str, str] | Sequence[tuple[str, str]] | Callable[[str], str | None]

# Where training scripts put the state dict of the model.
_USUAL = ("state_dict", "model", "module", "model_state_dict", "params", "weights")


def checkpoint(
    source: str | os.PathLike | Mapping[str, Any] | Checkpoint,
    *,
    key_map: KeyMap | None = None,
    inside: str | None = None,
) -> Checkpoint:
    """Look into a checkpoint: names, shapes, dtypes and bytes of its tensors. No value is read, no code is run.

    Args:
        source: A safetensors file, a file of ``torch.save`` (``.pt``, ``.pth``, ``.bin``, Lightning's ``.ckpt``), a
            folder with one of them, with shards and their index, or of ``torch.distributed.checkpoint``; or a state
            dict, which is never changed.
        key_map: How names of the checkpoint become names of a model, where they differ: pairs of beginnings
            ``[("bert.", "")]``, a dict of names or beginnings, or a function from name to name. Beginnings end where a
            part of a name ends, and what becomes None is left out. What is usual (``model.``, ``module.``,
            ``_orig_mod.`` ...) is found without.
        inside: Which entry of the file to take, where several hold tensors: ``"ema"``, ``"model.generator"``.

    Raises:
        BadCheckpoint: It cannot be read, is damaged, or wants to run code; or there are several of them.

    Example:
        >>> metaviz.checkpoint({"weight": torch.ones(2, 3)}).nbytes
        24
    """
    if isinstance(source, Checkpoint):
        _refuse_inside(inside, source.path)
        return source if key_map is None else source.with_key_map(key_map)
    if isinstance(source, Mapping):
        return _of_content(source, None, inside, key_map)
    if not isinstance(source, str | os.PathLike):
        raise TypeError(
            f"A checkpoint is a path or a state dict, and this is of type {type(source).__name__}. "
            "Next: metaviz.checkpoint('model.safetensors')"
        )
    path = os.path.expanduser(os.fspath(source))
    found = find(path)
    if found.format != "torch" or len(found.files) != 1:
        _refuse_inside(inside, path)
    if found.format == "distributed":
        tensors, notes = distributed(path)
        return Checkpoint(path, found.format, tensors, tuple(notes), key_map)
    if found.index is not None:
        return _of_index(path, found, key_map)
    if len(found.files) > 1:
        return Checkpoint(path, found.format, _of_shards(found), found.notes, key_map)
    file = File.at(found.files[0])
    if found.format == "safetensors":
        return Checkpoint(path, found.format, safetensors(file), found.notes, key_map)
    return _of_torch_file(path, file, found.notes, inside, key_map)


class Checkpoint(Mapping[str, Stored]):
    """What a checkpoint holds. A mapping from names to :class:`Stored`, in the order of the file.

    Attributes:
        path: Where it is; None for a state dict.
        format: ``"safetensors"``, ``"torch"``, ``"distributed"`` or ``"state dict"``.
        notes: What else is to know about it, in sentences.
        key_map: How its names become those of a model, None as they are.
    """

    #: Draws a checkpoint: `drawn(checkpoint, how)`. Core does not know its views, so `metaviz` sets it.
    drawn: ClassVar[Callable[..., Any] | None] = None

    def __init__(
        self,
        path: str | None,
        format: str,
        tensors: dict[str, Stored],
        notes: Sequence[str] = (),
        key_map: KeyMap | None = None,
    ) -> None:
        self.path = path
        self.format = format
        self.notes = tuple(notes)
        self.key_map = key_map
        self._tensors = tensors

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of all its values; what is stored once under several names counts once."""
        held = {stored.place: stored.nbytes for stored in self._tensors.values() if not stored.trouble}
        return sum(held.values())

    @functools.cached_property
    def files(self) -> tuple[str, ...]:
        """The files that hold values."""
        return tuple(
            dict.fromkeys(piece.file.path for each in self._tensors.values() for piece in each.pieces)
        )

    @functools.cached_property
    def called(self) -> str:
        """What to call it in a sentence."""
        if self.path is None:
            return "the state dict"
        files = self.files
        name = os.path.basename(files[0] if len(files) == 1 else os.path.abspath(self.path))
        return name if len(files) == 1 else f"{name}/"

    def with_key_map(self, key_map: KeyMap) -> Checkpoint:
        """The same checkpoint with another ``key_map``."""
        return Checkpoint(self.path, self.format, self._tensors, self.notes, key_map)

    def __getitem__(self, name: str) -> Stored:
        try:
            return self._tensors[name]
        except KeyError:
            near = difflib.get_close_matches(str(name), self._tensors, n=1) or list(self._tensors)[:1]
            advice = f"The nearest is {near[0]!r}. Next: checkpoint[{near[0]!r}]" if near else "It is empty."
            raise UnknownPath(f"{self.called} has no tensor {name!r}. {advice}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __str__(self) -> str:
        return type(self).drawn(self, "text") if self.drawn else self.summary

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str | None:
        return type(self).drawn(self, "html") if self.drawn else None

    @property
    def summary(self) -> str:
        """The checkpoint in one line."""
        files = len(self.files)
        where = f" in {files} files" if files > 1 else ""
        return f"{self.called}: {plural(len(self), 'tensor')}, {format_bytes(self.nbytes)}{where} ({self.format})"


def _refuse_inside(inside: str | None, path: str | None) -> None:
    """Refuse to look inside of what only has names."""
    if inside is not None:
        where = "state" if path is None else repr(path)
        raise BadCheckpoint(
            f"{'The state dict' if path is None else where} has names and no entries with names of their own, so "
            f"inside={inside!r} means nothing. Next: metaviz.checkpoint({where}, key_map=[({inside!r}, '')])"
        )


def _of_torch_file(
    path: str, file: File, notes: tuple[str, ...], inside: str | None, key_map: KeyMap | None
) -> Checkpoint:
    head = file.head(64)
    if head.startswith(b"PK"):
        archive = Archive(file)
        return _of_content(archive.content, path, inside, key_map, archive, notes)
    if is_legacy(head):
        old = "It is in the format before torch 1.6, which can only be read as a whole."
        return _of_content(load_legacy(file), path, inside, key_map, None, (*notes, old))
    raise BadCheckpoint(
        f"{file.path!r} begins with {head[:8]!r}: that is neither a safetensors file nor one of torch.save. "
        "Next: metaviz.checkpoint('model.safetensors')"
    )


def _of_content(
    content: Any,
    path: str | None,
    inside: str | None,
    key_map: KeyMap | None,
    archive: Archive | None = None,
    notes: tuple[str, ...] = (),
) -> Checkpoint:
    """The checkpoint of what was unpickled, or of a state dict."""
    found = {".".join(way): named for way, named in dicts_of_tensors(content)}
    chosen = _chosen(found, path, inside)
    tensors, others = {}, []
    for name, value in found[chosen].items():
        if not isinstance(value, torch.Tensor):
            others.append(name)
        else:
            tensors[name] = _held(name, value) if archive is None else archive.stored(name, value)
    if chosen:
        notes = (*notes, f"Its tensors are those under {chosen!r}.")
    if others:
        notes = (*notes, f"It has entries that are no tensors, too: {some(others)}.")
    return Checkpoint(path, "state dict" if path is None else "torch", tensors, notes, key_map)


def _chosen(found: Mapping[str, Any], path: str | None, inside: str | None) -> str:
    """Which of the dicts in a file is meant."""
    what = "The state dict" if path is None else repr(path)
    call = "metaviz.checkpoint(state" if path is None else f"metaviz.checkpoint({path!r}"
    if not found:
        step = "model.state_dict()" if path is None else f"torch.load({path!r}, weights_only=True)"
        raise BadCheckpoint(f"{what} holds no tensors by name. Next: {step}")
    if inside is not None:
        if inside in found:
            return inside
        raise BadCheckpoint(
            f"{what} has no tensors under {inside!r}, but under {', '.join(map(repr, found))}. "
            f"Next: {call}, inside={next(iter(found))!r})"
        )
    if len(found) == 1:
        return next(iter(found))
    usual = [name for name in _USUAL if name in found]
    if usual:
        return usual[0]
    raise BadCheckpoint(
        f"{what} has tensors under {', '.join(map(repr, found))}: which are meant? "
        f"Next: {call}, inside={next(iter(found))!r})"
    )


def _held(name: str, value: torch.Tensor) -> Stored:
    """A tensor of a state dict."""
    try:
        shape = tuple(value.shape)
    except RuntimeError:
        return Stored(name, None, None, trouble="it is lazy or nested, and has no shape")
    if value.device.type == "meta":
        return Stored(name, shape, value.dtype, trouble="it is on meta, so there are no values in it")
    if type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return Stored(
            name, shape, value.dtype, trouble=f"it is a {type(value).__name__}, which has no plain bytes"
        )
    if value.layout is not torch.strided or value.is_quantized:
        return Stored(name, shape, value.dtype, trouble="it is sparse or quantized, and has no plain bytes")
    return Stored(name, shape, value.dtype, value=value.detach())


def _of_index(path: str, found: Found, key_map: KeyMap | None) -> Checkpoint:
    """The checkpoint of an index; of shards that are missing it knows the names only."""
    shards: dict[str, Mapping[str, Stored] | None] = {}
    tensors, missing = {}, {}
    for name, file in found.index.items():
        if file not in shards:
            # A link to nowhere is what is left of a cache that was cleaned up.
            shards[file] = _shard(file, found.format) if os.path.exists(file) else None
        shard = shards[file]
        if shard is None:
            missing[os.path.basename(file)] = None
            trouble = f"its file {os.path.basename(file)!r} is missing"
            tensors[name] = Stored(name, None, None, trouble=trouble)
        elif name in shard:
            tensors[name] = shard[name]
        else:
            raise BadCheckpoint(
                f"The index of {path!r} says that {name!r} is in {os.path.basename(file)!r}, and it is not: they do "
                f"not belong together. Next: download the folder again, or metaviz.checkpoint({file!r})"
            )
    notes = found.notes
    if missing:
        notes = (*notes, f"{plural(len(missing), 'file')} of its {len(shards)} missing: {some(missing)}.")
    return Checkpoint(path, found.format, tensors, notes, key_map)


def _of_shards(found: Found) -> dict[str, Stored]:
    tensors: dict[str, Stored] = {}
    for file in found.files:
        tensors.update(_shard(file, found.format))
    return tensors


def _shard(path: str, format: str) -> Mapping[str, Stored]:
    file = File.at(path)
    return safetensors(file) if format == "safetensors" else _of_torch_file(path, file, (), None, None)

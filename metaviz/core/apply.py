"""Materialize gives values, unload takes them back to meta. With swap.py the only code that changes a model."""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from metaviz.core import watch
from metaviz.core.choice import Fill
from metaviz.core.description import PlannedTensor
from metaviz.core.filling import Filled, Progress, dressed_as, fill_aside
from metaviz.core.origin import Was, mark_real, remember, was
from metaviz.core.paths import Model, Place, some
from metaviz.core.plan import Work, check, prepare
from metaviz.core.replay import plain_torch
from metaviz.core.report import Report
from metaviz.core.swap import Change, commit
from metaviz.core.tape import MARK, Tag, tag_of, version_of, window, window_of
from metaviz.core.verify import Verifier
from metaviz.errors import CannotMaterialize, WouldLoseValues

# One change of one model at a time: widgets call from other threads.
_lock = threading.RLock()
_at_work: list[int] = []


def materialize(
    model: nn.Module,
    paths: str | Iterable[str] = "",
    *,
    device: Any = None,
    source: str = "auto",
    rng: str = "eager",
    dtype: torch.dtype | str | None = None,
    checkpoint: Any = None,
    blocked: str = "error",
    progress: Progress | None = None,
) -> Report:
    """Give the chosen parts of a model their values, on the device of your choice. All or nothing.

    Parameters stay the same objects, so ties, optimizers, hooks and captured references stay good. Real tensors are
    never touched. An error, too little memory or Ctrl-C at any moment leaves the model as it was.

    Args:
        model: A model on meta; one that :func:`metaviz.build` made has a tape.
        paths: Module paths (each takes its subtree), tensor paths or globs such as ``"layers.*.mlp"``; ``""`` is the
            whole model.
        device: Where the values shall be: ``"cpu"`` (default), ``"cuda:0"`` ...; ``"auto"`` fills one device after the
            other with whole blocks, as the plan says; or a dict of module paths and devices, the rest on the CPU.
        source: ``"checkpoint"``: read what is stored. ``"replay"``: run again what the constructor did. ``"reset"``:
            call the modules' own init methods, children first, where :meth:`ModuleTree.verdict` says that they write
            the tensor. ``"auto"``: the first of them that can.
        rng: ``"eager"`` gives the numbers of an ordinary CPU build with the seed that was set when the model was
            built, bit for bit, whatever is chosen and on whatever device. ``"keyed"`` draws each random op on the
            device with a seed of its own: the same values for any selection. ``"device"`` draws from the device's
            global generator. A reset has no ordinary build to follow: with ``"eager"`` it draws from the CPU's global
            generator, which moves on as if you had called those methods yourself that write chosen tensors.
        dtype: Floating-point dtype to cast to, or ``"checkpoint"`` for the one that is stored. Default: the dtype that
            each tensor has now.
        checkpoint: Where to read values from: a path, a state dict or what :func:`metaviz.checkpoint` gives. Only the
            bytes of the chosen tensors are read, and compared with the file afterwards. What it lacks gets its values
            from the tape or a reset; the report says which.
        blocked: ``"error"`` refuses if a chosen tensor cannot be given values; ``"skip"`` leaves such ones on meta.
        progress: Called as ``progress(done_nbytes, total_nbytes, path)`` after each tensor. What it raises stops all.

    Returns:
        What was done.

    Raises:
        UnknownPath: A path means nothing in this model; the nearest one is named.
        UnknownDevice: This machine does not have the device; those it has are named.
        CannotMaterialize: Chosen tensors have no source, and ``blocked="error"``.
        NotEnoughMemory: The values do not fit; both numbers are named.
        BadCheckpoint: The checkpoint cannot be read.
        CheckpointMismatch: Nothing of the checkpoint fits the model, or shapes differ; all of them are listed.
        StalePlan: A file of the checkpoint was changed in the meantime.

    Example:
        >>> model = metaviz.build(torch.nn.Transformer, num_encoder_layers=48)
        >>> metaviz.materialize(model, "encoder.layers.47").device
        device(type='cpu')
    """
    began = time.perf_counter()
    if progress is not None and not callable(progress):
        raise TypeError(
            f"progress={progress!r} cannot be called. Next: metaviz.materialize(model, paths, progress=print)"
        )
    with _alone(), plain_torch():
        options = {"device": device, "source": source, "rng": rng, "dtype": dtype, "checkpoint": checkpoint}
        work = prepare(model, paths, **options)
        check(work.plan, blocked, source)
        try:
            changes, conflicts = _carry_out(work, rng, progress or (lambda *_: None))
            if work.program is not None:
                work.program.advance(rng)
        except BaseException as error:
            # Notebooks keep the last traceback, and its frames keep what was filled aside.
            traceback.clear_frames(error.__traceback__)
            raise
    watch.tell()
    described = work.plan
    return Report(
        "materialized",
        described.tensors,
        described.blocked,
        described.kept,
        described.lazy,
        tuple(path for change in changes for path in change.repointed),
        tuple(path for change in changes for path in change.stranded),
        described.device,
        described.nbytes,
        time.perf_counter() - began,
        described.pulled_in,
        described.match,
        conflicts,
    )


def unload(model: nn.Module, paths: str | Iterable[str] = "", *, force: bool = False) -> Report:
    """Take the chosen parts back to meta and free their memory. Materializing them again gives the same values.

    A change made through ``.data``, or through a NumPy array that shares the memory, leaves no trace and is lost.

    Args:
        model: The model.
        paths: As for :func:`materialize`.
        force: Unload also what has been changed since it was materialized, and lose the changes.

    Returns:
        What was done.

    Raises:
        UnknownPath: A path means nothing in this model.
        WouldLoseValues: A chosen tensor was not given its values by metaviz, or was changed since, or has gradients.
    """
    began = time.perf_counter()
    with _alone(), plain_torch():
        view = Model(model)
        by_tensor: dict[int, list[Place]] = {}
        for place in view.places:
            by_tensor.setdefault(id(place.slot.tensor), []).append(place)
        selected = view.select(paths)
        chosen = _unloadable(selected, by_tensor, force)
        named = {id(place.slot.tensor) for place in selected}
        pulled_in = tuple(by_tensor[id(t)][0].path for t, _ in chosen if id(t) not in named)
        blank: dict[tuple[int, int], torch.UntypedStorage] = {}
        changes = [
            Change(tensor, dressed_as(tensor, _on_meta(tensor, then.tag, blank)), by_tensor[id(tensor)])
            for tensor, then in chosen
        ]
        nbytes = sum({s._cdata: s.nbytes() for s in (t.untyped_storage() for t, _ in chosen)}.values())
        described = tuple(
            PlannedTensor(
                by_tensor[id(t)][0].path,
                tuple(place.path for place in by_tensor[id(t)][1:]),
                tuple(t.shape),
                t.dtype,
                t.numel() * t.element_size(),
                then.source,
                _AFTER[then.source],
                torch.device("meta"),
            )
            for t, then in chosen
        )
        commit(changes, lambda: _remember_as_new(changes))
    watch.tell()
    return Report(
        "unloaded",
        described,
        {},
        (),
        (),
        tuple(path for change in changes for path in change.repointed),
        tuple(path for change in changes for path in change.stranded),
        torch.device("meta"),
        nbytes,
        time.perf_counter() - began,
        pulled_in,
    )


_AFTER = {
    "replay": "materialize it again for the same values",
    "checkpoint": "materialize it again, with the same checkpoint, for the same values",
    "reset": "its values are gone",
}


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Wait for other threads' changes; refuse a change from within one."""
    with _lock:
        if _at_work:
            raise CannotMaterialize(
                "A change of a model is at work in this very thread: a progress callback can look, but change nothing. "
                "Next: call metaviz.materialize(model, paths) after the first call has returned"
            )
        try:
            _at_work.append(threading.get_ident())
            yield
        finally:
            _at_work.clear()


def _remember_as_new(changes: list[Change]) -> None:
    """Let tensors that are back on meta count as not written to since the build."""
    back = {id(tensor) for change in changes for tensor in (change.old, change.new)}
    holders = {id(place.module): place.module for change in changes for place in change.places}
    for module in holders.values():
        remember(module, lambda tensor, _: id(tensor) in back)


def _conflicts(work: Work, filled: list[Filled]) -> dict[str, str]:
    """Of tensors and memory that are stored under several names: those that have other values under another name."""
    found, verifier = {}, Verifier()
    for old, new, fill in filled:
        if fill.origin != "checkpoint":
            continue
        path, together = work.places[id(old)][0].path, fill.source.storage in work.loading.put_together
        first, *others = work.loading.entries(old) or [None]
        for other in [first, *others] if together else others:
            stored = None if other is None else other.stored
            known = together or first.stored is None or stored is None or stored.place != first.stored.place
            if stored is None or not known or verifier.same(stored, new):
                continue
            found[path] = f"it does not have the values of {some(other.sources)}, " + (
                "as it shares its memory with others that are stored with other ones"
                if together
                else f"but those of {some(first.sources)}: one tensor in the model, two in the checkpoint"
            )
    return found


def _carry_out(work: Work, rng: str, progress: Progress) -> tuple[list[Change], dict[str, str]]:
    filled = fill_aside(work, rng, progress)
    conflicts = {} if work.loading is None else _conflicts(work, filled)
    changes = [Change(old, new, work.places[id(old)]) for old, new, _ in filled]
    changes += [_moved_lazy(old, work) for old in work.lazy]
    _mark(filled)
    commit(changes)
    return changes, conflicts


def _moved_lazy(old: torch.Tensor, work: Work) -> Change:
    """A lazy tensor stays lazy, on the device where its first forward will give it a shape and values."""
    dtype = work.dtype if work.dtype is not None and old.is_floating_point() else old.dtype
    new = torch.empty(0, dtype=dtype, device=work.plan.device)
    return Change(old, dressed_as(old, new), work.places[id(old)])


def _mark(filled: list[Filled]) -> None:
    """Let each new storage know what it was, so that unload can take it back; before the swap, so never late."""
    by_storage: dict[int, list[Filled]] = {}
    for entry in filled:
        by_storage.setdefault(entry[1].untyped_storage()._cdata, []).append(entry)
    for entries in by_storage.values():
        fill = entries[0][2]
        if fill.origin == "replay":
            tag = Tag(fill.tape, fill.source.storage, None if fill.exact else fill.source)
        else:
            tag = _tag_before(entries[0][0], fill)
        # Whether the swap will keep the old object or the new one, its version is that of the new content.
        versions = {id(tensor): version_of(new) for old, new, _ in entries for tensor in (old, new)}
        mark_real(entries[0][1].untyped_storage(), Was(tag, versions, fill.origin))


def _tag_before(old: torch.Tensor, fill: Fill) -> Tag | None:
    """What the storage of a tensor was tagged with before a reset gave it other values than its tape has."""
    tag = tag_of(old)
    if tag is None or fill.exact or tag.source is not None:
        return tag
    return tag._replace(source=window_of(old))


def _unloadable(
    places: list[Place], by_tensor: dict[int, list[Place]], force: bool
) -> list[tuple[torch.Tensor, Was]]:
    """The real tensors at ``places`` and all that share memory with them, with what they were."""
    chosen: dict[int, torch.Tensor] = {}
    for place in places:
        tensor = place.slot.tensor
        if not is_lazy(tensor) and not tensor.is_meta:
            chosen[id(tensor)] = tensor
    storages = {t.untyped_storage()._cdata for t in chosen.values() if was(t) is not None}
    for identity, (place, *_) in by_tensor.items():
        tensor = place.slot.tensor
        if not is_lazy(tensor) and was(tensor) is not None and tensor.untyped_storage()._cdata in storages:
            chosen[identity] = tensor
    lost = {}
    for identity, tensor in chosen.items():
        then = was(tensor)
        if then is None:
            lost[by_tensor[identity][0].path] = (
                "metaviz did not give it its values, or they were cast or moved since"
            )
        elif not force and then.source == "reset":
            lost[by_tensor[identity][0].path] = "reset gave it its values, and may give it others"
        elif not force and then.versions.get(identity) != version_of(tensor):
            lost[by_tensor[identity][0].path] = "it was changed since it was materialized"
        elif not force and tensor.is_leaf and tensor.grad is not None:
            lost[by_tensor[identity][0].path] = "it has a gradient"
    if lost:
        path, reason = next(iter(lost.items()))
        forced = (
            "" if reason.startswith("metaviz") else " Or lose them: metaviz.unload(model, paths, force=True)"
        )
        raise WouldLoseValues(
            f"Unloading would lose values of {len(lost)} of {len(chosen)} chosen tensors: {some(lost)}. "
            f"{path}: {reason}. Nothing was changed. Choose other parts, or save them first: "
            f"torch.save(model.state_dict(), 'kept.pt').{forced}"
        )
    return [(tensor, was(tensor)) for tensor in chosen.values()]


def _on_meta(
    tensor: torch.Tensor, tag: Tag | None, blank: dict[tuple[int, int], torch.UntypedStorage]
) -> torch.Tensor:
    """``tensor`` as it was before it was materialized: on meta, known to its tape."""
    if tag is None:
        real = tensor.untyped_storage()
        if (key := (0, real._cdata)) not in blank:
            blank[key] = torch.UntypedStorage(real.nbytes(), device="meta")
        return window(0, tensor).on(blank[key])
    if tag.source is not None:
        new = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
        setattr(new.untyped_storage(), MARK, tag)
        return new
    key = (id(tag.tape), tag.storage)
    if key not in blank:
        blank[key] = torch.UntypedStorage(tag.tape.storages[tag.storage].nbytes, device="meta")
        setattr(blank[key], MARK, tag)
    return window(tag.storage, tensor).on(blank[key])

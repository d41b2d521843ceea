"""Which checkpoint a path means: a file, or what a folder has. Names only, no tensor's bytes are looked at."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
from collections.abc import Mapping
from typing import Any

from metaviz.core.paths import some
from metaviz.core.stored import File, readable
from metaviz.errors import BadCheckpoint

_FORMATS = {
    ".safetensors": "safetensors",
    ".pt": "torch",
    ".pth": "torch",
    ".bin": "torch",
    ".ckpt": "torch",
}
#: How the names of files end that may be checkpoints.
SUFFIXES = (*_FORMATS, ".json")
# What trainers put beside the weights.
_OTHERS = re.compile(
    r"(training_args|optimizer|scheduler|scaler|rng_state.*|sampler|random_states.*)\.(bin|pt|pth|pkl)"
)
_SHARD = re.compile(r"(?P<stem>.+?)-(?P<number>\d+)-of-(?P<count>\d+)(?P<kind>\.\w+)")
_INDEX = re.compile(r".+(?P<kind>\.safetensors|\.bin|\.pt)\.index(\..+)?\.json")


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint that was found.

    Attributes:
        format: ``"safetensors"``, ``"torch"`` or ``"distributed"``.
        files: Its files.
        index: File by name of tensor, where there is an index.
        notes: What else is to know, in sentences.
    """

    format: str
    files: tuple[str, ...] = ()
    index: Mapping[str, str] | None = None
    notes: tuple[str, ...] = ()


def find(path: str) -> Found:
    """The checkpoint that ``path`` means.

    Raises:
        BadCheckpoint: There is none, or there are several.
    """
    if not os.path.isdir(path):
        return _file(path)
    with readable(path):
        names = sorted(os.listdir(path))
    if ".metadata" in names:
        return Found("distributed")
    indexes = {name: _read_index(os.path.join(path, name)) for name in names if _INDEX.fullmatch(name)}
    listed = {os.path.basename(file) for index in indexes.values() for file in set(index.values())}
    found: dict[str, Any] = {name: name for name in indexes}
    shards: dict[str, list[str]] = {}
    for name in names:
        if name in indexes or name in listed:
            continue
        if match := _SHARD.fullmatch(name):
            shards.setdefault(f"{match['stem']}-*-of-{match['count']}{match['kind']}", []).append(name)
        elif os.path.splitext(name)[1] in _FORMATS and not _OTHERS.fullmatch(name):
            found[name] = name
    covered = {_INDEX.fullmatch(name)["kind"] for name in indexes}
    for group, members in shards.items():
        kind = os.path.splitext(members[0])[1]
        if kind in _FORMATS and kind not in covered:
            found[group] = members
    if len(found) != 1:
        raise _none(path, names) if not found else _several(path, found)
    ((name, what),) = found.items()
    if name in indexes:
        return Found(_FORMATS[_INDEX.fullmatch(name)["kind"]], index=indexes[name])
    return _file(os.path.join(path, name)) if isinstance(what, str) else _group(path, what)


def _file(path: str) -> Found:
    name = os.path.basename(path)
    if match := _INDEX.fullmatch(name):
        return Found(_FORMATS[match["kind"]], index=_read_index(path))
    format = _FORMATS.get(os.path.splitext(name)[1].lower())
    if format is None:
        # Caches keep files under names that say nothing.
        head = File.at(path).head(16)
        format = "safetensors" if head[8:9] == b"{" else "torch"
    return Found(format, (path,))


def _group(folder: str, names: list[str]) -> Found:
    """Shards without an index."""
    count = int(_SHARD.fullmatch(names[0])["count"])
    there = {int(_SHARD.fullmatch(name)["number"]) for name in names}
    notes = ()
    if len(there) < count:
        missing = list(itertools.islice((n for n in range(1, count + 1) if n not in there), 5))
        notes = (f"Of its {count:,} files {count - len(there):,} are missing: {some(map(str, missing))}.",)
    return Found(
        _FORMATS[os.path.splitext(names[0])[1]],
        tuple(os.path.join(folder, name) for name in names),
        notes=("There is no index: the shards say themselves what they hold.", *notes),
    )


def _read_index(path: str) -> dict[str, str]:
    folder = os.path.dirname(path)
    with readable(path), open(path, "rb") as file:
        text = file.read()
    try:
        listed: Any = json.loads(text)["weight_map"]
        names = dict(listed.items())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadCheckpoint(
            f"{path!r} is no index: it has no 'weight_map' of names and files ({type(error).__name__}). "
            f"Next: import json; json.load(open({path!r}))"
        ) from None
    for name, file in names.items():
        if not isinstance(file, str) or _leads_out(file):
            raise BadCheckpoint(
                f"{path!r} says that {name!r} is in {file!r}, which is outside of its folder: nothing was read. "
                f"Next: import json; json.load(open({path!r}))['weight_map'][{name!r}]"
            )
    return {name: os.path.join(folder, file) for name, file in names.items()}


def _leads_out(file: str) -> bool:
    """Whether a file that an index names is not below its folder; Windows reads backslashes, and drives."""
    parts = re.split(r"[/\\]", file)
    return not file or parts[0] == "" or ".." in parts or ":" in parts[0] or "\0" in file


def _none(folder: str, names: list[str]) -> BadCheckpoint:
    below = _nearest_below(folder)
    looked = "*.safetensors, *.safetensors.index.json, *.pt, *.pth, *.bin, *.ckpt and .metadata"
    has = f"It has {some(names)}." if names else "It is empty."
    step = f"metaviz.checkpoint({below!r})" if below else f"import os; os.listdir({folder!r})"
    return BadCheckpoint(f"There is no checkpoint in {folder!r}: looked for {looked}. {has} Next: {step}")


def _nearest_below(folder: str) -> str | None:
    """A folder below that has files named like a checkpoint's; caches of downloads keep them two levels down."""
    level = [folder]
    for _ in range(3):
        paths = (os.path.join(above, name) for above in level for name in _listed(above))
        level = [path for path in itertools.islice(paths, 1000) if os.path.isdir(path)]
        for path in level:
            names = _listed(path)
            if any(os.path.splitext(name)[1] in _FORMATS or name == ".metadata" for name in names):
                return path
    return None


def _listed(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _several(folder: str, found: Mapping[str, Any]) -> BadCheckpoint:
    first = next((name for name, what in found.items() if isinstance(what, str)), None)
    step = os.path.join(folder, first) if first else folder
    return BadCheckpoint(
        f"There are {len(found)} checkpoints in {folder!r}: {some(found)}. Which is meant? "
        f"Next: metaviz.checkpoint({step!r})"
    )

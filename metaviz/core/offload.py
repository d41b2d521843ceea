"""Offloaded models: on meta to look at, while a hook of accelerate keeps the values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from metaviz.core.finding import Finding, Look, paths_of
from metaviz.core.paths import Place, join, modules, some
from metaviz.core.reasons import quoted
from metaviz.core.units import plural


def about_offloaded(look: Look) -> tuple[list[Finding], set[int]]:
    """The tensors on meta whose values a hook keeps: as findings, and by id.

    Keys and attributes of hooks are read, never a value. Source: accelerate 1.15, accelerate/hooks.py,
    AlignDevicesHook, and accelerate/utils/offload.py.
    """
    given_back: dict[int, Place] = {}
    kept: dict[int, tuple[Place, str]] = {}
    seen: set[int] = set()
    for path, module in look.modules.items():
        if "_hf_hook" not in module.__dict__ or id(module) in seen:
            continue
        seen.add(id(module))
        for hook, code in _hooks(module.__dict__["_hf_hook"], "._hf_hook"):
            for name, tensor in _tensors(module, bool(hook.get("place_submodules"))):
                place = look.empty.get(id(tensor))
                if place is None or not _keeps(hook["weights_map"], name):
                    continue
                before = hook.get("original_devices", {}).get(name)
                if before is not None and torch.device(before).type != "meta":
                    given_back[id(tensor)] = place
                else:
                    at = f"model.get_submodule({quoted(path)}){code}.weights_map[{quoted(name)}]"
                    kept[id(tensor)] = place, at
    return list(_findings(list(given_back.values()), list(kept.values()))), given_back.keys() | kept.keys()


def offloaded(module: nn.Module, name: str) -> bool:
    """Whether a hook of accelerate on ``module`` keeps the values of its parameter or buffer ``name``."""
    hook = module.__dict__.get("_hf_hook")
    return hook is not None and any(_keeps(each["weights_map"], name) for each, _ in _hooks(hook, ""))


def _findings(given_back: list[Place], kept: list[tuple[Place, str]]) -> Iterator[Finding]:
    if given_back:
        fix = "accelerate.hooks.remove_hook_from_module(model, recurse=True)  # brings the values back"
        yield _finding(given_back, fix)
    if kept:
        # accelerate gives nothing back to what was on meta before it was dispatched.
        place, at = kept[0]
        fix = f'accelerate.utils.set_module_tensor_to_device(model, {quoted(place.path)}, "cpu", value={at})'
        each = f"  # and so for each of the {len(kept):,}" if len(kept) > 1 else ""
        yield _finding([place for place, _ in kept], fix + each)


def _finding(places: list[Place], fix: str) -> Finding:
    paths = paths_of(places)
    return Finding(
        "offloaded",
        paths,
        f"{plural(len(paths), 'tensor')} on meta only between forwards: {some(paths)}. A hook of accelerate keeps the "
        "values in memory or on disk, and to_empty or a reset would put others in their place.",
        fix,
    )


def _hooks(hook: Any, code: str) -> Iterator[tuple[dict[str, Any], str]]:
    """The attributes of each hook that offloads, and where it is as code."""
    space = getattr(hook, "__dict__", {})
    inner = space.get("hooks")
    if isinstance(inner, list | tuple):
        for index, each in enumerate(inner):
            yield from _hooks(each, f"{code}.hooks[{index}]")
    elif space.get("offload") and isinstance(space.get("weights_map"), Mapping):
        yield space, code


def _keeps(weights: Any, name: str) -> bool:
    """Whether the map ``weights`` has a value of that name. To ask the map itself might read a file."""
    while isinstance(getattr(weights, "prefix", None), str) and hasattr(weights, "dataset"):
        name, weights = weights.prefix + name, weights.dataset
    parts = [getattr(weights, part, None) for part in ("state_dict", "index")]
    parts = [part for part in (weights, *parts) if isinstance(part, dict)]
    return any(name in part for part in parts) if parts else any(key == name for key in weights)


def _tensors(module: nn.Module, below: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """The registered tensors of ``module``, and of what is below it, by their names from there."""
    for path, each in modules(module) if below else [("", module)]:
        for registry in ("_parameters", "_buffers"):
            for name, tensor in each.__dict__[registry].items():
                if tensor is not None:
                    yield join(path, name), tensor

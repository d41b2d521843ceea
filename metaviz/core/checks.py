"""What is wrong, or unwise, about a planned mesh, in words, before anything is started."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from metaviz.core.layout import Axis, MeshLayout
from metaviz.core.paths import modules

# What people and libraries call the axis of tensor parallelism.
TENSOR_AXES = ("tp", "tensor_parallel", "tensor", "model")
# What transformers' configurations call what tensor parallelism divides. Source: transformers 5.24, configuration files
# of Llama, GPT-2 and T5.
_DIVIDED = {
    "attention heads": ("num_attention_heads", "n_head", "num_heads"),
    "key-value heads": ("num_key_value_heads",),
    "hidden features of the MLP": ("intermediate_size", "n_inner", "d_ff"),
}
# What modules call the same: torch.nn.MultiheadAttention, timm, torchtitan and nanoGPT.
_OF_MODULES = {
    "attention heads": ("num_heads", "n_heads", "num_attention_heads", "n_head"),
    "key-value heads": ("num_key_value_heads", "n_kv_heads", "num_kv_heads"),
}


def notes(layout: MeshLayout, model: Any = None) -> Iterator[str]:
    """Sentences on a planned mesh.

    Args:
        layout: The plan.
        model: A model that shall run on it.
    """
    yield from _of_world(layout)
    yield from of_order(layout)
    yield from _of_hosts(layout)
    yield from _of_devices(layout)
    if model is not None:
        yield from _of_model(layout, model)


def _of_world(layout: MeshLayout) -> Iterator[str]:
    if layout.world is not None and layout.size < layout.world:
        idle = (
            f"{layout.world - layout.size:,} of {layout.world:,} ranks are not on the mesh, and would idle."
        )
        yield f"{idle}{nearest(dict(zip(layout.names, layout.shape, strict=True)), layout.world)}"
    if layout.rank is not None and layout.rank not in layout.place_of:
        yield f"Rank {layout.rank} is not on the mesh."


def of_order(layout: MeshLayout) -> Iterator[str]:
    """A sentence on axes along which the ranks of the mesh and those of torch's groups are in another order.

    Source: torch 2.13, torch/distributed/distributed_c10d.py, `new_group` sorts the ranks that it is given.
    """
    if layout.disordered:
        yield (
            f"Along {' and '.join(layout.disordered)}, ranks are not in ascending order here, while torch sorts the "
            "ranks of a group: get_local_rank() and the coordinate can differ."
        )


def nearest(sizes: Mapping[str, int], world: int) -> str:
    """Which size of one axis makes a mesh that has just the ranks of a world: `" dp=4 would use all of 8."`."""
    size = math.prod(sizes.values())
    fits = [
        f"{name}={world // (size // each)}" for name, each in sizes.items() if world % (size // each) == 0
    ]
    if not fits:
        fits = [" × ".join(f"{name}={each}" for name, each in zip(sizes, _near(sizes, world), strict=True))]
    return f" {' or '.join(fits)} would use all of {world:,}."


def _near(sizes: Mapping[str, int], world: int) -> tuple[int, ...]:
    """The sizes nearest to those given, by their ratios, that multiply to a world."""
    divisors = [each for each in range(1, math.isqrt(world) + 1) if world % each == 0]
    divisors += [world // each for each in divisors if each * each != world]
    # What is left to be divided → how far off the sizes chosen so far are, and those.
    best: dict[int, tuple[float, tuple[int, ...]]] = {world: (0.0, ())}
    for wanted in sizes.values():
        found: dict[int, tuple[float, tuple[int, ...]]] = {}
        for left, (off, chosen) in best.items():
            for each in divisors:
                if left % each == 0:
                    option = off + abs(math.log(each / wanted)), (*chosen, each)
                    found[left // each] = min(found.get(left // each, option), option)
        best = found
    return best[1][1]


def _of_hosts(layout: MeshLayout) -> Iterator[str]:
    hosts = layout.ranks_per_host
    if hosts is None:
        return
    for axis in layout.axes:
        crossing = layout.crossing(axis.name) if axis.name in TENSOR_AXES else 0
        if not crossing:
            continue
        groups = f"{crossing:,} of {layout.size // axis.size:,} groups"
        why = "tensor parallelism talks in every layer, and wants one host"
        if axis.size > hosts:
            yield f"{axis.name}={axis.size} is more than the {hosts} ranks of a host, so {groups} cross hosts: {why}."
        else:
            yield f"{axis.name}={axis.size} crosses hosts of {hosts} ranks in {groups}: {why}.{_advice(layout, axis)}"
    if layout.world is not None and layout.world % hosts:
        yield f"{layout.world:,} ranks do not fill hosts of {hosts}: the last one has {layout.world % hosts}."


def _advice(layout: MeshLayout, axis: Axis) -> str:
    """What keeps the groups of an axis that is small enough within hosts; `""` where nothing simple does."""
    hosts = layout.ranks_per_host
    # The total shall stay what it is.
    fit = [size for size in range(2, hosts + 1) if hosts % size == 0 == layout.size % size]
    if hosts % axis.size and not fit:
        return ""
    steps = [] if axis is layout.axes[-1] else ["make it the last axis"]
    if layout.is_disordered:
        steps.append("order the ranks host by host")
    if hosts % axis.size:
        near = sorted(fit, key=lambda size: abs(math.log(size / axis.size)))[:2]
        steps.append(f"make it {' or '.join(map(str, sorted(near)))}")
    words = " and ".join(steps)
    return f" {words[0].upper()}{words[1:]}." if words else ""


def _of_devices(layout: MeshLayout) -> Iterator[str]:
    # Counting them creates no context.
    count = torch.accelerator.device_count() if hasattr(torch, "accelerator") else 0
    found = torch.accelerator.current_accelerator() if count else None
    if found is not None and found.type == layout.device_type and layout.size > count:
        machines = -(-layout.size // count)
        here = f"{layout.size:,} ranks, and {count} {found.type} devices here"
        yield f"{here}: it takes {machines:,} machines like this one."


def _of_model(layout: MeshLayout, model: Any) -> Iterator[str]:
    tensor = next((axis for axis in layout.axes if axis.name in TENSOR_AXES and axis.size > 1), None)
    if tensor is None:
        return
    for what, count in _counts(model):
        if count % tensor.size:
            fit = [size for size in range(1, min(count, 2 * tensor.size) + 1) if count % size == 0]
            yield (
                f"{count:,} {what} cannot be divided among {tensor.name}={tensor.size}: "
                f"{tensor.name} can be {', '.join(map(str, fit))}."
            )


def _counts(model: Any) -> Iterator[tuple[str, int]]:
    """What there is of each kind, as the configuration of a model says, or its modules do."""
    config = _kept(model, "config")
    # Models of text and pictures keep a configuration for each.
    configs = [
        each
        for each in (config, _kept(config, "text_config"), _kept(config, "vision_config"))
        if each is not None
    ]
    known: set[str] = set()
    for what, names in _DIVIDED.items():
        found = (_kept(each, name) for each in configs for name in names)
        count = next(filter(_counts_things, found), None)
        if count is not None:
            known.add(what)
            yield what, count
    if isinstance(model, torch.nn.Module):
        parts = [vars(part) for _, part in modules(model)]
        for what in (each for each in _OF_MODULES if each not in known):
            found = (part.get(name) for part in parts for name in _OF_MODULES[what])
            for count in dict.fromkeys(filter(_counts_things, found)):
                yield what, count


def _kept(thing: Any, name: str) -> Any:
    """An attribute; None where there is none, or where it cannot be had."""
    try:
        return getattr(thing, name, None)
    except Exception:
        # A configuration is somebody else's code, and a plan does not hang on it.
        return None


def _counts_things(value: Any) -> bool:
    return type(value) is int and value > 0

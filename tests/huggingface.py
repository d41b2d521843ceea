"""Every Hugging Face model type, made small, built twice and compared: each in a process of its own.

A warm process that has imported torch and transformers once forks a child per type, so that neither a crash, nor a
leak, nor a cache that one type fills can touch the next, and importing is paid once.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import dataclasses
import gc
import importlib
import multiprocessing
import pkgutil
import random
import re
import resource
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from huggingface_exceptions import CONFIGS

import metaviz
from metaviz.core.paths import Model

SEED = 7
MIB = 2**20
ADDRESS_SPACE = 8 * 2**30  # of which torch and transformers map about 1 GiB
MOST_NBYTES = 1536 * MIB  # above this a type is not built at all


class Case(NamedTuple):
    """A model type, one of its classes (the base model if empty), the bytes its tensors may take, and their dtype."""

    model_type: str
    head: str = ""
    limit_nbytes: int = 128 * MIB
    dtype: str = ""

    def __str__(self) -> str:
        return ":".join(filter(None, (self.model_type, self.head, self.dtype)))


def model_types() -> list[str]:
    """Every type that the installed transformers has a configuration for."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return sorted(CONFIG_MAPPING_NAMES)


def heads(model_type: str) -> list[str]:
    """The names of the classes that transformers' auto classes make for ``model_type``, the base model first."""
    from transformers.models.auto import modeling_auto

    names: dict[str, None] = {}
    for mapping in ("MODEL_MAPPING_NAMES", *sorted(vars(modeling_auto))):
        if mapping.startswith("MODEL_") and mapping.endswith("MAPPING_NAMES"):
            found = getattr(modeling_auto, mapping).get(model_type, ())
            names.update(dict.fromkeys([found] if isinstance(found, str) else found))
    return list(names)


def model_class(case: Case) -> type | None:
    """The class to build: the case's head, else what auto classes make, else one for the configuration."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name

    package = importlib.import_module(f"transformers.models.{model_type_to_module_name(case.model_type)}")
    names = [case.head] if case.head else heads(case.model_type)[:1]
    for home in (package, transformers) if names else ():
        if hasattr(home, names[0]):
            return getattr(home, names[0])
    config_class = CONFIG_MAPPING[case.model_type]
    for module in pkgutil.iter_modules(package.__path__):
        if module.name.startswith("modeling_"):
            for name, cls in vars(importlib.import_module(f"{package.__name__}.{module.name}")).items():
                ours = name in names if names else getattr(cls, "config_class", None) is config_class
                if ours and not name.endswith("PreTrainedModel"):
                    return cls
    return None


# What each step makes smaller, from what matters least for coverage to what matters most; a step keeps those before.
_LAYERS = re.compile(r"(^|_)(layers?|depth|blocks|layers_per_stack|self_attends_per_block)$")
_EXPERTS = re.compile(r"experts?$")
_CHOSEN_EXPERTS = re.compile(r"^(num_experts_per_tok|moe_topk|top_k_experts|moe_top_k)$")
_INNER = re.compile(r"intermediate_size|ffn_dim|d_ff|mlp_dim|ffn_hidden_size|inner_dim|dim_ff")
_WIDTHS = re.compile(
    r"(hidden_size|(hidden|emb|embed|projection)_dim|d_model|n_embd|embedding_size|upsample_groups|_width|heads?)$"
)
STEPS = 7


def _smaller(name: str, value: int, step: int) -> int:
    if step >= 1 and _LAYERS.search(name):
        return min(value, 2)
    if step >= 2 and "vocab" in name:
        return min(value, 2048)
    if step >= 2 and name == "pad_token_id" and value >= 2048:
        return 0
    if step >= 3 and _CHOSEN_EXPERTS.search(name):
        return min(value, 2)
    if step >= 3 and _EXPERTS.search(name):
        return min(value, 4)
    if step >= 3 and name in ("n_group", "topk_group"):
        return 1
    if step >= 4 and _INNER.search(name) and value % 8 == 0:
        return max(value // 8, 8)
    if step >= 5 and _WIDTHS.search(name):
        by = 4 if step == 5 else 16
        return value // by if value % by == 0 else 1 if "head" in name and value < by else value
    return value


def shrunk(config: Any, step: int) -> Any:
    """``config`` with fewer layers (from step 1), words (2), experts (3), narrower inside (4) and all over (5, 6)."""
    cls = type(config)
    now, fresh = vars(config), vars(cls())
    layers = now.get("num_hidden_layers")
    names = [field.name for field in dataclasses.fields(cls) if field.name in now]
    names += [name for name in now if name not in fresh]
    changes = {}
    for name in names:
        value = now[name]
        if name.startswith("_"):
            continue
        if dataclasses.is_dataclass(value) and hasattr(value, "model_type"):
            changes[name] = shrunk(value, step)
            continue
        if type(value) is int:
            value = _smaller(name, value, step)
        elif isinstance(value, list | tuple) and name.endswith("depths"):
            value = type(value)(min(n, 2) for n in value)
        elif isinstance(value, list | tuple) and len(value) == layers and value != fresh.get(name):
            value = value[:2]
        if value != fresh.get(name):
            changes[name] = value
    return cls(**changes)


def small_config(case: Case, cls: type) -> tuple[Any, int]:
    """The least changed configuration whose model is within the limit, else the smallest; and the bytes of its model.

    Sizes come from plain meta builds. Where none succeeds, it is the most changed configuration, and 0.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    default = config = CONFIG_MAPPING[case.model_type](**CONFIGS.get(case.model_type, {}))
    best: tuple[Any, int] | None = None
    for step in range(STEPS):
        # Some steps contradict a rule of the configuration: the next one may not.
        with contextlib.suppress(Exception):
            config = shrunk(default, step) if step else default
            with torch.device("meta"):
                model = cls(copy.deepcopy(config))
            nbytes = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
            if best is None or nbytes < best[1]:
                best = config, nbytes
            if nbytes <= case.limit_nbytes:
                break
    return best or (config, 0)


def check(case: Case) -> dict[str, Any]:
    """Build ``case`` as ordinary code does and with metaviz, and say how the two differ.

    Returns:
        ``outcome`` is ``"same"``, ``"different"`` (``differences`` says where), or why there is nothing to compare:
        ``"not makeable"`` (the ordinary build raises; metaviz raises the same), ``"no class"``, ``"too large"``.
    """
    cls = model_class(case)
    if cls is None:
        return {"outcome": "no class"}
    try:
        config, nbytes = small_config(case, cls)
    except Exception as raised:
        return {"outcome": "not makeable", "error": f"configuration: {raised}"}
    if nbytes > MOST_NBYTES:
        return {"outcome": "too large", "nbytes": nbytes}

    def make() -> Any:
        fresh = copy.deepcopy(config)
        return cls._from_config(fresh, dtype=getattr(torch, case.dtype)) if case.dtype else cls(fresh)

    return {"nbytes": nbytes, **compare(make, str(case))}


def compare(make: Callable[[], Any], name: str) -> dict[str, Any]:
    """Call ``make`` twice with one seed, the second time with metaviz: ``outcome``, ``differences`` and more."""
    seconds, ordinary, error = _attempt(make, poisoned=True)
    found: dict[str, Any] = {"outcome": "same", "seconds": {"ordinary": seconds}}
    seconds, model, our_error = _attempt(lambda: metaviz.build(make))
    found["seconds"]["build"] = seconds
    if not torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(SEED).get_state()):
        our_error = f"the generator moved ({our_error})"
    if error is not None and error == our_error:
        return {**found, "outcome": "not makeable", "error": error}
    if error or our_error:
        return {**found, "outcome": "different", "differences": [f"ordinary: {error}; metaviz: {our_error}"]}
    expected = tensors(ordinary)
    wrong = differences_in_shape(expected, tensors(model)) + different_attributes(ordinary, model)
    # Values must come from the tape alone.
    draws = torch.manual_seed(SEED + 1).get_state()
    try:
        blocked = metaviz.plan(model).blocked
        wrong += _not_as_blocked(blocked, expected)
        part = some_part(name, model)
        wrong += [f"alone, {line}" for line in part_alone(model, part, expected)] if part else []
        began = time.perf_counter()
        metaviz.materialize(model, blocked="skip")
        found["seconds"]["materialize"] = round(time.perf_counter() - began, 3)
        found["blocked"] = sorted(blocked)
        now = tensors(model)
        wrong += differences_in_shape(expected, now) + differences_in_values(expected, now, blocked)
        wrong += [] if torch.equal(draws, torch.get_rng_state()) else ["materialize moved the generator"]
    except Exception:
        wrong.append(traceback.format_exc()[-2000:])
    return {**found, "outcome": "different", "differences": wrong} if wrong else found


def _attempt(build: Callable[[], Any], poisoned: bool = False) -> tuple[float, Any, str | None]:
    """Seconds, model and error of a build with the seed; ``poisoned`` fills with NaN what it leaves uninitialized."""
    torch.manual_seed(SEED)
    random.seed(SEED)
    torch.use_deterministic_algorithms(poisoned, warn_only=True)
    began, model, error = time.perf_counter(), None, None
    try:
        model = build()
    except Exception as raised:
        error = re.sub(r"0x[0-9a-f]+", "0x", f"{type(raised).__name__}: {raised}")
    finally:
        torch.use_deterministic_algorithms(False)
    return round(time.perf_counter() - began, 3), model, error


def tensors(model: Any) -> dict[str, Any]:
    """Every tensor of ``model`` by path: parameters, buffers, and those in plain attributes."""
    return {place.path: place.slot.tensor for place in Model(model).places}


def differences_in_shape(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Where paths, shapes, dtypes, strides, classes, ``requires_grad`` or ties differ."""

    def traits(tensor: Any) -> tuple:
        layout = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        return type(tensor).__name__, tensor.dtype, layout, tensor.requires_grad

    wrong = [f"{path}: only in one of the two" for path in expected.keys() ^ found.keys()]
    both = [path for path in expected if path in found]
    for path in both:
        was, now = traits(expected[path]), traits(found[path])
        if was != now:
            wrong.append(f"{path}: {was} became {now}")
    for identity in (id, lambda tensor: tensor.untyped_storage()._cdata):
        if _groups(expected, both, identity) != _groups(found, both, identity):
            wrong.append("other tensors are tied, or share their memory")
    return wrong


def _groups(by_path: dict[str, Any], paths: list[str], identity: Callable[[Any], int]) -> set[frozenset[str]]:
    groups: dict[int, set[str]] = {}
    for path in paths:
        groups.setdefault(identity(by_path[path]), set()).add(path)
    return {frozenset(group) for group in groups.values()}


def differences_in_values(
    expected: dict[str, Any], found: dict[str, Any], blocked: Iterable[str] = ()
) -> list[str]:
    """The paths whose bytes differ, or that are on meta in one model only; not those under ``blocked``."""
    wrong = []
    blank = {id(found[path]) for path in blocked}
    for path in expected.keys() & found.keys():
        was, now = expected[path], found[path]
        if id(now) in blank:
            if not now.is_meta:
                wrong.append(f"{path}: blocked, and yet it has values")
        elif was.is_meta or now.is_meta:
            if was.device != now.device:
                wrong.append(f"{path}: on {was.device}, and here on {now.device}")
        elif not torch.equal(*(t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (was, now))):
            wrong.append(f"{path}: other values")
    return wrong


def _not_as_blocked(blocked: dict[str, str], expected: dict[str, Any]) -> list[str]:
    """Blocked must be what an ordinary build leaves uninitialized: torch's deterministic mode fills that."""

    def filled(tensor: Any) -> bool:
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            return bool(tensor.isnan().any())
        return bool((tensor == (True if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).max)).any())

    return [
        f"{path}: blocked, but an ordinary build fills it" for path in blocked if not filled(expected[path])
    ]


def different_attributes(ordinary: Any, model: Any) -> list[str]:
    """The attributes of modules that are numbers, words or truth values and differ: values read while building."""
    was, now = _plain_attributes(ordinary), _plain_attributes(model)
    differ = sorted(name for name in was.keys() | now.keys() if was.get(name) != now.get(name))
    return [f"{name}: {was.get(name)}, here {now.get(name)}" for name in differ]


def _plain_attributes(model: Any) -> dict[str, str]:
    def plain(value: Any) -> bool:
        return (
            all(map(plain, value)) if type(value) in (list, tuple) else type(value) in (int, float, str, bool)
        )

    return {
        f"{path}.{name}": repr(value)
        for path, module in model.named_modules()
        for name, value in (("class", type(module).__name__), *vars(module).items())
        if plain(value)
    }


def some_part(name: str, model: Any) -> str | None:
    """A submodule with tensors below it, drawn by the name of the case."""
    above = {place.module_path for place in Model(model).places}
    paths = {".".join(path.split(".")[: n + 1]) for path in above if path for n in range(path.count(".") + 1)}
    return random.Random(name).choice(sorted(paths)) if paths else None


def part_alone(model: Any, part: str, expected: dict[str, Any]) -> Iterator[str]:
    """Materialize ``part`` alone, compare it, see that the rest stayed on meta, and unload it again."""
    before = {path for path, tensor in tensors(model).items() if tensor.is_meta}
    plan = metaviz.plan(model, part)
    planned = {path for planned in plan.tensors for path in (planned.path, *planned.also)}
    metaviz.materialize(model, part, blocked="skip")
    now = tensors(model)
    filled = {path for path in before if not now[path].is_meta}
    if filled != planned:
        yield f"{part}: {sorted(filled ^ planned)[:5]} got values and were not planned, or the other way round"
    inside = {path: tensor for path, tensor in expected.items() if path in filled}
    yield from differences_in_values(inside, now)
    metaviz.unload(model, part)
    yield from (
        f"{path}: not unloaded"
        for path, tensor in tensors(model).items()
        if path in before and not tensor.is_meta
    )


def _child(case: Case, pipe: Any) -> None:
    """What a forked process does: bound its memory, check, answer."""
    import transformers

    # The collector would touch, and so copy, every page that is shared with the warm process.
    gc.freeze()
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    try:
        found = check(case)
    except Exception:
        found = {"outcome": "different", "differences": [traceback.format_exc()[-2000:]]}
    pipe.send(found)


def check_apart(case: Case, timeout_seconds: float = 300) -> dict[str, Any]:
    """:func:`check` in a process of its own; the outcome is ``"crashed"`` or ``"timeout"`` where it gives no answer."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers.modeling_utils"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(case, theirs), daemon=True)
    began = time.perf_counter()
    process.start()
    theirs.close()
    try:
        found = ours.recv() if ours.poll(timeout_seconds) else {"outcome": "timeout"}
    except EOFError:
        process.join()
        found = {"outcome": "crashed", "exitcode": process.exitcode}
    finally:
        process.kill()
        process.join()
        ours.close()
    return {"case": str(case), **found, "wall_seconds": round(time.perf_counter() - began, 1)}


@contextlib.contextmanager
def check_all(cases: Iterable[Case], processes: int = 2) -> Iterator[dict[Case, concurrent.futures.Future]]:
    """Start :func:`check_apart` for all ``cases``, so many at a time; the futures give what it returns."""
    pool = concurrent.futures.ThreadPoolExecutor(processes)
    try:
        yield {case: pool.submit(check_apart, case) for case in cases}
    finally:
        pool.shutdown(cancel_futures=True)

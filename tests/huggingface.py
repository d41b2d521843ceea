"""Every Hugging Face model type, made small, built twice and compared: each in a process of its own.

A warm process that has imported torch and transformers once forks a child per type, so that neither a crash, nor a
leak, nor a cache that one type fills can touch the next, and importing is paid once.
"""

from __future__ import annotations

import concurrent.futures
import copy
import dataclasses
import gc
import importlib
import json
import multiprocessing
import pkgutil
import random
import re
import resource
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

SEED = 7
MIB = 2**20
# Address space of a child: torch and transformers alone map about 4 GiB.
ADDRESS_SPACE = 16 * 2**30


class Case(NamedTuple):
    """A model type, one of its classes (the base model if empty), and the bytes that its tensors may take."""

    model_type: str
    head: str = ""
    limit_nbytes: int = 256 * MIB

    def __str__(self) -> str:
        return f"{self.model_type}:{self.head}" if self.head else self.model_type


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
    """The class to build: by name, else the one that transformers' auto classes make, else one with that config."""
    from transformers import PreTrainedModel
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name

    package = importlib.import_module(f"transformers.models.{model_type_to_module_name(case.model_type)}")
    names = [case.head] if case.head else heads(case.model_type)
    if names and hasattr(package, names[0]):
        return getattr(package, names[0])
    config_class = CONFIG_MAPPING[case.model_type]
    for module in pkgutil.iter_modules(package.__path__):
        if module.name.startswith("modeling_"):
            for cls in vars(importlib.import_module(f"{package.__name__}.{module.name}")).values():
                usable = isinstance(cls, type) and issubclass(cls, PreTrainedModel)
                wanted = cls.__name__ in names if names else getattr(cls, "config_class", None) is config_class
                if usable and wanted and not cls.__name__.endswith("PreTrainedModel"):
                    return cls
    return None


# Fields of a configuration, from what matters least for coverage to what matters most: each step keeps the ones before.
_LAYERS = re.compile(r"(^|_)(layers?|depth|blocks|layers_per_stack|self_attends_per_block)$")
_EXPERTS = re.compile(r"experts?$")
_WIDE = re.compile(r"(intermediate_size|ffn_dim|d_ff|mlp_dim|ffn_hidden_size|inner_dim|dim_ff)")
_WIDTHS = re.compile(r"(hidden_size|hidden_dim|d_model|n_embd|embed_dim|emb_dim|embedding_size|projection_dim|_width|heads?|n_head)$")
STEPS = 7


def _smaller(name: str, value: int, step: int) -> int:
    if step >= 1 and _LAYERS.search(name):
        return min(value, 2)
    if step >= 2 and "vocab" in name:
        return min(value, 2048)
    if step >= 2 and name == "pad_token_id" and value >= 2048:
        return 0
    if step >= 3 and _EXPERTS.search(name):
        return min(value, 4)
    if step >= 3 and name in ("num_experts_per_tok", "moe_topk", "top_k_experts", "moe_top_k"):
        return min(value, 2)
    if step >= 3 and name in ("n_group", "topk_group"):
        return 1
    if step >= 4 and _WIDE.search(name) and value % 8 == 0:
        return max(value // 8, 8)
    if step >= 5 and _WIDTHS.search(name):
        by = 4 if step == 5 else 16
        return value // by if value % by == 0 else 1 if "head" in name and value < by else value
    return value


def shrunk(config: Any, step: int) -> Any:
    """``config`` made anew with fewer layers (step 1), words (2), experts (3), narrower feed-forwards (4)."""
    cls = type(config)
    now, fresh, changes = vars(config), vars(cls()), {}
    layers = now.get("num_hidden_layers")
    for field in dataclasses.fields(cls):
        name, value = field.name, now.get(field.name)
        if dataclasses.is_dataclass(value) and hasattr(value, "model_type"):
            changes[name] = shrunk(value, step)
        elif type(value) is int and _smaller(name, value, step) != value:
            changes[name] = _smaller(name, value, step)
        elif isinstance(value, list | tuple):
            if step >= 1 and name.endswith("depths"):
                changes[name] = type(value)(min(n, 2) for n in value)
            elif step >= 1 and len(value) == layers and value != fresh.get(name):
                changes[name] = value[:2]
        elif field.init and value != fresh.get(name):
            changes[name] = value
    return cls(**changes)


def small_config(case: Case, cls: type) -> tuple[Any, int, int]:
    """The first configuration within the limit, its step, and the bytes of its tensors."""
    import torch
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    default = CONFIG_MAPPING[case.model_type]()
    known = []
    for step in range(STEPS):
        try:
            config = shrunk(default, step) if step else default
            with torch.device("meta"):
                model = cls(copy.deepcopy(config))
        except Exception:
            continue
        nbytes = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        known.append((config, step, nbytes))
        if nbytes <= case.limit_nbytes:
            break
    return min(known, key=lambda entry: entry[2], default=(default, 0, 0)) if known else (default, 0, 0)

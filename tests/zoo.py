"""Small models, each named after its trap: what breaks `to_empty`, `reset_parameters` or a naive recording.

Every `Trap` can be built in the ordinary way and has all its values afterwards; `differences` compares such a
build with another one, bit for bit, in every slot.
"""

from __future__ import annotations

import copy
import functools
import math
import types
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrizations

import metaviz
from metaviz.core.paths import Model

TRAPS: list[type[Trap]] = []
OUTSIDE = torch.arange(12.0).reshape(3, 4)


class Trap(nn.Module):
    """A model whose `make` is its constructor."""

    def __init_subclass__(cls) -> None:
        TRAPS.append(cls)

    def __init__(self) -> None:
        super().__init__()
        self.make()


def facts(tensor: torch.Tensor) -> dict[str, object]:
    """All that can be told of one tensor, its bytes included."""
    told = {"class": type(tensor).__name__, "grad": tensor.requires_grad, "attributes": repr(vars(tensor))}
    if is_lazy(tensor):
        return {**told, "device": tensor.device}
    told |= {"device": tensor.device, "dtype": tensor.dtype, "shape": tensor.shape, "stride": tensor.stride()}
    told |= {"conj": tensor.is_conj(), "neg": tensor.is_neg(), "leaf": tensor.is_leaf}
    told |= {"offset": tensor.storage_offset(), "nbytes": tensor.untyped_storage().nbytes()}
    if not tensor.is_meta:
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
        told["bytes"] = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return told


def shared(model: nn.Module, key) -> list[list[str]]:
    """The paths of the model in groups of those whose tensors have the same `key`."""
    groups = defaultdict(list)
    for place in Model(model).places:
        if not is_lazy(place.slot.tensor):
            groups[key(place.slot.tensor)].append(place.path)
    return sorted(groups.values())


def notes(model: nn.Module) -> dict[str, str]:
    """The numbers, strings and lists of numbers that its modules keep as plain attributes."""
    found = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            items = value if isinstance(value, list) else [value]
            if all(isinstance(item, int | float | str) for item in items):
                found[f"{path}.{name}"] = repr(value)
    return found


def differences(ordinary: nn.Module, other: nn.Module, below: str = "") -> list[str]:
    """In what `other` differs from the `ordinary` build, in the slots at and below the path `below`."""
    ours = {place.path: place.slot for place in Model(other).places}
    found = []
    for place in Model(ordinary).places:
        if not f"{place.path}.".startswith(f"{below}." if below else ""):
            continue
        slot = ours.get(place.path)
        if slot is None or (slot.kind, slot.persistent) != (place.slot.kind, place.slot.persistent):
            found.append(f"{place.path} is not there, or is no {place.slot.kind}")
            continue
        wanted, got = facts(place.slot.tensor), facts(slot.tensor)
        found += [f"{place.path}: {name}" for name in wanted if wanted[name] != got.get(name)]
    if not below:
        keys = {"object": id, "memory": lambda tensor: tensor.untyped_storage()._cdata}
        found += [f"same {what}" for what, key in keys.items() if shared(ordinary, key) != shared(other, key)]
        found += ["modules"] if repr(ordinary) != repr(other) else []
        found += [key for key, value in notes(ordinary).items() if notes(other).get(key) != value]
    return found


def pair(fn: Callable[[], nn.Module], seed: int = 11) -> tuple[nn.Module, nn.Module]:
    """The ordinary build and the recorded one, on meta, with the same seed."""
    torch.manual_seed(seed)
    ordinary = fn()
    torch.manual_seed(seed)
    return ordinary, metaviz.build(fn)


def faults(fn: Callable[[], nn.Module]) -> list[str]:
    """In what a recorded and materialized build differs from the ordinary one: nothing, if all is well."""
    ordinary, model = pair(fn)
    metaviz.materialize(model)
    return differences(ordinary, model)


def holding(**held: object) -> nn.Module:
    """A module that holds tensors as buffers, and all else as its attributes."""
    module = nn.Module()
    for name, value in held.items():
        if type(value) is torch.Tensor:
            module.register_buffer(name, value)
        else:
            setattr(module, name, value)
    return module


class TiedHead(Trap):
    def make(self):
        self.embedding, self.head = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight


class TiedBeforeInit(Trap):
    def make(self):
        self.embedding, self.head = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.head.weight, std=0.02)


class TiedAfterInit(Trap):
    def make(self):
        self.embedding, self.head = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)
        self.head.weight = self.embedding.weight


class SharedModule(Trap):
    def make(self):
        layer = nn.Linear(2, 2)
        self.stack = nn.Sequential(layer, nn.ReLU(), layer)


class NoReset(Trap):
    def make(self):
        self.weight, self.gamma = nn.Parameter(torch.ones(4)), nn.Parameter(1e-5 * torch.ones(3))


class ResetMissesBuffer(Trap):
    def make(self):
        self.register_buffer("running", torch.full((3,), 5.0))
        self.weight = nn.Parameter(torch.empty(3))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.ones_(self.weight)


class NonPersistentBuffer(Trap):
    def make(self):
        frequency = 1.0 / (10000.0 ** (torch.arange(0, 8, 2).float() / 8))
        self.register_buffer("inv_freq", frequency, persistent=False)


class RootParameter(Trap):
    def make(self):
        self.token, self.body = nn.Parameter(torch.randn(1, 1, 4)), nn.Linear(4, 4)


class Literals(Trap):
    def make(self):
        self.register_buffer("temperature", torch.tensor(0.07))
        self.scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("nothing", None)
        self.register_buffer("empty", torch.zeros(0, 3))


class LazyOut(Trap):
    def make(self):
        self.stack = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2), nn.LazyBatchNorm1d())


class Hidden(Trap):
    def make(self):
        self.layers = [nn.Linear(2, 2)]
        self.table = {"weight": nn.Parameter(torch.randn(3)), "deep": [{"x": (torch.rand(2),)}]}
        self.partial = functools.partial(F.linear, weight=torch.randn(2, 2))
        self.record = types.SimpleNamespace(values=torch.rand(3))


class HeldByFunctions(Trap):
    def make(self):
        self.body, scale, shift = nn.Linear(3, 3), torch.rand(3), torch.rand(3)
        self.scaled = lambda x: x * scale
        self.body.register_forward_hook(lambda module, inputs, output, by=shift: output + by)


class FreqsCis(Trap):
    def make(self):
        angles = torch.outer(torch.arange(4.0), torch.rand(3))
        self.freqs_cis = torch.polar(torch.ones(4, 3), angles)
        self.register_buffer("turned", self.freqs_cis.conj())
        self.register_buffer("negative", self.freqs_cis.conj().imag)
        self.register_buffer("product", self.freqs_cis.conj().T @ self.freqs_cis)


class DropPathItem(Trap):
    def make(self):
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 5)]
        self.body = nn.Linear(2, 2)


class MaskIndex(Trap):
    def make(self):
        values = torch.randn(10)
        self.register_buffer("kept", values[values > 0])
        self.body = nn.Linear(len(self.kept) + 1, 3)
        with torch.no_grad():
            self.body.weight[self.body.weight > 0.1] *= 2
        self.register_buffer("causal", torch.zeros(4, 4))
        self.causal[torch.triu(torch.ones(4, 4), 1).bool()] = float("-inf")


class ItemFromParameter(Trap):
    def make(self):
        self.beta = nn.Parameter(torch.rand(()))
        self.cached = self.beta.item()
        self.body = nn.Linear(3, 3) if self.beta > 0.5 else nn.Linear(2, 2)


class FromNumpy(Trap):
    def make(self):
        self.register_buffer("table", torch.from_numpy(np.arange(6.0).reshape(2, 3)))
        self.body = nn.Linear(4, 4)
        turned, _ = np.linalg.qr(self.body.weight.detach().numpy())
        self.body.weight.data.copy_(torch.from_numpy(turned))


class LegacyConstructor(Trap):
    def make(self):
        self.weight = nn.Parameter(torch.Tensor(3, 4).normal_())
        self.register_buffer("data", torch.Tensor([1, 2, 3]))
        self.register_buffer("whole", torch.LongTensor([4, 5]))
        self.register_buffer("new", self.data.new(2, 2).fill_(3))
        self.register_buffer("listed", self.data.new([7.0]))


class LoadsStateDict(Trap):
    def make(self):
        self.body, source = nn.Linear(3, 3), nn.Linear(3, 3)
        self.body.load_state_dict(source.state_dict())
        self.assigned = nn.Linear(3, 3)
        self.assigned.load_state_dict(source.state_dict(), assign=True)


class Orthogonal(Trap):
    def make(self):
        self.weight = nn.Parameter(torch.empty(4, 6))
        nn.init.orthogonal_(self.weight)
        self.square = parametrizations.orthogonal(nn.Linear(4, 4))
        self.wide = parametrizations.orthogonal(nn.Linear(6, 4))


class Norms(Trap):
    def make(self):
        self.weight_norm = parametrizations.weight_norm(nn.Conv1d(3, 4, 2))
        self.spectral_norm = parametrizations.spectral_norm(nn.Linear(3, 4))


class ClonedLayers(Trap):
    def make(self):
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)
        base = torch.randn(4, 4)
        views = holding(base=base, rows=base[1:3], turned=base.T)
        self.views, self.copied = views, copy.deepcopy(views)


class Averaged(Trap):
    def make(self):
        self.student = nn.Linear(3, 3)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False).eval()
        self.average = torch.optim.swa_utils.AveragedModel(self.student)


class Dtypes(Trap):
    def make(self):
        self.register_buffer("eight", torch.randn(4, 4).to(torch.float8_e4m3fn))
        self.complex = nn.Parameter(torch.randn(3, dtype=torch.cfloat))
        self.half = nn.Linear(20, 20).half()
        self.wide = nn.Linear(3, 3, dtype=torch.float64)
        self.brain = nn.Linear(20, 20, dtype=torch.bfloat16)
        self.register_buffer("mask", torch.ones(4, 4, dtype=torch.bool).triu(1))


class Inits(Trap):
    def make(self):
        for name in ("orthogonal", "eye", "xavier_uniform", "kaiming_normal", "trunc_normal", "ones"):
            weight = nn.Parameter(torch.empty(6, 4))
            self.register_parameter(name, getattr(nn.init, f"{name}_")(weight))
        self.sparse = nn.Parameter(nn.init.sparse_(torch.empty(6, 4), 0.5))
        self.dirac = nn.Parameter(nn.init.dirac_(torch.empty(4, 4, 3)))


class SmallNormals(Trap):
    def make(self):
        for numel in (1, 2, 3, 5, 15, 16, 17, 31, 33):
            self.register_buffer(f"normal{numel}", torch.randn(numel))
            self.register_buffer(f"uniform{numel}", torch.rand(numel))


class NonContiguousInit(Trap):
    def make(self):
        self.weight = nn.Parameter(torch.empty(20, 30))
        with torch.no_grad():
            self.weight.T.normal_()
            self.weight[:, ::2].uniform_()


class ViewsShareStorage(Trap):
    def make(self):
        fused = torch.randn(12, 4)
        self.qkv = nn.Parameter(fused)
        self.q, self.k, self.v = (nn.Parameter(part) for part in fused.split(4))


class ExpandedBuffer(Trap):
    def make(self):
        self.register_buffer("ids", torch.arange(8).expand(3, 8))


class DataSwap(Trap):
    def make(self):
        self.body = nn.Linear(3, 3)
        self.body.weight.data = torch.zeros(5, 3)
        self.body.bias.data = self.body.bias.data[1:]
        self.tied = nn.Linear(3, 5)
        self.tied.weight.data = self.body.weight.data
        self.tied.weight.data.add_(2)


class PartialInit(Trap):
    def make(self):
        self.weight = nn.Parameter(torch.empty(4, 4))
        self.weight.data[:2].normal_()
        self.weight.data[2:] = 0.5


class MixesRealTensors(Trap):
    def make(self):
        self.body = nn.Linear(4, 3)
        self.body.weight.data.add_(OUTSIDE)
        self.register_buffer("joined", torch.cat([OUTSIDE, torch.ones(1, 4)]))


class Seeds(Trap):
    def make(self):
        self.before = nn.Linear(3, 3)
        torch.manual_seed(5)
        self.a = nn.Linear(3, 3)
        torch.manual_seed(5)
        self.b = nn.Linear(3, 3)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.forked = nn.Linear(2, 2)
        state = torch.get_rng_state()
        self.c = nn.Linear(3, 3)
        torch.set_rng_state(state)
        self.d = nn.Linear(3, 3)


class LastStepWins(Trap):
    def make(self):
        self.stack = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.LSTM(3, 3))
        self.apply(lambda m: nn.init.normal_(m.weight, std=0.02) if isinstance(m, nn.Linear) else None)
        nn.init.zeros_(self.stack[1].weight)


class Trained(Trap):
    def make(self):
        self.body, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        optimizer = torch.optim.SGD(self.body.parameters(), lr=0.1, momentum=0.9)
        self.norm(self.body(torch.randn(4, 3))).pow(2).sum().backward()
        optimizer.step()
        self.zero_grad()


class Tagged(Trap):
    def make(self):
        class Shard(nn.Parameter): ...

        self.weight = Shard(torch.rand(3))
        self.weight.parallel = True
        self.frozen = nn.Parameter(torch.rand(2), requires_grad=False)

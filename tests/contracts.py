"""Small models that keep the contract of `reset_parameters`, or break it in one way each."""

from __future__ import annotations

import math
import time

import torch
from torch import nn
from torch.nn.utils import parametrizations

CONTRACTS: list[type[Contract]] = []


class Contract(nn.Module):
    """A model whose `make` is its constructor."""

    def __init_subclass__(cls, listed: bool = True) -> None:
        if listed:
            CONTRACTS.append(cls)

    def __init__(self) -> None:
        super().__init__()
        self.make()


class Norm(nn.Module):
    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class Scale(nn.Module):
    """Keeps the contract."""

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.constant_(self.weight, 2.0)


class Own(Contract, listed=False):
    """Has a parameter and a Linear of its own."""

    def make(self):
        self.weight = nn.Parameter(torch.empty(3, 3))
        self.out = nn.Linear(3, 3)
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.ones_(self.weight)


class Kept(Own):
    """Two layers, each with a method."""


class LayersOnly(Contract):
    def make(self):
        self.stack = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.LayerNorm(4), nn.BatchNorm1d(4))


class NoMethod(Contract):
    def make(self):
        self.first, self.norm, self.last = nn.Linear(3, 3), Norm(), nn.Linear(3, 3)


class NoMethodAtTheRoot(Contract):
    def make(self):
        self.first, self.token = nn.Linear(3, 3), nn.Parameter(torch.zeros(1, 3))


class NoMethodBelow(Contract):
    def make(self):
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), nn.Sequential(Norm(), Norm()))])
        self.late = Norm(4)


class PrivateMethod(Contract):
    def make(self):
        self.attention = nn.MultiheadAttention(4, 2)


class MissesBuffer(Own):
    def make(self):
        super().make()
        self.register_buffer("steps", torch.tensor(5))
        self.register_buffer("mask", torch.ones(2, 2, dtype=torch.bool))


class WritesSomeRows(Own):
    def reset_parameters(self):
        nn.init.ones_(self.weight[1:])


class WritesNothing(Own):
    def reset_parameters(self):
        pass


class WorksOnWhatIsThere(Own):
    def make(self):
        self.weight, self.out = nn.Parameter(torch.ones(3, 3)), nn.Linear(3, 3)

    def reset_parameters(self):
        with torch.no_grad():
            self.weight.mul_(2)


class WritesChild(Own):
    def reset_parameters(self):
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.out.weight)


class WritesChildWithoutMethod(Contract):
    def make(self):
        self.weight, self.norm = nn.Parameter(torch.ones(2)), Norm()

    def reset_parameters(self):
        nn.init.ones_(self.weight)
        nn.init.ones_(self.norm.weight)


class WritesChildHasNothing(Contract):
    def make(self):
        self.norm, self.out = Norm(), nn.Linear(3, 3)

    def reset_parameters(self):
        nn.init.zeros_(self.out.weight)


class CallsChild(Own):
    def reset_parameters(self):
        self.out.reset_parameters()
        nn.init.ones_(self.weight)


class AppliesToAll(Own):
    def reset_parameters(self):
        nn.init.ones_(self.weight)
        self.apply(lambda m: nn.init.normal_(m.weight, std=0.02) if isinstance(m, nn.Linear) else None)


class CopiesChild(Own):
    def reset_parameters(self):
        with torch.no_grad():
            self.weight.copy_(self.out.weight)


class AddsChild(Own):
    def reset_parameters(self):
        with torch.no_grad():
            self.weight.fill_(1).add_(self.out.weight)


class ComputesWithChild(Own):
    def reset_parameters(self):
        self.weight.data = self.out.weight.data + torch.ones(3, 3)


class CopiesIntoChild(Own):
    def reset_parameters(self):
        with torch.no_grad():
            self.weight.fill_(1)
            self.out.weight.copy_(self.weight)


class DecidesByGarbage(Own):
    """Where its child is in memory already, what it does depends on what is in there."""

    def make(self):
        self.weight, self.out = nn.Parameter(torch.ones(3, 3)), nn.Linear(3, 3)

    def reset_parameters(self):
        nn.init.constant_(self.weight, self.out.bias[0].item())


class LooksWhereTheChildIs(Own):
    def reset_parameters(self):
        if not self.out.weight.is_meta:
            nn.init.ones_(self.weight)


class TruncatesChild(Own):
    def reset_parameters(self):
        nn.init.trunc_normal_(self.weight)
        nn.init.trunc_normal_(self.out.weight)
        nn.init.orthogonal_(self.out.weight)


class NeedsNoGrad(Own):
    def make(self):
        self.weight, self.out = nn.Parameter(torch.ones(3, 3)), nn.Linear(3, 3)

    def reset_parameters(self):
        self.weight.uniform_()


class NeedsNoGradLater(NeedsNoGrad):
    def make(self):
        super().make()
        self.bias, self.late = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def reset_parameters(self):
        nn.init.zeros_(self.bias)
        self.weight.uniform_()
        nn.init.zeros_(self.late)


class Rebinds(Own):
    def reset_parameters(self):
        self.weight = nn.Parameter(torch.rand(3, 3))


class RebindsEmpty(Own):
    def reset_parameters(self):
        self.weight = nn.Parameter(torch.empty(3, 3))


class RebindsTied(Contract):
    def make(self):
        self.body = Rebinds()
        self.head = nn.Linear(3, 3)
        self.head.weight = self.body.weight


class TiesAgain(Contract):
    def make(self):
        self.first, self.second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        self.out = nn.Linear(3, 3)

    def reset_parameters(self):
        nn.init.ones_(self.first)
        self.second = self.first
        self.shared = self.out.bias


class Deletes(Own):
    def make(self):
        super().make()
        self.register_buffer("scratch", torch.ones(2))

    def reset_parameters(self):
        nn.init.ones_(self.weight)
        if hasattr(self, "scratch"):
            del self.scratch


class Registers(Own):
    def reset_parameters(self):
        nn.init.ones_(self.weight)
        self.register_buffer("angles", torch.arange(4.0))
        self.table = torch.arange(3)


class Raises(Own):
    def make(self):
        self.weight, self.out = nn.Parameter(torch.ones(3, 3)), nn.Linear(3, 3)

    def reset_parameters(self):
        raise ValueError("a size that\nmakes no sense")


class RaisesLater(Raises):
    def reset_parameters(self):
        nn.init.ones_(self.weight)
        raise KeyError("std")


class NeedsArguments(Raises):
    def reset_parameters(self, std, mean, *, seed):
        raise AssertionError


class NeedsKeyword(Raises):
    def reset_parameters(self, *, seed):
        raise AssertionError


class NotCallable(Raises):
    reset_parameters = 3


class SetToNone(Raises):
    reset_parameters = None


class PropertyWithoutValue(Raises):
    @property
    def reset_parameters(self):
        raise AttributeError("none here")


class PropertyThatRaises(Raises):
    @property
    def reset_parameters(self):
        raise ValueError("not now")


class PropertyThatGives(Raises):
    @property
    def reset_parameters(self):
        return lambda: nn.init.ones_(self.weight)


class StaticMethod(Raises):
    @staticmethod
    def reset_parameters():
        pass


class OnTheInstance(Raises):
    def make(self):
        super().make()
        self.reset_parameters = lambda: None


class ChildOfThatName(Contract):
    def make(self):
        self.weight = nn.Parameter(torch.ones(2))
        self.add_module("reset_parameters", Scale())


class Delegates(Contract):
    def make(self):
        self.inner, self.bias = Scale(), nn.Parameter(torch.ones(2))

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


class _Rude(type):
    def __getattr__(cls, name):
        raise RuntimeError(f"no {name} here")


class RudeMetaclass(Own, metaclass=_Rude):
    pass


class RudeInstance(Contract):
    def make(self):
        self.weight, self.ready = nn.Parameter(torch.ones(2)), True

    def __getattr__(self, name):
        if name == "reset_parameters" and "ready" in self.__dict__:
            raise RuntimeError(f"no {name} here")
        return super().__getattr__(name)


class Lazy(Contract):
    def make(self):
        self.stack = nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(4), nn.Linear(4, 2))


class LazyLater(Contract):
    def make(self):
        self.norm = nn.LazyBatchNorm1d()
        self.bias = nn.Parameter(torch.ones(3))

    def reset_parameters(self):
        nn.init.ones_(self.bias)


class SharedModule(Contract):
    def make(self):
        layer = nn.Linear(3, 3)
        self.stack, self.again = nn.Sequential(layer, nn.Sequential(layer, Norm())), layer


class SharedBeforeItsParent(Contract):
    def make(self):
        self.shared = nn.Linear(3, 3)
        self.owner = nn.Module()
        self.owner.inner = _Copies(self.shared)


class _Copies(nn.Module):
    def __init__(self, out: nn.Module) -> None:
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.empty(3, 3)), out

    def reset_parameters(self):
        with torch.no_grad():
            self.weight.copy_(self.out.weight)
            self.out.bias.zero_()


class Tied(Contract):
    def make(self):
        self.embedding, self.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight


class TiedWithin(Contract):
    def make(self):
        self.weight = nn.Parameter(torch.ones(3))
        self.other = self.weight
        self.register_buffer("mask", torch.ones(2))
        self.register_buffer("again", self.mask)

    def reset_parameters(self):
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.again)


class TiedBuffer(Contract):
    def make(self):
        self.first, self.second = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
        self.second.running_mean = self.first.running_mean


class Views(Contract):
    def make(self):
        fused = torch.empty(6, 3)
        self.fused, self.q = nn.Parameter(fused), nn.Parameter(fused[:3])
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.ones_(self.fused)


class Expanded(Contract):
    def make(self):
        self.register_buffer("ids", torch.arange(4).expand(3, 4))
        self.register_buffer("some", torch.ones(1).expand(4))

    def reset_parameters(self):
        self.ids.copy_(torch.arange(4))
        self.some[:2] = 1


class Attribute(Own):
    def make(self):
        super().make()
        self.table, self.deep = torch.arange(3.0), {"x": [torch.ones(2)]}


class AttributeWritten(Own):
    def make(self):
        self.table = torch.ones(3)
        super().make()

    def reset_parameters(self):
        nn.init.ones_(self.weight)
        self.table.zero_()


class AttributeMadeAnew(Own):
    def reset_parameters(self):
        nn.init.ones_(self.weight)
        self.table = torch.arange(3.0)


class AttributeOfAnother(Own):
    def make(self):
        self.angles = torch.arange(3.0)
        super().make()

    def reset_parameters(self):
        nn.init.ones_(self.weight)
        self.table = self.angles * 2


class AttributeCopied(Own):
    def make(self):
        self.angles = torch.ones(3, 3)
        super().make()

    def reset_parameters(self):
        with torch.no_grad():
            self.weight.copy_(self.angles)


class AttributeRefers(Own):
    def make(self):
        super().make()
        self.same, self.listed = [self.out.weight], {"w": self.weight}


class HiddenModule(Own):
    def make(self):
        super().make()
        self.hidden = [nn.Linear(2, 2)]


class Recurrent(Contract):
    def make(self):
        self.stack = nn.ModuleList([nn.LSTM(3, 3), nn.GRU(3, 3, bidirectional=True), nn.RNNCell(3, 3)])


class RecurrentAfterError(Contract):
    def make(self):
        self.norm, self.late = Norm(), nn.LSTM(3, 3)


class WeightNorm(Contract):
    def make(self):
        self.body = parametrizations.weight_norm(nn.Linear(3, 4))


class SpectralNorm(Contract):
    def make(self):
        self.body = parametrizations.spectral_norm(nn.Linear(3, 4))


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).T


class ParametrizedWithMethod(Contract):
    def make(self):
        self.body = Scaled()
        nn.utils.parametrize.register_parametrization(self.body, "weight", Symmetric())


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3))

    def reset_parameters(self):
        nn.init.zeros_(self.bias)
        nn.init.ones_(self.weight)


class Lists(Contract):
    def make(self):
        self.listed = nn.ParameterList([torch.ones(2), torch.ones(3)])
        self.named = nn.ParameterDict({"a": torch.ones(2)})

    def reset_parameters(self):
        for each in (*self.listed, *self.named.values()):
            nn.init.ones_(each)


class NoElements(Contract):
    def make(self):
        self.weight = nn.Parameter(torch.ones(0, 3))
        self.register_buffer("empty", torch.zeros(0))

    def reset_parameters(self):
        pass


class DtypesAndFrozen(Contract):
    def make(self):
        self.half, self.wide = nn.Linear(3, 3, dtype=torch.bfloat16), nn.Linear(3, 3, dtype=torch.float64)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.complex = nn.Linear(2, 2, dtype=torch.cfloat)


class OddNames(Contract):
    def make(self):
        for name in ("a b", "half", "é\n", "modules", "0"):
            self._modules[name] = Scale()
        self._parameters["to"] = nn.Parameter(torch.ones(2))

    def reset_parameters(self):
        nn.init.ones_(self._parameters["to"])


class Trained(Contract):
    """An ordinary build gives it values that its layers do not."""

    def make(self):
        self.stack = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
        nn.init.normal_(self.stack[0].weight, std=0.02)
        nn.init.zeros_(self.stack[1].weight)


class Rotary(Contract):
    def make(self):
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("inv_freq", self.rates(), persistent=False)

    def rates(self):
        return 1.0 / (10000.0 ** (torch.arange(0, 8, 2).float() / 8))

    def reset_parameters(self):
        nn.init.ones_(self.weight)
        self.inv_freq = self.rates() * math.e / math.e


class Transformer(Contract):
    def make(self):
        self.body = nn.Transformer(4, 2, 1, 1, 8)


class MixedExperts(Contract):
    def make(self):
        self.experts = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(3, 4), "norm": Scale()}) for _ in range(6)
        )


class Sleeps(Own):
    """Does not come back in time, so nothing can be said of it."""

    def make(self):
        self.weight, self.out = nn.Parameter(torch.ones(3, 3)), nn.Linear(3, 3)

    def reset_parameters(self):
        time.sleep(1.5)


class OnAccelerator(Own):
    """What happens depends on whether the machine has a GPU."""

    def make(self):
        self.weight, self.out = nn.Parameter(torch.ones(3, 3)), nn.Linear(3, 3)

    def reset_parameters(self):
        self.weight.data = torch.ones(3, 3).cuda()


#: Of these not all recipes can be told.
OUTSIDE = (Sleeps, OnAccelerator, DecidesByGarbage)

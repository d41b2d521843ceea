"""Cases of init methods that do not keep the contract, of tensors with several names, and of models' own methods."""

from __future__ import annotations

import torch
from cases import case, holding, linear
from torch import nn
from torch.nn import init


class Own(nn.Module):
    """A layer that initializes itself; a case changes how."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))
        self.register_buffer("steps", torch.zeros(2))
        self.begin()

    def begin(self):
        with torch.no_grad():
            self.reset_parameters()

    def reset_parameters(self):
        init.xavier_uniform_(self.weight)


@case({"weight": "reset", "steps": "no not_written"})
def a_buffer_that_is_forgotten():
    return Own()


@case({"weight": "reset", "steps": "no not_written"})
def a_method_that_needs_no_grad():
    class Raw(Own):
        def reset_parameters(self):
            self.weight.uniform_(-1, 1)

    return Raw()


@case({"weight": "reset", "steps": "reset"})
def a_method_that_puts_in_new_tensors():
    class Rebinds(Own):
        def reset_parameters(self):
            self.weight = nn.Parameter(torch.full((4, 4), 0.5, device=self.weight.device))
            self.register_buffer("steps", torch.arange(2.0))

    return Rebinds()


class Halves(Own):
    def begin(self):
        init.ones_(self.weight)

    def reset_parameters(self):
        self.weight.data[:2].normal_()


@case({"weight": "no part", "steps": "no not_written"})
def a_method_that_writes_a_part():
    return Halves()


class Needy(Halves):
    def reset_parameters(self, std):
        init.normal_(self.weight, std=std)


@case({"weight": "no arguments", "steps": "no arguments"})
def a_method_with_arguments():
    return Needy()


class Raises(Halves):
    def reset_parameters(self):
        init.zeros_(self.weight)
        raise ValueError("not today")


@case({"weight": "no raises", "steps": "no raises"})
def a_method_that_raises():
    return Raises()


class Drops(Halves):
    def reset_parameters(self):
        del self.weight


@case({"weight": "no deleted", "steps": "no not_written"})
def a_method_that_deletes():
    return Drops()


class Wider(Halves):
    def reset_parameters(self):
        self.weight = nn.Parameter(torch.ones(5))


@case({"weight": "no deleted", "steps": "no not_written"})
def a_method_that_changes_the_shape():
    return Wider()


class Doubles(Halves):
    def reset_parameters(self):
        self.weight.data.mul_(2)


@case({"weight": "no reads", "steps": "no not_written"})
def a_method_that_works_with_what_is_there():
    return Doubles()


class Asks(Halves):
    def reset_parameters(self):
        if self.weight.abs().sum() > 0:
            init.zeros_(self.weight)


@case({"weight": "no reads", "steps": "no reads"})
def a_method_that_asks_what_is_there():
    return Asks()


class Saves(Halves):
    def reset_parameters(self):
        with open("weights.txt", "w"):
            init.zeros_(self.weight)


@case({"weight": "no refused", "steps": "no refused"})
def a_method_that_writes_a_file():
    return Saves()


class Constant(Halves):
    reset_parameters = 3


@case({"weight": "no not_callable", "steps": "no not_callable"})
def a_method_that_is_a_number():
    return Constant()


@case({"weight": "reset!", "steps": "no not_written"})
def a_method_with_another_distribution():
    class Wide(Halves):
        def reset_parameters(self, std=0.02):
            init.normal_(self.weight, std=std)

    return Wide()


@case(
    {
        "in_proj_weight": "private",
        "in_proj_bias": "private",
        "bias_k": "private",
        "bias_v": "private",
        "out_proj.weight": "reset",
        "out_proj.bias": "private",
    }
)
def attention():
    return nn.MultiheadAttention(4, 2, add_bias_kv=True)


@case({**linear("inner"), "outer.weight": "reset", "outer.bias": "reset"})
def a_parent_that_undoes_its_child():
    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(3, 3), nn.Linear(3, 3)
            self.reset_parameters()

        def reset_parameters(self):
            for child in self.children():
                child.reset_parameters()
            init.zeros_(self.outer.weight)

    return Gate()


@case({"first.a": "reset", "first.b": "reset", "second.0": "reset"})
def an_owner_of_parameter_lists():
    class Bank(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.ParameterDict({name: nn.Parameter(torch.empty(3)) for name in "ab"})
            self.second = nn.ParameterList([nn.Parameter(torch.empty(2, 2))])
            self.reset_parameters()

        def reset_parameters(self):
            for parameter in self.first.values():
                init.ones_(parameter)
            init.orthogonal_(self.second[0])

    return Bank()


class Speller(nn.Module):
    """A model that initializes its modules in the way of transformers, all but one parameter."""

    def __init__(self):
        super().__init__()
        self.table, self.fc = nn.Embedding(5, 3), nn.Linear(3, 5)
        self.fc.extra = nn.Parameter(torch.zeros(2))
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            init.zeros_(module.bias)


@case(
    {"table.weight": "init_weights", "fc.weight": "init_weights", "fc.bias": "init_weights"}
    | {"fc.extra": "no not_written"}
)
def a_model_that_misses_a_parameter():
    return Speller()


@case({"body.weight": "init_weights", "body.bias": "reset"})
def a_model_with_a_method_without_arguments():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(3, 3)
            self.init_weights()

        def init_weights(self):
            init.normal_(self.body.weight, std=0.02)

    return Whole()


@case({"table.weight": "reset", "head.weight": "reset"})
def a_tied_head():
    model = holding(table=nn.Embedding(5, 3), head=nn.Linear(3, 5, bias=False))
    model.head.weight = model.table.weight
    return model


@case({**linear("a"), **linear("b"), "c.weight": "reset"})
def one_tie_among_many():
    model = holding(a=nn.Linear(3, 3), b=nn.Linear(3, 3), c=nn.Linear(3, 3, bias=False))
    model.c.weight = model.a.weight
    return model


@case({"0.weight": "reset", "0.steps": "no not_written", "1.weight": "reset"})
def a_tie_to_a_parameter_that_is_replaced():
    class Filled(Own):
        def reset_parameters(self):
            self.weight = nn.Parameter(torch.full((4, 4), 0.5))

    model = nn.Sequential(Filled(), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    return model


@case({"fused": "no no_method", "query": "no no_method", "key": "no no_method"})
def views_of_one_buffer():
    model = nn.Module()
    model.register_buffer("fused", torch.randn(6, 3))
    model.register_buffer("query", model.fused[:3])
    model.register_buffer("key", model.fused[3:])
    return model


@case({f"{name}_l0": "reset" for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")})
def a_recurrent_layer():
    return nn.LSTM(2, 3)


@case({"weight": "reset", "bias": "reset"})
def a_class_with_slots_and_super():
    class Slim(nn.Linear):
        __slots__ = ("calls",)

        def reset_parameters(self):
            self.calls = 1
            super().reset_parameters()

    return Slim(3, 3)


@case(linear("inside"))
def a_wrapper_that_delegates():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = nn.Linear(3, 3)

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self._modules["inside"], name)

    return Wrapper()

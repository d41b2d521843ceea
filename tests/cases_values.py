"""Cases of values that only the constructor knows, of constructors that cannot run on meta, and of what is there."""

from __future__ import annotations

import copy
import math

import numpy as np
import torch
from cases import case, holding, linear
from torch import nn
from torch.nn import init
from torch.nn.utils import parametrizations


class Scaled(nn.Module):
    """Holds what its constructor is given, as a parameter or a buffer, and has no init method."""

    def __init__(self, parameter=None, **buffers):
        super().__init__()
        if parameter is not None:
            self.scale = nn.Parameter(parameter)
        for name, value in buffers.items():
            self.register_buffer(name, value, persistent=False)


@case({"turn.angle": "no no_method", **linear("query")})
def rotary_angles():
    return holding(turn=Scaled(angle=500.0 ** -(torch.arange(0, 6, 2) / 6)), query=nn.Linear(6, 6))


@case({"scale": "no no_method"})
def a_layer_scale():
    return Scaled(1e-4 * torch.ones(5))


@case({"scale": "no no_method", "heat": "no no_method", "mean": "no no_method"})
def literals():
    return Scaled(torch.ones([]) * math.log(14), heat=torch.tensor(0.3), mean=torch.tensor([0.1, 0.2]))


@case({f"{i}.norm.scale": "no no_method" for i in range(2)} | linear("0.body") | linear("1.body"))
def norms_without_a_method():
    return nn.Sequential(
        *(holding(norm=Scaled(torch.ones(3)), body=nn.Linear(3, 3)) for _ in range(2)),
    )


@case({"token": "no no_method", **linear("body")})
def a_token_next_to_a_layer():
    model = holding(body=nn.Linear(3, 3))
    model.token = nn.Parameter(torch.zeros(1, 1, 3))
    return model


@case({"scale": "no no_method"})
def a_truncated_normal_by_the_owner():
    return Scaled(init.trunc_normal_(torch.zeros(1, 3, 8), std=0.02))


@case({"conv.weight": "reset!", "conv.bias": "reset!", "fc.weight": "reset!", "fc.bias": "reset!"})
def a_loop_over_all_modules():
    model = holding(conv=nn.Conv2d(2, 4, 3), fc=nn.Linear(4, 8))
    for module in model.children():
        init.normal_(module.weight, std=0.02)
        init.zeros_(module.bias)
    return model


@case({**linear("fc"), "norm.weight": "reset!", "norm.bias": "reset"})
def a_residual_that_begins_with_zero():
    model = holding(fc=nn.Linear(3, 3), norm=nn.LayerNorm(3))
    init.zeros_(model.norm.weight)
    return model


@case({"weight": "reset!", "bias": "reset"})
def a_gain_on_top():
    layer = nn.Linear(4, 4)
    with torch.no_grad():
        layer.weight.mul_(0.5)
    return layer


@case({"weight": "reset!"})
def a_padding_row_set_later():
    table = nn.Embedding(6, 3)
    with torch.no_grad():
        table.weight[0].zero_()
    return table


# A look at the meta device gives no values to load: the copy is lost there, and nobody can tell.
@case({**linear("backbone", "reset!"), **linear("head")})
def a_checkpoint_in_the_constructor():
    model = holding(backbone=nn.Linear(3, 3), head=nn.Linear(3, 2))
    model.backbone.load_state_dict(STORED)
    return model


@case({**linear("student", "reset!"), **linear("teacher", "reset!"), **linear("head")})
def a_teacher_that_is_a_copy():
    student = nn.Linear(3, 3)
    return holding(student=student, teacher=copy.deepcopy(student), head=nn.Linear(3, 2))


@case(
    {"bias": "reset", "parametrizations.weight.original0": "no computed"}
    | {"parametrizations.weight.original1": "no computed"}
)
def a_weight_norm():
    return parametrizations.weight_norm(nn.Linear(3, 4))


@case(
    {
        "weight": "reset!",
        "turn.parametrizations.weight.original": "no computed",
        "turn.parametrizations.weight.0.base": "no computed",
    },
    on_meta=None,
)
def orthogonal_matrices():
    layer = nn.Linear(6, 6, bias=False)
    init.orthogonal_(layer.weight)
    layer.turn = parametrizations.orthogonal(nn.Linear(4, 4, bias=False))
    return layer


@case(linear("0") | linear("1"), on_meta=None)
def rates_read_from_a_tensor():
    rates = [rate.item() for rate in torch.linspace(0, 0.2, 2)]
    layers = nn.Sequential(*(nn.Linear(3, 3) for _ in rates))
    for layer, rate in zip(layers, rates, strict=True):
        layer.rate = rate
    return layers


@case(linear("0"), on_meta=None)
def a_choice_by_value():
    keep = torch.arange(5)[torch.arange(5) % 2 == 0]
    return nn.Sequential(nn.Linear(len(keep), 2))


@case({**linear("0"), "1.scale": "no no_method", "1.beta": "no no_method"}, on_meta=None)
def a_number_kept_beside_its_parameter():
    act = Scaled(torch.tensor(0.8), beta=torch.tensor(0.5))
    act.number = float(act.scale.detach()) + act.beta.item()
    return nn.Sequential(nn.Linear(3, 3), act)


@case(linear("body") | linear("head"), on_meta=None)
def a_move_in_the_constructor():
    return holding(body=nn.Linear(3, 3), head=nn.Linear(3, 2).to("cpu"))


@case({**linear("0"), "1.scale": "real"}, on_meta={})
def what_is_real_before_the_build():
    return nn.Sequential(nn.Linear(3, 3), REAL)


@case({"table": "no no_method"}, on_meta={"table": "real"})
def a_table_from_numpy():
    return Scaled(table=torch.from_numpy(np.arange(4.0)))


class Old(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.Tensor(3, 4))
        self.bias = nn.Parameter(torch.zeros(3))
        self.reset_parameters()

    def reset_parameters(self):
        init.xavier_uniform_(self.weight)
        init.zeros_(self.bias)


@case({"weight": "reset", "bias": "reset"}, on_meta={"weight": "real"})
def a_legacy_constructor():
    return Old()


@case({"0.weight": "lazy", "0.bias": "lazy", **linear("1")})
def a_lazy_layer():
    return nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))


@case({"turns": "no no_method", "past['key'][0]": "no no_method", **linear("fc")})
def tensors_in_plain_attributes():
    model = holding(fc=nn.Linear(3, 3))
    model.turns = torch.polar(torch.ones(3), torch.arange(3.0))
    model.past = {"key": [torch.zeros(2)]}
    return model


@case({"total": "no not_written", "_defaults['total']": "no not_written"})
def a_metric_that_resets_to_its_default():
    return Metric()


class Metric(nn.Module):
    """Like those of torchmetrics: a state, and a default that it is reset to."""

    def __init__(self):
        super().__init__()
        self._defaults = {"total": torch.tensor(0.0)}
        self.register_buffer("total", self._defaults["total"].clone())

    def reset_parameters(self):
        """Does nothing to them."""


@case(linear("fc"), on_meta={})
def a_parameter_in_a_hook():
    model = holding(fc=nn.Linear(3, 3))
    weight = model.fc.weight
    model.fc.register_forward_hook(lambda module, inputs, output: output + weight.sum())
    return model


@case({"angle": "no no_method", "turn": "no no_method", **linear("fc")})
def buffers_in_other_dtypes():
    model = holding(fc=nn.Linear(3, 3, dtype=torch.bfloat16))
    model.register_buffer("angle", 1 / torch.arange(1, 4))
    model.register_buffer("turn", torch.polar(torch.ones(3), torch.arange(3.0)))
    return model


@case({"ids": "no no_method", "mask": "no no_method", "nothing": "reset"})
def masks_and_counters():
    model = Scaled(ids=torch.arange(6).expand(1, -1), mask=torch.ones(3, 3).tril().bool())
    model.register_buffer("nothing", torch.empty(0, 3))
    return model


STORED = {"weight": torch.full((3, 3), 0.5), "bias": torch.full((3,), 0.25)}
REAL = Scaled(torch.ones(2))

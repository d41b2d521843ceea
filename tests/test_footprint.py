"""What tensors and their training take, against the memory of real optimizers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import metaviz
from metaviz.core.footprint import Item, footprint
from metaviz.errors import MetavizError

CPU = torch.device("cpu")
GPU = torch.device("cuda:0")
OPTIMIZERS = sorted(
    name
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
)
REFUSED = {"LBFGS", "SparseAdam"}


def net() -> nn.Module:
    model = nn.Sequential(
        nn.Linear(6, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(8, 5, bias=False)
    )
    model[1].requires_grad_(False)
    model[2].to(torch.bfloat16)
    return model


def real_state_nbytes(make) -> int:
    model = net()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = make(trained)
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_every_optimizer_of_torch_is_what_it_is_after_a_real_step(name):
    plan = metaviz.plan(metaviz.build(net))
    if name in REFUSED:
        with pytest.raises(MetavizError, match=f"What {name} keeps cannot be found out on meta: .*Next: "):
            plan.memory(optimizer=name)
        return
    cls = getattr(torch.optim, name)
    assert sum(plan.memory(optimizer=cls).optimizer.values()) == real_state_nbytes(cls)
    assert plan.memory(optimizer=name.lower()).optimizer == plan.memory(optimizer=cls).optimizer


def test_an_optimizer_can_be_a_function_and_is_tried_once_for_each_shape():
    def make(parameters):
        asked.append(len(parameters))
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    asked: list[int] = []
    plan = metaviz.plan(metaviz.build(lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(50)))))
    assert sum(plan.memory(optimizer=make).optimizer.values()) == 50 * (16 + 4) * 4
    assert asked == [2]


def test_values_gradients_and_state_are_added_up_by_device_and_dtype():
    items = [
        Item("a", (4, 4), torch.float32, True, GPU, 64),
        Item("b", (4, 4), torch.float32, False, GPU, 64),
        Item("c", (8,), torch.bfloat16, True, CPU, 16),
    ]
    found = footprint(items, {GPU: 400, CPU: 10}, gradients=True, optimizer="AdamW")
    assert found.values == {(GPU, torch.float32): 128, (CPU, torch.bfloat16): 16}
    assert found.gradients == {(GPU, torch.float32): 64, (CPU, torch.bfloat16): 16}
    # AdamW counts its steps on the CPU, in float32.
    assert found.optimizer == {
        (GPU, torch.float32): 128,
        (CPU, torch.bfloat16): 32,
        (CPU, torch.float32): 8,
    }
    assert found.nbytes == {GPU: 320, CPU: 72}
    assert not found.fits
    assert str(found) == (
        "device  dtype     values  gradients  optimizer  sum    free\n"
        "cuda:0  float32   128 B   64 B       128 B      320 B  400 B\n"
        "cpu     bfloat16  16 B    16 B       32 B       64 B\n"
        "        float32   —       —          8 B        8 B\n"
        "        all       16 B    16 B       40 B       72 B   10 B, does NOT fit"
    )


def test_nothing_of_the_process_changes(generators_stay):
    plan = metaviz.plan(metaviz.build(net))
    plan.memory(optimizer=lambda params: (torch.rand(3), torch.optim.Adam(params))[1])


def test_hooks_for_the_steps_of_all_optimizers_are_not_called():
    called = []
    hook = register_optimizer_step_pre_hook(lambda *_: called.append("hook"))
    try:
        metaviz.plan(metaviz.build(net)).memory(optimizer="AdamW")
        assert called == []
        real_state_nbytes(torch.optim.AdamW)
        assert called == ["hook"]
    finally:
        hook.remove()


def test_parameters_that_an_optimizer_does_not_take_cost_nothing():
    plan = metaviz.plan(metaviz.build(nn.Linear, 4, 4))
    found = plan.memory(optimizer=lambda params: torch.optim.Adam([each for each in params if each.ndim > 1]))
    assert sum(found.optimizer.values()) == 2 * 64 + 4


class Lists(torch.optim.Optimizer):
    """Keeps lists of tensors, and makes some of them only after it has looked at values."""

    def __init__(self, params, looks):
        super().__init__(params, {})
        self.looks = looks

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            if self.looks:
                parameter.sum().item()
            self.state[parameter]["sides"] = [parameter.new_zeros(n, n) for n in parameter.shape]


def test_tensors_in_lists_count():
    plan = metaviz.plan(metaviz.build(nn.Linear, 3, 5))
    found = plan.memory(optimizer=lambda params: Lists(params, looks=False))
    assert sum(found.optimizer.values()) == 4 * (5 * 5 + 3 * 3 + 5 * 5)
    with pytest.raises(MetavizError, match="keeps cannot be found out on meta: "):
        plan.memory(optimizer=lambda params: Lists(params, looks=True))


def broken(params):
    raise AttributeError


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        (lambda params: None, "has no attribute 'step'"),
        (broken, "AttributeError"),
        (nn.Linear, "out_features"),
    ],
    ids=["none", "broken", "module"],
)
def test_what_makes_no_optimizer_is_refused_with_the_reason(optimizer, why):
    with pytest.raises(MetavizError, match=f"keeps cannot be found out on meta: .*{why}.*Next: "):
        metaviz.plan(metaviz.build(net)).memory(optimizer=optimizer)


def test_an_optimizer_with_its_own_parameters_is_refused():
    with pytest.raises(ValueError, match=r"optimizer=SGD\(\.\.\.\) is neither a class nor a function"):
        metaviz.plan(metaviz.build(net)).memory(optimizer=torch.optim.SGD(net().parameters(), lr=0.1))


def test_an_unknown_optimizer_is_refused_with_the_nearest():
    plan = metaviz.plan(metaviz.build(net))
    with pytest.raises(ValueError, match=r"torch\.optim has no 'AdmW'\. The nearest is 'AdamW'"):
        plan.memory(optimizer="AdmW")
    with pytest.raises(ValueError, match="optimizer=3 is neither"):
        plan.memory(optimizer=3)


def test_a_selection_without_parameters_takes_nothing_to_train():
    plan = metaviz.plan(metaviz.build(nn.BatchNorm1d, 4, affine=False))
    assert plan.memory(gradients=True, optimizer="Adam").nbytes == {CPU: 40}

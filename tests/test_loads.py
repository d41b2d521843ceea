"""What a constructor loads is told from what it makes."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest
import torch
from surroundings import Constructed, only, run
from torch import nn

import metaviz
from metaviz.core.around import findings, loaded
from metaviz.core.origin import origin_of

GIVEN = {"weight": torch.full((4, 4), 0.5), "bias": torch.full((4,), 0.25)}


def from_numpy(module):
    module.register_buffer("table", torch.from_numpy(np.arange(4, dtype=np.float32)))


def saved() -> io.BytesIO:
    file = io.BytesIO()
    torch.save(GIVEN, file)
    file.seek(0)
    return file


def from_elsewhere(module):
    module.layer.load_state_dict(GIVEN)


def copied_before(module):
    module.layer.load_state_dict({name: value.clone() for name, value in GIVEN.items()})


def in_half(module):
    module.layer.load_state_dict({name: value.half() for name, value in GIVEN.items()})


def from_a_file(module):
    module.layer.load_state_dict(torch.load(saved()))


def assigned(module):
    module.layer.load_state_dict(torch.load(saved()), assign=True)


def from_a_safetensors_file(module):
    from safetensors.torch import load, save

    module.layer.load_state_dict(load(save(GIVEN)))


def of_a_copy(module):
    module.other = copy.deepcopy(module.layer)
    module.other.load_state_dict(GIVEN)
    module.layer.load_state_dict(module.other.state_dict())
    del module.other


LOADS = [from_elsewhere, copied_before, in_half, from_a_file, assigned, from_a_safetensors_file, of_a_copy]


@pytest.mark.parametrize("change", LOADS)
def test_values_that_the_constructor_loads_are_found_and_replay_has_them(change):
    model = metaviz.build(Constructed, change)
    found = only(model)
    assert (found.kind, found.paths) == ("loaded", ("layer.weight", "layer.bias"))
    run(found, model=model)
    assert torch.equal(model.layer.weight, GIVEN["weight"])


def literal(module):
    module.scale = nn.Parameter(torch.tensor([1.0, 2.0]))
    module.register_buffer("mean", torch.tensor(0.07))
    module.register_buffer("bytes", torch.tensor([1, 2], dtype=torch.uint8))


def numpy_tables(module):
    from_numpy(module)
    module.register_buffer("cast", torch.from_numpy(np.arange(4.0)).float())
    module.layer.weight.data.copy_(torch.from_numpy(np.eye(4)).float())


def rows_of_a_table(module):
    sines = torch.from_numpy(np.ones((4, 2), dtype=np.float32))
    with torch.no_grad():
        module.layer.weight[:, 0::2] = sines
        module.layer.weight[:, 1::2] = sines


def a_table_made_before_it_is_copied(module):
    table = torch.tensor([[1.0] * 4] * 4)
    module.layer.weight.data.copy_(table)


def from_a_sibling(module):
    module.target = nn.Linear(4, 4)
    module.target.load_state_dict(module.layer.state_dict())


def written_after_a_load(module):
    module.layer.load_state_dict(GIVEN)
    nn.init.zeros_(module.layer.weight)
    nn.init.zeros_(module.layer.bias)


NOT_LOADED = [
    *(literal, numpy_tables, rows_of_a_table, a_table_made_before_it_is_copied),
    *(from_a_sibling, written_after_a_load),
]


@pytest.mark.parametrize("change", NOT_LOADED)
def test_literals_tables_and_copies_are_not_loaded(change):
    assert findings(metaviz.build(Constructed, change)) == ()


def test_loaded_answers_for_one_window():
    model = metaviz.build(Constructed, lambda module: module.layer.weight.data.copy_(GIVEN["weight"]))
    answers = [loaded(*origin_of(tensor)[:2]) for tensor in (model.layer.weight, model.layer.bias)]
    assert answers == [True, False]


def test_a_state_dict_that_was_converted_before_counts_as_loaded_where_torch_loads_it():
    numbers = {"weight": np.full((2, 2), 0.5, np.float32), "bias": np.zeros(2, np.float32)}

    class Ported(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(2, 2)
            state = {name: torch.from_numpy(array) for name, array in numbers.items()}
            self.body.load_state_dict(state)

    body = metaviz.build(Ported).body
    origin = origin_of(body.weight)
    assert loaded(origin.tape, origin.window)
    assert origin.tape.last_write(origin.window.storage).name == "load_state_dict"


def test_the_state_of_another_part_of_the_model_is_no_loaded_data():
    class Momentum(nn.Module):
        def __init__(self):
            super().__init__()
            self.online, self.slow = nn.Linear(2, 2), nn.Linear(2, 2)
            self.slow.load_state_dict(self.online.state_dict())

    origin = origin_of(metaviz.build(Momentum).slow.weight)
    assert not loaded(origin.tape, origin.window)

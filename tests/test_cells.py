"""Cells and what works beside them take turns with settings of the process."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from front import eventually, quiet, showing  # noqa: F401
from torch import nn

import metaviz
from metaviz.core.sandbox import run_aside
from metaviz.widgets import cells
from metaviz.widgets.tree import TreeWidget


@pytest.fixture
def cell():
    """A cell that runs, in another thread's eyes, until the test ends it."""
    cells.begins()
    yield cells.ends
    cells.ends()


def in_thread(fn) -> list:
    found = []

    def go():
        try:
            found.append(fn())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=go)
    thread.start()
    thread.join(60)
    return found


def tried_beside():
    with cells.beside():
        return run_aside(lambda: torch.rand(3)).finished


def test_beside_a_running_cell_nothing_is_tried(cell):
    (error,) = in_thread(tried_beside)
    assert isinstance(error, cells.CellRuns)
    assert "between cells only" in str(error)
    cell()
    assert in_thread(tried_beside) == [True]


def test_the_cell_itself_tries_what_it_likes(cell):
    assert run_aside(lambda: 3).value == 3


def test_who_can_wait_goes_on_after_the_cell(cell):
    turns = []

    def waits():
        with cells.beside(lambda: turns.append(1)):
            return run_aside(lambda: 3).value

    found = []
    thread = threading.Thread(target=lambda: found.append(waits()))
    thread.start()
    eventually(lambda: turns)
    assert found == []
    cell()
    thread.join(60)
    assert found == [3]


def test_a_cell_begins_after_what_is_being_tried():
    began, order = threading.Event(), []

    def slow():
        began.set()
        time.sleep(0.3)

    def tries():
        with cells.beside():
            run_aside(slow)
        order.append("tried")

    thread = threading.Thread(target=tries)
    thread.start()
    assert began.wait(30)
    cells.begins()
    order.append("cell")
    cells.ends()
    thread.join(60)
    assert order[0] == "tried" or (len(order) == 2 and order == ["cell", "tried"])


def model():
    return nn.Sequential(*(nn.Linear(8, 8, device="meta") for _ in range(6)))


def test_numbers_that_a_cell_draws_are_its_own_whatever_the_widget_is_asked():
    """Without turns, looks and plans put the generator back in the middle of the loop."""
    torch.manual_seed(0)
    alone = [float(torch.rand(1)) for _ in range(300)]
    net = model()
    widget = TreeWidget(net)
    try:
        quiet()
        cells.begins()
        torch.manual_seed(0)
        drawn = []
        for step in range(300):
            if step % 30 == 0:
                widget.selection = [str(step // 30 % 6)]
                widget.follow()
            if step == 100:
                net[5] = nn.Linear(8, 8, device="meta")
            drawn.append(float(torch.rand(1)))
            time.sleep(0.001)
        assert drawn == alone
    finally:
        cells.ends()
        widget.close()
        quiet()


def test_what_had_to_wait_is_planned_and_looked_at_after_the_cell(cell):
    net = model()
    widget = TreeWidget(net)
    try:
        # As a browser does it: what code sets is planned in the code's own thread.
        widget.set_state({"_ticked": {"shape": 1, "rows": [1]}})
        eventually(lambda: widget._plan.get("state") == "after")
        assert widget.plan is None
        assert widget._plan["line"].startswith("The plan follows after the running cell")
        cell()
        widget.follow()
        eventually(lambda: widget.plan is not None)
        assert [tensor.source for tensor in widget.plan.tensors] == ["reset", "reset"]
    finally:
        widget.close()
        quiet()


def test_a_plan_from_a_tape_waits_for_nobody(cell):
    net = metaviz.build(nn.Linear, 4, 4)
    widget = TreeWidget(net)
    try:
        widget.selection = ["weight"]
        eventually(lambda: widget.plan is not None)
        assert widget._plan["line"] == "1 tensor, 64 B → cpu, fits, 1 tensor from replay"
    finally:
        widget.close()
        quiet()

"""Work beside the main thread: the newest job wins, each older one is told, and no thread stays."""

from __future__ import annotations

import threading

import pytest
from front import eventually

from metaviz.widgets.worker import Latest

NAME = "metaviz-test"


def alive() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


@pytest.fixture
def held():
    """A worker that is at a job until `go` is set, and the list of what happened."""
    latest, go, began, events = Latest(NAME), threading.Event(), threading.Event(), []

    def first() -> None:
        began.set()
        assert go.wait(60)
        events.append("first")

    latest.submit(first, lambda: events.append("first dropped"))
    assert began.wait(60)
    yield latest, go, events
    go.set()
    eventually(lambda: not alive())


def test_a_job_is_done_in_a_thread_of_its_own():
    found: list[threading.Thread] = []
    Latest(NAME).submit(lambda: found.append(threading.current_thread()))
    (thread,) = eventually(lambda: list(found))
    assert thread.name == NAME
    assert thread.daemon
    thread.join(60)
    assert not thread.is_alive()


def test_of_those_that_wait_the_newest_is_done_and_the_others_are_told(held):
    latest, go, events = held
    for number in range(5):
        latest.submit(
            lambda number=number: events.append(number),
            lambda number=number: events.append(f"{number} dropped"),
        )
    assert events == ["0 dropped", "1 dropped", "2 dropped", "3 dropped"]
    go.set()
    eventually(lambda: not alive())
    assert events[4:] == ["first", 4]


def test_what_has_begun_is_not_dropped(held):
    latest, go, events = held
    latest.submit(lambda: events.append("second"), lambda: events.append("second dropped"))
    latest.drop()
    latest.drop()
    assert events == ["second dropped"]
    go.set()
    eventually(lambda: not alive())
    assert events == ["second dropped", "first"]


def test_jobs_of_one_worker_are_done_one_at_a_time():
    latest, running, most = Latest(NAME), [], []

    def job() -> None:
        running.append(1)
        most.append(len(running))
        running.pop()

    for _ in range(300):
        latest.submit(job)
    eventually(lambda: not alive())
    assert set(most) == {1}


def test_a_worker_that_has_ended_starts_again():
    latest, found = Latest(NAME), []
    for number in range(3):
        latest.submit(lambda number=number: found.append(number))
        eventually(lambda: not alive())
    assert found == [0, 1, 2]


def test_a_job_may_give_its_own_worker_another_one():
    latest, found = Latest(NAME), []
    latest.submit(lambda: latest.submit(lambda: found.append("second")))
    eventually(lambda: found)
    eventually(lambda: not alive())
    assert found == ["second"]


def test_a_thousand_jobs_are_each_done_or_told_of_once_and_leave_no_thread():
    latest, done, dropped = Latest(NAME), [], []
    for number in range(1000):
        latest.submit(lambda number=number: done.append(number), lambda number=number: dropped.append(number))
    eventually(lambda: not alive())
    assert sorted(done + dropped) == list(range(1000))
    assert done[-1] == 999
    assert done == sorted(done)


def test_many_threads_may_give_it_jobs():
    latest, done, dropped = Latest(NAME), [], []

    def give(start: int) -> None:
        for number in range(start, start + 200):
            latest.submit(
                lambda number=number: done.append(number), lambda number=number: dropped.append(number)
            )

    givers = [threading.Thread(target=give, args=(200 * each,)) for each in range(5)]
    for giver in givers:
        giver.start()
    for giver in givers:
        giver.join(60)
    eventually(lambda: not alive())
    assert sorted(done + dropped) == list(range(1000))


def test_a_job_that_fails_is_reported_and_the_next_one_is_done(monkeypatch):
    latest, done, failed = Latest(NAME), [], []
    monkeypatch.setattr(threading, "excepthook", lambda said: failed.append(said.exc_type))
    latest.submit(lambda: 1 / 0)
    eventually(lambda: failed and not alive())
    latest.submit(lambda: done.append(1))
    eventually(lambda: done)
    assert failed == [ZeroDivisionError]

"""The family of errors: one name catches them all, and each reads as prose wherever it ends up."""

from __future__ import annotations

import inspect
import pickle

import pytest

from metaviz import errors

FAMILY = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if cls.__module__ == errors.__name__]
MESSAGE = "No module or tensor 'encoder.0'. Did you mean 'encoders.0'?\n    tree['encoders.0']"


def test_every_error_is_a_metaviz_error():
    assert len(FAMILY) > 1
    assert [cls for cls in FAMILY if not issubclass(cls, errors.MetavizError)] == []


@pytest.mark.parametrize("cls", FAMILY)
def test_a_message_is_shown_as_it_was_written(cls):
    assert str(cls(MESSAGE)) == MESSAGE


@pytest.mark.parametrize("cls", FAMILY)
def test_an_error_crosses_to_another_process_whole(cls):
    twin = pickle.loads(pickle.dumps(cls(MESSAGE)))
    assert type(twin) is cls
    assert str(twin) == MESSAGE


def test_an_unknown_path_is_caught_as_a_key_error_but_not_shown_as_one():
    # Python shows the repr of a KeyError's argument, so "\n" would be printed as two characters.
    assert str(KeyError(MESSAGE)) != MESSAGE
    with pytest.raises(KeyError) as caught:
        raise errors.UnknownPath(MESSAGE)
    assert str(caught.value) == MESSAGE


def test_control_characters_of_names_are_spelled_out_and_lines_are_kept():
    assert (
        str(errors.MetavizError("no axis \x1b[31mtp\u202e\n  next")) == "no axis \\x1b[31mtp\\u202e\n  next"
    )

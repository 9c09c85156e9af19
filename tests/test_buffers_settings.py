"""Equality of buffers by configuration; `buffers.py` as a file without the project."""

import copy
import doctest
import inspect
import pickle
import re
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from buffer_helpers import encode

import buffers


def parity(item):
    return item["id"] % 2


MAKERS = {
    "circular": partial(buffers.circular_buffer, np.int64(6)),
    "uniform": partial(buffers.uniform_replay, 6, sequence_length=2),
    "prioritised": partial(buffers.prioritised_replay, 6, 0.5),
    "clustered": lambda: buffers.clustered_replay(2, buffers.prioritised_replay(6), parity),
}


@pytest.mark.parametrize("kind", ["circular", "clustered"])
def test_buffers_of_the_same_settings_are_equal(kind):
    buffer = MAKERS[kind]()
    state = buffer.add(buffer.init(encode(0)), encode(3))  # now it has compiled functions

    for same in (MAKERS[kind](), pickle.loads(pickle.dumps(buffer)), copy.deepcopy(buffer)):
        assert same == buffer
        assert hash(same) == hash(buffer)
        assert repr(same) == repr(buffer)
        assert same.size(state) == 1


def test_buffers_of_other_settings_differ():
    assert len({maker() for maker in MAKERS.values()}) == len(MAKERS)
    assert buffers.uniform_replay(6) != buffers.uniform_replay(6, num_envs=1)
    assert type(MAKERS["circular"]().max_size) is int


@pytest.mark.parametrize(
    ("max_size", "num_envs", "length", "period", "held"),
    [(33, None, None, 4, 32), (104, 8, 3, 3, 96), (32, None, 4, 4, 32)],
)
def test_max_size_is_rounded_down_to_the_period(max_size, num_envs, length, period, held):
    sizes = {"num_envs": num_envs, "sequence_length": length, "period": period}
    replay = buffers.uniform_replay(max_size, **sizes)

    assert replay.max_size == held
    assert replay == buffers.uniform_replay(held, **sizes)


def test_a_buffer_without_priorities_has_no_functions_for_them():
    clusters_of_uniform = buffers.clustered_replay(2, buffers.uniform_replay(6), parity)

    for replay in (MAKERS["uniform"](), clusters_of_uniform):
        assert replay.set_priorities is None
        assert replay.priorities is None


def test_compiled_functions_keep_their_help():
    circular = MAKERS["circular"]()

    assert "more items fit" in inspect.getdoc(circular.can_add)
    assert list(inspect.signature(circular.can_add).parameters) == ["state", "n"]


def test_the_example_of_the_module_runs():
    result = doctest.testmod(buffers)

    assert result.attempted >= 10
    assert result.failed == 0


def test_the_module_stands_alone():
    text = Path(buffers.__file__).read_text()
    modules = re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE)

    assert set(modules) <= {"jax", "numpy"} | set(sys.stdlib_module_names)

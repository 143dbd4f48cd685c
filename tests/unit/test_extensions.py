"""A user's functions are found and looked at before anything starts."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import yaml

from mslime.config.errors import ConfigError
from mslime.extensions import calling, check_parameters, load_function


def takes_two(sample: object, label: str) -> float:
    return float(bool(sample) and bool(label))


def takes_more_by_default(sample: object, label: str, scale: float = 1.0) -> float:
    return scale * takes_two(sample, label)


def takes_anything(*values: object, **named: object) -> float:
    return float(len(values) + len(named))


def takes_one(sample: object) -> float:
    return float(bool(sample))


def needs_a_keyword(sample: object, label: str, *, scale: float) -> float:
    return scale * takes_two(sample, label)


@pytest.mark.parametrize("function", [takes_two, takes_more_by_default, takes_anything, max])
def test_a_function_that_takes_the_arguments_passes(function):
    check_parameters(function, "m:f", "reward.function", "sample", "label")


@pytest.mark.parametrize("function", [takes_one, needs_a_keyword])
def test_a_function_that_cannot_be_called_so_is_refused(function):
    with pytest.raises(ConfigError, match=rf"(?s)reward.function.*m:f.*\(sample, label\).*{function.__name__}"):
        check_parameters(function, "m:f", "reward.function", "sample", "label")


@pytest.mark.parametrize(("spec", "said"), [
    ("nothing", "module:function"), ("no_such_module_here:f", "cannot be imported"),
    (f"{__name__}:takes_to", "takes_two"),
])  # fmt: skip
def test_a_function_that_is_not_there_is_refused_by_name(spec, said):
    with pytest.raises(ConfigError, match=said):
        load_function(spec, "reward.function")


@pytest.mark.parametrize("load", [json.loads, yaml.safe_load])
def test_an_error_names_the_last_line_of_the_users_own_files_and_its_traceback_is_logged_once(
    load: object, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Not the line of a library, standard or installed, that the line calls."""
    name = f"own_{getattr(load, '__module__', '')}"
    (tmp_path / f"{name}.py").write_text("def f(load):\n    return load('{')\n")
    monkeypatch.syspath_prepend(tmp_path)
    caplog.set_level(logging.INFO, logger="mslime")
    for _ in range(2):
        with pytest.raises(ConfigError, match=rf"(?s)raised .*{name}\.py:2\)"), calling(f"{name}:f", "loss.function"):
            load_function(f"{name}:f", "loss.function")(load)
    assert [record.exc_info is not None for record in caplog.records] == [True]

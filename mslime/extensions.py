"""A user's own functions: loaded by their `module:function` name and checked before they are called.

Every package may import this module; it imports only the errors of mslime.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import math
import re
import sysconfig
import traceback
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, SupportsFloat, cast

from mslime.config.errors import ConfigError, UserError, nearest

_log = logging.getLogger(__name__)


def load_function(spec: str, setting: str) -> Callable[..., Any]:
    """Load the function `spec`.

    Args:
        spec: `package.module:function`.
        setting: the configuration field it came from, for messages.

    Raises:
        ConfigError: the name is malformed, the module cannot be imported, or has no such function.
    """
    module_name, colon, name = spec.partition(":")
    if not colon or not module_name or not name:
        raise ConfigError(
            setting, spec, "must be a function, `module:function`", "for example my_project.functions:mine"
        )
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything during import
        raise ConfigError(
            setting,
            spec,
            f"module {module_name!r} cannot be imported ({type(error).__name__}: {error})",
            "fix it, or put its directory on PYTHONPATH",
        ) from error
    function = vars(module).get(name)
    if not callable(function):
        functions = [n for n, v in vars(module).items() if callable(v)]
        raise ConfigError(
            setting, spec, f"module {module_name!r} has no function {name!r}",
            nearest(name, functions) or "name one of its functions",
        )  # fmt: skip
    return function


def check_parameters(function: Callable[..., Any], spec: str, setting: str, *parameters: str) -> None:
    """Reject a function that does not take the given number of positional arguments.

    Args:
        parameters: names of the arguments, in their order; the function may use other names.

    Raises:
        ConfigError: the function takes fewer, or needs more. A function without a readable signature (in C) passes.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:
        return
    try:
        signature.bind(*parameters)
    except TypeError as error:
        wanted, name = f"({', '.join(parameters)})", getattr(function, "__qualname__", spec.partition(":")[2])
        raise ConfigError(
            setting,
            spec,
            f"it is called with {wanted}, which {name}{signature} does not accept: {error}",
            f"define it as def {name}{wanted}",
        ) from error


@contextmanager
def calling(spec: str, setting: str, about: str = "") -> Generator[None]:
    """Convert any exception of a user's function inside the block to a ConfigError with the line that raised it.

    Args:
        about: purpose of the call, in words.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # a user's function may raise anything
        raise ConfigError(setting, spec, raised(error, about), "fix the function") from error


_HERE = Path(__file__).parent
_LIBRARIES = (sysconfig.get_path("stdlib"), str(_HERE), str(_HERE.with_name("mslime_plugins")))
_LOGGED = set[str]()


def raised(error: BaseException, about: str = "") -> str:
    """Describe an exception of a user's function, with the last line of the user's own files in its traceback.

    The process log gets the whole traceback at level info, once per line.

    Args:
        about: purpose of the call, in words.
    """
    frames = traceback.extract_tb(error.__traceback__)
    place = ([frame for frame in frames if not _of_a_library(frame.filename)] or frames)[-1]
    where = f"{place.filename}:{place.lineno}"
    if where not in _LOGGED:
        _LOGGED.add(where)
        _log.info("full traceback of the first error at %s", where, exc_info=error)
    return f"raised {type(error).__name__}: {error}{f' for {about}' if about else ''} ({where})"


def _of_a_library(file: str) -> bool:
    parts = Path(file).parts
    return (
        file.startswith("<")
        or "site-packages" in parts
        or "dist-packages" in parts
        or any(Path(file).is_relative_to(library) for library in _LIBRARIES)
    )


MOST_METRICS = 64
"""Most metrics that one user function may log."""
_METRIC_NAME = re.compile(r"[\w.@+-]+")


def bad_metric_name(name: object) -> str | None:
    """Error in the name of a metric that a user's function returned, in words; None if it is valid."""
    if isinstance(name, str) and _METRIC_NAME.fullmatch(name) is not None:
        return None
    return f"returned a metric named {name!r:.80}; a name must consist of letters, digits and _ . @ + -"


def checked_metrics(metrics: object) -> dict[str, float] | str:
    """Metrics that a user's function returned, by name; or a description of their error."""
    if not isinstance(metrics, Mapping):
        return f"returned metrics {metrics!r:.80}, which are not a mapping of names to numbers"
    given = cast("Mapping[object, object]", metrics)
    if len(given) > MOST_METRICS:
        return f"returned {len(given)} metrics; at most {MOST_METRICS} are allowed"
    found: dict[str, float] = {}
    for name, number in given.items():
        if (wrong := bad_metric_name(name)) is not None:
            return wrong
        if isinstance(number, str) or not isinstance(number, SupportsFloat) or not math.isfinite(float(number)):
            return f"returned the metric {name} = {number!r:.80}, which is not a finite number"
        found[str(name)] = float(number)
    return found

"""A user's own functions: found by their `module:function` name, and looked at before they are called.

Every room may import this module; it imports nothing of ours but the errors.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from mslime.config.errors import ConfigError, nearest


def load_function(spec: str, setting: str) -> Callable[..., Any]:
    """The function that `spec` names.

    Args:
        spec: `package.module:function`.
        setting: the configuration field it came from, for messages.

    Raises:
        ConfigError: the name is malformed, the module cannot be imported, or has no such function.
    """
    module_name, colon, name = spec.partition(":")
    if not colon or not module_name or not name:
        raise ConfigError(setting, spec, "a function is named `module:function`", "for example rewards:score")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything while it is imported
        raise ConfigError(
            setting,
            spec,
            f"module {module_name!r} cannot be imported ({type(error).__name__}: {error})",
            "mend it, or put its directory on PYTHONPATH",
        ) from error
    function = vars(module).get(name)
    if not callable(function):
        functions = [n for n, v in vars(module).items() if callable(v)]
        raise ConfigError(
            setting, spec, f"module {module_name!r} has no function {name!r} {nearest(name, functions)}".rstrip(),
            "name one of its functions",
        )  # fmt: skip
    return function


def check_parameters(function: Callable[..., Any], spec: str, setting: str, *parameters: str) -> None:
    """Refuse a function that cannot be called with as many positional arguments as it will be given.

    Args:
        parameters: names of the arguments, in their order; the function may name them otherwise.

    Raises:
        ConfigError: the function takes fewer, or needs more. One without a readable signature (written in C) passes.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:
        return
    try:
        signature.bind(*parameters)
    except TypeError as error:
        wanted, name = f"({', '.join(parameters)})", function.__qualname__
        raise ConfigError(
            setting,
            spec,
            f"it is called with {wanted}, and {name}{signature} takes no such call: {error}",
            f"write it as def {name}{wanted}",
        ) from error

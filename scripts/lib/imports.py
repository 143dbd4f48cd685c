"""Imports all given modules, in this order and in one process, as a trainer rank does.

Prints one line for each. Exits with status 1 at the first failure, with its exception as the last line of stdout, in
one line, and the traceback on stderr.
"""

from __future__ import annotations

import importlib
import sys
import traceback


def main(modules: list[str]) -> int:
    """Import the modules; returns the exit status."""
    for name in modules:
        try:
            module = importlib.import_module(name)
        except BaseException as error:  # a library may raise anything while it looks for its shared objects
            traceback.print_exc()
            text = " ".join(str(error).split())[:300]
            print(f"import {name} fails: {type(error).__name__}: {text}")
            return 1
        print(name, getattr(module, "__version__", ""))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

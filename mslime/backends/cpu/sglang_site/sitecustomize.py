"""Install the CPU platform at Python's start, in every process with this directory on PYTHONPATH (an SGLang server and
its children).

It does nothing unless the server was launched for CPU. A failure ends the process: Python would otherwise print one
line about sitecustomize and continue without the patches.
"""

import os

if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    from mslime.backends.cpu import sglang as platform
    from mslime.config.errors import EngineError

    try:
        platform.install()
    except EngineError as error:
        raise SystemExit(str(error)) from error

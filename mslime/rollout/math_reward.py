"""Mathematical equivalence of a response and its label, with math-verify. Runs inside a reward worker process.

math-verify's own time limits are switched off: they need signals on the main thread, and a worker that takes too long
is killed from outside.
"""

from __future__ import annotations

import logging

from math_verify import parse, verify

from mslime.data.sample import Sample

logging.getLogger("math_verify").setLevel(logging.ERROR)


def math_equivalent(sample: Sample) -> float:
    """1.0 when the response's final answer equals the label, else 0.0.

    The label is LaTeX or plain (`1/2`, `\\frac{1}{2}`, `$x=3$`); the response may carry its answer in `\\boxed{}`.

    Raises:
        ValueError: no answer can be read from the label.
    """
    label = str(sample.label)
    gold = parse(label if "boxed" in label or "$" in label else f"\\boxed{{{label}}}", parsing_timeout=0)
    if not gold:
        raise ValueError(f"no mathematical answer can be read from the label {label!r}")
    answer = parse(sample.response, parsing_timeout=0)
    return float(bool(answer) and verify(gold, answer, timeout_seconds=0))

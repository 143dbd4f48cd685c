"""Mathematical equivalence of a response and its label: reward kind `math`. Runs inside a reward worker process.

Other modules of `graders` read labels, locate answers in responses, and define equality.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mslime.data.sample import Sample
from mslime_plugins.graders.answers import answer_lines, candidates, final_part, math_labels
from mslime_plugins.graders.equality import equal
from mslime_plugins.graders.symbolic import TooLargeError


class UngradedError(Exception):
    """A response could not be graded; the reason is the message."""


def graded_math(sample: Sample) -> float:
    """1.0 when the response's final answer equals the label, else 0.0. Has no time limit: a worker process sets one.

    The label is LaTeX or plain (`1/2`, `\\frac{1}{2}`, `$x=3$`), or a list of alternatives; the response has its answer
    in `\\boxed{}`, else behind `answer is`, else at its end.

    Raises:
        UngradedError: the answer is too large to compute.
        ValueError: no answer can be read from the label.
    """
    return _grade(sample, candidates)


def graded_answer_line(sample: Sample) -> float:
    """1.0 if the last `Answer:` line of the response equals the label as mathematics, else 0.0.

    Raises UngradedError, ValueError.
    """
    return _grade(sample, lambda response: answer_lines(final_part(response))[-1:])


def _grade(sample: Sample, answers_of: Callable[[str], Sequence[str]]) -> float:
    golds = math_labels(sample.label)
    answers = answers_of(sample.response)
    refused = ""
    for gold in golds:
        for answer in answers:
            try:
                if equal(gold, answer):
                    return 1.0
            except TooLargeError as error:
                refused = f"the answer contains {error}"
            except (RecursionError, MemoryError) as error:
                refused = f"the answer is too deep or too large ({type(error).__name__})"
    if refused:
        raise UngradedError(refused)
    return 0.0

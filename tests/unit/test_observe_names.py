"""The list of metrics is what the code can report: nothing unknown is written, and nothing listed is never written."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from mslime.observe.names import METRICS, is_known, open_parts

PACKAGE = Path(__file__).parents[2] / "mslime"
READERS = {PACKAGE / "observe" / name for name in ("names.py", "rows.py", "progress.py")}
"""Modules that read metrics: a name there is no proof that it is written."""
SUPERVISED = ("nll", "perplexity", "tokens")
WRITTEN_BY_THE_LOG = {"step", "time"}


@functools.cache
def literals() -> tuple[frozenset[str], frozenset[object]]:
    """(what the package spells and may be a name, `{}` for what an f-string fills in; constants that may fill it)."""
    spelt: set[str] = set()
    constants: set[object] = set()
    pieces: set[int] = set()  # of f-strings, which ast.walk visits after the whole
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py") if path not in READERS}
    for path in trees:
        for node in ast.walk(trees[path]):
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values)
                spelt |= {text} if re.search(r"\w", text.replace("{}", "")) else set()
                pieces |= {id(v) for v in node.values}
            elif isinstance(node, ast.Constant) and isinstance(node.value, (str, int)) and id(node) not in pieces:
                constants.add(node.value)
                spelt.add(str(node.value))
    return frozenset(text for text in spelt if re.fullmatch(r"[\w{}/@]{1,80}", text)), frozenset(constants)


@functools.cache
def patterns() -> list[re.Pattern[str]]:
    return [re.compile("(.+)".join(re.escape(part) for part in text.split("{}"))) for text in literals()[0]]


def is_written(name: str) -> bool:
    """Whether a literal can be this name: its fields are open parts of the name or constants of the package."""
    constants = literals()[1]
    return any(
        all("{" in part or part in constants or (part.isdigit() and int(part) in constants) for part in found.groups())
        for pattern in patterns()
        if (found := pattern.fullmatch(name))
    )


@pytest.mark.slow
def test_every_listed_metric_is_written_somewhere() -> None:
    assert [name for name in METRICS.keys() - WRITTEN_BY_THE_LOG if not is_written(name)] == []


def test_every_name_that_the_code_spells_is_listed() -> None:
    rooms = "|".join({name.split("/")[0] for name in METRICS if "/" in name} - {"rollout", "weights", "eval"})
    whole = [text for text in literals()[0] if re.fullmatch(rf"({rooms})/[a-z0-9_/]+[a-z0-9]", text)]
    assert len(whole) > 50
    assert [name for name in whole if not is_known(name)] == []


def templates_of(names: dict[str, float]) -> set[str]:
    assert [name for name in names if not is_known(name)] == []
    return {template for name in names for template in METRICS if open_parts(template, name) is not None}


def test_losses_and_advantages_report_exactly_what_is_listed_for_them() -> None:
    import numpy as np
    import torch

    from mslime.algorithms.advantages_tokens import advantage_metrics
    from mslime.algorithms.losses import PolicyLossInputs, policy_loss, sft_loss, value_loss
    from mslime.algorithms.statistics import finalise
    from mslime.config.algorithm import AlgorithmConfig

    x = torch.linspace(-3, -1, 4)
    mask, zeros = torch.ones(4, dtype=torch.bool), torch.zeros(4, dtype=torch.int64)
    inputs = PolicyLossInputs(
        x, x - 0.1, x, mask, x.abs(), zeros, 1, reference_log_probs=x - 0.2, entropy=x.abs(), ages=zeros,
        positions=zeros,
    )  # fmt: skip
    outputs = policy_loss(inputs, AlgorithmConfig()), sft_loss(x, x.abs(), mask), value_loss(x, x, x, x, mask, 0.2)
    reported = templates_of({name: 0.0 for output in outputs for name in finalise(output.statistics)})
    reported |= templates_of(advantage_metrics([np.ones(2)], [np.ones(2, np.bool_)]))
    rooms = ("loss/", "entropy/", "mismatch/", "correction/", "advantage/")
    assert reported == {name for name in METRICS if name.startswith(rooms)}


def test_a_rollout_step_reports_exactly_what_is_listed_for_it() -> None:
    from mslime.data.ledger import Ledger
    from mslime.rollout.step_metrics import batch_metrics, summarise
    from mslime.run.assemble import assemble

    from .test_assemble import EIGHT_EXPERTS, make_config, make_group, with_routes

    groups = [with_routes(make_group(0, [1.0, 0.0]))]
    config = make_config(cluster={"trainer_ranks": 2}, megatron={"expert_model_parallel_size": 2})
    ledger = Ledger()
    ledger.generate(9)
    ledger.train(3)
    ledger.mask(3)
    ledger.drop(3, "stale")
    reported = templates_of(assemble(groups, config, 1, model=EIGHT_EXPERTS).metrics | batch_metrics(groups, 1))
    reported |= templates_of({f"ledger/{name}": 0.0 for name in ledger.settle(0)})
    reported |= templates_of(summarise("held_out", groups[:1], 1.0).metrics())
    rooms = ("reward/", "advantage/", "packing/", "staleness/", "ledger/", "eval/")
    elsewhere = {"reward/errors", "reward/{part}/mean", *(f"eval/{{set}}/{name}" for name in SUPERVISED)}
    assert reported >= {name for name in METRICS if name.startswith(rooms)} - elsewhere

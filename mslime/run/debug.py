"""Parts of a run alone: generation without a trainer, training without engines, evaluation without a loop.

Each writes into a separate directory beside the run's (`NAME-rollout`, `NAME-replay`, `NAME-eval`). It neither collides
with a running run nor changes a finished one.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from mslime import __version__
from mslime.checks.environment import refuse_without_gpu
from mslime.checks.resolve import ResolvedRun, resolve
from mslime.config.base import Task
from mslime.config.cluster import RunParts
from mslime.config.engines import SGLangConfig, TeacherConfig
from mslime.config.errors import ConfigError
from mslime.config.schema import ModelConfig, RunConfig
from mslime.data.checkpoints import newest, read_manifest, step_directory, steps
from mslime.data.sample import Group
from mslime.data.tokenizer import load_tokenizer
from mslime.logs import log_file
from mslime.observe.metrics import free_name
from mslime.observe.progress import open_progress
from mslime.rollout.group_files import fitted, group_files, read_groups
from mslime.rollout.step_metrics import batch_metrics
from mslime.run.assemble import SourceNames, assemble, references
from mslime.run.ray_cluster import resolved_device
from mslime.run.rollout_process import ONLY, RolloutActor, RolloutProcess
from mslime.run.run import only_run, owned, write_resolved
from mslime.run.run_checkpoints import export
from mslime.run.run_rollouts import RunRollouts, StepShards
from mslime.run.started import StartedRun
from mslime.run.stop import StopSignals
from mslime.run.training_run import TrainingRun

EVAL_FILE = "eval.json"
_WEIGHTS = "exported-"
SHOWN_GROUPS, SHOWN_CHARACTERS = 3, 400


# ---------------------------------------------------------------------------------------------------- engines without


class GenerationSession(StartedRun):
    """The engines and the rollout service of a run, with the weights that the engines start from.

    Attributes:
        rollouts: the service.
    """

    def __init__(self, run: ResolvedRun, stop: StopSignals, num_steps: int) -> None:
        super().__init__(run, stop)
        self._num_steps = num_steps

    def _start(self) -> None:
        config, logs = self.config, self._logs
        self.progress = self._stack.enter_context(open_progress(config.observe.progress, self._num_steps))
        self.progress.note(f"starting engines on {config.model.path}; logs in {logs}")
        cluster, watch = self._join_cluster(True, trainers=False)
        group = self._engine_group(cluster)
        engines, teachers = self._start_beside(lambda _: None, group, self._engine_group(cluster, "teacher"))
        self._take_over(group.attached, lambda _: None)
        self.rollouts = RolloutProcess(self._run, logs / "rollouts.log", watch.check)
        self._stack.callback(self.rollouts.stop)
        self.rollouts.process.call(RolloutActor.start, engines, [], {ONLY: (None, 0)}, teachers)
        self.rollouts.service.call(RunRollouts.count_as, 0)


def generate(config: RunConfig, num_steps: int, out: Path | None) -> int:
    """`mslime rollout`: the groups of `num_steps` steps, into files of `out`. Returns 0.

    Raises:
        UserError: a user's mistake, or a failed part.
        Stopped: a signal ended it.
    """
    config.refuse_several("mslime rollout")
    _wants_engines(config.train.task, "mslime rollout")
    if num_steps < 1:
        raise ConfigError("--steps", num_steps, "must be at least 1", "leave it out for one step")
    run, console = resolve(_alone(config, "rollout"), RunParts(trainers=False)), Console()
    directory = out or run.config.run_dir / "groups"
    rows: list[dict[str, float]] = []
    with _owned(run.config.run_dir, run.config.observe.log_level) as stop:
        write_resolved(run.config, run.config.run_dir / "config.yaml")
        with GenerationSession(run, stop, num_steps) as generation:
            for step in range(num_steps):
                rollouts = generation.rollouts
                collected = rollouts.service.begin(RunRollouts.collect, step, directory)
                rows.append(rollouts.groups(collected, generation.progress.rollout))
                generation.progress.step_done(step + 1, rows[-1])
    last = read_groups(directory / f"step_{num_steps}.npz")
    tokenizer = load_tokenizer(run.config.model.tokenizer)
    for group in last.groups[:SHOWN_GROUPS]:
        prompt = tokenizer.decode(group.samples[0].tokens[: group.samples[0].prompt_length].tolist())
        _print_group(console, group, prompt)
    console.print(_table("step", {str(i): row for i, row in enumerate(rows, 1)}, _ROLLOUT_COLUMNS))
    _say(console, f"{num_steps} step(s) in {directory}; train on them: mslime train RUN.yaml --replay {directory}")
    return 0


def _print_group(console: Console, group: Group, prompt: str) -> None:
    """Its prompt, and the responses with the highest and the lowest reward."""
    ordered = sorted(group.samples, key=lambda s: s.reward or 0.0, reverse=True)
    _say(console, f"\ngroup {group.group_id} of {group.source}, label {group.samples[0].label!r}")
    _say(console, f"  prompt: {_cut(prompt)}")
    for sample in ordered if len(ordered) == 1 else (ordered[0], ordered[-1]):
        length, status = sample.response_length, sample.status.value
        _say(console, f"  reward {sample.reward:g}, {length} tokens, {status}: {_cut(sample.response)}")


def _cut(text: str) -> str:
    """Shortened to one line."""
    line = repr(text)[1:-1]
    return line if len(line) <= SHOWN_CHARACTERS else f"{line[:SHOWN_CHARACTERS]} ... ({len(line)} characters)"


def _say(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, markup=False, highlight=False)


_ROLLOUT_COLUMNS = (
    ("reward", "reward/mean", "{:.3f}"),
    ("groups", "rollout/groups", "{:.0f}"),
    ("no signal", "reward/zero_variance_groups", "{:.0f}"),
    ("tokens", "rollout/response_len_mean", "{:.0f}"),
    ("longest", "rollout/response_len_max", "{:.0f}"),
    ("truncated", "rollout/truncated", "{:.1%}"),
    ("tok/s", "rollout/tokens_per_s", "{:.0f}"),
)


def _table(first: str, rows: dict[str, dict[str, float]], columns: Sequence[tuple[str, str, str]]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(first)
    for label, _, _ in columns:
        table.add_column(label, justify="right")
    for name, row in rows.items():
        table.add_row(name, *(form.format(row[key]) if key in row else "–" for _, key, form in columns))
    return table


# ------------------------------------------------------------------------------------------------ trainer without


class ReplaySession(TrainingRun):
    """A session without engines: it trains on groups from files, publishes no weights and saves no checkpoint."""

    parts: ClassVar[RunParts] = RunParts(engines=False)

    def __init__(self, run: ResolvedRun, stop: StopSignals, files: dict[int, Path]) -> None:
        super().__init__(run, stop)
        self._files, self._source_name = files, SourceNames()

    def take(self, step: int) -> StepShards:
        """The groups of a file as shards."""
        begin, path, model, config = self._timeline.now(), self._files[step + 1], self._run.model, self.config
        stored = read_groups(path)
        groups = fitted(stored, path, config.train, config.teacher.serves, model)
        work = assemble(groups, config, stored.version, self._source_name, model)
        shards = references(work.shards, config.layout, self._layers)
        end = self._timeline.now()
        self._timeline.record("driver", "read groups", begin, end, step + 1)
        waited = {"perf/wait_seconds": end - begin}
        return StepShards(shards, batch_metrics(groups, stored.version) | work.metrics | waited, b"")


def replay(config: RunConfig, directory: Path) -> int:
    """`mslime train --replay`: train on the groups in `directory`, step by step, at most `train.num_steps`. Returns 0.

    Raises:
        UserError: a user's mistake, groups that do not fit, or a failed part of the run.
        Stopped: a signal ended it.
    """
    config.refuse_several("mslime train --replay")
    if config.train.task == "sft":
        raise ConfigError("--replay", str(directory), "not supported in supervised training (train.task: sft)",
                          "leave --replay out, or set train.task: rl")  # fmt: skip
    files = dict(list(group_files(directory).items())[: config.train.num_steps])
    run = resolve(_alone(config, "replay"), RunParts(engines=False))
    with _owned(run.config.run_dir, run.config.observe.log_level) as stop:
        write_resolved(run.config, run.config.run_dir / "config.yaml")
        with ReplaySession(run, stop, files) as session:
            for step in (number - 1 for number in files):
                with session.step(step) as record:
                    batch = session.take(step)
                    record.update(batch.metrics)
                    record.update(session.train(batch.shards))
    Console(stderr=True).print(f"replayed {len(files)} step(s) of {directory}: {run.config.run_dir}", soft_wrap=True)
    return 0


# ------------------------------------------------------------------------------------------------------- evaluation


def evaluate(config: RunConfig, checkpoint: str | None) -> int:
    """`mslime eval`: scores on the held-out sets, as a table and in `eval.json`. Returns 0.

    Args:
        checkpoint: a training checkpoint's directory, its step, or `newest`; None: the weights of `model.path`.

    Raises:
        UserError: a user's mistake, or a failed part.
        Stopped: a signal ended it.
    """
    found = evaluated(config, checkpoint)
    console, metrics = Console(), found.metrics
    sets = [s.name for s in config.data.eval_sets]
    rows = {name: {k.removeprefix(f"eval/{name}/"): v for k, v in metrics.items()} for name in sets}
    passes = sorted({k for row in rows.values() for k in row if k.startswith("pass@")}, key=lambda k: int(k[5:]))
    columns = [("accuracy", "accuracy", "{:.1%}"), ("reward", "reward", "{:.3f}")]
    columns += [(k, k, "{:.1%}") for k in passes if k != "pass@1"]
    columns += [("tokens", "response_len_mean", "{:.0f}"), ("truncated", "truncated", "{:.1%}")]
    console.print(_table("set", rows, [*columns, ("seconds", "seconds", "{:.1f}")]))
    _say(console, f"weights: {found.weights}; written to {found.path}")
    return 0


@dataclass(frozen=True)
class EvalScores:
    """Result of an evaluation.

    Attributes:
        weights: the model, or the training checkpoint.
        step: step that the checkpoint continues at; None for a model.
        metrics: `eval/<set>/...`.
        path: the file with the same content.
    """

    weights: Path
    step: int | None
    metrics: dict[str, float]
    path: Path


def evaluated(config: RunConfig, checkpoint: str | None = None) -> EvalScores:
    """Evaluate, and write `eval.json`; see `evaluate`."""
    config.refuse_several("mslime eval")
    _wants_engines(config.train.task, "mslime eval")
    if not config.data.eval_sets:
        raise ConfigError("data.eval_sets", [], "no held-out data to evaluate on",
                          "list held-out files: data: {eval_sets: [{name: test, path: test.jsonl}]}")  # fmt: skip
    source = None if checkpoint is None else _checkpoint(config.run_dir / "checkpoints", checkpoint, config.sglang)
    # The teacher's scores are for training only.
    config = _alone(config, "eval").model_copy(update={"teacher": TeacherConfig()})
    quiet = config.observe.progress == "off"
    with (
        _owned(config.run_dir, config.observe.log_level) as stop,
        _loadable(config.model, source, config.run_dir, quiet) as model,
    ):
        run = resolve(config.model_copy(update={"model": model}), RunParts(trainers=False))
        write_resolved(config, config.run_dir / "config.yaml")
        with GenerationSession(run, stop, 1) as generation:
            found = generation.rollouts.service.call(RunRollouts.evaluate)
    step = read_manifest(source).extra.get("next_step") if source is not None else None
    scores = EvalScores(source or config.model.path, step, found.metrics, config.run_dir / EVAL_FILE)
    _write_scores(scores, found.end - found.begin)
    return scores


def _write_scores(scores: EvalScores, seconds: float) -> None:
    """Write `eval.json`; an earlier file is kept under a numbered name."""
    summary: dict[str, Any] = {
        "weights": str(scores.weights), "step": scores.step, "metrics": scores.metrics, "seconds": round(seconds, 3),
        "time": round(time.time(), 3), "mslime": __version__,
    }  # fmt: skip
    if scores.path.exists():
        scores.path.rename(free_name(scores.path))
    scores.path.write_text(json.dumps(summary, indent=1) + "\n")


@contextmanager
def _loadable(model: ModelConfig, checkpoint: Path | None, run_dir: Path, quiet: bool) -> Iterator[ModelConfig]:
    """The model in a form that engines can load: a checkpoint's weights are exported into `run_dir` meanwhile.

    Args:
        checkpoint: None: the model itself.
        quiet: show no progress.
    """
    for left in run_dir.glob(f"{_WEIGHTS}*"):  # left by a killed process; the directory is ours
        shutil.rmtree(left)
    if checkpoint is None:
        yield model
        return
    directory = run_dir / f"{_WEIGHTS}{checkpoint.name}"
    try:
        export(checkpoint, model.path, directory, quiet=quiet)
        yield model.model_copy(update={"path": directory, "tokenizer_path": model.tokenizer})
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _checkpoint(root: Path, text: str, engines: SGLangConfig) -> Path:
    """The training checkpoint that `--checkpoint` names.

    Args:
        root: directory of the run's own checkpoints.
        engines: settings of the engines that will serve it.
    """
    if engines.urls:
        raise ConfigError(
            "--checkpoint", text, "not supported with attached servers (sglang.urls), which keep their weights",
            "export it with `mslime convert run`, start a server on it, and leave --checkpoint out; or let mslime "
            "launch the engines (no sglang.urls)",
        )  # fmt: skip
    known = [path.name.removeprefix("step_") for path in steps(root)]
    if text == "newest":
        found = newest(root)
        if found is None:
            raise ConfigError("--checkpoint", text, f"{root} contains no checkpoint",
                              "specify its directory, or leave --checkpoint out to use model.path")  # fmt: skip
        return found
    found = step_directory(root, int(text)) if text.isdecimal() else Path(text)
    if not (found / "manifest.json").is_file():
        raise ConfigError("--checkpoint", text, f"{found} is not a checkpoint: manifest.json is missing", "specify a "
                          f"directory, newest, or a step of {root}: {', '.join(known) or 'none yet'}")  # fmt: skip
    return found


# ---------------------------------------------------------------------------------------------------------- together


def _wants_engines(task: Task, command: str) -> None:
    if task == "sft":
        raise ConfigError("train.task", "sft", f"supervised training has no engines, and {command} needs them",
                          "add --train.task rl, and a reward if none is set")  # fmt: skip


@contextmanager
def _owned(run_dir: Path, log_level: str) -> Iterator[StopSignals]:
    """Own the run directory, follow signals, and write a log inside the block."""
    log = log_file(run_dir / "logs" / "driver.log", "driver", log_level)
    with only_run(run_dir.name), StopSignals() as stop, owned(run_dir), log:
        yield stop


def _alone(config: RunConfig, suffix: str) -> RunConfig:
    """The run under a separate name, on the device found. Raises ConfigError if the device is missing."""
    config = resolved_device(config).model_copy(update={"name": f"{config.name}-{suffix}"})
    refuse_without_gpu(config.cluster)
    return config

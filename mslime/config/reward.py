"""Scoring of responses: graders, their weights, and penalties for length and repetition."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from mslime.config.base import Seconds, Section, check_choice, check_url
from mslime.config.errors import ConfigError, nearest
from mslime.config.plugins import found

KINDS = ("exact", "http", "judge", "custom")
"""Built-in kinds of reward; entry points of the group `mslime.rewards` name the others."""
LIMIT_S = 30.0
RESERVED_NAMES = ("source", "overlong", "repetition", "unshaped", "group")
"""Names below `reward/` that other metrics use."""


class RewardServersConfig(Section):
    """Reward servers: URLs, concurrency, retries and authentication."""

    url: str | list[str] | None = Field(
        default=None,
        description="One or several URLs. A request goes to the one with the fewest open requests, and a retry to "
        "another one.",
    )
    concurrency: int = Field(default=16, ge=1, description="Maximum open requests, over all URLs.")
    retries: int = Field(
        default=3, ge=0, description="Further attempts after a refused connection, a time-out, or HTTP 408, 429, 5xx."
    )
    auth_env: str | None = Field(
        default=None,
        description="Environment variable with the token of the header `Authorization: Bearer TOKEN`; never logged.",
    )

    @property
    def urls(self) -> tuple[str, ...]:
        """All URLs; empty when there is none."""
        if self.url is None:
            return ()
        return (self.url,) if isinstance(self.url, str) else tuple(self.url)


class HttpRewardConfig(RewardServersConfig):
    """A served reward model; docs/rewards.md describes its requests."""

    batch_size: int = Field(default=16, ge=1, description="Maximum samples of one request.")
    batch_wait_s: float = Field(default=0.05, le=1e9, ge=0, description="Seconds to wait until a request is full.")


class JudgeConfig(RewardServersConfig):
    """A language model that grades with a number, at an OpenAI-compatible `/v1/chat/completions`."""

    model: str | None = Field(default=None, description="Name of the model on the server.")
    template: str | None = Field(
        default=None,
        description="Question for the judge: a text with {response}, and with {prompt} and {label} if they matter.",
    )
    system: str | None = Field(default=None, description="System message before the question.")
    pattern: str | None = Field(
        default=None,
        description="Regular expression; the first group of its last match in the reply is the number, for example "
        "`Score: ([0-9.]+)`.",
    )
    field: str | None = Field(
        default=None, description="In place of pattern: the reply is a JSON object, and this is the number's key."
    )
    range: tuple[float, float] | None = Field(
        default=None, description="Lowest and highest valid number; any other is an error of the sample."
    )
    options: dict[str, Any] = Field(
        default_factory=lambda: {"temperature": 0.0, "max_tokens": 512},
        description="Further fields of the request, for example temperature, max_tokens or response_format.",
    )


class GraderConfig(Section):
    """One way to score a response."""

    kind: str = Field(
        default="exact",
        description="exact: equals the label. math: equals it as mathematics. answer_line: math on the last `Answer:` "
        "line. letters: multiple choice. f1: overlap of words. http: a served reward model. judge: a language model. "
        "custom: your function. Plug-ins add more (docs/plugins.md).",
    )
    function: str | None = Field(
        default=None,
        description="`module:function`(sample) -> float, sync or async, for kind custom; it may also return process "
        "rewards or extra metrics.",
    )
    per: Literal["sample", "group"] = Field(
        default="sample",
        description="custom: with group, the function is called once per prompt with all its finished samples, and "
        "returns a list of rewards.",
    )
    http: HttpRewardConfig = Field(default_factory=HttpRewardConfig)
    judge: JudgeConfig = Field(default_factory=JudgeConfig)
    timeout_s: Seconds | None = Field(
        default=None,
        description="Seconds for one sample (http, judge: one request). Default: 5 for math, else 30.",
    )
    workers: int = Field(default=2, ge=1, le=65536, description="Processes for kinds math, answer_line and custom.")

    @property
    def limit_s(self) -> float:
        """Seconds for scoring one sample with the kinds http, judge and custom."""
        return self.timeout_s or LIMIT_S

    @property
    def servers(self) -> tuple[str, RewardServersConfig] | None:
        """(section's name, settings) of this kind's servers; None if it has none."""
        return {"http": ("http", self.http), "judge": ("judge", self.judge)}.get(self.kind)


class RewardPartConfig(GraderConfig):
    """One of several rewards."""

    name: str = Field(description="Name in the metric reward/NAME/mean.")
    weight: float = Field(default=1.0, allow_inf_nan=False, description="Weight of this reward in the sum.")


class ScoringConfig(GraderConfig):
    """Scoring of responses, by one grader or by several."""

    on_error: Literal["fail", "zero", "drop"] = Field(
        default="fail",
        description="If a reward raises, hangs or is not finite: stop the run, count 0, or drop the sample. With kind "
        "math, a time-out always counts 0.",
    )
    parts: list[RewardPartConfig] = Field(
        default_factory=list[RewardPartConfig],
        description="Several graders in place of `kind` and `function`; the reward is the sum of weight x reward.",
    )

    @property
    def graders(self) -> list[RewardPartConfig]:
        """Graders with their names and weights; a single one is named by its kind."""
        if self.parts:
            return self.parts
        return [RewardPartConfig(name=self.kind, **{n: getattr(self, n) for n in GraderConfig.model_fields})]


class OverlongConfig(Section):
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13)."""

    buffer_tokens: int = Field(
        default=0,
        ge=0,
        description="Number of tokens before rollout.max_response_tokens over which the penalty grows from 0 to "
        "`factor`; 0: no penalty.",
    )
    factor: float = Field(default=1.0, ge=0, allow_inf_nan=False, description="The penalty at the limit.")


class RepetitionConfig(Section):
    """A penalty for n-grams of tokens that occur again within a response."""

    ngram: int = Field(default=0, ge=0, description="n; 0: no penalty. 20 detects loops, but not ordinary prose.")
    factor: float = Field(
        default=1.0, ge=0, allow_inf_nan=False, description="Penalty: factor x share of the response's n-grams that "
        "occurred before."
    )  # fmt: skip


class RewardConfig(ScoringConfig):
    """Scoring of a response: graders and penalties."""

    overlong: OverlongConfig = Field(default_factory=OverlongConfig)
    repetition: RepetitionConfig = Field(default_factory=RepetitionConfig)


def check_reward(reward: RewardConfig, *, max_response_tokens: int) -> None:
    """Check graders by `check_scoring`, and reject a length penalty without a start. Raises ConfigError."""
    check_scoring("reward", reward)
    if reward.overlong.buffer_tokens >= max_response_tokens:
        raise ConfigError(
            "reward.overlong.buffer_tokens",
            reward.overlong.buffer_tokens,
            f"must be below rollout.max_response_tokens = {max_response_tokens}",
            "a fifth of it is usual (DAPO: 4096 of 20480)",
        )


def check_scoring(place: str, scoring: ScoringConfig) -> None:
    """Reject a grader that lacks required settings, or has settings that it does not use.

    Args:
        place: path of the section, for messages.

    Raises:
        ConfigError: the first broken rule.
    """
    _check_parts(place, scoring)
    for where, grader in _with_places(place, scoring):
        _check_grader(where, grader)


def _with_places(place: str, scoring: ScoringConfig) -> Iterator[tuple[str, GraderConfig]]:
    if not scoring.parts:
        yield place, scoring
    for i, part in enumerate(scoring.parts):
        yield f"{place}.parts[{i}]", part


def _check_parts(place: str, scoring: ScoringConfig) -> None:
    names = [p.name for p in scoring.parts]
    for i, name in enumerate(names):
        if re.fullmatch(r"[A-Za-z][\w-]*", name) is None or name in RESERVED_NAMES:
            taken = ", ".join(RESERVED_NAMES)
            rule = f"must consist of letters, digits, _ and -, begin with a letter, and not be {taken}"
            raise ConfigError(f"{place}.parts[{i}].name", name, rule, "it becomes the metric reward/NAME/mean")
        if names.count(name) > 1:
            raise ConfigError(f"{place}.parts[{i}].name", name, "two parts have this name", "rename one of them")
    if scoring.parts and (scoring.function is not None or scoring.kind != "exact"):
        field = "function" if scoring.function is not None else "kind"
        raise ConfigError(
            f"{place}.{field}", getattr(scoring, field), "has no effect with parts", "move it into one of the parts"
        )


def _check_grader(place: str, grader: GraderConfig) -> None:
    if grader.kind not in KINDS and grader.kind not in (added := found("mslime.rewards")):
        known = [*KINDS, *added]
        raise ConfigError(f"{place}.kind", grader.kind, "unknown kind",
                          nearest(grader.kind, known) or f"choose one of {', '.join(known)}")  # fmt: skip
    if grader.function is not None:
        check_choice(f"{place}.function", grader.function, ())
    if (grader.kind == "custom") != (grader.function is not None):
        raise ConfigError(
            f"{place}.function",
            grader.function,
            f"must be set together with {place}.kind: custom (kind is {grader.kind!r})",
            "set both, or neither",
        )
    if grader.per == "group" and grader.kind != "custom":
        raise ConfigError(f"{place}.per", "group", f"kind {grader.kind} scores samples one by one",
                          "remove it, or set kind: custom and function")  # fmt: skip
    _check_servers(place, grader, "http", grader.http)
    _check_servers(place, grader, "judge", grader.judge)
    if grader.kind == "judge":
        _check_judge(f"{place}.judge", grader.judge)


def _check_servers(place: str, grader: GraderConfig, kind: str, servers: RewardServersConfig) -> None:
    where = f"{place}.{kind}.url"
    if (grader.kind == kind) != bool(servers.urls):
        raise ConfigError(
            where,
            servers.url,
            f"must be set together with {place}.kind: {kind} (kind is {grader.kind!r})",
            "set both, or neither",
        )
    for url in servers.urls:
        check_url(where, url, "http://10.0.0.5:8000/score")
    variable = servers.auth_env
    if variable is not None and re.fullmatch(r"[A-Za-z_]\w*", variable) is None:
        raise ConfigError(
            f"{place}.{kind}.auth_env", "(not shown)", "must be the name of an environment variable",
            "export the token in a variable, and set its name here",
        )  # fmt: skip


def _check_judge(place: str, judge: JudgeConfig) -> None:
    if not judge.template or not judge.template.strip():
        raise ConfigError(f"{place}.template", judge.template, "kind judge needs a template",
                          "write one with {prompt}, {response} and {label}")  # fmt: skip
    if "{response}" not in judge.template:
        raise ConfigError(f"{place}.template", judge.template, "must contain {response}",
                          "add {response} to the template")  # fmt: skip
    if (judge.pattern is None) == (judge.field is None):
        raise ConfigError(f"{place}.pattern", judge.pattern, f"exactly one of {place}.pattern and {place}.field must "
        "be set",
                          "set the one that fits the judge's replies")  # fmt: skip
    if judge.pattern is not None:
        _check_pattern(f"{place}.pattern", judge.pattern)
    if judge.range is not None and not judge.range[0] < judge.range[1]:
        raise ConfigError(f"{place}.range", list(judge.range), "must be [lowest, highest]", "for example [0, 10]")
    if taken := sorted({"messages", "model", "stream", "n"} & judge.options.keys()):
        raise ConfigError(f"{place}.options", ", ".join(taken), "mslime sets these fields itself",
                          "use the other settings of this section")  # fmt: skip


def _check_pattern(where: str, pattern: str) -> None:
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise ConfigError(
            where, pattern, f"is not a valid regular expression: {error}", "fix it; in YAML quote it with '...'"
        ) from error
    if groups == 0:
        raise ConfigError(where, pattern, "has no group for the number", "for example 'Score: ([0-9.]+)'")

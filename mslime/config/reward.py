"""How a response is scored: graders, their weights, and what is taken off for length and repetition."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from mslime.config.base import Section
from mslime.config.choices import check_choice
from mslime.config.errors import ConfigError

if TYPE_CHECKING:
    from mslime.config.schema import RunConfig

RewardKind = Literal["exact", "math", "answer_line", "letters", "f1", "http", "custom"]

MATH_SECONDS = 5.0
OTHER_SECONDS = 30.0
RESERVED_NAMES = ("source", "overlong", "repetition", "group")
"""Names that metrics below `reward/` have already."""


class HttpRewardConfig(Section):
    """A reward model that somebody serves; see docs/rewards.md for what it is sent."""

    url: str | None = Field(default=None, description="Where samples are posted, for kind http.")
    batch_size: int = Field(default=16, ge=1, description="Samples of one request at most.")
    batch_wait_s: float = Field(default=0.05, ge=0, description="Seconds for which a request waits to become full.")
    concurrency: int = Field(default=16, ge=1, description="Requests on their way at once.")
    retries: int = Field(
        default=3, ge=0, description="Further attempts after a refused connection, a time-out, or HTTP 408, 429, 5xx."
    )
    auth_env: str | None = Field(
        default=None,
        description="Environment variable with the token of the header `Authorization: Bearer TOKEN`, which is "
        "neither logged nor written to config.yaml.",
    )


class GraderConfig(Section):
    """One way to score a response."""

    kind: RewardKind = Field(
        default="exact",
        description="exact: equals the label. math: equals it as mathematics. answer_line: as math, read from the last "
        "`Answer:` line (DAPO). letters: the letter of a multiple choice (GPQA). f1: overlap of words with the label "
        "(SQuAD). http: a served reward model. custom: a function of yours.",
    )
    function: str | None = Field(
        default=None,
        description="`module:function`(sample) -> float, sync or async, for kind custom; it may also return process "
        "rewards or extra metrics.",
    )
    per: Literal["sample", "group"] = Field(
        default="sample",
        description="custom: group calls the function once a prompt, with the list of its finished samples; it returns "
        "a list of what it would return for each.",
    )
    http: HttpRewardConfig = Field(default_factory=HttpRewardConfig)
    timeout_s: float | None = Field(
        default=None, gt=0, description="Seconds for one sample (http: one request). Default: 5 for math, else 30."
    )
    workers: int = Field(default=2, ge=1, description="Processes for kinds math, answer_line and custom.")

    @property
    def limit_s(self) -> float:
        """Seconds that scoring one sample may take."""
        return self.timeout_s or (MATH_SECONDS if self.kind in ("math", "answer_line") else OTHER_SECONDS)


class RewardPartConfig(GraderConfig):
    """One of several rewards."""

    name: str = Field(description="Its metric is reward/NAME/mean.")
    weight: float = Field(
        default=1.0, allow_inf_nan=False, description="What it is multiplied with before it is added."
    )


class ScoringConfig(GraderConfig):
    """How responses are scored: by one grader, or by several."""

    on_error: Literal["fail", "zero", "drop"] = Field(
        default="fail",
        description="A reward that raises, hangs or is not finite: stop the run, count 0, or drop the sample. An "
        "answer that kind math cannot grade in time always counts 0.",
    )
    parts: list[RewardPartConfig] = Field(
        default_factory=list[RewardPartConfig],
        description="Several graders; the reward is the sum of weight x reward. `kind` and `function` are unused then.",
    )

    @property
    def graders(self) -> list[RewardPartConfig]:
        """The graders with their names and weights; a single one is called by its kind."""
        if self.parts:
            return self.parts
        return [RewardPartConfig(name=self.kind, **{n: getattr(self, n) for n in GraderConfig.model_fields})]


class OverlongConfig(Section):
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13)."""

    buffer_tokens: int = Field(
        default=0,
        ge=0,
        description="The last tokens below rollout.max_response_tokens in which the penalty grows from 0 to `factor`; "
        "0: no penalty.",
    )
    factor: float = Field(default=1.0, ge=0, allow_inf_nan=False, description="The penalty at the limit.")


class RepetitionConfig(Section):
    """A penalty for n-grams of tokens that occur again within a response."""

    ngram: int = Field(default=0, ge=0, description="n; 0: no penalty. 20 finds loops and leaves prose alone.")
    factor: float = Field(
        default=1.0, ge=0, allow_inf_nan=False, description="Taken off: factor x share of the response's n-grams that "
        "occurred before."
    )  # fmt: skip


class RewardConfig(ScoringConfig):
    """How a response is scored."""

    overlong: OverlongConfig = Field(default_factory=OverlongConfig)
    repetition: RepetitionConfig = Field(default_factory=RepetitionConfig)


def check_reward(config: RunConfig) -> None:
    """Raise ConfigError for a grader without what it needs, or with what it does not use."""
    places: list[tuple[str, ScoringConfig]] = [("reward", config.reward)]
    places += [(f"data.eval_sets[{i}].reward", s.reward) for i, s in enumerate(config.data.eval_sets) if s.reward]
    for place, scoring in places:
        _check_parts(place, scoring)
        for where, grader in _with_places(place, scoring):
            _check_grader(where, grader)
    if config.reward.overlong.buffer_tokens >= config.rollout.max_response_tokens:
        raise ConfigError(
            "reward.overlong.buffer_tokens",
            config.reward.overlong.buffer_tokens,
            f"must be below rollout.max_response_tokens = {config.rollout.max_response_tokens}",
            "a fifth of it is usual (DAPO: 4096 of 20480)",
        )


def _with_places(place: str, scoring: ScoringConfig) -> Iterator[tuple[str, GraderConfig]]:
    if not scoring.parts:
        yield place, scoring
    for i, part in enumerate(scoring.parts):
        yield f"{place}.parts[{i}]", part


def _check_parts(place: str, scoring: ScoringConfig) -> None:
    names = [p.name for p in scoring.parts]
    for i, name in enumerate(names):
        if re.fullmatch(r"[A-Za-z][\w-]*", name) is None or name in RESERVED_NAMES:
            rule = "a name is letters, digits, _ and -, begins with a letter, and is not " + ", ".join(RESERVED_NAMES)
            raise ConfigError(f"{place}.parts[{i}].name", name, rule, "it becomes the metric reward/NAME/mean")
        if names.count(name) > 1:
            raise ConfigError(f"{place}.parts[{i}].name", name, "two parts have this name", "rename one of them")
    if scoring.parts and (scoring.function is not None or scoring.kind != "exact"):
        field = "function" if scoring.function is not None else "kind"
        raise ConfigError(
            f"{place}.{field}", getattr(scoring, field), "parts say how to score", "move it into one of the parts"
        )


def _check_grader(place: str, grader: GraderConfig) -> None:
    if grader.function is not None:
        check_choice(f"{place}.function", grader.function, ())
    if (grader.kind == "custom") != (grader.function is not None):
        raise ConfigError(
            f"{place}.function",
            grader.function,
            f"goes together with {place}.kind: custom (kind is {grader.kind!r})",
            "set both, or neither",
        )
    if grader.per == "group" and grader.kind != "custom":
        raise ConfigError(f"{place}.per", "group", f"kind {grader.kind} scores samples one by one",
                          "remove it, or give a function of yours with kind: custom")  # fmt: skip
    url = grader.http.url
    if (grader.kind == "http") != (url is not None):
        raise ConfigError(
            f"{place}.http.url",
            url,
            f"goes together with {place}.kind: http (kind is {grader.kind!r})",
            "set both, or neither",
        )
    if url is not None and re.match(r"https?://[^/\s]+", url) is None:
        raise ConfigError(f"{place}.http.url", url, "is not a URL", "write for example http://10.0.0.5:8000/score")
    variable = grader.http.auth_env
    if variable is not None and re.fullmatch(r"[A-Za-z_]\w*", variable) is None:
        raise ConfigError(
            f"{place}.http.auth_env", "(not shown)", "must be the name of an environment variable",
            "put the token into a variable, and its name here",
        )  # fmt: skip

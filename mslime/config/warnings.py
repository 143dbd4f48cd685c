"""Warnings of `mslime check`: allowed combinations of settings that have no effect or are known to fail, with reasons.

Settings that corrupt a run are rejected by their section instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mslime.config.algorithm import (
    POLICY_LOSSES,
    AdvantageConfig,
    AlgorithmConfig,
    CorrectionConfig,
    CriticConfig,
    loss_traits,
)
from mslime.config.base import is_function
from mslime.config.cluster import ClusterConfig
from mslime.config.data import DataConfig
from mslime.config.engines import SGLangConfig
from mslime.config.megatron import MegatronConfig
from mslime.config.reward import RewardConfig
from mslime.config.rollout import RolloutConfig
from mslime.config.schema import ModelConfig, RunConfig
from mslime.config.train import TrainConfig
from mslime.config.transports import FALLBACK, owner_of, traits_of, transport_names, transports
from mslime.config.weights import WeightsConfig


def warnings(config: RunConfig) -> list[str]:
    """One or two sentences for each setting with no effect or a doubtful one: the setting, the reason, a remedy."""
    engines = {"megatron": config.megatron, "sglang": config.sglang, "teacher": config.teacher}
    if config.train.task == "sft":
        return [*_untested(engines)]
    algorithm, rollout, train = config.algorithm, config.rollout, config.train
    steps, staleness, on_stale = train.optimizer_steps_per_rollout, rollout.max_staleness, config.on_stale
    return [
        *_stale_tokens(rollout, on_stale),
        *_ratio_is_one(algorithm, steps),
        *_unbounded_weights(algorithm, steps, staleness),
        *_correction_without_effect(algorithm.correction, steps, staleness, on_stale),
        *_kl(algorithm),
        *_other_losses(algorithm),
        *_advantage(algorithm, rollout.dynamic_filter),
        *_never_binds(algorithm, steps, config.critic.value_clip if config.has_critic else None),
        *_unused_fields(algorithm, config.model, config.data, train),
        *_rewards_of_others(config.reward, rollout.function),
        *_weights(config.weights, config.sglang.urls),
        *_kept_engines(config.cluster, several=bool(config.adapters)),
        *_untested(engines),
    ]


def _untested(sections: Mapping[str, MegatronConfig | SGLangConfig]) -> Iterator[str]:
    """Engine fields that mslime neither rejects nor tests."""
    found = [f"{name}.{key}" for name, own in sections.items() for key in own.extra if key not in own.tested]
    if found:
        yield (
            f"{', '.join(found)}: passed on untested: no test and no launch script of mslime sets "
            f"{'it' if len(found) == 1 else 'them'}. Compare a short run with one without."
        )


def _ratio_is_one(algorithm: AlgorithmConfig, steps: int) -> Iterator[str]:
    traits = loss_traits(algorithm.loss)
    if steps > 1 or algorithm.correction.reference == "rollout":
        return
    if traits.plain_at_one:
        yield (
            f"algorithm.loss {algorithm.loss}: with train.optimizer_steps_per_rollout 1 and a recomputed old policy "
            "the ratio is 1 at its only use, so the loss is the plain policy gradient. Take more steps a rollout, or "
            "algorithm.correction.preset bypass, whose ratio is over the policy that sampled."
        )
    if traits.around_sampler:
        yield (
            f"algorithm.loss {algorithm.loss}: its trust region is meant to be around the policy that sampled, and is "
            "around the recomputed one, from which a single step never moves. Set algorithm.correction.preset bypass."
        )


def _unbounded_weights(algorithm: AlgorithmConfig, steps: int, staleness: int) -> Iterator[str]:
    correction, stale = algorithm.correction, staleness > 0
    if loss_traits(algorithm.loss).unbounded and (steps > 1 or (stale and correction.reference == "rollout")):
        yield (
            f"algorithm.loss {algorithm.loss}: its importance weight has no bound, and off-policy a few tokens can "
            "dominate the gradient (at a lag of 3 versions the KL has been seen to grow thirtyfold). Use cispo, which "
            "bounds it."
        )
    weighs = correction.action in ("mask", "drop") and correction.kept_weight == "ratio"
    if stale and weighs and correction.high is None and correction.reference == "recompute":
        yield (
            f"algorithm.correction.kept_weight ratio with rollout.max_staleness {staleness}: the "
            "weights have no upper bound. Set algorithm.correction.high, or kept_weight token."
        )
    if stale and not correction.corrects:
        yield (
            f"algorithm.correction.action none with rollout.max_staleness {staleness}: tokens of "
            "old weights are trained as if the current policy had sampled them. Use the preset tis, or bypass."
        )


def _correction_without_effect(
    correction: CorrectionConfig, steps: int, staleness: int, on_stale: str
) -> Iterator[str]:
    on_policy = staleness == 0 and steps == 1
    if correction.negative_advantage_only and on_policy:
        yield (
            "algorithm.correction.negative_advantage_only (OPSM) with one optimizer step a rollout and max_staleness "
            "0: the policy trained is the one that sampled, so only numerical differences between trainer and engine "
            "decide which sequences are dropped. Take more steps, allow staleness, or use preset tis."
        )
    if correction.action in ("truncate", "clip") and correction.reference == "rollout":
        yield (
            f"algorithm.correction.action {correction.action} has no effect with reference rollout: the loss's own "
            "ratio is over the policy that sampled, and is not weighted twice. Use preset bypass, or reference "
            "recompute."
        )
    if correction.max_age is not None and correction.max_age >= staleness and on_stale != "keep":
        yield (
            f"algorithm.correction.max_age {correction.max_age} never binds: no trained token is older than "
            f"rollout.max_staleness {staleness}. Lower it."
        )
    if correction.level == "segment" and staleness == 0:
        yield (
            "algorithm.correction.level segment with rollout.max_staleness 0: every response is of one weight version, "
            "so this is level sequence."
        )


def _kl(algorithm: AlgorithmConfig) -> Iterator[str]:
    if algorithm.kl_coef == 0:
        return
    if algorithm.kl_type == "k1" and algorithm.kl_in == "loss" and not algorithm.kl_unbiased:
        yield (
            "algorithm.kl_type k1 in the loss: the gradient of log pi - log ref is that of log pi, which is zero on "
            "average, so nothing is pulled to the reference. Use k2 or low_var, kl_unbiased, or kl_in reward."
        )
    if algorithm.kl_unbiased and algorithm.kl_in == "reward":
        yield "algorithm.kl_unbiased has no effect with kl_in reward: nothing is differentiated there."


def _other_losses(algorithm: AlgorithmConfig) -> Iterator[str]:
    traits, plain = loss_traits(algorithm.loss), AlgorithmConfig()
    if algorithm.clip_dual is not None and not traits.clips_dual:
        dual = " and ".join(name for name, loss in POLICY_LOSSES.items() if loss.clips_dual)
        yield f"algorithm.clip_dual has no effect on the loss {algorithm.loss}; only {dual} use it."
    others = {} if is_function(algorithm.loss) else {loss.section: name for name, loss in POLICY_LOSSES.items()}
    for section, name in others.items():
        if section and name != algorithm.loss and getattr(algorithm, section) != getattr(plain, section):
            yield f"algorithm.{section} has no effect: it belongs to the loss {name}, and the loss is {algorithm.loss}."
    if traits.of_responses and algorithm.loss_aggregation == "token":
        yield (
            f"algorithm.loss_aggregation token with {algorithm.loss}: its objective is one number per response, and "
            "this counts it once per token, so long responses weigh more. The paper uses sequence."
        )


def _advantage(algorithm: AlgorithmConfig, dynamic_filter: str) -> Iterator[str]:
    start = AdvantageConfig()
    of = {"gamma": ("reinforce_pp", "gae"), "gae_lambda": ("gae",), "normalise_std": ("grpo",)}
    for field, users in of.items():
        if getattr(algorithm, field) != getattr(start, field) and algorithm.advantage not in users:
            yield (
                f"algorithm.{field} has no effect: it belongs to the advantage {' and '.join(users)}, and the "
                f"advantage is {algorithm.advantage}."
            )
    if algorithm.advantage == "reinforce_pp" and not algorithm.whitens:
        yield (
            "algorithm.whiten false with reinforce_pp: the return has no baseline, so with non-negative rewards every "
            "response becomes more likely, right or wrong. Leave whiten on, or use reinforce_pp_baseline."
        )
    teaches = algorithm.advantage in ("reinforce_pp", "gae") or algorithm.opd_coef > 0
    if teaches and dynamic_filter == "zero_variance":
        why = "opd_coef" if algorithm.opd_coef > 0 else algorithm.advantage
        yield (
            f"rollout.dynamic_filter zero_variance with {why}: groups of equal rewards also have a training signal "
            "here, and would be generated in vain. Set it to none."
        )


def _never_binds(algorithm: AlgorithmConfig, steps: int, value_clip: float | None) -> Iterator[str]:
    """Clips around values from before the update, in runs that use each rollout once."""
    if steps > 1:
        return
    if algorithm.clip_dual is not None and algorithm.loss == "ppo" and algorithm.correction.reference == "recompute":
        yield (
            f"algorithm.clip_dual {algorithm.clip_dual:g} never binds: with train.optimizer_steps_per_rollout 1 and a "
            "recomputed old policy the ratio is 1 at its only use. Take more steps, or use preset bypass."
        )
    if value_clip is not None and value_clip != CriticConfig().value_clip:
        yield (
            f"critic.value_clip {value_clip:g} never binds: with train.optimizer_steps_per_rollout 1 a value is used "
            "only once, before it changes. Take more steps, or remove it."
        )


def _unused_fields(
    algorithm: AlgorithmConfig, model: ModelConfig, data: DataConfig, train: TrainConfig
) -> Iterator[str]:
    correction, plain = algorithm.correction, AlgorithmConfig()
    if data.source is not None and data.prompts:
        yield "data.prompts has no effect: prompts come from data.source."
    if not loss_traits(algorithm.loss).clips:
        for field in ("clip_low", "clip_high"):
            if getattr(algorithm, field) != getattr(plain, field):
                yield f"algorithm.{field} has no effect: the loss {algorithm.loss} does not clip."
    if model.reference_path is not None and algorithm.kl_coef == 0:
        yield (
            "model.reference_path has no effect with algorithm.kl_coef 0: no reference policy is loaded. Set kl_coef."
        )
    if correction.token_cap != plain.correction.token_cap and correction.kept_weight != "token":
        yield "algorithm.correction.token_cap has no effect: it bounds weights with kept_weight token only."
    if correction.old_weight != 0 and correction.max_age is None:
        yield "algorithm.correction.old_weight has no effect without max_age: no token is too old."
    if train.replay_max_age is not None and train.replay != "r3":
        yield f"train.replay_max_age has no effect with train.replay {train.replay}: no route has an age."
    if correction.normalise and not correction.corrects and correction.max_age is None:
        yield "algorithm.correction.normalise has no effect with action none: every weight is 1."


def _rewards_of_others(reward: RewardConfig, function: str) -> Iterator[str]:
    shaped = (("overlong", reward.overlong.buffer_tokens), ("repetition", reward.repetition.ngram))
    for name, on in shaped:
        if on and function != "single_turn":
            yield (
                f"reward.{name} has no effect on rewards that rollout.function {function} sets itself: it applies to "
                "rewards of the section reward."
            )


def _stale_tokens(rollout: RolloutConfig, on_stale: str) -> Iterator[str]:
    if rollout.over_sampling > 1 and rollout.max_staleness > 0 and rollout.dynamic_filter == "none":
        yield (
            f"rollout.over_sampling {rollout.over_sampling:g} has no effect with max_staleness {rollout.max_staleness} "
            "and no dynamic_filter: work for later steps is under way already, and no group is refused."
        )
    if rollout.max_staleness == 0 and rollout.spare_groups and rollout.partial and on_stale == "mask":
        yield (
            "rollout.partial with max_staleness 0 and over_sampling: the tokens of responses that are cut short are "
            "kept, and masked a step later, up to half of all tokens. Set max_staleness 1, partial false, or "
            "over_sampling 1."
        )
    if on_stale == "keep" and rollout.max_staleness == 0 and rollout.partial:
        yield (
            "rollout.on_stale keep with max_staleness 0: responses that are continued have tokens of older weights, so "
            "the run is not on-policy. Leave on_stale alone, or set max_staleness 1."
        )


def _weights(weights: WeightsConfig, engine_urls: list[str]) -> Iterator[str]:
    traits, own = traits_of(weights.transport), {name for each in transports().values() for name in each.settings}
    writes_files = weights.carrier not in transport_names() or traits_of(weights.carrier).uses_directory
    if weights.directory is not None and not writes_files:
        how = f"weights.{'delta_over' if traits.sends_changes else 'transport'} is {weights.carrier}"
        yield f"weights.directory has no effect: {how}, and only disk and delta write files."
    for name in sorted(own - set(traits.settings)):
        if getattr(weights, name) != WeightsConfig.model_fields[name].default:
            yield (
                f"weights.{name} has no effect: weights.transport is {weights.transport}, and only {owner_of(name)} "
                "uses it."
            )
    if traits.sends_changes and weights.loader == "model":
        yield (
            f"weights.transport {weights.transport} with weights.loader model: engines need recorded copies to apply "
            "changes, so every bucket will be sent completely. Remove weights.loader, or set weights.transport "
            f"{weights.delta_over}."
        )
    if traits.needs_plugin and engine_urls:
        yield (
            f"weights.transport {weights.transport} with sglang.urls: a server that was started without mslime's "
            "plug-in (mslime/engine_plugin/path_entry on its PYTHONPATH) is rejected when the run connects to it. Set "
            f"weights.transport {FALLBACK}."
        )


def _kept_engines(cluster: ClusterConfig, *, several: bool) -> Iterator[str]:
    if "restarts" in cluster.model_fields_set and cluster.restarts and (cluster.colocated or several):
        why = "engines share the trainer's GPUs" if cluster.colocated else "several adapters are trained"
        yield (
            f"cluster.restarts {cluster.restarts} has no effect: {why}, so engines do not survive the loss of a "
            "trainer rank. scripts/train_again.sh starts the whole run again."
        )

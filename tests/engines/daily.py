"""Default cases of tests with many cases: one, or a few with different code paths.

The others are marked `nightly`; `scripts/test.sh --all` runs them.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

PARALLEL_FAMILIES = [
    f"{family} {{'tp': 2, 'pp': 2, 'ep': 2}}" for family in ("deepseek-v3", "gpt-oss", "qwen3-moe", "qwen3-next")
]
DAILY: dict[str, list[str]] = {
    "test_an_episode_holds_what_each_version_sampled": ["other weights"],
    "test_every_ratio_is_that_of_an_independent_computation": ["other weights-tp2_ep2"],
    "test_gradients_of_the_routers_losses_are_those_without_padding": ["cp2"],
    "test_a_resumed_run_continues_the_uninterrupted_loss_curve": ["dp2_ep2_distopt-pp2_vpp2_distopt"],
    "test_a_checkpoint_is_as_large_as_planned": ["tp2_ep2_distopt"],
    "test_a_damaged_checkpoint_is_refused_on_every_rank_by_file": ["truncated"],
    "test_a_checkpoint_of_somebody_else_runs_no_code": ["stored object"],
    "test_clients_steps_are_those_of_peft_in_every_layout": ["dp2_distributed_optimizer_overlapped"],
    "test_a_trainer_that_sleeps_learns_the_same_bits": ["DP2 EP2 in bfloat16, main weights, gathers that overlap-disk"],
    "test_megatron_core_loads_a_converted_checkpoint_as_the_weights_that_hugging_face_gives": [
        "moe-{'tp': 2, 'pp': 2, 'ep': 2}"
    ],
    "test_a_training_checkpoint_becomes_the_trainers_own_export_without_a_trainer": [
        "{'tp': 2, 'ep': 2, 'dp': 2, 'use_distributed_optimizer': True}"
    ],
    "test_segments_and_ages_are_corrected_alike_in_every_layout": ["cp2"],
    "test_values_loss_and_gradient_are_those_of_transformers": ["untied"],
    "test_every_layout_learns_what_one_process_learns": ["tied-pp2_vpp2_distopt"],
    "test_routes_and_routers_give_one_process_loss_and_gradients_in_a_parallel_layout": ["v3"],
    "test_no_layer_keeps_a_micro_batch_after_the_step": ["recompute1"],
    "test_megatron_logits_equal_transformers_within_1e_5": PARALLEL_FAMILIES,
    "test_a_checkpoint_comes_back_bit_for_bit": PARALLEL_FAMILIES,  # the same runs
    "test_the_export_equals_mbridges_bit_for_bit": ["qwen3-moe {'tp': 2, 'pp': 2, 'ep': 2, 'vpp': 2}"],
    "test_a_bfloat16_checkpoint_comes_back_bit_for_bit": ["deepseek-v3", "qwen3-moe"],
    "test_every_parameter_of_every_rank_is_made_by_one_rule": [
        "qwen3-30B-A3B {'ranks': 64, 'tp': 8, 'pp': 2, 'ep': 32}"
    ],
    "test_every_checkpoint_name_and_shape_is_the_one_of_transformers": ["gpt-oss-20b", "qwen3-30B-A3B"],
    "test_the_held_out_loss_is_that_of_transformers_in_every_layout": ["sizes1"],
    "test_loss_and_gradients_are_transformers": ["qwen3-next"],
    "test_loss_and_gradients_of_a_parallel_layout_are_those_of_one_process": ["qwen3-next"],
    "test_another_layout_goes_on_from_a_checkpoint": ["{'tp': 2, 'ep': 2, 'dp': 2}"],
    "test_a_checkpoint_of_other_adapters_is_refused": ["{'rank': 8, 'alpha': 6}"],
    "test_an_exported_adapter_is_read_by_peft_and_started_from": ["{'tp': 2, 'ep': 2, 'pp': 2}"],
    "test_adapters_train_like_one_process": ["tp2_ep2_recompute"],
    "test_adapters_learn_what_peft_learns": ["qwen3-moe"],
    "test_each_of_eight_adapters_is_that_of_its_own_run": ["one_process"],
    "test_a_layout_gives_the_output_and_gradients_of_one_process": ["2-2-True"],
    "test_a_layout_trains_like_one_process": [
        "dp2_distributed_optimizer_overlapped",
        "pp2_vpp2_recompute",
        "cp2_tp2_ep2",
    ],
    "test_log_probs_from_hidden_states_train_like_those_of_logits": ["cp2_tp2_ep2"],
    "test_forced_random_routes_train_like_one_process": ["pp2_vpp2_recompute"],
    "test_recorded_routes_train_like_one_process": ["dp2_tp2_ep2"],
    "test_tied_embeddings_of_a_dense_model_train_like_one_process": ["tp2_pp2"],
    "test_weights_that_are_not_finite_are_refused_by_file_and_name": ["layers.1.mlp.experts.5.up_proj.weight-nan"],
    "test_the_harness_ends_with_the_reason_and_in_time": ["raises-the reason"],
    "test_every_parameter_of_a_full_size_prediction_layer_is_made_by_one_rule": ["qwen3-next-80B-A3B"],
    "test_a_prediction_layer_computes_what_transformers_computes": ["TP2 EP2"],
    "test_training_and_checkpoints_under_tensor_parallelism_equal_one_process": ["minimax-m2"],
    "test_padding_spreads_over_the_experts_as_tokens_do_and_changes_no_gradient": ["cp2_tp2_ep2"],
    "test_parameter_gradient_and_optimizer_bytes_are_what_real_ranks_allocate": [
        "TP2 EP2 PP2",
        "TP2 DP2, state not sharded",
    ],
    "test_later_weights_arrive_quantised": ["broadcast"],
    "test_random_routes_give_the_loss_and_gradients_of_one_process_in_every_layout": [
        "cp2_tp2_ep2",
        "pp2_vpp2_recompute",
    ],
    "test_log_probs_match_the_engine_on_every_generated_token": ["tp2_ep2"],
    "test_engine_and_trainer_say_the_same_of_a_probe": ["pp2_vpp2"],
    "test_a_response_that_crosses_a_weight_update_holds_what_each_version_made": ["abort"],
    "test_log_probs_are_those_of_the_sampled_distribution_with_temperature": ["0.7"],
    "test_a_pause_holds_requests_back_and_spans_show_the_version_change": ["retract"],
    "test_supports_are_what_the_settings_keep_and_log_probs_are_over_them": ["all"],
    "test_supports_outlive_a_pause_in_which_the_engine_keeps_the_request": ["in_place"],
    "test_every_layout_agrees_with_the_engine_and_gives_one_process_s_loss_and_gradient": ["cp2"],
    "test_watched_log_probs_are_those_of_the_policy_before_its_update": ["tp2_pp2_ep2", "old_log_probs"],
    "test_two_engines_hold_what_all_senders_sent_and_each_senders_buckets_came_in_the_order_of_the_plan": [
        "tp2 ep2 pp2-",
        "transportrelay tp2 ep2 pp2-",
    ],
    "test_all_senders_use_the_same_transport_where_settings_leave_it_to_the_engines": ["one without the plug-in"],
    "test_engines_wait_for_no_bucket_that_cannot_be_filled_and_the_next_sync_is_whole": ["experts"],
    "test_the_engine_serves_the_trainers_weights_under_their_version": ["tp2 ep2", "relay tp2 ep2", "handles dp2 ep2"],
    "test_changes_alone_bring_an_engine_to_the_trainers_weights_and_are_refused_by_one_that_has_others": [
        "broadcast dp2 ep2"
    ],
}
"""Ids of cases by function."""


def mark_nightly(items: Iterable[pytest.Item]) -> None:
    """Mark the cases in `DAILY`'s tests that do not run by default."""
    for item in items:
        chosen = DAILY.get(item.originalname) if isinstance(item, pytest.Function) else None
        if chosen is not None and item.callspec.id not in chosen:
            item.add_marker(pytest.mark.nightly)

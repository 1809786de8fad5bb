"""Which tests show what an option does, by its name; `tests/session/test_every_option.py` asks that each has one."""

ADAPTERS = "session/test_train_command.py::test_adapters_are_trained_where_a_rank_is_given"
EFFECTS: dict[str, tuple[str, ...]] = {
    "pretrain": ("session/test_train_command.py::test_the_session_is_made_with_the_options_that_concern_it",),
    "use_ms": (
        "session/test_modelscope.py::test_models_named_by_an_id_are_fetched_and_folders_and_embedded_ones_are_not",
    ),
    "freeze_prefix": ("session/test_train_command.py::test_what_does_not_train_is_named_by_its_beginning",),
    "lora_rank": (ADAPTERS,),
    "lora_alpha": (ADAPTERS,),
    "lora_targets": (ADAPTERS,),
    "lora_dropout": (ADAPTERS,),
    "teacher": (
        "session/test_train_command.py::test_a_run_distils_from_its_teacher_and_another_trains_a_reward_model",
    ),
    "reward_pretrain": (
        "trainers/test_run_config.py::test_several_reward_models_and_services_are_lists_and_one_is_one",
        "session/test_run_data.py::test_several_rewards_are_a_list_with_the_folders_of_models_first",
    ),
    "reward": (
        "session/test_run_data.py::test_rewards_are_functions_of_files_and_modules_the_built_in_one_and_checked_mathematics",
    ),
    "reward_fn": (
        "session/test_train_command.py::test_the_trainer_is_given_what_concerns_it_and_nothing_of_the_session",
    ),
    "enable_ema": (
        "session/test_train_command.py::test_a_run_is_stopped_by_ctrl_c_leaves_nothing_and_a_second_one_goes_on_to_its_end",
    ),
    "pooling": (
        "session/test_train_command.py::test_a_run_distils_from_its_teacher_and_another_trains_a_reward_model",
    ),
    "probing_layer": (
        "session/test_train_command.py::test_a_run_distils_from_its_teacher_and_another_trains_a_reward_model",
    ),
    "heads": ("session/test_train_command.py::test_a_run_distils_from_its_teacher_and_another_trains_a_reward_model",),
    "data": ("session/test_run_data.py::test_a_file_of_texts_is_read_as_the_method_wants_it",),
    "max_length": ("session/test_run_data.py::test_a_file_of_texts_is_read_as_the_method_wants_it",),
    "loss": ("session/test_run_data.py::test_a_loss_is_written_as_python_would_or_found_in_a_file",),
    "token_budget": (
        "trainers/test_text_trainer.py::test_its_curve_is_that_of_a_plain_loop_however_the_texts_are_packed",
    ),
    "prompt_data": ("session/test_run_data.py::test_a_file_gives_prompts_with_labels_and_their_other_columns",),
    "prompt_data_probs": (
        "trainers/test_run_config.py::test_shares_belong_to_sources",
        "session/test_run_data.py::test_several_sources_are_mixed_in_the_shares_asked_for",
    ),
    "prompt_split": (
        "session/test_run_data.py::test_a_folder_has_splits_and_a_file_is_one",
        "session/test_run_data.py::test_the_built_in_tasks_splits_do_not_mix",
    ),
    "eval_data": ("session/test_run_data.py::test_a_folder_has_splits_and_a_file_is_one",),
    "eval_split": ("session/test_run_data.py::test_a_folder_has_splits_and_a_file_is_one",),
    "max_eval_samples": ("session/test_run_data.py::test_no_more_prompts_are_read_than_asked_for",),
    "input_key": ("session/test_run_data.py::test_columns_go_by_the_names_they_are_given",),
    "label_key": ("session/test_run_data.py::test_columns_go_by_the_names_they_are_given",),
    "reference_key": (
        "session/test_run_data.py::test_a_reference_answer_stands_beside_a_label_that_says_the_kind_of_task",
    ),
    "input_template": ("session/test_run_data.py::test_a_template_makes_the_prompt_of_a_rows_columns",),
    "apply_chat_template": (
        "session/test_run_data.py::test_texts_become_chats_where_the_template_or_a_system_prompt_asks_for_it",
    ),
    "system_prompt": (
        "session/test_run_data.py::test_texts_become_chats_where_the_template_or_a_system_prompt_asks_for_it",
    ),
    "max_samples": ("session/test_run_data.py::test_no_more_prompts_are_read_than_asked_for",),
    "num_episodes": ("session/test_train_command.py::test_a_run_is_as_long_as_its_episodes_or_its_steps",),
    "max_steps": ("session/test_train_command.py::test_a_run_is_as_long_as_its_episodes_or_its_steps",),
    "lr_schedule": (
        "session/test_train_command.py::test_a_run_on_texts_is_as_long_as_its_passes_and_gives_the_trainer_what_acts",
        "session/test_train_command.py::test_a_schedule_lasts_for_the_optimizer_steps_of_the_run_or_there_is_none",
    ),
    "shards": ("trainers/test_run_config.py::test_batches_that_ranks_cannot_share_are_refused_with_the_numbers",),
    "replicas": ("session/test_train_command.py::test_the_session_is_made_with_the_options_that_concern_it",),
    "kv_cache_bytes": ("session/test_train_command.py::test_the_session_is_made_with_the_options_that_concern_it",),
    "metrics_file": (
        "session/test_train_command.py::test_all_metrics_of_each_iteration_are_kept_as_lines_where_a_file_is_named",
    ),
    "reward_failures": (
        "trainers/test_experience_maker.py::test_more_failures_than_are_allowed_end_the_iteration",
        "trainers/test_experience_maker.py::test_a_group_whose_reward_failed_is_left_out_counted_and_told_with_its_row",
    ),
    "no_signal": (
        "trainers/test_update.py::test_a_step_without_a_signal_says_so_and_moves_by_moments_unless_it_is_left_out",
    ),
    "rollout_batch_size": (
        "trainers/test_ppo_trainer.py::test_an_iteration_steps_once_for_each_train_batch_and_then_syncs",
    ),
    "prompt_max_len": ("trainers/test_experience_maker.py::test_a_prompt_that_is_too_long_is_named",),
    "max_tokens": ("trainers/test_experience_maker.py::test_options_of_sampling_reach_the_engine_under_its_names",),
    "temperature": ("trainers/test_update.py::test_the_temperature_of_the_sampler_divides_the_logits",),
    "top_p": ("trainers/test_experience_maker.py::test_options_of_sampling_reach_the_engine_under_its_names",),
    "top_k": ("trainers/test_experience_maker.py::test_options_of_sampling_reach_the_engine_under_its_names",),
    "use_fire": ("trainers/test_experience_maker.py::test_options_of_sampling_reach_the_engine_under_its_names",),
    "first_token_temperature": (
        "trainers/test_experience_maker.py::test_options_of_sampling_reach_the_engine_under_its_names",
        "workers/test_replica_vllm.py::test_a_first_token_has_a_temperature_of_its_own_and_the_rest_follows_on_it",
    ),
    "template": (
        "trainers/test_experience_maker.py::test_options_of_the_chat_template_reach_the_engine_and_the_tokens",
        "session/test_run_data.py::test_options_of_the_chat_template_count_where_prompts_and_texts_are_read",
    ),
    "tools": (
        "trainers/test_experience_maker.py::test_options_of_the_chat_template_reach_the_engine_and_the_tokens",
        "session/test_run_data.py::test_options_of_the_chat_template_count_where_prompts_and_texts_are_read",
    ),
    "buffer_limit": ("trainers/test_replay_buffer.py::test_the_limit_keeps_the_newest_sequences",),
    "max_epochs": (
        "trainers/test_ppo_trainer.py::test_smaller_train_batches_step_more_often_and_epochs_go_over_all_again",
    ),
    "aggregation": ("trainers/test_update.py::test_the_gradient_is_that_of_a_dense_step_for_each_aggregation",),
    "clip_low": ("trainers/test_loss_choice.py::test_the_options_mean_this_loss",),
    "clip_high": ("trainers/test_loss_choice.py::test_the_options_mean_this_loss",),
    "use_gspo": ("trainers/test_loss_choice.py::test_the_options_mean_this_loss",),
    "use_cpg_loss": ("trainers/test_loss_choice.py::test_the_options_mean_this_loss",),
    "entropy_coef": ("trainers/test_loss_choice.py::test_the_options_mean_this_loss",),
    "high_entropy_token_ratio": (
        "trainers/test_update.py::test_the_high_entropy_filter_sees_the_whole_step_however_it_is_split",
    ),
    "old_logprobs": (
        "trainers/test_experience_maker.py::test_with_the_samplers_logprobs_the_actor_looks_at_one_micro_batch_alone",
    ),
    "mismatch": ("trainers/test_loss_choice.py::test_the_options_mean_this_loss",),
    "ptx_coef": (
        "trainers/test_update.py::test_pretraining_text_adds_its_own_mean_whatever_the_policy_is_normalised_by",
    ),
    "gradient_checkpointing": ("trainers/test_trainer_options.py::test_recomputed_activations_change_no_step",),
    "kl_coef": ("trainers/test_experience_maker.py::test_the_weight_of_the_kl_is_the_controllers_of_that_moment",),
    "kl_target": ("trainers/test_ppo_trainer.py::test_the_weight_of_the_kl_adapts_and_the_loss_follows_it",),
    "kl_horizon": ("trainers/test_ppo_trainer.py::test_the_weight_of_the_kl_adapts_and_the_loss_follows_it",),
    "value_clip": ("trainers/test_update.py::test_the_critics_gradient_is_that_of_a_dense_step",),
    "gamma": ("trainers/test_advantage_stage.py::test_each_estimator_is_what_loops_over_tokens_give",),
    "lambd": ("trainers/test_advantage_stage.py::test_each_estimator_is_what_loops_over_tokens_give",),
    "freezing_actor_steps": (
        "trainers/test_ppo_trainer.py::test_a_critic_learns_beside_the_policy_and_alone_while_the_actor_is_frozen",
    ),
    "ema_beta": ("trainers/test_ppo_trainer.py::test_the_average_follows_the_actor_after_each_step",),
    "save_path": (
        "trainers/test_ppo_trainer.py::test_lengths_trajectories_and_tensorboard_are_written_where_the_options_say",
    ),
    "save_steps": ("trainers/test_ppo_trainer.py::test_fit_goes_on_where_it_was_from_a_checkpoint",),
    "ckpt_path": ("trainers/test_ppo_trainer.py::test_fit_goes_on_where_it_was_from_a_checkpoint",),
    "max_ckpt_num": ("trainers/test_trainer_options.py::test_as_many_checkpoints_are_kept_as_the_options_allow",),
    "max_ckpt_mem": ("trainers/test_trainer_options.py::test_as_many_checkpoints_are_kept_as_the_options_allow",),
    "load_checkpoint": ("trainers/test_ppo_trainer.py::test_fit_goes_on_where_it_was_from_a_checkpoint",),
    "save_hf_ckpt": (
        "trainers/test_trainer_options.py::test_a_checkpoint_comes_with_a_model_for_transformers_where_that_is_asked_for",
    ),
    "eval_steps": ("trainers/test_trainer_options.py::test_every_so_many_iterations_are_evaluated",),
    "logging_steps": (
        "trainers/test_trainer_options.py::test_lines_and_curves_are_as_often_as_logging_steps_says",
        "session/test_train_command.py::test_each_iteration_has_its_line_unless_logging_steps_says_less",
    ),
    "save_trajectories": (
        "trainers/test_ppo_trainer.py::test_lengths_trajectories_and_tensorboard_are_written_where_the_options_say",
    ),
    "num_trajectories_to_save": (
        "trainers/test_trajectory_saver.py::test_as_many_as_there_are_each_once_and_unknown_numbers_choose_nothing",
    ),
    "mark_high_entropy_tokens": (
        "trainers/test_trajectory_saver.py::test_marked_tokens_join_to_the_text_and_the_highest_entropies_are_marked",
    ),
    "use_mp_opt": (
        "strategies/test_mp_optimizer.py::test_use_mp_opt_trains_half_precision_shards_with_float32_copies",
        "session/test_trainer_held.py::test_float32_copies_go_on_where_half_precision_weights_stand_still",
    ),
    "sequence_parallel": (
        "trainers/test_sequence_parallel.py::test_a_step_of_ranks_that_split_sequences_is_that_of_one_plain_process",
        "session/test_sequence_parallel.py::test_its_trainers_split_sequences_too",
    ),
    "fsdp_cpu_offload": (
        "strategies/test_surface_prepare.py::test_fsdp_cpu_offload_keeps_trained_weights_on_the_host_and_switches_adam_offload_off",
        "session/test_trainer_held.py::test_the_weights_wait_in_host_memory_by_fsdps_own_policy",
    ),
    "tensor_parallel": (
        "strategies/test_tensor_parallel.py::test_a_users_loop_trains_as_a_plain_loop_does",
        "session/test_parallel.py::test_it_samples_trains_goes_back_and_is_kept_as_one_on_one_rank_does",
    ),
    "max_norm": (
        "strategies/test_surface_steps.py::test_ranks_train_as_torch_alone_does_clipped_over_all_groups_at_once_or_not",
    ),
    "micro_train_batch_size": (
        "strategies/test_surface_ranks.py::test_ranks_share_a_batch_by_the_rule_with_its_numbers",
    ),
    "train_batch_size": ("strategies/test_strategy.py::test_gradients_accumulate_until_the_batch_is_full",),
    "seed": (
        "strategies/test_surface_ranks.py::test_one_seed_gives_all_ranks_the_same_numbers_and_another_seed_others",
    ),
    "bf16": ("strategies/test_surface_steps.py::test_run_steps_of_bf16_compute_over_float32_weights",),
    "fp16": (
        "strategies/test_float16.py::test_forwards_compute_in_float16_over_float32_weights",
        "strategies/test_deepspeed_options.py::test_float16_steps_with_a_scaled_loss_which_an_overflow_halves",
        "session/test_float16_session.py::test_a_session_in_float16_steps_syncs_and_goes_back",
    ),
    "lr": ("strategies/test_surface_prepare.py::test_all_models_of_a_trainer_are_prepared_with_their_rates",),
    "critic_lr": ("strategies/test_surface_prepare.py::test_all_models_of_a_trainer_are_prepared_with_their_rates",),
    "betas": ("strategies/test_surface_prepare.py::test_all_models_of_a_trainer_are_prepared_with_their_rates",),
    "weight_decay": ("strategies/test_surface_prepare.py::test_all_models_of_a_trainer_are_prepared_with_their_rates",),
    "lr_warmup_ratio": (
        "strategies/test_surface_prepare.py::test_all_models_of_a_trainer_are_prepared_with_their_rates",
    ),
    "critic_pretrain": (
        "strategies/test_surface_prepare.py::test_all_models_of_a_trainer_are_prepared_with_their_rates",
    ),
    "fsdp": ("strategies/test_config.py::test_without_fsdp_it_is_deepspeeds_strategy",),
    "zero_stage": ("strategies/test_deepspeed.py::test_each_rank_holds_what_its_stage_leaves_it",),
    "zpg": (
        "strategies/test_deepspeed_options.py::test_a_second_copy_of_the_weights_changes_no_step_and_is_never_one_of_before",
    ),
    "grad_accum_dtype": (
        "strategies/test_deepspeed_options.py::test_gradients_are_added_up_in_the_dtype_of_grad_accum_dtype",
    ),
    "overlap_comm": (
        "strategies/test_deepspeed_options.py::test_overlapped_reductions_give_the_same_steps_and_a_host_says_it_has_none",
    ),
    "adam_offload": ("strategies/test_surface_ranks.py::test_offload_and_load_come_in_pairs_and_return_the_optimizer",),
    "local_rank": ("strategies/test_surface_ranks.py::test_local_rank_says_which_gpu_of_the_node",),
    "engine_type": (
        "strategies/test_generation.py::test_ranks_that_cannot_share_engines_and_other_engines_are_refused",
        "session/test_train_command.py::test_the_session_is_made_with_the_options_that_concern_it",
    ),
    "engine_tp_size": (
        "strategies/test_generation.py::test_ranks_that_cannot_share_engines_and_other_engines_are_refused",
    ),
    "gpu_memory_utilization": (
        "session/test_train_command.py::test_the_engine_takes_a_share_of_the_gpus_memory_or_of_the_hosts_free_one",
    ),
    "enable_engine_sleep": ("strategies/test_generation.py::test_the_options_of_setup_count_for_sleep",),
    "remote_rm_url": (
        "strategies/test_surface_prepare.py::test_all_models_of_a_trainer_are_prepared_with_their_rates",
    ),
    "reward_running_norm": (
        "trainers/test_experience_maker.py::test_scores_are_shaped_in_one_order_and_clips_counted_before_clamping",
    ),
    "reward_running_norm_minus_mean": (
        "trainers/test_experience_maker.py::test_scores_are_shaped_in_one_order_and_clips_counted_before_clamping",
    ),
    "reward_clip": (
        "trainers/test_experience_maker.py::test_scores_are_shaped_in_one_order_and_clips_counted_before_clamping",
    ),
    "advantages_norm": (
        "trainers/test_advantage_stage.py::test_advantages_norm_whitens_every_estimator_and_its_alias_over_trained_tokens",
    ),
    "advantage_clip": (
        "trainers/test_advantage_stage.py::test_what_stands_outside_the_clip_is_counted_before_it_is_clamped",
    ),
    "advantage_estimator": ("trainers/test_advantage_stage.py::test_each_estimator_is_what_loops_over_tokens_give",),
    "use_kl_loss": ("trainers/test_advantage_stage.py::test_the_kl_stands_in_the_reward_or_in_the_loss_never_in_both",),
    "kl_estimator": ("trainers/test_loss_choice.py::test_the_options_mean_this_loss",),
    "pretrain_data": (
        "trainers/test_update.py::test_pretraining_text_adds_its_own_mean_whatever_the_policy_is_normalised_by",
    ),
    "micro_rollout_batch_size": (
        "trainers/test_experience_maker.py::test_experience_comes_in_parts_of_so_many_sequences_and_groups_are_never_numbered_twice",
    ),
    "n": ("trainers/test_experience_maker.py::test_each_prompt_has_its_samples_in_order_token_for_token",),
    "overlong_buffer": (
        "trainers/test_experience_maker.py::test_scores_are_shaped_in_one_order_and_clips_counted_before_clamping",
    ),
    "overlong_buffer_len": (
        "trainers/test_experience_maker.py::test_scores_are_shaped_in_one_order_and_clips_counted_before_clamping",
    ),
    "overlong_buffer_penalty_factor": (
        "trainers/test_experience_maker.py::test_scores_are_shaped_in_one_order_and_clips_counted_before_clamping",
    ),
    "dynamic_sampling": (
        "trainers/test_dynamic_sampling.py::test_groups_that_teach_nothing_are_replaced_by_further_prompts",
    ),
    "dynamic_sampling_metric": ("trainers/test_dynamic_sampling.py::test_the_metric_may_be_a_component_of_the_reward",),
    "max_num_gen_batches": (
        "trainers/test_dynamic_sampling.py::test_it_gives_up_after_so_many_generations_and_says_how_many_had_a_signal",
    ),
    "packing": ("trainers/test_experience_maker.py::test_packed_and_padded_forwards_give_the_same_experience",),
    "share_prompts": (
        "trainers/test_experience_maker.py::test_prompts_that_samples_share_are_computed_once_and_the_experience_is_the_same",
        "trainers/test_update.py::test_prompts_that_samples_share_are_computed_once_and_the_gradient_is_the_same",
    ),
    "head": ("trainers/test_experience_maker.py::test_chunk_size_bounds_the_logits_held_at_once",),
    "chunk_size": ("trainers/test_experience_maker.py::test_chunk_size_bounds_the_logits_held_at_once",),
    "log_dir": (
        "strategies/test_length_analysis.py::test_the_folder_is_the_one_given_and_without_one_nothing_is_written",
    ),
    "plot_every": ("strategies/test_length_analysis.py::test_plot_every_says_which_steps_are_collected_and_drawn",),
    "use_tensorboard": (
        "trainers/test_ppo_trainer.py::test_lengths_trajectories_and_tensorboard_are_written_where_the_options_say",
    ),
    "lora_base": (
        ADAPTERS,
        "trainers/test_run_config.py::test_a_quantised_base_needs_adapters_beside_it",
    ),
    "value_head_prefix": (
        "session/test_train_command.py::test_head_of_the_critic_and_shards_of_the_reference_reach_the_trainer",
        "trainers/test_reference_shards.py::test_a_critics_head_has_another_name_in_its_checkpoint",
    ),
    "reference_shard_size": (
        "session/test_train_command.py::test_head_of_the_critic_and_shards_of_the_reference_reach_the_trainer",
        "trainers/test_reference_shards.py::test_a_reference_is_split_over_as_many_ranks_as_are_asked_for",
    ),
    "images_key": ("session/test_run_data.py::test_pictures_stand_in_the_column_that_is_named",),
    "pretrain_data_probs": (
        "session/test_run_data.py::test_texts_of_several_sources_are_mixed_and_a_folders_split_is_chosen",
    ),
    "pretrain_split": (
        "session/test_run_data.py::test_texts_of_several_sources_are_mixed_and_a_folders_split_is_chosen",
    ),
    "pretrain_max_len": (
        "trainers/test_trainer_options.py::test_pretraining_texts_are_as_long_as_pretrain_max_len_says",
    ),
    "trajectory_analysis": (
        "trainers/test_trainer_options.py::test_what_trajectories_hold_is_told_as_metrics_where_that_is_asked_for",
    ),
    "print_replay_buffer_stats": (
        "trainers/test_trainer_options.py::test_the_spread_of_an_iterations_numbers_follows_its_line_where_that_is_asked_for",
    ),
    "save_value_network": (
        "trainers/test_trainer_options.py::test_the_critic_is_saved_at_the_end_where_that_is_asked_for",
    ),
    "disable_ds_ckpt": (
        "trainers/test_trainer_options.py::test_a_checkpoint_comes_with_a_model_for_transformers_where_that_is_asked_for",
    ),
    "gradient_checkpointing_use_reentrant": (
        "trainers/test_trainer_options.py::test_reentrant_checkpoints_change_no_step_and_pass_frozen_embeddings",
    ),
    "aux_loss_coef": (
        "trainers/test_balancing.py::test_a_steps_gradient_has_it_however_the_step_is_split",
        "trainers/test_balancing.py::test_ranks_share_it_as_one_process_has_it",
    ),
    "limit_mm_image_per_prompt": (
        "session/test_train_command.py::test_an_engine_keeps_room_for_as_many_pictures_as_are_asked_for",
    ),
    "track": ("session/test_train_command.py::test_trackers_are_started_as_the_options_name_them",),
    "use_wandb": ("session/test_train_command.py::test_trackers_are_started_as_the_options_name_them",),
    "wandb_project": ("session/test_train_command.py::test_trackers_are_started_as_the_options_name_them",),
    "wandb_org": ("session/test_train_command.py::test_trackers_are_started_as_the_options_name_them",),
    "wandb_group": ("session/test_train_command.py::test_trackers_are_started_as_the_options_name_them",),
    "wandb_run_name": ("session/test_train_command.py::test_trackers_are_started_as_the_options_name_them",),
}

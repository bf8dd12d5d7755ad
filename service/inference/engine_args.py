"""The arguments of vLLM's AsyncEngineArgs that the setting `inference.engine_args` may set.

Each argument of the pinned vLLM is in one of two tables: allowed, with the type of its value, or
refused, with a reason. A test compares the names with vLLM's source, so that an upgrade of vLLM
needs a decision for each new argument. `service.config` calls this module, which is pure.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from actors.user_code import shown_json

# The allowed arguments, which change speed, memory or rounding, with the types of their values.
ALLOWED: Mapping[str, type] = {
    # Quantised weights and cache: the log-probability check measures their difference.
    "quantization": str,
    "quantization_config": dict,
    "allow_deprecated_quantization": bool,
    "kv_cache_dtype": str,
    "kv_cache_dtype_skip_layers": list,
    # Scheduling and cache.
    "max_num_batched_tokens": int,
    "max_num_scheduled_tokens": int,
    "max_num_active_seqs": int,
    "long_prefill_token_threshold": int,
    "long_prefill_token_threshold_adaptive": bool,
    "enable_chunked_prefill": bool,
    "scheduler_reserve_full_isl": bool,
    "watermark": float,
    "async_scheduling": bool,
    "enable_prefix_caching": bool,
    "prefix_caching_hash_algo": str,
    "prefix_cache_retention_interval": int,
    "prefix_match_unit": int,
    "disable_hybrid_kv_cache_manager": bool,
    "swa_bounded_replay": bool,
    # Kernels and compilation.
    "attention_backend": str,
    "attention_config": dict,
    "disable_cascade_attn": bool,
    "compilation_config": dict,
    "cudagraph_capture_sizes": list,
    "max_cudagraph_capture_size": int,
    "optimization_level": int,
    "performance_mode": str,
    "kernel_config": dict,
    "ir_op_priority": dict,
    "enable_flashinfer_autotune": bool,
    "use_fp64_gumbel": bool,
    "linear_backend": str,
    "moe_backend": str,
    "sparse_indexer_topk_backend": str,
    "gdn_prefill_backend": str,
    "kda_prefill_backend": str,
    "kda_decode_backend": str,
    "model_impl": str,
    "additional_config": dict,
    # Recurrent layers.
    "mamba_backend": str,
    "mamba_config": dict,
    "mamba_ssu_algorithm": str,
    "mamba_cache_dtype": str,
    "mamba_ssm_cache_dtype": str,
    "mamba_block_size": int,
    "mamba_cache_mode": str,
    "enable_mamba_shared_prefix_checkpoint": bool,
    "replayssm_buffer_len": int,
    "use_replayssm": bool,
    # Several GPUs of one engine.
    "enable_expert_parallel": bool,
    "enable_ep_weight_filter": bool,
    "expert_placement_strategy": str,
    "all2all_backend": str,
    "enable_batch_sharded_sampling": bool,
    "enable_hc_sp": bool,
    "disable_custom_all_reduce": bool,
    "distributed_timeout_seconds": int,
    "cpu_distributed_timeout_seconds": int,
    "numa_bind": bool,
    "numa_bind_nodes": list,
    "numa_bind_cpus": list,
    # The first load of the model's files.
    "load_format": str,
    "download_dir": str,
    "safetensors_load_strategy": str,
    "safetensors_prefetch_num_threads": int,
    "safetensors_prefetch_block_size": int,
    "max_parallel_loading_workers": int,
    "model_loader_extra_config": dict,
    "ignore_patterns": list,
    "pt_load_map_location": str,
    "use_tqdm_on_load": bool,
    # Measurement.
    "kv_cache_metrics": bool,
    "kv_cache_metrics_sample": float,
    "cudagraph_metrics": bool,
    "enable_layerwise_nvtx_tracing": bool,
    "enable_mfu_metrics": bool,
    "enable_logging_iteration_details": bool,
    "jit_monitor_mode": str,
    "jit_monitor_verbose": bool,
    "fail_on_environ_validation": bool,
}
QUANTISING = ("quantization", "quantization_config", "kv_cache_dtype")
"""Arguments with which an engine computes with less precision than `model.dtype`."""

# Groups of names with a common reason.
_REASONS: Mapping[str, str] = {
    "model": "set model.path",
    "dtype": "set model.dtype",
    "max_model_len": "set model.max_context_tokens",
    "seed": "set run.seed",
    "max_num_seqs": "set inference.max_num_seqs",
    "block_size": "set inference.block_tokens",
    "kv_cache_memory_bytes num_gpu_blocks_override": (
        "set inference.kv_cache_gib on CPU and inference.gpu_memory_fraction on a GPU"
    ),
    "gpu_memory_utilization": "set inference.gpu_memory_fraction",
    "tensor_parallel_size": "set inference.tensor_parallel_size",
    "enforce_eager": "set inference.enforce_eager",
    "reasoning_parser reasoning_parser_plugin": (
        "Rayloom parses the replies itself; set inference.reasoning_parser"
    ),
    "otlp_traces_endpoint collect_detailed_traces": "set tracing.endpoint",
    "logprobs_mode max_logprobs": (
        "the loss needs the log-probability of each sampled token after the temperature"
    ),
    "generation_config override_generation_config logits_processors reasoning_config "
    "watermark_config diffusion_config": (
        "it changes which tokens are sampled, so that the recorded log-probabilities are not the "
        "policy's"
    ),
    "speculative_config spec_method spec_model spec_tokens per_request_spec_decode_metrics": (
        "a draft model would not get the published weights, and no run has compared the "
        "log-probabilities of accepted drafts with the trainer's"
    ),
    "hf_overrides model_class_overrides config_format hf_config_path disable_sliding_window "
    "trust_remote_code engram_config": (
        "the engine would compute another function than the trainer, which reads config.json; "
        "change the model's config.json"
    ),
    "revision code_revision tokenizer_revision model_weights": (
        "the trainer would load another revision than the engines; set model.path to a directory "
        "with the revision"
    ),
    "enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds": (
        "the engine would score the same text differently each time"
    ),
    "kv_sharing_fast_prefill": (
        "vLLM then skips layers for a prompt's tokens, and the log-probability check scores "
        "a prompt"
    ),
    "kv_transfer_config kv_events_config kv_offloading_size kv_offloading_backend "
    "ec_transfer_config ec_manager_config": (
        "cached blocks outside the engine would outlive the weights that computed them"
    ),
    "offload_backend cpu_offload_gb cpu_offload_params offload_group_size offload_num_in_group "
    "offload_prefetch_step offload_params": (
        "published weights are loaded into parameters on the engine's device"
    ),
    "weight_transfer_config worker_cls worker_extension_cls scheduler_cls": (
        "Rayloom loads published weights through its own part of vLLM's worker; set "
        "inference.weight_backend"
    ),
    "enable_lora max_loras max_lora_rank default_mm_loras fully_sharded_loras max_cpu_loras "
    "lora_dtype lora_target_modules enable_tower_connector_lora specialize_active_lora "
    "enable_mixed_moe_lora_format enable_moe_shared_loras max_lora_cls_labels": (
        "the trainer determines the weights that the engines serve"
    ),
    "enable_return_routed_experts aux_output_config return_sampling_mask enable_trace_replay": (
        "Rayloom determines what an engine returns with its tokens"
    ),
    "enable_sleep_mode sleep_mode_offload_cudagraph sleep_preserve_parameter_names "
    "enable_cumem_allocator enable_nccl_comm_suspend": "Rayloom puts no engine to sleep",
    "pipeline_parallel_size prefill_context_parallel_size decode_context_parallel_size "
    "dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size cp_kv_cache_interleave_size": (
        "weights are published to inference.tensor_parallel_size workers of an engine; set that"
    ),
    "data_parallel_size data_parallel_rank data_parallel_start_rank data_parallel_size_local "
    "data_parallel_address data_parallel_rpc_port data_parallel_hybrid_lb "
    "data_parallel_external_lb data_parallel_multi_port_external_lb data_parallel_backend "
    "enable_dbo ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold "
    "dp_sync_interval disable_nccl_for_dp_synchronization prefill_schedule_interval "
    "aggregate_engine_logging enable_elastic_ep elastic_ep_max_dp_size": (
        "it belongs to vLLM's data parallelism; set inference.num_replicas"
    ),
    "enable_eplb eplb_config": (
        "experts would move between workers while published weights and recorded experts refer to "
        "their original positions"
    ),
    "distributed_executor_backend master_addr master_port nnodes node_rank device_ids "
    "ray_workers_use_nsight": (
        "Rayloom reserves the GPUs of an engine and starts its workers on one node; set "
        "inference.gpus_per_replica"
    ),
    "fault_tolerance_config enable_fault_tolerance shutdown_timeout": (
        "Rayloom replaces an engine that fails"
    ),
    "max_num_queued_reqs max_num_queued_tokens": (
        "the engine would refuse turns that the run waits for; set inference.max_num_seqs"
    ),
    "scheduling_policy stream_interval served_model_name io_processor_plugin renderer_num_workers "
    "runner convert pooler_config enable_prompt_embeds tokens_only": (
        "Rayloom calls the engine with token ids, without vLLM's server, so it has no effect"
    ),
    "tokenizer tokenizer_mode skip_tokenizer_init": (
        "the tokenizer is the model's, which the environments use too; set model.path"
    ),
    "structured_outputs_config": "set evaluation.structured_outputs",
    "hf_token": "a secret would be stored with the run; set HF_TOKEN in the environment",
    "disable_log_stats show_hidden_metrics_for_version custom_histogram_buckets": (
        "the dashboards and alerts read vLLM's metrics"
    ),
    "enable_log_requests logging_config log_level log_config_file": (
        "Rayloom writes the engines' logs"
    ),
    "profiler_config": "nothing starts vLLM's profiler",
    "language_model_only limit_mm_per_prompt enable_mm_embeds interleave_mm_strings "
    "media_io_kwargs mm_processor_kwargs mm_processor_cache_gb mm_processor_cache_type "
    "mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode "
    "mm_encoder_attn_backend mm_encoder_attn_dtype skip_mm_profiling video_pruning_rate "
    "video_pruning_method mm_tensor_ipc mm_processor_device mm_ipc_gpu_memory_gb "
    "mm_device_do_normalize disable_chunked_mm_input enable_mm_processor_stats "
    "allowed_local_media_path allowed_media_domains enable_shm_tensor_arena "
    "mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin": (
        "a policy reads text only"
    ),
}
REFUSED: Mapping[str, str] = {
    name: reason for names, reason in _REASONS.items() for name in names.split()
}
"""The reason for refusing an argument, by its name."""
_TYPE_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "a mapping",
}


def engine_args_problems(given: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error message for each argument that is unknown, refused or of the wrong type.

    Args: given: the value of `inference.engine_args`.
    """
    for name, value in given.items():
        key = f"inference.engine_args.{name}"
        if name in REFUSED:
            yield f"{key}: refused, expected it to be left out: {REFUSED[name]}"
        elif (expected := ALLOWED.get(name)) is None:
            near = difflib.get_close_matches(name, [*ALLOWED, *REFUSED], n=1)
            remedy = f"did you mean {near[0]!r}?" if near else "docs/engine-args.md lists them"
            yield f"{key}: expected the name of one of vLLM's engine arguments; {remedy}"
        elif not _is_a(value, expected):
            yield (
                f"{key}: got {shown_json(value)}; expected {_TYPE_NAMES[expected]}; remove it "
                "for vLLM's default"
            )


def _is_a(value: Any, expected: type) -> bool:
    if isinstance(value, bool):
        return expected is bool
    return isinstance(value, (int, float) if expected is float else expected)

"""Names that other projects import from here or read off a module: trainers, converters and forks of Megatron-LM.

Many of them have no user inside this repository (getters of parallel_state, enumerations, helpers of megatron.core.utils). They are here
for those projects: what looks unused and is in this list stays, and a name that becomes available is added.
"""

import importlib
from typing import Any

import pytest

NAMES = [
    "megatron.core",
    "megatron.core.activations.squared_relu",
    "megatron.core.datasets.blended_megatron_dataset_builder.BlendedMegatronDatasetBuilder",
    "megatron.core.datasets.gpt_dataset.GPTDataset",
    "megatron.core.datasets.gpt_dataset.GPTDatasetConfig",
    "megatron.core.datasets.utils.get_blend_from_list",
    "megatron.core.dist_checkpointing",
    "megatron.core.dist_checkpointing.ShardedTensor",
    "megatron.core.dist_checkpointing.load",
    "megatron.core.dist_checkpointing.mapping.ShardedObject",
    "megatron.core.dist_checkpointing.mapping.ShardedStateDict",
    "megatron.core.dist_checkpointing.mapping.ShardedTensor",
    "megatron.core.dist_checkpointing.mapping.ShardedTensorFactory",
    "megatron.core.dist_checkpointing.save",
    "megatron.core.dist_checkpointing.utils.replace_prefix_for_sharding",
    "megatron.core.distributed.distributed_data_parallel.DistributedDataParallel",
    "megatron.core.distributed.distributed_data_parallel_config.DistributedDataParallelConfig",
    "megatron.core.distributed.finalize_model_grads",
    "megatron.core.enums.Fp8Recipe",
    "megatron.core.enums.Fp8Recipe.delayed",
    "megatron.core.enums.ModelType",
    "megatron.core.enums.ModelType.encoder_and_decoder",
    "megatron.core.enums.ModelType.encoder_or_decoder",
    "megatron.core.enums.ModelType.retro_decoder",
    "megatron.core.extensions.transformer_engine.TEColumnParallelLinear",
    "megatron.core.extensions.transformer_engine.TEDotProductAttention",
    "megatron.core.extensions.transformer_engine.TELayerNormColumnParallelLinear",
    "megatron.core.extensions.transformer_engine.TELinear",
    "megatron.core.extensions.transformer_engine.TENorm",
    "megatron.core.extensions.transformer_engine.TERowParallelLinear",
    "megatron.core.fusions.fused_bias_dropout.get_bias_dropout_add",
    "megatron.core.fusions.fused_bias_gelu.bias_gelu_impl",
    "megatron.core.fusions.fused_bias_swiglu.bias_swiglu_impl",
    "megatron.core.fusions.fused_layer_norm.FusedLayerNorm",
    "megatron.core.inference_params.InferenceParams",
    "megatron.core.jit.jit_fuser",
    "megatron.core.model_parallel_config.ModelParallelConfig",
    "megatron.core.models.common.embeddings.language_model_embedding.LanguageModelEmbedding",
    "megatron.core.models.common.embeddings.rotary_pos_embedding.RotaryEmbedding",
    "megatron.core.models.common.embeddings.rotary_pos_embedding.apply_rotary_pos_emb",
    "megatron.core.models.common.language_module.language_module.LanguageModule",
    "megatron.core.models.gpt.gpt_layer_specs.get_gpt_decoder_block_spec",
    "megatron.core.models.gpt.gpt_layer_specs.get_gpt_layer_local_spec",
    "megatron.core.models.gpt.gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec",
    "megatron.core.models.gpt.gpt_model.GPTModel",
    "megatron.core.num_microbatches_calculator",
    "megatron.core.num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR",
    "megatron.core.num_microbatches_calculator.get_current_global_batch_size",
    "megatron.core.num_microbatches_calculator.get_micro_batch_size",
    "megatron.core.num_microbatches_calculator.get_num_microbatches",
    "megatron.core.num_microbatches_calculator.reconfigure_num_microbatches_calculator",
    "megatron.core.num_microbatches_calculator.update_num_microbatches",
    "megatron.core.optimizer.MegatronOptimizer",
    "megatron.core.optimizer.get_megatron_optimizer",
    "megatron.core.optimizer.optimizer_config.OptimizerConfig",
    "megatron.core.optimizer_param_scheduler.OptimizerParamScheduler",
    "megatron.core.packed_seq_params.PackedSeqParams",
    "megatron.core.parallel_state",
    "megatron.core.parallel_state.destroy_model_parallel",
    "megatron.core.parallel_state.get_context_parallel_group",
    "megatron.core.parallel_state.get_context_parallel_rank",
    "megatron.core.parallel_state.get_context_parallel_world_size",
    "megatron.core.parallel_state.get_data_parallel_group",
    "megatron.core.parallel_state.get_data_parallel_rank",
    "megatron.core.parallel_state.get_data_parallel_src_rank",
    "megatron.core.parallel_state.get_data_parallel_world_size",
    "megatron.core.parallel_state.get_embedding_group",
    "megatron.core.parallel_state.get_expert_model_parallel_group",
    "megatron.core.parallel_state.get_expert_model_parallel_rank",
    "megatron.core.parallel_state.get_expert_model_parallel_world_size",
    "megatron.core.parallel_state.get_expert_tensor_parallel_world_size",
    "megatron.core.parallel_state.get_global_memory_buffer",
    "megatron.core.parallel_state.get_model_parallel_group",
    "megatron.core.parallel_state.get_pipeline_model_parallel_group",
    "megatron.core.parallel_state.get_pipeline_model_parallel_last_rank",
    "megatron.core.parallel_state.get_pipeline_model_parallel_rank",
    "megatron.core.parallel_state.get_pipeline_model_parallel_world_size",
    "megatron.core.parallel_state.get_tensor_and_data_parallel_group",
    "megatron.core.parallel_state.get_tensor_model_parallel_group",
    "megatron.core.parallel_state.get_tensor_model_parallel_rank",
    "megatron.core.parallel_state.get_tensor_model_parallel_world_size",
    "megatron.core.parallel_state.get_virtual_pipeline_model_parallel_rank",
    "megatron.core.parallel_state.get_virtual_pipeline_model_parallel_world_size",
    "megatron.core.parallel_state.initialize_model_parallel",
    "megatron.core.parallel_state.is_initialized",
    "megatron.core.parallel_state.is_pipeline_first_stage",
    "megatron.core.parallel_state.is_pipeline_last_stage",
    "megatron.core.parallel_state.model_parallel_is_initialized",
    "megatron.core.parallel_state.set_virtual_pipeline_model_parallel_rank",
    "megatron.core.pipeline_parallel.schedules.get_forward_backward_func",
    "megatron.core.pipeline_parallel.utils.is_pp_first_stage",
    "megatron.core.pipeline_parallel.utils.is_pp_last_stage",
    "megatron.core.process_groups_config.ProcessGroupCollection",
    "megatron.core.process_groups_config.ProcessGroupCollection.use_mpu_process_groups",
    "megatron.core.tensor_parallel",
    "megatron.core.tensor_parallel.broadcast_data",
    "megatron.core.tensor_parallel.cross_entropy.vocab_parallel_cross_entropy",
    "megatron.core.tensor_parallel.layers.ColumnParallelLinear",
    "megatron.core.tensor_parallel.layers.RowParallelLinear",
    "megatron.core.tensor_parallel.layers.VocabParallelEmbedding",
    "megatron.core.tensor_parallel.linear_with_grad_accumulation_and_async_allreduce",
    "megatron.core.tensor_parallel.mappings.copy_to_tensor_model_parallel_region",
    "megatron.core.tensor_parallel.mappings.gather_from_sequence_parallel_region",
    "megatron.core.tensor_parallel.mappings.gather_from_tensor_model_parallel_region",
    "megatron.core.tensor_parallel.mappings.scatter_to_sequence_parallel_region",
    "megatron.core.tensor_parallel.random",
    "megatron.core.tensor_parallel.random.checkpoint",
    "megatron.core.tensor_parallel.random.get_cuda_rng_tracker",
    "megatron.core.tensor_parallel.random.model_parallel_cuda_manual_seed",
    "megatron.core.tensor_parallel.split_tensor_along_last_dim",
    "megatron.core.transformer.moe.moe_layer.MoELayer",
    "megatron.core.transformer.moe.moe_layer.MoESubmodules",
    "megatron.core.transformer.moe.router.TopKRouter",
    "megatron.core.transformer.TransformerLayer",
    "megatron.core.transformer.TransformerLayerSubmodules",
    "megatron.core.transformer.attention.SelfAttention",
    "megatron.core.transformer.attention.SelfAttentionSubmodules",
    "megatron.core.transformer.build_module",
    "megatron.core.transformer.dot_product_attention.DotProductAttention",
    "megatron.core.transformer.enums.AttnBackend",
    "megatron.core.transformer.enums.AttnBackend.auto",
    "megatron.core.transformer.enums.AttnBackend.flash",
    "megatron.core.transformer.enums.AttnBackend.fused",
    "megatron.core.transformer.enums.AttnMaskType",
    "megatron.core.transformer.enums.AttnMaskType.causal",
    "megatron.core.transformer.enums.AttnMaskType.no_mask",
    "megatron.core.transformer.enums.AttnMaskType.padding",
    "megatron.core.transformer.enums.LayerType",
    "megatron.core.transformer.enums.LayerType.decoder",
    "megatron.core.transformer.enums.ModelType.encoder_or_decoder",
    "megatron.core.transformer.identity_op.IdentityOp",
    "megatron.core.transformer.mlp.MLP",
    "megatron.core.transformer.mlp.MLPSubmodules",
    "megatron.core.transformer.module.Float16Module",
    "megatron.core.transformer.module.MegatronModule",
    "megatron.core.transformer.spec_utils.ModuleSpec",
    "megatron.core.transformer.spec_utils.build_module",
    "megatron.core.transformer.spec_utils.import_module",
    "megatron.core.transformer.torch_norm.WrappedTorchNorm",
    "megatron.core.transformer.transformer_block.TransformerBlock",
    "megatron.core.transformer.transformer_block.TransformerBlockSubmodules",
    "megatron.core.transformer.transformer_block.get_num_layers_to_build",
    "megatron.core.transformer.transformer_config.TransformerConfig",
    "megatron.core.transformer.transformer_layer.TransformerLayer",
    "megatron.core.transformer.transformer_layer.TransformerLayerSubmodules",
    "megatron.core.transformer.transformer_layer.get_transformer_layer_offset",
    "megatron.core.transformer.utils.make_sharded_tensors_for_checkpoint",
    "megatron.core.transformer.utils.sharded_state_dict_default",
    "megatron.core.utils",
    "megatron.core.utils.get_batch_on_this_cp_rank",
    "megatron.core.utils.WrappedTensor",
    "megatron.core.utils.deprecate_inference_params",
    "megatron.core.utils.divide",
    "megatron.core.utils.get_model_config",
    "megatron.core.utils.get_pg_rank",
    "megatron.core.utils.is_te_min_version",
    "megatron.core.utils.make_viewless_tensor",
    "megatron.core.utils.unwrap_model",
    "megatron.training.arguments.core_transformer_config_from_args",
    "megatron.training.arguments.parse_args",
    "megatron.training.checkpointing.get_checkpoint_name",
    "megatron.training.checkpointing.get_checkpoint_tracker_filename",
    "megatron.training.checkpointing.load_checkpoint",
    "megatron.training.checkpointing.read_metadata",
    "megatron.training.get_args",
    "megatron.training.get_timers",
    "megatron.training.get_tokenizer",
    "megatron.training.initialize.initialize_megatron",
    "megatron.training.pretrain",
    "megatron.training.print_rank_0",
]


def resolve(name: str) -> Any:
    """The object that a dotted name stands for: a module, or attributes of one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        module = ".".join(parts[:length])
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            # only the name itself may be missing: a module that fails inside is an error
            if not module.startswith(str(error.name)):
                raise
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


@pytest.mark.parametrize("name", NAMES)
def test_name_can_be_imported(name):
    resolve(name)


def test_a_missing_name_is_noticed():
    for name in ("megatron.core.parallel_state.get_no_such_group", "megatron.core.no_such_module", "megatron.core.utils.divide.no"):
        with pytest.raises(AttributeError):
            resolve(name)

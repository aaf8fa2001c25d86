"""Names of other packages that this library uses although they are not part of a public interface.

A name in this list may disappear in the next version of its package. Every other name that the library uses is public.
The dependencies have no upper bounds, because a bound would also refuse versions that still have the names. Instead,
``rapidformer doctor`` and the tests look for each name in the installed packages. Importing this module imports none
of the packages.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class PrivateName:
    """Private names of one owner, and the features that need them.

    Attributes:
        owner: ``module`` or ``module:Class`` that has the names.
        names: the names. For a class, these may be attributes that only its instances have.
        serves: what the names are used for.
        without: what does not work if a name is missing.
    """

    owner: str
    names: tuple[str, ...]
    serves: str
    without: str

    @property
    def package(self) -> str:
        return self.owner.partition(":")[0].partition(".")[0]


def _of(owner: str, names: str, serves: str, without: str) -> PrivateName:
    return PrivateName(owner, tuple(names.split()), serves, without)


_ZERO = "deepspeed.runtime.zero"
_EXPORTER = "torch.onnx._internal.exporter"

PRIVATE_NAMES = (
    # Inspecting values and modules.
    _of("torch.utils", "_pytree", "finding the tensors of a batch or an output", "every run"),
    _of("torch.nn:Module", "_parameters _buffers _modules _forward_hooks",
        "replacing a tensor, a module or a hook", "every switch that changes the model"),
    _of("torch.utils._python_dispatch", "is_traceable_wrapper_subclass TorchDispatchMode",
        "inspecting each operation, and the tensors inside a tensor", "receipts and the planner"),
    _of("torch.utils._python_dispatch", "_get_current_dispatch_mode_stack", "whether a recomputation keeps products",
        "--recompute-granularity selective with tensor parallelism"),
    _of("torch:Tensor", "_version", "detecting that a weight was set from outside",
        "--cpu-offload after a resume; 16-bit weights that a hook sets"),
    _of("torch:Tensor", "_base", "recognizing a view of a weight", "--offload-activations"),
    _of("torch._dynamo.eval_frame:OptimizedModule", "_orig_mod", "names of parameters without their wrappers",
        "checkpoints of a model that the user has compiled"),
    _of("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "_CHECKPOINT_PREFIX",
        "names of parameters without their wrappers (_checkpoint_wrapped_module)",
        "checkpoints of a model that the user has wrapped"),
    _of("peft.tuners.tuners_utils:BaseTunerLayer", "_disable_adapters", "a model without its adapters as a reference",
        "--task preference with --lora-rank"),
    _of("torch.distributed.fsdp._common_utils", "FSDP_WRAPPED_MODULE",
        "names of parameters without their wrappers (_fsdp_wrapped_module)",
        "checkpoints of a model that the user has wrapped"),
    # Training steps.
    _of("torch", "_foreach_norm _foreach_mul_", "the norm of all gradients and clipping by it in one kernel",
        "--max-grad-norm"),
    _of("torch", "_amp_update_scale_", "updating the loss scale without waiting for the device", "fp16"),
    _of("torch.optim:Optimizer", "_optimizer_step_pre_hooks _optimizer_step_post_hooks",
        "refusing an optimizer whose hooks would be lost", "compose() with an optimizer"),
    _of("torch.optim:Adam", "_step_supports_amp_scaling", "knowing that an optimizer can skip an update",
        "the host's running ahead of a GPU"),
    _of("torch.autograd:Variable", "_execution_engine", "being called at the end of a backward",
        "equal gradients where workers reach other parameters (DDP, ZeRO, OSS)"),
    _of("torch.utils.data._utils.pin_memory", "pin_memory", "pinning a batch on its way to a GPU", "batches on a GPU"),
    _of("torch._C._autograd", "DeviceType", "separating the device's time from the host's", "--profile"),
    # Workers and shards.
    _of("torch._C._distributed_c10d", "HashStore", "a process group of one process without a port",
        "engines that want a group, in one process"),
    _of("torch.distributed.tensor.placement_types", "_StridedShard", "shards of matrices that were joined (QKV)",
        "tensor parallelism of joined projections"),
    _of("torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState", "_fsdp_param_group _fsdp_param_groups",
        "gradients of parameters that a worker did not reach, and the type they are summed in",
        "FSDP with branches, its receipt"),
    _of("torch.distributed.fsdp:FSDPModule", "_get_fsdp_state", "the same", "FSDP with branches, its receipt"),
    _of("torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup", "_reduce_dtype _orig_dtype",
        "the type that gradients are summed in", "FSDP's receipt"),
    _of("torch.nn.parallel:DistributedDataParallel", "_set_params_and_buffers_to_ignore_for_model",
        "leaving divided experts out of the sum over all workers", "--expert-parallel"),
    _of("torch.nn.modules.dropout", "_DropoutNd", "finding every kind of dropout", "tensor parallelism with dropout"),
    _of("torch:Tensor", "_make_wrapper_subclass", "logits whose vocabulary is divided", "tensor parallelism"),
    _of("torch._C", "DisableTorchFunctionSubclass", "logits whose vocabulary is divided", "tensor parallelism"),
    _of("torch", "_assert_async", "refusing a target that is not a token, without waiting for the device",
        "tensor parallelism"),
    # The planner, which works with shapes and without memory.
    _of("torch._subclasses.fake_tensor", "FakeTensor FakeTensorMode", "models without memory", "the planner"),
    _of("torch.testing._internal.distributed.fake_pg", "FakeStore", "groups without processes", "the planner"),
    _of("torch._ops:OpOverload", "_overloadpacket", "the operations of an operator", "the planner's times"),
    _of("torch.ops.aten", "_local_scalar_dense _grouped_mm", "answers that shapes alone do not give",
        "the planner with experts"),
    _of("torch.ops.aten", "_to_copy", "recognizing autocast's copies of weights", "the planner with pipelines"),
    # Attention of rows that hold several samples.
    _of("torch.ops.aten",
        "_flash_attention_forward _scaled_dot_product_flash_attention_for_cpu "
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        "attention of packed samples without a mask", "--pack-sequences with --flash-attention"),
    # torch.compile and ONNX Runtime.
    _of("torch", "_dynamo", "limits of recompilation and the reasons of a refusal", "--torch-compile"),
    _of("torch._dynamo", "list_backends", "listing the available backends", "--torch-compile"),
    _of("torch._dynamo.utils", "counters get_compilation_metrics set_compilation_metrics_limit",
        "counting graphs, breaks and recompilations", "the receipt of --torch-compile"),
    _of("torch._functorch", "config", "graphs without views of their inputs", "--onnx-runtime-training"),
    _of("torch._functorch.aot_autograd", "aot_module_simplified", "the graph of a backward", "--onnx-runtime-training"),
    _of("torch._functorch._aot_autograd.utils", "_boxed_call", "freeing what a forward has kept in the backward",
        "--onnx-runtime-training"),
    _of("torch._functorch.partitioners", "default_partition", "the graph of a backward", "--onnx-runtime-training"),
    _of("torch.utils._sympy.printers", "PythonPrinter", "shapes as ONNX", "--onnx-runtime-training"),
    _of(_EXPORTER, "_core _decomp _fx_passes _registration", "a graph as ONNX", "--onnx-runtime-training"),
    _of(f"{_EXPORTER}._core", "_exported_program_to_onnx_program _is_onnx_op", "a graph as ONNX",
        "--onnx-runtime-training"),
    _of("torch.ops.aten", "_safe_softmax _softmax_backward_data _unsafe_view", "operators as ONNX",
        "--onnx-runtime-training"),
    _of("onnxruntime.capi", "_pybind_state", "tensors that ONNX Runtime reads in place", "--onnx-runtime-training"),
    # Models of transformers.
    _of("transformers.masking_utils",
        "_preprocess_mask_arguments _ignore_causal_mask_sdpa _ignore_bidirectional_mask_sdpa "
        "find_packed_sequence_indices",
        "masks without a read of the device's memory in each step", "the host's running ahead of a GPU"),
    _of("transformers:PreTrainedModel", "_no_split_modules", "the blocks of a model", "every switch that needs blocks"),
    _of("transformers:PreTrainedModel", "_supports_sdpa _can_set_attn_implementation",
        "whether the attention of a model can be chosen", "--flash-attention"),
    _of("transformers.configuration_utils:PretrainedConfig", "_attn_implementation",
        "which attention a model calls", "--flash-attention, --pack-sequences"),
    _of("transformers.configuration_utils:PretrainedConfig", "_name_or_path",
        "the folder that a model was read from", "naming the base of exported adapters"),
    _of("transformers:PreTrainedModel", "_is_hf_initialized", "the initial values of a head that a checkpoint lacks",
        "heads that start with the same weights under every engine"),
    _of("transformers:PreTrainedModel", "_can_record_outputs", "the routers of a mixture",
        "the balance of transformers' own mixtures"),
    _of("transformers.integrations.moe", "_apply_gate", "the computation between the two products of an expert",
        "transformers' own mixtures"),
    _of("transformers.utils.output_capturing", "_output_capturing_hooks_installed",
        "leaving a model without the hooks of a trial", "pipeline parallelism"),
    _of("transformers.utils.output_capturing", "_active_collector",
        "tracing the hooks that collect outputs", "graphs without breaks where hidden states are asked for"),
    _of("transformers.models.auto.auto_factory:_BaseAutoModelClass", "_model_mapping",
        "which heads an architecture has", "the message about a missing head"),
    _of("transformers:PreTrainedModel", "_tp_plan", "how an architecture is divided",
        "tensor parallelism of architectures for which we have no plan"),
    # DeepSpeed: where ZeRO keeps the states.
    _of(f"{_ZERO}.partition_parameters:ZeroParamStatus", "NOT_AVAILABLE", "whether a parameter is whole", "ZeRO-3"),
    _of(f"{_ZERO}.partition_parameters:Init", "ds_id ds_shape ds_status", "parameters that are divided", "ZeRO-3"),
    _of("deepspeed.utils.mixed_precision_linkage", "_hp_mapping", "where the fp32 weights of a parameter are",
        "checkpoints of ZeRO-1 and ZeRO-2"),
    _of(f"{_ZERO}.stage_1_and_2:DeepSpeedZeroOptimizer",
        "bit16_groups single_partition_of_fp32_groups averaged_gradients ipg_buckets _optimizer_step",
        "weights, gradients and buckets of a worker", "checkpoints and receipts of ZeRO-1 and ZeRO-2"),
    _of(f"{_ZERO}.stage3:DeepSpeedZeroOptimizer_Stage3",
        "fp32_partitioned_groups_flat sub_group_to_group_id parameter_offload swap_optimizer "
        "_optimizer_step _swappable_optimizer_subgroup _optimizer_states_and_gradient_swap_in "
        "_optimizer_states_and_gradient_swap_out _reassign_or_swap_out_partitioned_parameters _release_swap_buffers",
        "weights of a worker, in memory and on NVMe", "checkpoints of ZeRO-3"),
    _of(f"{_ZERO}.partitioned_param_coordinator:PartitionedParameterCoordinator", "is_record_trace _invalidate_trace",
        "forgetting forwards that had no backward", "one gather of each parameter a micro batch under ZeRO-3"),
    _of("deepspeed:DeepSpeedEngine", "_config", "the settings that DeepSpeed derived from ours", "the receipt of ZeRO"),
    # fairscale: the library extends its sharded DDP.
    _of("fairscale.nn.data_parallel:ShardedDataParallel",
        "_should_accumulate_grads _trainable_params _setup_backward_hooks _clear_counters _get_reduce_fn "
        "_flush_reduce_calls _bucket_flush_callback_set",
        "reductions in one order on all workers", "OSS with sharded gradients"),
)  # fmt: skip


def missing(package: str) -> Iterator[tuple[str, PrivateName]]:
    """Yield the names that the installed version of ``package`` lacks, each with its entry.

    If an entry's module needs another package that is not installed, the entry is skipped, because nobody can use it.
    """
    for entry in PRIVATE_NAMES:
        if entry.package != package:
            continue
        try:
            yield from [(name, entry) for name in entry.names if not has(entry.owner, name)]
        except ModuleNotFoundError as error:
            if str(error.name).partition(".")[0] == package:
                raise


def has(owner: str, name: str) -> bool:
    """Whether ``module`` or ``module:Class`` has ``name``. Attributes of instances are searched in the source."""
    module_name, _, class_name = owner.partition(":")
    holder = _holder(module_name)
    if holder is None or (class_name and not hasattr(holder, class_name)):
        return False
    owner_object = getattr(holder, class_name) if class_name else holder
    return hasattr(owner_object, name) or _is_module(f"{module_name}.{name}") or name in _words(owner_object)


def _holder(module_name: str) -> object | None:
    """Return a module, or an object that acts as one, such as ``torch.ops.aten``. Return None if neither exists."""
    parent, _, last = module_name.rpartition(".")
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not module_name.startswith(str(error.name)):
            raise  # a package that the module needs is missing
        return getattr(_holder(parent), last, None) if parent else None


def _is_module(module_name: str) -> bool:
    try:
        return importlib.import_module(module_name) is not None
    except ModuleNotFoundError as error:
        if not module_name.startswith(str(error.name)):
            raise
        return False


@functools.cache
def _words(owner_object: object) -> frozenset[str]:
    """Return all words in the source file of a module or a class. Without a source file, the set is empty."""
    try:
        source = inspect.getsourcefile(owner_object)  # type: ignore[arg-type]
    except TypeError:
        return frozenset()
    if source is None:
        return frozenset()
    with open(source, encoding="utf-8") as file:
        return frozenset(re.findall(r"\w+", file.read()))

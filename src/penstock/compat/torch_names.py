"""Replacements for the internal names of torch.distributed.pipelining (docs/from-torch.md)."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["OF_MODULE", "OF_SCHEDULE", "OF_STAGE", "no_attribute", "no_import"]


def _by_name(table: str) -> dict[str, str]:
    """Per line of ``table``: torch's names, a colon, and the replacement."""
    rows = (line.split(":", 1) for line in table.strip().splitlines())
    return {name: use.strip() for names, use in rows for name in names.split()}


OF_MODULE = _by_name("""
_PipelineContext: a function of (block, forward, backward) for OVERLAP_F_B
_batch_p2p _sorted_batch_p2p _wait_batch_p2p: a schedule, which waits by itself
_add_send_recv _add_unshard_reshard: penstock.ScheduleProgram, which adds sends and gathers
_add_reduce_grad _merge_bw: penstock.ScheduleProgram, which adds reductions
_validate_schedule: penstock.check(program)
_simulate_comms_compute: penstock.simulate(program)
_format_pipeline_order _dump_chrometrace: penstock.simulate(program) and `penstock render`
visualize_schedule: `penstock render`
generate_rank_to_stage_mapping: stage_ids() of the schedule's class, or program.placement
generate_stage_to_rank_mapping: stage_ids() of the schedule's class, or program.placement
""")
OF_SCHEDULE = _by_name("""
_has_backward: has_loss
_internal_losses _maybe_compute_loss _maybe_get_loss: losses
_split_inputs: penstock.split_args_kwargs_into_chunks
_merge_outputs: penstock.merge_chunks
_initialize_stage _initialize_stages: nothing, since shapes are learned from microbatches
_step_microbatches: step(arg_mbs=..., kwarg_mbs=..., target_mbs=...)
backward_counter fwd_recv_ops bwd_recv_ops unshard_ops unsharded_stages: program and trace()
number_of_rounds microbatches_per_round: penstock.build("interleaved-1f1b", ..., group=)
""")
OF_STAGE = _by_name("""
fwd_cache bwd_cache backward_state: what forward_one_chunk returns, or get_local_bwd_output
dw_runner: backward_weight_one_chunk
args_recv_info act_send_info: get_fwd_recv_ops and its kin, or get_outputs_meta
grad_recv_info grad_send_info: get_fwd_recv_ops and its kin, or get_outputs_meta
node: stage_index
p2p_per_direction p2p_per_edge: nothing, since messages each way have a communicator on CUDA
submod_to_stage_index: get_stage_index_of_submod
inputs_meta _outputs_meta _configure_outputs_meta _shape_inference: nothing, as shapes are learned
_prepare_forward_infra _prepare_backward_infra: nothing, since shapes are learned from microbatches
""")


def no_import(name: str) -> ImportError:
    """The error for importing an internal name; Python drops an ``AttributeError``'s message."""
    return ImportError(
        f"cannot import name {name!r} from 'penstock': use {OF_MODULE[name]} (docs/from-torch.md)",
        name=name,
    )


def no_attribute(owner: object, name: str, instead: Mapping[str, str]) -> AttributeError:
    """The error for reading an attribute that ``owner`` lacks."""
    message = f"{type(owner).__name__!r} object has no attribute {name!r}"
    if name in instead:
        message += f", which torch's has: use {instead[name]} (docs/from-torch.md)"
    return AttributeError(message, name=name, obj=owner)

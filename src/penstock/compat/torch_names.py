"""Replacements for the internal names of torch.distributed.pipelining (docs/from-torch.md).

Importing an internal name, or reading it from a stage or schedule, raises an error with the
replacement.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["OF_MODULE", "OF_SCHEDULE", "OF_STAGE", "no_attribute", "no_import"]


def _by_name(names_by_use: Mapping[str, str]) -> dict[str, str]:
    return {name: use for use, names in names_by_use.items() for name in names.split()}


_NOTHING = "nothing, since shapes are learned from microbatches, and may change between steps"

# Replacement → the replaced names of torch.
OF_MODULE = _by_name(
    {
        "penstock.Action, whose parts are stage, op and microbatch": "_Action",
        "penstock.Op": "_ComputationType FORWARD FULL_BACKWARD BACKWARD_INPUT BACKWARD_WEIGHT",
        "a function of (block, forward, backward) for OVERLAP_F_B": "_PipelineContext",
        "a schedule, which waits by itself": "_batch_p2p _sorted_batch_p2p _wait_batch_p2p",
        "penstock.ScheduleProgram, which adds sends, receives and gathers to a program": (
            "_add_send_recv _add_unshard_reshard _add_reduce_grad _merge_bw"
        ),
        "penstock.check(program)": "_validate_schedule",
        "penstock.simulate(program)": "_simulate_comms_compute",
        "penstock.simulate(program) and `penstock render`": (
            "_format_pipeline_order _dump_chrometrace get_schedule_ops visualize_schedule"
        ),
        "stage_ids() of the schedule's class, or program.placement": (
            "generate_rank_to_stage_mapping generate_stage_to_rank_mapping"
        ),
    }
)
OF_SCHEDULE = _by_name(
    {
        "n_microbatches": "_n_microbatches",
        "program.num_stages": "_num_stages",
        "has_loss": "_has_backward",
        "losses": "_internal_losses _maybe_compute_loss _maybe_get_loss",
        "pipeline_order": "_get_pipeline_order",
        "penstock.split_args_kwargs_into_chunks": "_split_inputs",
        "penstock.merge_chunks": "_merge_outputs",
        _NOTHING: "_initialize_stage _initialize_stages",
        "step(arg_mbs=..., kwarg_mbs=..., target_mbs=...)": "_step_microbatches",
        "penstock.check, and ScheduleProgram": "_prepare_schedule_with_comms",
        "program and trace()": (
            "backward_counter fwd_recv_ops bwd_recv_ops unshard_ops unsharded_stages"
        ),
        'penstock.build("interleaved-1f1b", ..., group=)': (
            "number_of_rounds microbatches_per_round"
        ),
    }
)
OF_STAGE = _by_name(
    {
        "what forward_one_chunk returns, or get_local_bwd_output": (
            "fwd_cache bwd_cache backward_state"
        ),
        "backward_weight_one_chunk": "dw_runner",
        "get_fwd_recv_ops and its kin, or get_outputs_meta": (
            "args_recv_info act_send_info grad_recv_info grad_send_info"
        ),
        "stage_index": "node",
        "get_stage_index_of_submod": "submod_to_stage_index",
        _NOTHING: (
            "inputs_meta _outputs_meta _configure_outputs_meta _prepare_forward_infra "
            "_prepare_backward_infra _shape_inference"
        ),
    }
)


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

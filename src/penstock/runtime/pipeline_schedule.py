"""PipelineSchedule: a program over one rank's stages, with ``step()`` and ``eval()``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.cause import default_group, key_of, publishing_errors
from penstock.compat.actions import PipelineOrder, order_of, program_from_order
from penstock.compat.stage import HAND_DRIVEN, PipelineStage
from penstock.errors import ScheduleError, StageError, folds_tracebacks
from penstock.runtime.comm.base import Transport
from penstock.runtime.comm.loopback import loopback
from penstock.runtime.comm.process_group import make_transport
from penstock.runtime.config import LossFn, RunConfig
from penstock.runtime.engine import Engine
from penstock.runtime.overlap import PairFunction
from penstock.runtime.step import BatchSplitter, StepState
from penstock.schedule.passes import Lookahead
from penstock.schedule.program import Program
from penstock.schedule.registry import build, family
from penstock.trace import Trace

__all__ = ["PipelineSchedule", "group_of"]

# The schedules made per group, by its key: since every rank makes them in the same order, the
# number is an id.
_num_made: Counter[str] = Counter()

# Names that torch's schedules call or read on themselves.
_ONLY_IN_TORCH = (
    "_step_microbatches", "_split_inputs", "_check_inputs", "_compute_loss", "_maybe_compute_loss",
    "_maybe_get_loss", "_update_losses", "_merge_outputs", "_loss_fn", "_has_backward",
)  # fmt: skip

# The engine and the process group of each running step of this process.
_running: list[tuple[object, dist.ProcessGroup | None]] = []


class PipelineSchedule:
    """Runs a program over one rank's stages. Subclasses choose the program.

    A subclass of one's own sets ``pipeline_order``, or overrides ``_get_pipeline_order``. Several
    schedules may run over the same stages in turn.

    Args:
        stages: this rank's stages.
        defer_pp_recv, defer_reduce_grad_wait, max_outstanding_sends: no effect, since the program
            places receives, and sent tensors are freed as receivers answer; torch's signature.
        program: the program; chosen by the subclass if None.
        is_single_process: run all ranks in this process, even if the stages' group has others.
        options: these and all others: see ``penstock.runtime.config.RunConfig``.

    Attributes:
        n_microbatches: as in the options.
        has_loss: whether there is a loss function; without one, steps train nothing.
        losses: the last step's losses, shape (microbatches with rows,), on every rank; None
            without a loss.
        metrics: per microbatch, the metrics of the loss function, on the rank where it ran.
        rank, pp_group_size: this process's rank, and the number of ranks.
        num_stages, n_local_stages: the numbers of stages in all, and on this rank.

    Raises:
        ScheduleError: stages, ranks and microbatches do not fit the program, or a class overrides a
            method that no schedule calls.
        PartitionError: ``shared`` names a stage, module or parameter that does not exist, or
            stages share a layer with running statistics.
    """

    schedule_name: ClassVar[str | None] = None
    _pair_function: PairFunction | None = None

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: LossFn | None = None,
        args_chunk_spec: tuple[Any, ...] | None = None,
        kwargs_chunk_spec: dict[str, Any] | None = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        max_active_stages: int = 3,
        unshard_lookahead: Lookahead = "full",
        *,
        defer_reduce_grad_wait: bool = False,
        max_outstanding_sends: int | None = None,
        program: Program | None = None,
        is_single_process: bool = False,
        **options: Any,
    ) -> None:
        self._stages, self._group = stages, group_of(stages)
        self._engine: Engine | None = None
        self._order: PipelineOrder | None = None  # replaces the program at its next use
        self.n_microbatches = n_microbatches
        self.has_loss = loss_fn is not None
        self.losses: Tensor | None = None
        self.metrics: list[Any] = []
        # The other ranks may be waiting for this rank in their first step.
        with publishing_errors(self._group):
            _check_stages(stages)
            _refuse_overrides(self, stages)
            self.rank, self.pp_group_size = stages[0].group_rank, stages[0].group_size
            self._is_single_process = is_single_process or self.pp_group_size == 1
            self.num_stages, self.n_local_stages = stages[0].num_stages, len(stages)
            # Torch's names, for classes that make their own order.
            self._num_stages, self._n_microbatches = self.num_stages, n_microbatches
            specs = (args_chunk_spec, kwargs_chunk_spec, output_merge_spec)
            # Torch's names; they may be set between steps.
            self._args_chunk_spec, self._kwargs_chunk_spec, self._output_merge_spec = specs
            flags = (scale_grads, backward_requires_autograd)
            options["max_active_stages"] = max_active_stages
            options["unshard_lookahead"] = unshard_lookahead
            self._config = RunConfig(n_microbatches, loss_fn, *specs, *flags, **options)
            program = program or self._build()
            if program is not None:
                self._load(program)

    def _load(self, program: Program) -> None:
        """Load ``program`` for the following steps; a collective call."""
        stages, group, config = self._stages, self._group, self._config
        ties = config.shared or stages[0].ties
        with publishing_errors(group):
            transports: Sequence[Transport] = loopback(program.num_ranks)
            if group is not None and not self._is_single_process:
                number = _num_made[key_of(group, "made")]
                transports = [make_transport(group, stages[0].device, number, config.timeout_s)]
            by_index = {s.stage_index: s for s in stages}
            engine = Engine(program, by_index, transports, config, ties, self._pair_function)
            self.splitter = BatchSplitter(config, program, by_index)
        if self._engine is not None:
            self._engine.close()
        self._engine, self._order = engine, None
        if group is not None:
            _num_made[key_of(group, "made")] += 1
        for stage in stages:
            # Facts of the stages, for other schedules over them and for messages by hand.
            stage.ties = ties
            stage.stage_index_to_group_rank = self.stage_index_to_group_rank

    def _load_order(self) -> None:
        """Load the order that was set, or that of the class, if there is one."""
        order = self._order
        if not order and self._engine is None:
            order = self._get_pipeline_order()
        if order:
            with publishing_errors(self._group):
                program = program_from_order(order, self.n_microbatches, type(self).__name__)
            self._load(program)

    def _build(self) -> Program | None:
        """Build the program of this class's schedule, if any."""
        name, ranks = self.schedule_name, self.pp_group_size
        if name is None:
            return None
        unit = ranks * family(name).num_directions
        if self.num_stages % unit:
            raise ScheduleError(
                f"{self.num_stages} stages on {ranks} ranks: {name} takes a multiple of {unit}"
            )
        virtual = self.num_stages // unit
        return build(name, ranks=ranks, microbatches=self.n_microbatches, virtual=virtual)

    # --- facts -------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """Runs the steps; a ScheduleError before a program is loaded."""
        if self._order is not None or self._engine is None:
            self._load_order()
        if self._engine is None or self._order is not None:
            raise ScheduleError(
                f"this {type(self).__name__} has no program: take a class of a named schedule, set "
                "pipeline_order, or let PipelineScheduleMulti._load_csv(path) read a program"
            )
        return self._engine

    @property
    def scale_grads(self) -> bool:
        """As in the options; to change it, make another schedule over the stages."""
        return self._config.scale_grads

    @property
    def program(self) -> Program:
        """The executed program, including sends and receives."""
        return self.engine.program

    @property
    def pipeline_order(self) -> PipelineOrder:
        """The computations of each rank in order, as in torch, without idle time.

        An order that is set replaces the program at its next use, and is checked as every program;
        later changes of it have no effect.
        """
        if self._engine is None and self._order is None:
            self._order = {}
        return order_of(self.engine.requested) if self._order is None else self._order

    @pipeline_order.setter
    def pipeline_order(self, order: PipelineOrder) -> None:
        self._order = order

    def _get_pipeline_order(self) -> PipelineOrder | None:
        """The order that a subclass makes once it is used; None for the program's."""
        return None

    @property
    def stage_index_to_group_rank(self) -> dict[int, int]:
        """The rank of each stage, as in torch."""
        return dict(enumerate(self.engine.requested.placement.stage_ranks))

    # --- running -----------------------------------------------------------------------------

    @folds_tracebacks
    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        arg_mbs: Any = None,
        kwarg_mbs: Any = None,
        target_mbs: Any = None,
        finalize_gradients: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Run one training step: gradients are added to the parameters' ``.grad``.

        A batch is split by rows, as evenly as possible: 5 rows in 4 microbatches are 2, 1, 1, 1,
        and 3 rows run in 3 microbatches of 1, on all ranks. Gradients are those of the mean of the
        microbatches' means: if rows do not divide, rows of shorter microbatches count more. An
        object that is in no pytree registry goes whole to every microbatch.

        Args:
            args: the model's inputs, a whole batch (needed on the rank of the first stage; in a
                schedule of two directions, on those of both ends).
            target: the target of the loss (needed on the rank of the last stage; likewise).
            losses: a list that is filled with the microbatches' losses, on every rank.
            return_outputs: whether to return the last stage's outputs.
            loss_kwargs: keyword arguments of the loss function.
            arg_mbs, kwarg_mbs, target_mbs: ready microbatches instead of a batch.
            finalize_gradients: whether the gradients of replicas (DDP, FSDP2) and of shared
                parameters are reduced. If False, they accumulate as this rank's parts, and the
                next step with True reduces all at once; read no gradient before.
            kwargs: keyword arguments of every stage on this rank, a whole batch; and
                ``merge_outputs=False`` for a list with each microbatch's output.

        Returns:
            On the rank of the last stage (likewise) the outputs, unless turned off; else None.

        Raises:
            PenstockError: this rank or another one failed; see the subclasses. If nothing had run,
                on any rank (missing inputs, a batch that can't be split), the next step may follow.
            ValueError: the outputs can't be merged. The step is complete; the next one may follow.
        """
        kwargs |= {"return_outputs": return_outputs, "loss_kwargs": loss_kwargs}
        kwargs |= {"arg_mbs": arg_mbs, "kwarg_mbs": kwarg_mbs, "target_mbs": target_mbs}
        kwargs["finalize_gradients"] = finalize_gradients
        return self._run(args, kwargs | {"target": target, "losses": losses}, train=True)

    @folds_tracebacks
    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        arg_mbs: Any = None,
        kwarg_mbs: Any = None,
        target_mbs: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Run the forwards alone, without a graph, also under ``torch.inference_mode``. Arguments
        and result are those of ``step``.

        Losses are computed where a target is given; for these alone, where outputs can't be
        merged or are not wanted, pass ``return_outputs=False``.
        """
        kwargs |= {"arg_mbs": arg_mbs, "kwarg_mbs": kwarg_mbs, "target_mbs": target_mbs}
        return self._run(args, kwargs | {"target": target, "losses": losses}, train=False)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, train: bool) -> Any:
        engine, splitter, config = self.engine, self.splitter, self._config
        filled, merge = kwargs.pop("losses"), kwargs.pop("merge_outputs", True)
        train = train and self.has_loss and engine.requested.has_backward

        def prepare() -> StepState:
            _refuse_overrides(self, self._stages)  # either may have been patched since
            if train and config.backward_requires_autograd and not torch.is_grad_enabled():
                raise StageError("step() computes gradients, but runs under no_grad; use eval()")
            if not isinstance(filled, list | None):
                raise TypeError(
                    f"losses is a {type(filled).__name__}, expected a list, to be filled"
                )
            specs = self._args_chunk_spec, self._kwargs_chunk_spec
            return splitter.split(args, kwargs, specs)

        flags = {"keep_outputs": kwargs.get("return_outputs", True)}
        flags["reduces"] = kwargs.pop("finalize_gradients", True)
        with _exclusive_step(engine, self._group), nullcontext() if train else _evaluation():
            step, computed = engine.run(prepare, train=train, **flags)
        self.losses = splitter.merge_losses(computed)
        self.metrics = step.metrics if splitter.has_last else []
        if filled is not None:
            filled[:] = () if self.losses is None else self.losses.unbind()
        return splitter.merge_outputs(step, self._output_merge_spec, merge=merge)

    @folds_tracebacks
    def trace(self) -> Trace:
        """The trace of the last step on all ranks. A collective call."""
        engine = self.engine
        with _exclusive_step(engine, self._group):
            return engine.trace()


@contextmanager
def _exclusive_step(engine: object, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Refuse a step of ``engine`` over ``group`` within a step of the same engine or group.

    Raises:
        ScheduleError: a step of this engine or process group is running.
    """
    for running, other in _running:
        if running is engine or (group is not None and group is other and group.size() > 1):
            within = "the same pipeline" if running is engine else "another one over the same ranks"
            raise ScheduleError(
                f"step() or eval() was called within a step of {within} (in a loss function, a "
                "hook or a module), where other ranks do not join and microbatches' state is in "
                "use: call it before, and pass its result as target= or loss_kwargs="
            )
    entry = (engine, group)
    _running.append(entry)
    try:
        yield
    finally:
        _running.remove(entry)


@contextmanager
def _evaluation() -> Iterator[None]:
    # Not in inference mode, whose tensors don't count the writes that stages look for.
    with torch.inference_mode(False), torch.no_grad():
        yield


def group_of(stages: Sequence[PipelineStage]) -> dist.ProcessGroup | None:
    """The process group of a schedule's stages; the default group for arguments of other types."""
    first = next(iter(stages), None) if isinstance(stages, Sequence) else stages
    return first.group if isinstance(first, PipelineStage) else default_group()


def _refuse_overrides(schedule: PipelineSchedule, stages: Sequence[PipelineStage]) -> None:
    """Refuse overrides and attributes of torch's names, which would have no effect."""
    for name in _ONLY_IN_TORCH:
        if name in vars(schedule) or hasattr(type(schedule), name):
            raise ScheduleError(
                f"{type(schedule).__name__} has a {name} of its own, which is not used: pass "
                "loss_fn= or arg_mbs=, call eval() for forwards alone, or set pipeline_order"
            )
    for stage in stages:
        for name in HAND_DRIVEN:
            inherited = getattr(type(stage), name) is getattr(PipelineStage, name)
            if not inherited or name in vars(stage):
                raise ScheduleError(
                    f"stage {stage.stage_index} has a {name} of its own, which schedules do not "
                    "call: use dw_builder=, register_forward_context, or the module's hooks; or "
                    "drive the stage by hand"
                )


def _check_stages(stages: Sequence[PipelineStage]) -> None:
    """Require distinct stages of one model, in ascending order."""
    if isinstance(stages, PipelineStage):
        raise ScheduleError("a PipelineStage was given alone, expected a list of them")
    if not stages:
        raise ScheduleError("a rank was given no stage; each rank of the group holds one at least")
    for stage in stages:
        if not isinstance(stage, PipelineStage):
            raise ScheduleError(
                f"a {type(stage).__name__} was given as a stage, expected a PipelineStage (alone "
                "for schedules with one stage per rank, else in a list)"
            )
    indices, counts = [s.stage_index for s in stages], sorted({s.num_stages for s in stages})
    if len(counts) > 1:
        raise ScheduleError(f"the stages disagree on num_stages: {counts}; it counts all stages")
    if indices != sorted(set(indices)):
        raise ScheduleError(f"stage indices {indices}: pass each stage once, in rising order")

"""A mistake on one rank, or on all: one clear error on every rank, and no hang."""

from __future__ import annotations

import copy
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock import (
    Pipeline,
    PipelineScheduleMulti,
    PipelineStage,
    Schedule1F1B,
    ScheduleError,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
    ScheduleProgram,
    StageError,
    build,
)
from tests.compare import plain_step
from tests.distributed.attempts import SOON_S, Attempt, Run, played

DIM = 4
CPU = torch.device("cpu")
BATCH = torch.ones(8, DIM)


def make_stage(index: int, group: dist.ProcessGroup, num_stages: int = 2) -> PipelineStage:
    return PipelineStage(nn.Linear(DIM, DIM), index, num_stages, CPU, group=group)


def make_schedule(
    rank: int, group: dist.ProcessGroup, cls: Any = ScheduleGPipe, num_mb: int = 4, **options: Any
) -> Any:
    loss_fn = options.pop("loss_fn", nn.functional.mse_loss)
    return cls(make_stage(rank, group), num_mb, loss_fn, timeout_s=20, **options)


def step(rank: int, schedule: Any) -> object:
    return schedule.step(*((BATCH,) if rank == 0 else ()), target=BATCH if rank else None)


# --- what goes wrong: each is called with the rank and a fresh group -------------------------


def under_no_grad(culprit: int, rank: int, group: dist.ProcessGroup) -> object:
    schedule = make_schedule(rank, group)
    with torch.set_grad_enabled(rank != culprit):
        return step(rank, schedule)


def too_few_rows(rank: int, group: dist.ProcessGroup) -> object:
    schedule = make_schedule(rank, group)
    return schedule.step(BATCH[:3]) if rank == 0 else schedule.step(target=BATCH)


def no_rows(rank: int, group: dist.ProcessGroup) -> object:
    schedule = make_schedule(rank, group)
    return schedule.step(BATCH[:0]) if rank == 0 else schedule.step(target=BATCH)


def target_of_other_size(rank: int, group: dist.ProcessGroup) -> object:
    schedule = make_schedule(rank, group)
    return schedule.step(BATCH) if rank == 0 else schedule.step(target=BATCH.repeat(3, 1))


def target_with_too_few_rows(rank: int, group: dist.ProcessGroup) -> object:
    schedule = make_schedule(rank, group)
    return schedule.step(BATCH) if rank == 0 else schedule.step(target=BATCH[:2])


def a_step_within_a_step(rank: int, group: dist.ProcessGroup) -> object:
    teacher = make_schedule(rank, group)
    schedule = make_schedule(rank, group, loss_fn=lambda out, _: teacher.eval(out).mean())
    return step(rank, schedule)


def no_target(rank: int, group: dist.ProcessGroup) -> object:
    schedule = make_schedule(rank, group)
    return schedule.step(BATCH) if rank == 0 else schedule.step()


def no_inputs(rank: int, group: dist.ProcessGroup) -> object:
    schedule = make_schedule(rank, group)
    return schedule.step() if rank == 0 else schedule.step(target=BATCH)


def no_inputs_in_eval(rank: int, group: dist.ProcessGroup) -> object:
    return make_schedule(rank, group).eval()


def step_beside_eval(rank: int, group: dist.ProcessGroup) -> object:
    schedule = make_schedule(rank, group)
    step(rank, schedule)
    return step(rank, schedule) if rank == 0 else schedule.eval()


def too_long_lists(rank: int, group: dist.ProcessGroup) -> object:
    schedule = make_schedule(rank, group)
    if rank == 0:
        return schedule.step(arg_mbs=[(BATCH,)] * 5)
    return schedule.step(target=BATCH)


def other_microbatches(rank: int, group: dist.ProcessGroup) -> object:
    return step(rank, make_schedule(rank, group, num_mb=4 + rank))


def no_microbatches(rank: int, group: dist.ProcessGroup) -> object:
    return step(rank, make_schedule(rank, group, num_mb=0 if rank else 4))


def input_args_of_another_shape(rank: int, group: dist.ProcessGroup) -> object:
    example = torch.ones(2, DIM)
    stage = PipelineStage(
        nn.Linear(DIM, DIM),
        rank,
        2,
        CPU,
        input_args=torch.ones(3, DIM) if rank else example,
        output_args=example,
        group=group,
    )
    return step(rank, ScheduleGPipe(stage, 4, nn.functional.mse_loss, timeout_s=20))


def other_schedule(rank: int, group: dist.ProcessGroup) -> object:
    return step(rank, make_schedule(rank, group, Schedule1F1B if rank else ScheduleGPipe))


def same_name(schedule: str, rank: int, group: dist.ProcessGroup) -> object:
    """Gpipe on rank 0 and something else on rank 1, under one name."""
    program = build(schedule if rank else "gpipe", ranks=2, microbatches=4)
    return step(
        rank,
        ScheduleProgram(
            [make_stage(rank, group)],
            replace(program, name="mine"),
            nn.functional.mse_loss,
            timeout_s=20,
        ),
    )


def cut_otherwise(
    layers: tuple[list[nn.Linear], list[nn.Linear]],
    split: tuple[Any, Any],
    rank: int,
    group: dist.ProcessGroup,
) -> object:
    """Each rank has layers and a split of its own."""
    pipe = Pipeline(
        nn.Sequential(*layers[rank]),
        loss_fn=nn.functional.mse_loss,
        split=split[rank],
        n_microbatches=4,
        group=group,
        timeout_s=20,
    )
    return pipe.step(BATCH, target=BATCH)


def a_loss_on_one_rank(rank: int, group: dist.ProcessGroup) -> object:
    loss_fn = None if rank else nn.functional.mse_loss
    pipe = Pipeline(
        nn.Sequential(*linears(2)), loss_fn=loss_fn, n_microbatches=4, group=group, timeout_s=20
    )
    return pipe.step(BATCH, target=BATCH)


def linears(num: int, **options: Any) -> list[nn.Linear]:
    return [nn.Linear(DIM, DIM, **options) for _ in range(num)]


def loss_on_one_rank_only(rank: int, group: dist.ProcessGroup) -> object:
    loss_fn = nn.functional.mse_loss if rank else None
    return step(rank, make_schedule(rank, group, loss_fn=loss_fn))


def dynamic_on_one_rank_only(rank: int, group: dist.ProcessGroup) -> object:
    return step(rank, make_schedule(rank, group, dynamic_shapes=rank == 0))


def doubled_stage(rank: int, group: dist.ProcessGroup) -> object:
    return step(rank, ScheduleGPipe(make_stage(0, group), 4, nn.functional.mse_loss))


def out_of_range(culprit: int, rank: int, group: dist.ProcessGroup) -> object:
    index = 2 if rank == culprit else rank
    return step(rank, ScheduleGPipe(make_stage(index, group), 4, nn.functional.mse_loss))


def swapped_stages(rank: int, group: dist.ProcessGroup) -> object:
    return step(rank, ScheduleGPipe(make_stage(1 - rank, group), 4, nn.functional.mse_loss))


def interleaved(indices: list[int], rank: int, group: dist.ProcessGroup) -> object:
    stages = [make_stage(i, group, 4) for i in indices]
    return step(rank, ScheduleInterleaved1F1B(stages, 4, nn.functional.mse_loss))


def wrong_order(rank: int, group: dist.ProcessGroup) -> object:
    return interleaved([2, 0] if rank == 0 else [1, 3], rank, group)


def doubled_on_a_rank(rank: int, group: dist.ProcessGroup) -> object:
    return interleaved([0, 2] if rank == 0 else [1, 1], rank, group)


def missing_stage(rank: int, group: dist.ProcessGroup) -> object:
    return interleaved([0, 2] if rank == 0 else [1], rank, group)


def no_stage(rank: int, group: dist.ProcessGroup) -> object:
    stages = [] if rank else [make_stage(0, group)]
    return step(rank, ScheduleInterleaved1F1B(stages, 4, nn.functional.mse_loss, timeout_s=20))


def wrong_number_of_stages(rank: int, group: dist.ProcessGroup) -> object:
    stage = make_stage(rank, group, num_stages=3)
    return step(rank, ScheduleLoopedBFS([stage], 4, nn.functional.mse_loss))


def two_per_rank_for_1f1b(rank: int, group: dist.ProcessGroup) -> object:
    stage = make_stage(rank, group, num_stages=4)
    return step(rank, Schedule1F1B(stage, 4, nn.functional.mse_loss))


def num_stages_differs(rank: int, group: dist.ProcessGroup) -> object:
    stage = make_stage(rank, group, num_stages=2 if rank == 0 else 4)
    return step(rank, ScheduleGPipe(stage, 4, nn.functional.mse_loss))


def vector_loss(rank: int, group: dist.ProcessGroup) -> object:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target, reduction="none")

    return step(rank, make_schedule(rank, group, loss_fn=loss_fn))


def number_loss(rank: int, group: dist.ProcessGroup) -> object:
    return step(rank, make_schedule(rank, group, loss_fn=lambda output, target: 1.0))


def detached_loss(rank: int, group: dist.ProcessGroup) -> object:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output.detach(), target)

    return step(rank, make_schedule(rank, group, loss_fn=loss_fn))


def module_for_a_stage(rank: int, group: dist.ProcessGroup) -> object:
    stage: Any = nn.Linear(DIM, DIM) if rank else make_stage(0, group)
    return step(rank, ScheduleGPipe(stage, 4, nn.functional.mse_loss, timeout_s=20))


def list_for_a_stage(rank: int, group: dist.ProcessGroup) -> object:
    stage: Any = [make_stage(1, group)] if rank else make_stage(0, group)
    return step(rank, ScheduleGPipe(stage, 4, nn.functional.mse_loss, timeout_s=20))


def stage_for_a_list(rank: int, group: dist.ProcessGroup) -> object:
    stages: Any = make_stage(1, group) if rank else [make_stage(0, group)]
    return step(rank, ScheduleLoopedBFS(stages, 4, nn.functional.mse_loss, timeout_s=20))


def uncallable_loss(rank: int, group: dist.ProcessGroup) -> object:
    return step(rank, make_schedule(rank, group, loss_fn="mse" if rank else nn.MSELoss()))


@contextmanager
def csv_of(rank: int, text: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"rank{rank}.csv"
        path.write_text(text)
        yield path


PROGRAM = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def csv_by_path(mistaken: str, rank: int, group: dist.ProcessGroup) -> object:
    stages = [make_stage(rank, group)]
    with csv_of(rank, mistaken if rank else PROGRAM) as path:
        return step(rank, ScheduleProgram(stages, path, nn.functional.mse_loss, timeout_s=20))


def csv_loaded(rank: int, group: dist.ProcessGroup) -> object:
    schedule = PipelineScheduleMulti(
        [make_stage(rank, group)], 2, nn.functional.mse_loss, timeout_s=20
    )
    with csv_of(rank, PROGRAM.replace("0B1", "0B0") if rank == 0 else PROGRAM) as path:
        schedule._load_csv(path)
    return step(rank, schedule)


def csv_for_a_pipeline(rank: int, group: dist.ProcessGroup) -> object:
    model = [nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)]
    loss_fn = nn.functional.mse_loss
    with csv_of(rank, PROGRAM if rank else PROGRAM + "2F0,2B0") as path:
        pipe = Pipeline(model, loss_fn=loss_fn, schedule=path, group=group, timeout_s=20)
    return pipe.step(BATCH, target=BATCH)


def no_program(rank: int, group: dist.ProcessGroup) -> object:
    program: Any = "1f1b" if rank else build("1f1b", ranks=2, microbatches=4)
    stages = [make_stage(rank, group)]
    return step(rank, ScheduleProgram(stages, program, nn.functional.mse_loss, timeout_s=20))


def timeout_as_text(rank: int, group: dist.ProcessGroup) -> object:
    timeout_s: Any = "5" if rank else 5
    stage = make_stage(rank, group)
    return step(rank, ScheduleGPipe(stage, 4, nn.functional.mse_loss, timeout_s=timeout_s))


class Mute(Exception):
    """An error that can't say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


def mute_error(rank: int, group: dist.ProcessGroup) -> object:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        raise Mute

    return step(rank, make_schedule(rank, group, loss_fn=loss_fn))


@dataclass(frozen=True)
class Mistake:
    """A mistake, and what is heard of it.

    Args:
        make: what each rank does.
        kinds: the error's type on rank 0 and on rank 1.
        said: pattern of what the message says, on every rank.
        by: the ranks that may be named as the culprit.
    """

    make: Callable[[int, dist.ProcessGroup], object]
    kinds: tuple[str, str]
    said: str
    by: tuple[int, ...] = (0, 1)

    def __call__(self, rank: int, group: dist.ProcessGroup) -> list[Run]:
        return [lambda: self.make(rank, group)]


@dataclass(frozen=True)
class InDefaultGroup(Mistake):
    """What has no stage has no group but the default one: such cases run alone."""

    def __call__(self, rank: int, group: dist.ProcessGroup) -> list[Run]:
        assert dist.group.WORLD is not None
        return super().__call__(rank, dist.group.WORLD)


@dataclass(frozen=True)
class By:
    """A mistake that either rank may make."""

    make: Callable[[int, int, dist.ProcessGroup], object]
    culprit: int

    def __call__(self, rank: int, group: dist.ProcessGroup) -> object:
        return self.make(self.culprit, rank, group)


S, P, SCH, PAR = "StageError", "PeerError", "ScheduleError", "PartitionError"
MISTAKES = {
    "no grad on rank 0": Mistake(By(under_no_grad, 0), (S, P), r"no_grad; use eval\(\)", (0,)),
    "no grad on rank 1": Mistake(By(under_no_grad, 1), (P, S), r"no_grad; use eval\(\)", (1,)),
    "too few rows": Mistake(
        too_few_rows, (S, S), r"different numbers of microbatches \(rank 0: 3, rank 1: 4\)"
    ),
    "target of another size": Mistake(target_of_other_size, (P, S), "The size of tensor a", (1,)),
    "target with too few rows": Mistake(
        target_with_too_few_rows,
        (S, S),
        r"different numbers of microbatches \(rank 0: 4, rank 1: 2\)",
    ),
    "no rows": Mistake(
        no_rows, ("ValueError", P), r"shape \(0, 4\) can't be split into 4 .* at least 1 row;", (0,)
    ),
    "a loss on one rank": Mistake(
        a_loss_on_one_rank, (P, S), r"there is no loss: pass loss_fn= to Pipeline", (1,)
    ),
    "a step within a step": Mistake(
        a_step_within_a_step, (SCH, SCH), r"within a step of another one over the same ranks", (1,)
    ),
    "no target": Mistake(no_target, (P, S), r"no target.*passes target= .* to step\(\)", (1,)),
    "no inputs": Mistake(no_inputs, (S, P), r"no inputs.*passes them to step\(\) or eval", (0,)),
    "no inputs in eval": Mistake(no_inputs_in_eval, (S, P), r"no inputs.*passes them", (0,)),
    "step beside eval": Mistake(
        step_beside_eval, (SCH, SCH), r"rank 0 in step\(\).*rank 1 in eval\(\).*same order"
    ),
    "too long lists": Mistake(
        too_long_lists, ("ValueError", P), "5 ready microbatches in arg_mbs, expected 1 to", (0,)
    ),
    "other microbatches": Mistake(
        other_microbatches, (SCH, SCH), "do not agree on .*microbatches.*rank 0: .*4.*rank 1: .*5"
    ),
    "no microbatches": Mistake(
        no_microbatches, (SCH, SCH), "microbatches=0 must be a whole number from 1 on", (1,)
    ),
    "input_args of another shape": Mistake(
        input_args_of_another_shape,
        ("BoundaryError", "BoundaryError"),
        r"1F0: the stage's input is float32\[2,4\], expected float32\[3,4\] as input_args says",
        (1,),
    ),
    "other schedule": Mistake(
        other_schedule, (SCH, SCH), "do not agree on .*rank 0: .*gpipe.*rank 1: .*1f1b"
    ),
    "other order": Mistake(
        partial(same_name, "1f1b"), (SCH, SCH), "do not agree on the program .*rank 0: .*rank 1: "
    ),
    "too long a split": Mistake(
        partial(cut_otherwise, (linears(4), linears(4)), ([2, 2], [2, 3])),
        (PAR, PAR),
        "counts 5 layers, but there are 4",
        (1,),
    ),
    "other split": Mistake(
        partial(cut_otherwise, (linears(5), linears(5)), ([2, 3], [3, 2])),
        (SCH, SCH),
        r"the cut of the model \(rank 0: 2.weight is float32\[4,4\] in stage 1, "
        r"rank 1: 2.weight is float32\[4,4\] in stage 0\); pass the same",
    ),
    "one layer more": Mistake(
        partial(cut_otherwise, (linears(4), linears(5)), ([2, 2], [2, 3])),
        (SCH, SCH),
        r"rank 0: 4.weight is missing, rank 1: 4.weight is float32\[4,4\] in stage 1",
    ),
    "other dtype": Mistake(
        partial(cut_otherwise, (linears(4), linears(4, dtype=torch.float64)), ([2, 2], [2, 2])),
        (SCH, SCH),
        r"rank 0: 0.weight is float32\[4,4\] in stage 0, rank 1: 0.weight is float64\[4,4\]",
    ),
    "loss on one rank only": Mistake(
        loss_on_one_rank_only, (SCH, SCH), "do not agree on .*loss.*False.*True"
    ),
    "dynamic on one rank only": Mistake(
        dynamic_on_one_rank_only, (SCH, SCH), "do not agree on dynamic_shapes .*True.*False"
    ),
    "doubled stage": Mistake(
        doubled_stage, (SCH, SCH), r"needs the stages \[1\].* was given \[0\]", (1,)
    ),
    "out of range on rank 0": Mistake(
        By(out_of_range, 0), (S, P), "stage_index is 2, expected 0 to below num_stages=2", (0,)
    ),
    "out of range on rank 1": Mistake(
        By(out_of_range, 1), (P, S), "stage_index is 2, expected 0 to below num_stages=2", (1,)
    ),
    "swapped stages": Mistake(
        swapped_stages, (SCH, SCH), r"needs the stages \[\d\].*stage → rank: \(0, 1\)"
    ),
    "wrong order": Mistake(
        wrong_order, (SCH, SCH), r"stage indices \[2, 0\]: pass each stage once", (0,)
    ),
    "doubled on a rank": Mistake(
        doubled_on_a_rank, (SCH, SCH), r"stage indices \[1, 1\]: pass each stage once", (1,)
    ),
    "missing stage": Mistake(
        missing_stage, (SCH, SCH), r"needs the stages \[1, 3\].*given \[1\]", (1,)
    ),
    "wrong number of stages": Mistake(
        wrong_number_of_stages, (SCH, SCH), "3 stages on 2 ranks.*takes a multiple of 2"
    ),
    "two per rank for 1f1b": Mistake(
        two_per_rank_for_1f1b, (SCH, SCH), "1f1b: virtual=2 stages per rank do not work; 1 does"
    ),
    "num_stages differs": Mistake(
        num_stages_differs, (SCH, SCH), "gpipe: virtual=2 stages per rank do not work", (1,)
    ),
    "vector loss": Mistake(
        vector_loss, (P, S), r"a tensor of shape \(2, 4\), expected a scalar tensor, or", (1,)
    ),
    "number for a loss": Mistake(
        number_loss, (P, S), r"returned 1\.0, expected a scalar tensor", (1,)
    ),
    "detached loss": Mistake(detached_loss, (P, S), "does not depend on any parameter", (1,)),
    "mistake in a CSV file": Mistake(
        partial(csv_by_path, PROGRAM.replace("1B1", "1X1")),
        (SCH, SCH),
        r"rank1.csv: row 2, column 4: .*1X1",
        (1,),
    ),
    "trailing text in a CSV file": Mistake(
        partial(csv_by_path, PROGRAM.replace("1B1", "1B1 junk")),
        (SCH, SCH),
        r"rank1.csv: row 2, column 4: .*1B1 junk",
        (1,),
    ),
    "action missing in a CSV file": Mistake(
        partial(csv_by_path, PROGRAM.replace(",1B1", "")),
        (SCH, SCH),
        "1B1 is missing",
        (1,),
    ),
    "deadlock in a CSV file": Mistake(
        partial(csv_by_path, "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n"),
        (SCH, SCH),
        r"^(rank 1: )?rank 0, action 0B0: program .*deadlock: waits for 1B0 of rank 1",
        (1,),
    ),
    "mistake in a CSV file that is loaded": Mistake(csv_loaded, (SCH, SCH), "0B", (0,)),
    "CSV file for more ranks": Mistake(
        csv_for_a_pipeline, (SCH, SCH), "processes=2, but the program given as schedule has 3", (0,)
    ),
    "no program": Mistake(
        no_program, (SCH, SCH), r"takes a program, not '1f1b'; penstock.build\('1f1b', ranks=", (1,)
    ),
    "timeout as text": Mistake(
        timeout_as_text, (SCH, SCH), "timeout_s='5': expected a number of seconds above 0", (1,)
    ),
    "error without words": Mistake(
        mute_error, (P, S), "Mute, whose __str__ raised RuntimeError", (1,)
    ),
    "uncallable loss": Mistake(uncallable_loss, (SCH, SCH), "loss_fn is 'mse'.*callable", (1,)),
}
NO_GROUP = {
    "no stage": InDefaultGroup(no_stage, (SCH, SCH), "was given no stage", (1,)),
    "module for a stage": InDefaultGroup(
        module_for_a_stage, (SCH, SCH), "a Linear was given .*expected a PipelineStage", (1,)
    ),
    "list for a stage": InDefaultGroup(
        list_for_a_stage, (SCH, SCH), "a list was given .*expected a PipelineStage", (1,)
    ),
    "stage for a list": InDefaultGroup(
        stage_for_a_list, (SCH, SCH), "a PipelineStage was given .*expected a list", (1,)
    ),
}


def assert_told(mistake: Mistake, attempts: list[Attempt]) -> None:
    assert tuple(a.kind for a in attempts) == mistake.kinds, [a.message for a in attempts]
    for attempt in attempts:
        assert attempt.elapsed_s < SOON_S
        assert re.search(mistake.said, attempt.message.replace("\n", " ")), attempt.message
    for rank, attempt in enumerate(attempts):
        if rank not in mistake.by:
            culprit = mistake.by[0]
            assert attempt.where[0] == culprit
            # Penstock's own frames say nothing of the user's mistake.
            assert attempt.message.count("Traceback") <= 1
            assert attempt.message.count("penstock/runtime/") <= 1, attempt.message


@pytest.mark.parametrize("name", MISTAKES)
def test_every_rank_gets_one_clear_error(name: str) -> None:
    mistake = MISTAKES[name]
    # A rank waits some seconds for what another one says: more launches share this out evenly.
    by_rank = played(tuple(MISTAKES.values()), 2, launches=6)[mistake]
    assert_told(mistake, [told[0] for told in by_rank])


@pytest.mark.parametrize("name", NO_GROUP)
def test_a_mistake_before_there_is_a_stage(name: str) -> None:
    mistake = NO_GROUP[name]
    attempts = played(tuple(NO_GROUP.values()), 2, launches=len(NO_GROUP))[mistake]
    assert_told(mistake, [of_rank[0] for of_rank in attempts])


@dataclass(frozen=True)
class NothingRan:
    """Mistakes that are found before anything runs, each followed by a good step.

    Args:
        culprit: the rank that makes the mistakes.
    """

    culprit: int

    def __call__(self, rank: int, group: dist.ProcessGroup) -> list[Run]:
        # The loss and the gradients of the good steps are the plain loop's.
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
        module, mse = copy.deepcopy(plain[rank]), nn.functional.mse_loss
        stage = PipelineStage(module, rank, 2, CPU, group=group)
        schedule = ScheduleGPipe(stage, 4, mse, timeout_s=20)

        def call(method: Any, rows: int = 4, **wrong: Any) -> None:
            given: dict[str, Any] = {} if rank == 0 else {"target": BATCH[:rows]}
            inputs = (BATCH[:rows],) if rank == 0 else ()
            if rank == self.culprit:
                inputs, given = wrong.pop("inputs", inputs), given | wrong
            method(*inputs, **given)

        def good(rows: int) -> None:
            expected = plain_step(plain, mse, BATCH[:rows], target=BATCH[:rows], n_microbatches=4)
            call(schedule.step, rows)
            assert schedule.losses is not None and torch.equal(
                schedule.losses, torch.stack(expected.losses)
            )
            for mine, whole in zip(module.parameters(), plain[rank].parameters(), strict=True):
                assert mine.grad is not None and torch.equal(mine.grad, whole.grad)

        def without_grad() -> None:
            with torch.set_grad_enabled(rank != self.culprit):
                call(schedule.step)

        missing = {"inputs": ()} if self.culprit == 0 else {"target": None}
        unlike = {"inputs": (BATCH[:3],)} if self.culprit == 0 else {"target": BATCH[:3]}
        return [
            partial(call, schedule.step, **missing),  # in the first call, too
            partial(good, 8),
            partial(call, schedule.step, 8, **unlike),
            partial(good, 3),
            partial(call, schedule.step, losses=()),
            without_grad,
            lambda: call(schedule.eval if rank == self.culprit else schedule.step),
            partial(good, 4),
            partial(call, schedule.eval, arg_mbs=[()] * 5),
            lambda: call(schedule.eval, 2),
            lambda: schedule.trace() if rank == self.culprit else call(schedule.step),
            partial(good, 2),
        ]


NOTHING_RAN = (NothingRan(0), NothingRan(1))


@pytest.mark.parametrize("case", NOTHING_RAN)
def test_a_mistake_found_before_anything_ran_leaves_every_rank_usable(case: NothingRan) -> None:
    told = played(NOTHING_RAN, 2)[case]
    for rank, attempts in enumerate(told):
        own = rank == case.culprit
        assert [attempt.kind for attempt in attempts] == [
            *(
                S if own else P,
                None,
                S,
                None,
                "TypeError" if own else P,
                S if own else P,
                SCH,
                None,
            ),
            *("ValueError" if own else P, None, SCH, None),
        ], [attempt.message for attempt in attempts]


@dataclass(frozen=True)
class Mended:
    """Rank 1 makes mistakes, notices, and goes on; the others need not hear of it."""

    def __call__(self, rank: int, group: dist.ProcessGroup) -> list[Run]:
        def mend() -> None:
            if rank == 1:
                with pytest.raises(StageError):
                    make_stage(5, group)
            schedule = make_schedule(rank, group)
            if rank == 1:
                with pytest.raises(StageError):
                    make_stage(-1, group)
            step(rank, schedule)

        return [mend]


def test_a_mended_mistake_is_forgotten() -> None:
    case = Mended()
    for (told,) in played((case,), 2)[case]:
        assert told.kind is None, told.message


@dataclass(frozen=True)
class MendedLate:
    """Rank 0 waits in its first step already, while rank 1 makes mistakes and tries again."""

    def __call__(self, rank: int, group: dist.ProcessGroup) -> list[Run]:
        def mend() -> None:
            if rank == 1:
                time.sleep(0.8)  # by then the other rank waits, and its watcher looks
                with pytest.raises(StageError):
                    make_stage(5, group)
                time.sleep(0.6)
                with pytest.raises(ScheduleError):
                    make_schedule(rank, group, loss_fn="mse")
                time.sleep(0.6)
            schedule = make_schedule(rank, group)
            step(rank, schedule)
            step(rank, schedule)

        return [mend]


def test_a_mistake_mended_while_others_wait_is_forgotten() -> None:
    case = MendedLate()
    for (told,) in played((case,), 2)[case]:
        assert told.kind is None, told.message


class WithMetrics:
    """A loss with something beside it is no mistake."""

    def __call__(self, rank: int, group: dist.ProcessGroup) -> list[Run]:
        schedule = make_schedule(rank, group, loss_fn=loss_and_metrics)

        def run() -> None:
            losses: list[Tensor] = []
            schedule.step(*((BATCH,) if rank == 0 else ()), target=BATCH, losses=losses)
            assert len(losses) == 4
            assert schedule.metrics == ([{"rows": 2}] * 4 if rank == 1 else [])

        return [run]


def loss_and_metrics(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, int]]:
    return nn.functional.mse_loss(output, target), {"rows": len(output)}


def test_a_loss_with_metrics_is_accepted() -> None:
    case = WithMetrics()
    for (told,) in played((case,), 2)[case]:
        assert told.kind is None, told.message

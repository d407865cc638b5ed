"""Names and signatures are those of torch.distributed.pipelining: a user swaps the import alone."""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.pipelining as peer
from torch import nn
from torch.distributed.pipelining import _IR as peer_ir
from torch.distributed.pipelining import _backward as peer_backward
from torch.distributed.pipelining import microbatch as peer_microbatch
from torch.distributed.pipelining import schedules as peer_schedules
from torch.distributed.pipelining import stage as peer_stage
from torch.fx.node import map_aggregate

import penstock
from tests.processes import run_ranks

DIM = 6
CPU = torch.device("cpu")
# Earlier versions know less.
pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="compares with the API of torch 2.13 to 2.15"
)
MULTI = (
    "ScheduleInterleaved1F1B",
    "ScheduleLoopedBFS",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
)
VS = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
SCHEDULES = ("ScheduleGPipe", "Schedule1F1B", *MULTI)


def assert_takes_all_calls(ours: Callable[..., Any], theirs: Callable[..., Any]) -> None:
    """Every call that fits ``theirs`` fits ``ours``, and means the same."""
    mine = inspect.signature(ours).parameters
    other = inspect.signature(theirs).parameters
    positional = [n for n, p in other.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [n for n, p in mine.items() if p.kind is p.POSITIONAL_OR_KEYWORD][
        : len(positional)
    ] == positional
    for name, parameter in other.items():
        assert name in mine, name
        assert mine[name].kind is parameter.kind, name
        if parameter.default is not parameter.empty:
            assert mine[name].default == parameter.default, name
    for name, parameter in mine.items():
        # What is ours alone may be left out.
        if name not in other and parameter.kind is not parameter.VAR_KEYWORD:
            assert parameter.default is not parameter.empty, name


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("method", ["__init__", "step", "eval"])
def test_schedules_take_the_same_calls(name: str, method: str) -> None:
    ours, theirs = getattr(penstock, name), getattr(peer, name)
    assert_takes_all_calls(getattr(ours, method), getattr(theirs, method))
    mine = inspect.signature(getattr(ours, method)).parameters
    extra = set(mine) - set(inspect.signature(getattr(theirs, method)).parameters)
    keywords = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    new_in_torch_215 = {"max_active_stages", "unshard_lookahead"}
    assert all(mine[n].kind in keywords for n in extra - new_in_torch_215)


def test_no_public_name_of_the_peer_is_missing() -> None:
    public = [n for n in peer.__all__ if n.startswith("Schedule")]
    assert set(public) <= set(SCHEDULES) <= set(penstock.__all__)
    assert set(peer.__all__) <= set(penstock.__all__)


KINDS = ("PipelineScheduleSingle", "PipelineScheduleMulti", "_PipelineScheduleRuntime")


@pytest.mark.parametrize("name", [*SCHEDULES, *KINDS, "_ScheduleForwardOnly"])
def test_schedules_are_of_the_same_kinds(name: str) -> None:
    ours, theirs = getattr(penstock, name), getattr(peer_schedules, name)
    for kind in ("_PipelineSchedule", *KINDS):
        is_theirs = issubclass(theirs, getattr(peer_schedules, kind))
        assert issubclass(ours, getattr(penstock, kind)) == is_theirs, kind


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("PipelineScheduleSingle", "__init__"),
        ("PipelineScheduleMulti", "__init__"),
        ("PipelineScheduleMulti", "_load_csv"),
        ("PipelineScheduleMulti", "_dump_csv"),
        ("_PipelineScheduleRuntime", "__init__"),
        ("_PipelineScheduleRuntime", "_load_csv"),
        ("_PipelineScheduleRuntime", "_dump_csv"),
        ("_PipelineScheduleRuntime", "register_custom_function"),
    ],
)
def test_kinds_of_schedules_take_the_same_calls(name: str, method: str) -> None:
    ours, theirs = getattr(penstock, name), getattr(peer_schedules, name)
    assert_takes_all_calls(getattr(ours, method), getattr(theirs, method))


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (peer_schedules, ("_PipelineSchedule", "_PipelineScheduleRuntime", "_ScheduleForwardOnly")),
        (peer_stage, ("_PipelineStageBase", "_PipelineStage")),
        (peer_microbatch, ("_Replicate", "_CustomReducer", "sum_reducer", "BlockMask")),
        (peer_backward, ("stage_backward", "stage_backward_input", "stage_backward_weight")),
    ],
)
def test_names_that_users_import_with_an_underscore(module: Any, names: tuple[str, ...]) -> None:
    for name in names:
        assert hasattr(module, name), "torch has it no longer"
        assert hasattr(penstock, name)


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process alone, without which the peer makes no stage."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def is_public(name: str) -> bool:
    return not name.startswith("_")


def absent_in(ours: object, theirs: object) -> set[str]:
    """The public attributes of the peer's object that ours does not have."""
    shown = [*filter(is_public, vars(theirs)), *filter(is_public, dir(type(theirs)))]
    return {each for each in shown if not hasattr(ours, each)}


def told_absent() -> set[str]:
    """What the guide says is not here."""
    guide = (Path(__file__).parents[1] / "docs" / "from-torch.md").read_text()
    return set(re.findall(r"`(\w+)`", guide.partition("## Not here")[2]))


@pytest.mark.usefixtures("alone")
def test_attributes_are_there_or_the_guide_says_what_to_use() -> None:
    """Those that an instance has, which its class does not show."""

    def stages(library: Any, num: int) -> list[Any]:
        return [library.PipelineStage(nn.Identity(), i, num, CPU) for i in range(num)]

    absent: set[str] = set()
    for name in SCHEDULES:
        both = []
        for library in (penstock, peer):
            # A V of one rank has two stages.
            mine = stages(library, 2 if name in VS else 1)
            single = name in ("ScheduleGPipe", "Schedule1F1B")
            made = getattr(library, name)(mine[0] if single else mine, 4, nn.MSELoss())
            both.append([made, mine[0]])
        for ours, theirs in zip(*both, strict=True):
            absent |= absent_in(ours, theirs)
    assert absent <= told_absent()
    # Those that are of use are there.
    assert not absent & {"pipeline_order", "pipeline_order_with_comms", "rank", "output_chunks"}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", VS)
def test_attributes_of_schedules_are_torchs(name: str) -> None:
    told = []
    for library in (penstock, peer):
        stages = [library.PipelineStage(nn.Identity(), i, 2, CPU) for i in range(2)]
        schedule = getattr(library, name)(stages, 2, nn.MSELoss())
        assert schedule._stages == stages
        order = [[str(a) for a in row if a] for row in schedule.pipeline_order.values()]
        told.append(
            (
                (schedule.rank, schedule.pp_group_size, schedule.num_stages),
                schedule.n_local_stages,
                schedule.stage_index_to_group_rank,
                [stage.stage_index_to_group_rank for stage in stages],
                [stage.log_prefix for stage in stages],
                [len(row) for row in order],
            )
        )
    assert told[0] == told[1]


@pytest.mark.parametrize(
    "method",
    [
        "__init__",
        "forward_one_chunk",
        "backward_one_chunk",
        "backward_weight_one_chunk",
        "forward_maybe_with_nosync",
        "backward_maybe_with_nosync",
        "scale_grads",
        "perform_reduce_grad",
        "clear_runtime_states",
        "get_fwd_recv_ops",
        "get_fwd_send_ops",
        "get_bwd_recv_ops",
        "get_bwd_send_ops",
        "set_local_fwd_input",
        "set_local_bwd_input",
        "get_local_bwd_output",
        "register_forward_context",
        "start_gradient_reduction",
        "wait_for_gradient_reduction",
        "release_fwd_send_outputs",
    ],
)
def test_stages_take_the_same_calls(method: str) -> None:
    if not hasattr(peer.PipelineStage, method):
        pytest.skip(f"{method} exists since torch 2.15")
    assert_takes_all_calls(
        getattr(penstock.PipelineStage, method), getattr(peer.PipelineStage, method)
    )


def test_nothing_public_of_the_peers_stage_is_missing() -> None:
    stage = penstock.PipelineStage(nn.Identity(), 0, 1, torch.device("cpu"))
    # Older versions of the peer have get_outputs_meta.
    public = [n for n in dir(peer.PipelineStage) if not n.startswith("_")] + ["get_outputs_meta"]
    assert [n for n in public if not hasattr(stage, n)] == []


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (penstock.get_schedule_class, peer_schedules.get_schedule_class),
        (
            penstock.split_args_kwargs_into_chunks,
            peer_microbatch.split_args_kwargs_into_chunks,
        ),
        (penstock.merge_chunks, peer_microbatch.merge_chunks),
        (penstock.stage_backward, peer_backward.stage_backward),  # type: ignore[attr-defined]
        (penstock.stage_backward_input, peer_backward.stage_backward_input),  # type: ignore[attr-defined]
        (penstock.stage_backward_weight, peer_backward.stage_backward_weight),  # type: ignore[attr-defined]
        (penstock.TensorChunkSpec.__init__, peer_microbatch.TensorChunkSpec.__init__),
        (penstock.TensorChunkSpec.from_tuple, peer_microbatch.TensorChunkSpec.from_tuple),
        (penstock.TensorChunkSpec.from_dict, peer_microbatch.TensorChunkSpec.from_dict),
    ],
)
def test_functions_take_the_same_calls(
    ours: Callable[..., Any], theirs: Callable[..., Any]
) -> None:
    assert_takes_all_calls(ours, theirs)


@pytest.mark.parametrize(
    "name",
    [
        "pipeline",
        "pipe_split",
        "build_stage",
        "PipelineStageInfo",
        "analyze_pipeline_activation_liveness",
    ],
)
def test_public_functions_take_the_same_calls(name: str) -> None:
    if not hasattr(peer, name):
        pytest.skip(f"{name} exists since torch 2.15")
    assert_takes_all_calls(getattr(penstock, name), getattr(peer, name))


@pytest.mark.skipif(not hasattr(peer, "PipelineActivationLiveness"), reason="new in torch 2.15")
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", MULTI)
@pytest.mark.parametrize("granularity", ["microbatch", "stage_microbatch"])
def test_slots_of_activations_are_as_many_as_torchs(name: str, granularity: Any) -> None:
    found = []
    for library in (penstock, peer):
        num = 2 if name in VS else 3
        stages = [library.PipelineStage(nn.Identity(), i, num, CPU) for i in range(num)]
        schedule = getattr(library, name)(stages, 4, nn.MSELoss())
        found.append(
            library.analyze_pipeline_activation_liveness(  # type: ignore[attr-defined]
                schedule, pp_rank=0, stage_indices=range(num), granularity=granularity
            )
        )
    ours, theirs = found
    for field in ("pp_rank", "granularity", "stage_indices", "num_microbatches", "num_slots"):
        assert getattr(ours, field) == getattr(theirs, field), field
    assert ours.slot_by_stage_and_microbatch == theirs.slot_by_stage_and_microbatch


@pytest.mark.parametrize("name", [*(n.removeprefix("Schedule") for n in SCHEDULES), *KINDS[:2]])
def test_schedule_classes_are_found_by_the_same_names(name: str) -> None:
    for spelled in (name, name.lower(), name.upper()):
        theirs = peer_schedules.get_schedule_class(spelled)
        assert penstock.get_schedule_class(spelled).__name__ == theirs.__name__


def test_an_unknown_schedule_is_the_same_error() -> None:
    for library in (penstock, peer_schedules):
        with pytest.raises(ValueError, match=r"1f1b|1F1B"):
            library.get_schedule_class("2F2B")  # type: ignore[attr-defined]


# --- batches and programs ---------------------------------------------------------------------


@pytest.mark.parametrize("library", [penstock, peer_microbatch], ids=["penstock", "torch"])
def test_specs_mean_the_same(library: Any) -> None:
    rows, mask = torch.arange(4.0), torch.ones(3)
    spec = (library.TensorChunkSpec(0), library._Replicate())
    args, _ = library.split_args_kwargs_into_chunks((rows, mask), {}, 2, spec)
    assert [[len(t) for t in each] for each in args] == [[2, 3], [2, 3]]
    outputs = [(t, t.sum()) for t, _ in args]
    merged = library.merge_chunks(outputs, (library.TensorChunkSpec(0), library.sum_reducer))
    assert [t.tolist() for t in merged] == [[0, 1, 2, 3], 6]
    largest = library._CustomReducer(torch.tensor(0.0), torch.maximum)
    merged = library.merge_chunks(outputs, (library.TensorChunkSpec(0), largest))
    assert merged[1] == 5


def test_specs_of_another_library_are_refused() -> None:
    outputs = [torch.tensor(1.0), torch.tensor(2.0)]
    with pytest.raises(ValueError, match=r"output_merge_spec holds .*_LossReducer.* penstock's"):
        penstock.merge_chunks(outputs, peer_microbatch.sum_reducer)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("format", ["compute_only", "compute_comms"])
@pytest.mark.parametrize("module_name", ["penstock", "torch.distributed.pipelining.schedules"])
def test_a_program_is_loaded_from_its_dump(module_name: str, format: str, tmp_path: Path) -> None:
    library = importlib.import_module(module_name)
    stage_class = penstock.PipelineStage if library is penstock else peer.PipelineStage
    torch.manual_seed(0)
    layers = [nn.Linear(DIM, DIM) for _ in range(2)]
    batch = torch.randn(4, DIM)
    nn.functional.mse_loss(layers[1](layers[0](batch)), torch.zeros(4, DIM)).backward()
    expected = [p.grad.clone() for m in layers for p in m.parameters() if p.grad is not None]
    for layer in layers:
        layer.zero_grad()
    stages = [stage_class(m, i, 2, CPU) for i, m in enumerate(layers)]
    path = str(tmp_path / "mine.csv")
    library.ScheduleInterleaved1F1B(stages, 2, nn.MSELoss())._dump_csv(path, format=format)
    schedule = library._PipelineScheduleRuntime(stages, 2, nn.MSELoss(), defer_pp_recv=True)
    schedule._load_csv(path, format)
    schedule.step(batch, target=torch.zeros(4, DIM))
    torch.testing.assert_close(
        [p.grad for m in layers for p in m.parameters()], expected, rtol=1e-6, atol=1e-7
    )


# --- cutting by capture ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pipeline", "build_stage", "pipe_split"])
def test_cutting_takes_the_same_calls(name: str) -> None:
    assert_takes_all_calls(getattr(penstock, name), getattr(peer, name))


@pytest.mark.parametrize(
    "method", ["__init__", "get_stage_module", "build_stage", "info", "from_tracing"]
)
def test_pipes_take_the_same_calls(method: str) -> None:
    assert_takes_all_calls(getattr(penstock.Pipe, method), getattr(peer.Pipe, method))


def test_traced_stages_take_the_same_calls() -> None:
    theirs = peer_stage._PipelineStage
    assert_takes_all_calls(penstock.TracedStage.__init__, theirs.__init__)
    for method in ("get_stage_index_of_submod", "find_dst_rank"):
        assert_takes_all_calls(getattr(penstock.TracedStage, method), getattr(theirs, method))
    public = [n for n in dir(theirs) if not n.startswith("_")]
    assert [n for n in public if not hasattr(penstock.TracedStage, n) and n != "has_backward"] == []


def test_attributes_of_a_pipe_have_torchs_names() -> None:
    assert set(inspect.signature(peer_ir.PipeInfo).parameters) <= set(
        inspect.signature(penstock.PipeInfo).parameters
    )
    assert_takes_all_calls(penstock.annotate_split_points, peer_ir.annotate_split_points)
    assert [p.name for p in penstock.SplitPoint] == [p.name for p in peer.SplitPoint]
    assert set(peer.__all__) <= set(penstock.__all__)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # the peer's own
@pytest.mark.parametrize("module_name", ["torch.distributed.pipelining", "penstock"])
def test_the_same_script_cuts_a_model(module_name: str) -> None:
    """Written for the peer; each library gives the same stages, and the model's outputs."""
    library = importlib.import_module(module_name)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(3)))
    spec = {"1": library.SplitPoint.BEGINNING, "1.0": library.SplitPoint.END}
    pipe = library.pipeline(model, mb_args=(torch.ones(2, DIM),), split_spec=spec)
    assert pipe.num_stages == 3
    info = pipe.info()
    assert (info.num_stages, info.has_loss_and_backward) == (3, False)
    names = [[name for name, _ in pipe.get_stage_module(i).named_parameters()] for i in range(3)]
    assert names == [
        ["0.0.weight", "0.0.bias"],
        ["1.0.weight", "1.0.bias"],
        ["2.0.weight", "2.0.bias"],
    ]
    stages = [node for node in info.graph.nodes if node.op == "call_module"]
    assert [node.name for node in stages] == ["submod_pp_0", "submod_pp_1", "submod_pp_2"]
    x = torch.randn(2, DIM)
    output = pipe(x)
    assert isinstance(output, tuple) and len(output) == 1
    assert torch.equal(output[0], model(x))


class Outputs(nn.Module):
    """An output of some form."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.second(self.first(x))
        outputs = {"tensor": y, "tuple": (y,), "list": [y, y * 2], "values": (y, None, 3)}
        return outputs.get(self.form, {"z": y * 3, "a": [y, {"b": y * 2}]})


def step_traced(rank: int, num_ranks: int, module_name: str) -> list[Any]:
    """What pipes give, loss functions of traced stages see, and steps return."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # the peer's own
    library, told = importlib.import_module(module_name), list[Any]()
    for form in ("tensor", "tuple", "list", "values", "dict"):
        torch.manual_seed(0)
        model, x = Outputs(form), torch.randn(4, DIM)
        spec = {"second": library.SplitPoint.BEGINNING}
        pipe = library.pipeline(model, (x[:2],), split_spec=spec)
        seen: list[Any] = []

        def loss_fn(output: Any, target: Any, seen: list[Any] = seen) -> torch.Tensor:
            seen.append(output)
            return (output if isinstance(output, torch.Tensor) else output[0]).sum()

        schedule = library.Schedule1F1B(pipe.build_stage(rank, CPU), 2, loss_fn)
        output = schedule.step(*((x,) if rank == 0 else ()), target=torch.ones(4))
        told.append([pipe(x), [map_aggregate(each, torch.detach) for each in seen], output])
    return told


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_traced_pipes_and_stages_give_what_torchs_give() -> None:
    both = [
        [outcome.result() for outcome in run_ranks(step_traced, 2, name)]
        for name in ("penstock", "torch.distributed.pipelining")
    ]
    torch.testing.assert_close(*both)


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # the peer's own
def test_attributes_of_a_pipe_exist_or_the_guide_names_a_replacement() -> None:
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
    pipes = [
        library.pipeline(
            model, mb_args=(torch.ones(2, DIM),), split_spec={"1": library.SplitPoint.BEGINNING}
        )
        for library in (penstock, peer)
    ]
    stages = [pipe.build_stage(0, CPU) for pipe in pipes]
    absent = absent_in(*pipes) | absent_in(*stages)
    assert {"replicated_params", "submod_to_stage_index"} <= absent <= told_absent()


# --- the same script, over processes ----------------------------------------------------------


def train(rank: int, num_ranks: int, module_name: str, name: str) -> dict[str, Any]:
    """A user's script; only what it imports from differs."""
    library = importlib.import_module(module_name)
    cls = getattr(library, name)
    single = name in ("ScheduleGPipe", "Schedule1F1B")
    num_stages = num_ranks if single else 2 * num_ranks
    mine = [rank]
    if not single:
        is_v = name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
        mine.append(num_stages - 1 - rank if is_v else rank + num_ranks)
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(num_stages)]

    def make_schedule(**options: Any) -> Any:
        stages = [library.PipelineStage(layers[i], i, num_stages, CPU) for i in mine]
        made = stages[0] if single else stages
        return cls(made, n_microbatches=4, loss_fn=nn.MSELoss(), **options)

    schedule = make_schedule()
    params = [p for i in mine for p in layers[i].parameters()]
    optimizer = torch.optim.SGD(params, lr=0.1)
    history: dict[str, Any] = {"losses": [], "outputs": [], "grads": []}
    for _ in range(2):
        batch, target = torch.randn(8, DIM), torch.randn(8, DIM)
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        args = (batch,) if 0 in mine else ()
        if num_stages - 1 in mine:
            out = schedule.step(*args, target=target, losses=losses)
            history["losses"] += [loss.detach() for loss in losses]
            history["outputs"].append(out.detach())
        else:
            schedule.step(*args)
        history["grads"].append([p.grad.clone() for p in params])
        optimizer.step()
    optimizer.zero_grad()
    schedule = make_schedule(scale_grads=False)
    for _ in range(2):
        batch, target = torch.randn(8, DIM), torch.randn(8, DIM)
        given = {"target": target} if num_stages - 1 in mine else {}
        schedule.step(*((batch,) if 0 in mine else ()), **given)
    history["unscaled"] = [p.grad for p in params]
    return history


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_same_script_gives_the_same_numbers(name: str) -> None:
    theirs = [o.result() for o in run_ranks(train, 2, "torch.distributed.pipelining", name)]
    ours = [o.result() for o in run_ranks(train, 2, "penstock", name)]
    assert any(len(told["losses"]) == 8 for told in ours)
    for mine, other in zip(ours, theirs, strict=True):
        for key in ("losses", "outputs"):
            half = len(other[key]) // 2
            torch.testing.assert_close(mine[key][:half], other[key][:half], rtol=0, atol=0)
            torch.testing.assert_close(mine[key], other[key], rtol=1e-6, atol=1e-7)
        # The peer scales accumulated gradients at the end of a step, Penstock each loss before
        # its backward: sums of four terms, divided by four before or after, differ in rounding.
        torch.testing.assert_close(mine["grads"], other["grads"], rtol=1e-6, atol=1e-7)
        # The parameters that they are taken at are those after two steps.
        torch.testing.assert_close(mine["unscaled"], other["unscaled"], rtol=2e-6, atol=1e-6)

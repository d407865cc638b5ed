"""Every private name of torch that Penstock uses, and why.

Every entry says why public torch does not suffice. Unless an entry says otherwise, it was seen to
work on torch 2.11 to 2.15 (the versions in ``SEEN`` of ``tests/test_torch.py``). No other module
uses private names of torch.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, saved_tensors_hooks
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.errors import PenstockError

if TYPE_CHECKING:
    from torch.distributed._composable.replicate import DDP as ComposableDdp
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

__all__ = [
    "HOOKS",
    "HookWatch",
    "TorchDispatchMode",
    "REGISTRIES",
    "WRAPPERS_KEEP_UNDER",
    "WRAPPERS_STATE",
    "argument_effects",
    "around_compiled",
    "autocast_enabled",
    "autocast_state",
    "broadcast_ddp_buffers",
    "buffers_of",
    "by_positions",
    "children",
    "children_of",
    "composable_syncs",
    "copied_shell",
    "ddp_casts",
    "ddp_parameters",
    "ddp_within",
    "deferrable_now",
    "forward_of",
    "fsdp_finish_backward",
    "fused_by",
    "has_backward_hooks",
    "has_comm_hook",
    "has_forward_hooks",
    "has_grad_hooks",
    "has_memory",
    "has_no_forward",
    "in_function_forward",
    "in_transform",
    "is_composable_ddp",
    "is_data_dependent",
    "is_fsdp",
    "is_fsdp1",
    "is_lost_connection",
    "is_metadata_assert",
    "is_random",
    "is_sequential",
    "is_shared",
    "is_view",
    "make_group",
    "mutated_arguments",
    "observe_grad",
    "parameters_of",
    "pop_mode",
    "profiler_is_on",
    "push_mode",
    "pytree_node",
    "quietly",
    "refusing",
    "registries",
    "run_backward",
    "run_uncompiled",
    "same_storage",
    "saved_tensor_hooks_active",
    "saved_through",
    "shape_check",
    "switch_ddp_sink",
    "takes_cpu_tensors",
    "version_of",
    "view_base",
    "without_hooks",
    "without_modes",
    "without_override_check",
    "without_torch_function",
    "wrapper_subclass",
]

# -------------------- tensors and modules --------------------


def version_of(tensor: Tensor) -> int:
    """The number of in-place writes to ``tensor``'s storage: ``_version``, which autograd checks.

    Torch has no public counter of writes. Torch 2.11 to 2.15.
    """
    return tensor._version


def is_view(tensor: Tensor) -> bool:
    """True if ``tensor`` is a differentiable view: ``_is_view``.

    Torch has no public test for views. Torch 2.11 to 2.15.
    """
    return tensor._is_view()


def view_base(tensor: Tensor) -> Tensor | None:
    """The base tensor of a view: ``_base``.

    Torch has no public way from a view to its base. Torch 2.11 to 2.15.
    """
    return tensor._base


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The registered submodules of ``module``, including those set to None: ``_modules``.

    ``named_children`` omits None and repeated modules. Torch 2.11 to 2.15.
    """
    return module._modules


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The registered parameters of ``module`` itself: ``_parameters``.

    ``named_parameters`` omits None and repeated parameters. Torch 2.11 to 2.15.
    """
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The registered buffers of ``module`` itself: ``_buffers``.

    ``named_buffers`` omits None and repeated buffers. Torch 2.11 to 2.15.
    """
    return module._buffers


# -------------------- stages and the deferral of weight gradients --------------------
# Every name in this section was seen in torch 2.11, 2.13, 2.14 and 2.15.

# The attributes in which torch.compile and activation checkpointing store the wrapped module.
# Torch has no public method to unwrap such a module, or to remove the prefix from a name.
WRAPPERS_KEEP_UNDER = ("_orig_mod", "_checkpoint_wrapped_module")

# The public torch.is_autocast_enabled(device) needs the device's name. Looking up the name costs
# more than the rest of an interception.
autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled

# The bodies of TorchFunctionMode's __enter__ and __exit__, without two Python calls each. A mode is
# entered for every intercepted operation, so that these calls would add up.
push_mode: Callable[[Any], None] = torch._C._push_on_torch_function_stack
pop_mode: Callable[[], Any] = torch._C._pop_torch_function_stack

_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_grad_enabled = torch._C.is_grad_enabled
_engine = torch.autograd.Variable._execution_engine
_interpreters = torch._C._functorch.peek_interpreter_stack


class CompiledCall:
    """A temporarily replaceable call of a module compiled by ``torch.compile``.

    No public hook surrounds a compiled call. The call is ``_compiled_call_impl`` for a module
    compiled in place, and ``forward`` for the wrapper that ``torch.compile`` returns.

    Args:
        module: the compiled module.
        outside: makes the context manager around the replaced call.
    """

    def __init__(self, module: nn.Module, outside: Callable[[], Any]) -> None:
        self._held = vars(module)
        self._name = "forward" if is_compiled(module) else "_compiled_call_impl"
        compiled = self._held[self._name]

        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():  # inlined into another compiled function
                return compiled(*args, **kwargs)
            with outside():
                return compiled(*args, **kwargs)

        self._compiled, self._call = compiled, call

    def replace(self) -> None:
        """Wrap the call in the context from now on."""
        self._held[self._name] = self._call

    def restore(self) -> None:
        """Restore the compiled call."""
        self._held[self._name] = self._compiled


def compiled_calls(module: nn.Module, outside: Callable[[], Any]) -> list[CompiledCall]:
    """The calls of a module's outermost compiled submodules."""
    if is_compiled(module) or getattr(module, "_compiled_call_impl", None) is not None:
        return [CompiledCall(module, outside)]
    return [call for _, child in children(module) for call in compiled_calls(child, outside)]


@contextmanager
def without_modes(kind: type) -> Iterator[None]:
    """Remove the function modes of one class from the stack within a block.

    Public torch can only disable all modes at once. Uses ``_len_torch_function_stack`` in addition
    to ``push_mode`` and ``pop_mode``.

    Example:
        >>> from torch.overrides import TorchFunctionMode
        >>> class Loud(TorchFunctionMode):
        ...     def __torch_function__(self, func, types, args=(), kwargs=None):
        ...         raise AssertionError(func)
        >>> with Loud(), without_modes(Loud):
        ...     torch.ones(1)
        tensor([1.])
    """
    modes = [pop_mode() for _ in range(torch._C._len_torch_function_stack())]
    others = [mode for mode in modes if not isinstance(mode, kind)]
    for mode in reversed(others):
        push_mode(mode)
    try:
        yield
    finally:
        for _ in others:
            pop_mode()
        for mode in reversed(modes):
            push_mode(mode)


@contextmanager
def without_hooks(*leaves: Tensor) -> Iterator[None]:
    """Disable the gradient hooks of these leaves within a block.

    Torch has no public list of a tensor's hooks. The engine reads ``_backward_hooks`` and
    ``_post_accumulate_grad_hooks`` when it runs them.

    Example:
        >>> x = torch.ones(1, requires_grad=True)
        >>> handle = x.register_hook(lambda grad: grad * 2)
        >>> with without_hooks(x):
        ...     x.sum().backward()
        >>> x.sum().backward()
        >>> x.grad
        tensor([3.])
    """
    hooks = ((leaf._backward_hooks, leaf._post_accumulate_grad_hooks) for leaf in leaves)
    away = [(each, dict(each)) for both in hooks for each in both if each]
    for each, _ in away:
        each.clear()
    try:
        yield
    finally:
        for each, kept in away:
            each.update(kept)


def run_backward(roots: Sequence[Tensor | GradientEdge], grads: Sequence[Tensor]) -> None:
    """Run ``torch.autograd.backward(roots, grads)`` on the CPU without its Python checks.

    The engine, ``_execution_engine``, repeats the shape checks. On other devices its threads need
    the context that ``torch.autograd.backward`` passes to them.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> run_backward([x * 3], [torch.ones(2)])
        >>> x.grad
        tensor([3., 3.])
    """
    _engine.run_backward(
        tuple(roots), tuple(grads), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def saved_tensor_hooks_active() -> bool:
    """True if saved-tensor hooks are active, as in checkpointing and ``save_on_cpu``.

    Torch has public functions to set these hooks, but none to query them.

    Example:
        >>> with torch.autograd.graph.save_on_cpu():
        ...     saved_tensor_hooks_active()
        True
    """
    return _top_hooks(False) is not None


@contextmanager
def saved_through(
    pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor], refused: PenstockError
) -> Iterator[None]:
    """Pass the tensors that autograd saves through hooks.

    Args:
        pack: called with each tensor that is saved.
        unpack: called with the result of ``pack`` when the tensor is needed.
        refused: the error to raise under ``torch.func`` transforms, which forbid hooks. Torch's own
            error can be recognized only by its text.
    """
    try:
        with saved_tensors_hooks(pack, unpack):
            yield
    except RuntimeError as error:
        if "torch.func" in str(error) and "saved tensor hooks" in str(error):
            raise refused from error
        raise


def deferrable_now() -> bool:
    """True if autograd, and no functional transform, records operations now.

    False under ``no_grad``, in functional transforms, and in forward-mode differentiation. Torch
    has no public query for the latter two.

    Example:
        >>> with torch.no_grad():
        ...     deferrable_now()
        False
    """
    return _grad_enabled() and _interpreters() is None and forward_ad._current_level < 0


def in_transform(value: object) -> bool:
    """True if ``value`` is a wrapper tensor of ``torch.func.grad``, ``vjp`` or a similar transform.

    Torch has no public test for these wrapper tensors.

    Example:
        >>> in_transform(torch.ones(()))
        False
    """
    return isinstance(value, Tensor) and torch._C._functorch.is_gradtrackingtensor(value)


def has_memory(tensor: Tensor) -> bool:
    """True if ``tensor`` is backed by memory; False for a zero tensor, as tangents may be.

    Uses ``_is_zerotensor``, which has no public counterpart.

    Example:
        >>> has_memory(torch.ones(())), has_memory(torch._efficientzerotensor(()))
        (True, False)
    """
    return not tensor._is_zerotensor()


class ObserverLast(dict[Any, Callable[..., Any]]):
    """The hooks of one tensor, in insertion order, with the observer kept last.

    Hooks that a user adds later may replace the gradient, and the observer must see the gradient
    that the operation receives.
    """

    __slots__ = ("__weakref__",)

    def __setitem__(self, key: Any, hook: Callable[..., Any]) -> None:
        observer = self.pop("observer")
        super().__setitem__(key, hook)
        super().__setitem__("observer", observer)


def observe_grad(tensor: Tensor, observer: Callable[[Tensor], None]) -> None:
    """Call ``observer`` with the gradient that reaches the operation behind ``tensor``.

    ``Tensor.register_hook`` costs three times as much per operation, and hooks registered later
    would run after it. Uses ``_backward_hooks`` and ``_register_hook_dict``.

    Args:
        tensor: the result of an operation, without any hook registered on it.
        observer: called with each gradient of ``tensor``; must return None.

    Example:
        >>> seen = []
        >>> x = torch.ones(2, requires_grad=True)
        >>> y = x * 2
        >>> observe_grad(y, seen.append)
        >>> handle = y.register_hook(lambda grad: grad * 5)
        >>> y.sum().backward()
        >>> seen, x.grad
        ([tensor([5., 5.])], tensor([10., 10.]))
    """
    tensor._backward_hooks = ObserverLast(observer=observer)
    tensor.grad_fn._register_hook_dict(tensor)  # type: ignore[union-attr]


def observed(tensor: Tensor) -> bool:
    """True if ``observe_grad`` has been called on ``tensor``."""
    return type(tensor._backward_hooks) is ObserverLast


def observe_at_node(tensor: Tensor) -> None:
    """Move the observer of ``tensor`` behind the hooks of its graph node.

    Hooks registered on ``tensor.grad_fn`` run after those of the tensor. A node's post-hook
    receives the gradients as the operation received them, after all earlier hooks.
    """
    hooks: dict[Any, Callable[..., Any]] = tensor._backward_hooks  # type: ignore[assignment]
    observer = hooks["observer"]
    index = tensor.output_nr
    dict.__setitem__(hooks, "observer", ignore)

    def at_node(_: Any, received: tuple[Tensor | None, ...]) -> None:
        observer(received[index])

    tensor.grad_fn.register_hook(at_node)  # type: ignore[union-attr]


def ignore(_: Tensor) -> None:
    """Ignore a gradient whose observer has moved to the graph node."""


NO_OVERRIDES = {
    name: lambda *_: False
    for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
}


def without_override_check(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """A copy of a Python function of torch that runs its body under an active mode.

    These functions first dispatch to the active mode, which therefore never sees the operations
    inside. The copy shares code and defaults, and skips the dispatch.

    Args:
        function: a Python function of torch, such as ``F.multi_head_attention_forward``.

    Returns:
        The copy; None if ``function`` is not written in Python.

    Example:
        >>> twin = without_override_check(torch.nn.functional.layer_norm)
        >>> twin(torch.tensor([[1.0, 3.0]]), (2,), eps=0.0)
        tensor([[-1.,  1.]])
    """
    if not isinstance(function, FunctionType):
        return None
    twin = FunctionType(
        function.__code__,
        {**function.__globals__, **NO_OVERRIDES},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


# Classes registered with torch's pytree that are leaves here: torch.Size, and the BlockMask of flex
# attention, whose tensors hold block indices rather than rows.
NO_TREES = ("torch.Size", "torch.nn.attention.flex_attention.BlockMask")


def pytree_node(
    cls: type[Any],
) -> tuple[Callable[[Any], tuple[Any, Any]], Callable[[Sequence[Any], Any], Any]] | None:
    """The flatten and unflatten functions of a class in torch's pytree; None if unregistered.

    Reads the registry ``SUPPORTED_NODES``: torch has a public function to register, but no lookup.

    Args:
        cls: the class. A subclass of a registered class does not inherit the registration.

    Returns:
        A function from a value to (children, context), and a function from these to a value.

    Example:
        >>> class Point:
        ...     def __init__(self, x):
        ...         self.x = x
        >>> pytree_node(Point)
        >>> torch.utils._pytree.register_pytree_node(
        ...     Point, lambda point: ([point.x], None), lambda children, _: Point(*children)
        ... )
        >>> opened, made = pytree_node(Point)
        >>> children, context = opened(Point(3))
        >>> made(children, context).x
        3
    """
    node = _pytree.SUPPORTED_NODES.get(cls)
    if node is None or f"{cls.__module__}.{cls.__qualname__}" in NO_TREES:
        return None
    unflatten = node.unflatten_fn
    return node.flatten_fn, lambda children, context: unflatten(list(children), context)


# -------------------- DDP, FSDP2 and replicate --------------------
# Seen in torch 2.11, 2.13, 2.14 and 2.15, unless an entry says otherwise. These wrappers reduce
# gradients in hooks of the last backward. A pipeline's last weight gradient may come later, so that
# reductions are started, delayed and finished here. The wrappers are not imported, since an import
# takes a second and a wrapped module implies that user code has imported its wrapper.


def _loaded(module_name: str, name: str) -> Any:
    return getattr(sys.modules.get(module_name), name, ())


def is_fsdp(module: object) -> TypeGuard[FSDPModule]:
    """True if ``fully_shard`` was applied to ``module``."""
    return isinstance(module, _loaded("torch.distributed.fsdp", "FSDPModule"))


def is_fsdp1(module: object) -> TypeGuard[FullyShardedDataParallel]:
    """True if ``module`` is wrapped in FSDP1."""
    return isinstance(module, _loaded("torch.distributed.fsdp", "FullyShardedDataParallel"))


def is_composable_ddp(module: object) -> TypeGuard[ComposableDdp]:
    """True if the DDP-based ``replicate`` was applied to ``module``; its class is not public."""
    return isinstance(module, _loaded("torch.distributed._composable.replicate", "DDP"))


def _replicate_state(module: ComposableDdp) -> Any:
    from torch.distributed._composable.replicate import replicate

    return replicate.state(module)  # type: ignore[arg-type]


def ddp_casts(module: DistributedDataParallel) -> bool:
    """True if DDP casts parameters and gradients (``mixed_precision``)."""
    return module.mixed_precision is not None


def has_comm_hook(module: DistributedDataParallel) -> bool:
    """True if a communication hook is registered: ``_comm_hooks``, which DDP does not expose.
    Torch 2.11 to 2.15."""
    return bool(module._comm_hooks)


def broadcast_ddp_buffers(module: DistributedDataParallel) -> None:
    """Broadcast the first replica's buffers, except those that DDP ignores.

    DDP broadcasts in every forward, thus per microbatch. Its public arguments can only disable
    the broadcast. Uses ``_sync_buffers``.
    """
    module._sync_buffers()  # type: ignore[no-untyped-call]


def ddp_parameters(module: DistributedDataParallel) -> list[nn.Parameter]:
    """The parameters that DDP reduces: ``_module_parameters``, which has no public counterpart."""
    held: list[nn.Parameter] = module._module_parameters
    return [p for p in held if p.requires_grad]


def switch_ddp_sink(module: DistributedDataParallel, *, off: bool) -> bool:
    """Suppress the all-reduce of DDP with ``static_graph=True`` after the first backward.

    The all-reduce runs even under ``no_sync()``, where it fails. Sets
    ``_static_graph_delay_allreduce_enqueued``, since DDP has no public switch.

    Returns:
        The previous setting.
    """
    if not module.static_graph:
        return off
    before: bool = module._static_graph_delay_allreduce_enqueued
    module._static_graph_delay_allreduce_enqueued = off
    return before


def ddp_within(module: ComposableDdp) -> DistributedDataParallel:
    """The DDP module of a module under ``replicate``, stored only in its private ``_ddp``.

    Torch creates the DDP module in the first forward; this function creates it at once.
    """
    state = _replicate_state(module)
    if state._init_args or state._init_kwargs:
        state.lazy_init()
    ddp: DistributedDataParallel = state._ddp
    return ddp


def composable_syncs(module: ComposableDdp) -> bool:
    """True if a module under ``replicate`` reduces gradients: ``_no_sync`` has no public getter."""
    state = _replicate_state(module)
    return not state._no_sync


def fsdp_finish_backward(root: FSDPModule) -> None:
    """Reduce-scatter the gradients of ``root``'s parameters, as FSDP does after a last backward.

    FSDP reduces in an autograd callback at the end of ``backward()``, but deferred weight gradients
    may come later. FSDP sets no callback if it finds no tensor in a module's output. The callback,
    ``_root_post_backward_final_callback``, has no public counterpart.
    """
    state: Any = root._get_fsdp_state()
    for each in state._state_ctx.all_states:
        for group in _fsdp_groups(each):
            group._training_state = type(group._training_state).IDLE
    # Exists since torch 2.15, where the callback sets it too.
    context, manual = state._state_ctx, "manual_backward_finalization_active"
    setattr(context, manual, getattr(context, manual, None) or False)
    state._root_post_backward_final_callback()


def _fsdp_groups(state: Any) -> list[Any]:
    """The parameter groups of one module's FSDP state; torch 2.11 has at most one."""
    if hasattr(state, "_fsdp_param_groups"):
        return [*state._fsdp_param_groups]
    return [group for group in (state._fsdp_param_group,) if group is not None]


# -------------------- the runtime and process groups --------------------
def has_grad_hooks(param: Tensor) -> bool:
    """True if ``param`` has post-accumulate-grad hooks, which torch does not list publicly.
    Torch 2.11 to 2.15."""
    return bool(getattr(param, "_post_accumulate_grad_hooks", None))


def is_lost_connection(error: BaseException | None) -> bool:
    """True if torch raised ``error`` because a process is unreachable. Gloo raises a plain
    RuntimeError, recognizable only by its text. Torch 2.11 to 2.15."""
    said_by_gloo = isinstance(error, RuntimeError) and "gloo/transport" in str(error)
    return said_by_gloo or isinstance(error, dist.DistError)


def takes_cpu_tensors(group: dist.ProcessGroup) -> bool:
    """True if one of the group's backends handles CPU tensors: ``_device_types``, since the public
    ``get_backend`` names only one of several backends. Torch 2.11 to 2.15."""
    return torch.device("cpu") in group._device_types


def profiler_is_on() -> bool:
    """True while ``torch.profiler`` records in this process: torch has no public query.
    Torch 2.11 to 2.15."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def make_group(
    ranks: Sequence[int], backend: str, name: str, *, timeout_s: float
) -> dist.ProcessGroup:
    """Create a group of some processes without a call on the others.

    The public ``new_group`` does not suffice. It names groups by the number of groups of this
    process, which may differ between ranks. It sorts the ranks. If the default group is bound to a
    device, it splits that group's communicator in a call that all processes must join;
    ``bound_device_id`` is therefore cleared for the call. Torch 2.11 to 2.15.

    Args:
        ranks: the processes, in the group's order; each one must call.
        backend: ``"gloo"`` or ``"nccl"``.
        name: a unique name, the same on each of these processes.
        timeout_s: torch's own timeout for operations of the group.
    """
    world = dist.group.WORLD
    assert world is not None, "there is a pipeline's group"
    _, store = distributed_c10d._world.pg_map[world]
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        made, _ = distributed_c10d._new_process_group_helper(
            len(ranks),
            ranks.index(world.rank()),
            list(ranks),
            dist.Backend(backend),
            store,
            group_name=distributed_c10d.GroupName(name),
            timeout=timedelta(seconds=timeout_s),
            group_desc="penstock",
        )
    finally:
        world.bound_device_id = bound
    numbers = {process: number for number, process in enumerate(ranks)}
    distributed_c10d._world.pg_group_ranks[made] = numbers
    assert isinstance(made, dist.ProcessGroup)
    return made


# -------------------- cutting models by module --------------------

# The registries of a module's hooks, which a copy must not share.
HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)

# All registries that a copy must not share.
REGISTRIES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", *HOOKS)

# The prefix of the numbered attribute in which FSDP2 and replicate store their state on a module.
WRAPPERS_STATE = "__composable_api_state_key_"


def has_forward_hooks(module: nn.Module) -> bool:
    """True if ``module`` has forward or backward hooks of its own."""
    return bool(module._forward_pre_hooks or module._forward_hooks or has_backward_hooks(module))


def has_backward_hooks(module: nn.Module) -> bool:
    """True if ``module`` has backward hooks of its own."""
    return bool(module._backward_pre_hooks or module._backward_hooks)


def forward_of(module: nn.Module) -> Any:
    """The function that calling ``module`` runs: an instance attribute, or its class's method.

    Reads the dicts, since ``getattr`` fails for some classes of torch.jit.
    """
    owners = (module, *type(module).__mro__)
    return next(vars(owner)["forward"] for owner in owners if "forward" in vars(owner))


def is_sequential(module: nn.Module) -> bool:
    """True if ``module`` runs its children in sequence, as ``nn.Sequential`` does."""
    return forward_of(module) is nn.Sequential.forward


def has_no_forward(module: nn.Module) -> bool:
    """True if ``module`` is a container without a forward, such as ``nn.ModuleList``."""
    inherited: Any = nn.Module.forward
    return forward_of(module) is inherited


def registries(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """A module's own parameters, and its buffers: ``_parameters`` and ``_buffers``."""
    return module._parameters, module._buffers


def children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The direct children with their names; a module registered twice appears twice."""
    return [(name, child) for name, child in module._modules.items() if child is not None]


def copied_shell(module: nn.Module) -> nn.Module:
    """A shallow copy of ``module`` with registries of its own, which share their contents.

    ``copy.copy`` would share the registries, and ``copy.deepcopy`` would copy the parameters.
    """
    made: nn.Module = object.__new__(type(module))
    attributes = dict(vars(module))
    for name in REGISTRIES:
        if name in attributes:
            attributes[name] = attributes[name].copy()
    object.__setattr__(made, "__dict__", attributes)
    return made


def fused_by(module: nn.Module) -> str | None:
    """The compiler of a module's forward, such as torch.compile or torch.jit; None if uncompiled.

    A copy of a compiled module would run the original. torch.compile marks modules only by
    ``_compiled_call_impl`` and ``_torchdynamo_orig_callable``.
    """
    compiled = getattr(module, "_compiled_call_impl", None) is not None
    functions = [value for value in vars(module).values() if callable(value)]
    compiled |= any(hasattr(value, "_torchdynamo_orig_callable") for value in functions)
    if compiled or is_compiled(module):
        return "torch.compile"
    return "torch.jit" if isinstance(module, torch.jit.ScriptModule) else None


def is_compiled(module: nn.Module) -> bool:
    """True if ``module`` is the wrapper that ``torch.compile`` returns: ``OptimizedModule``."""
    return type(module).__name__ == "OptimizedModule" and "_orig_mod" in module._modules


def run_uncompiled(copy: nn.Module) -> None:
    """Make a ``copied_shell`` of a compiled module run its own children uncompiled."""
    vars(copy)["_compiled_call_impl"] = None
    if is_compiled(copy):
        vars(copy)["forward"] = lambda *args, **kwargs: copy._modules["_orig_mod"](*args, **kwargs)  # type: ignore[misc]


def without_torch_function(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call ``func`` without ``__torch_function__``; ``__torch_dispatch__`` stays active.

    Torch's guide to subclasses documents ``torch._C.DisableTorchFunctionSubclass``.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def is_shared(tensor: Tensor) -> bool:
    """True if other tensors share the storage of ``tensor``, judged by its use count.

    Example:
        >>> tensor = torch.zeros(2)
        >>> is_shared(tensor), is_shared(tensor.detach())
        (False, True)
    """
    storage = tensor.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) > 2)


def wrapper_subclass(cls: Any, like: Tensor, device: torch.device) -> Any:
    """A tensor of class ``cls`` with the shape, strides and dtype of ``like``, without storage."""
    return Tensor._make_wrapper_subclass(
        cls,
        like.shape,
        strides=like.stride(),
        storage_offset=like.storage_offset(),
        dtype=like.dtype,
        device=device,
    )


def is_data_dependent(func: Any, args: Sequence[Any]) -> bool:
    """True if an ATen call needs tensor values, if only for its result's shape."""
    if func is torch.ops.aten.index.Tensor:  # positions determine the result's shape
        return any(_is_mask(index) for index in args[1])
    return (
        torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
    )


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def by_positions(func: Any, args: tuple[Any, ...], has_value: Callable[[Tensor], bool]) -> Any:
    """The arguments of an ATen call, with masks of available value replaced by positions.

    Example:
        >>> mask = torch.tensor([True, False, True])
        >>> index = torch.ops.aten.index.Tensor
        >>> by_positions(index, (torch.ones(3), [mask]), lambda tensor: True)[1]
        [tensor([0, 2])]
    """
    if func is not torch.ops.aten.index.Tensor:
        return args
    indices: list[Any] = []
    for index in args[1]:
        known = _is_mask(index) and index.dim() > 0 and has_value(index)
        indices += index.nonzero().unbind(1) if known else [index]
    return (args[0], indices)


def is_random(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if an ATen call draws random numbers.

    Attention is tagged as random regardless of its dropout. The schema (``_schema``) locates the
    dropout argument.
    """
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for i, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            chance = args[i] if i < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(chance != 0)
    return True


def mutated_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an ATen call mutates, according to the private ``_schema``."""
    if not func._schema.is_mutable:
        return []
    found: list[Any] = []
    for i, (name, _, is_written) in enumerate(argument_effects(func) or ()):
        if is_written:
            value = args[i] if i < len(args) else kwargs.get(name)
            found += value if isinstance(value, (list, tuple)) else [value]
    return [value for value in found if value is not None]


def autocast_state(device: torch.device) -> tuple[Any, ...]:
    """The state of autocast on the CPU and on ``device``, to be compared."""
    kinds = sorted({"cpu", device.type} - {"meta"})
    return tuple(
        (kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)
    )


_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parent.parent)
# Functions of torch that inspect the graph on behalf of user code.
_GRAPH = str(Path(torch.__file__).parent / "autograd" / "graph.py")
_GRAD_FN: Any = torch._C.TensorBase.grad_fn
_GETTER = type(_GRAD_FN.__get__)


class HookWatch(TorchFunctionMode):
    """A mode that reports hooks registered on tensors, and reads of ``grad_fn``.

    Hooks on graph nodes can't be observed, but registering one requires reading ``grad_fn``.

    Args:
        report: called with a description of each event.

    Example:
        >>> with HookWatch(print):
        ...     handle = torch.zeros(2, requires_grad=True).register_hook(print)
        registers a hook on a tensor
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run ``func`` and report it if it registers a hook or reads ``grad_fn``."""
        if func is Tensor.register_hook:
            self._report("registers a hook on a tensor")
        elif type(func) is _GETTER and func.__self__ is _GRAD_FN:
            frame: Any = sys._getframe(1)
            while frame.f_code.co_name == "__torch_function__":  # a frame of another mode
                frame = frame.f_back
            helps = frame.f_code.co_filename == _GRAPH
            while frame.f_code.co_filename == _GRAPH:
                frame = frame.f_back
            if not frame.f_code.co_filename.startswith(_OURS if helps else (_TORCH, _OURS)):
                self._report("reads a tensor's grad_fn")
        return func(*args, **(kwargs or {}))

    def paused(self) -> AbstractContextManager[None]:
        """Suspend reports within a block."""
        return without_modes(HookWatch)


def in_function_forward() -> bool:
    """True if the caller runs within the forward of a user's or torch's autograd function.

    Such a function builds its own graph in its backward, or none. Torch has no query for this, so
    that the stack frames are inspected.
    """
    frame: Any = sys._getframe(1)
    ours = True
    while frame is not None:
        was, ours = ours, frame.f_code.co_filename.startswith(_OURS)
        if ours and not was:
            return False  # frames outside the model's code are irrelevant
        first = next(iter(frame.f_code.co_varnames), "")
        if isinstance(frame.f_locals.get(first), torch.autograd.function.FunctionCtx):
            return True
        frame = frame.f_back
    return False


def same_storage(left: Tensor, right: Tensor) -> bool:
    """True if two tensors share a storage; meta tensors too, although they have no memory."""
    return left.untyped_storage() is right.untyped_storage()


# -------------------- torch.export and profiling --------------------
# Workarounds for gaps of torch.export.
# Modules of torch whose autograd functions a graph of operations would lose.
LOST = ("torch.utils.checkpoint", "torch.nn.modules._functions")
HOOK_KINDS = {
    "registers a hook on a tensor": "Tensor.register_hook()",
    "reads a tensor's grad_fn": "Tensor.grad_fn, a node that a captured stage does not have",
}


@contextmanager
def around_compiled(
    module: nn.Module, before: Callable[..., Any], after: Callable[..., Any]
) -> Iterator[bool]:
    """Call hooks around a module compiled in place; yields False for any other module.

    ``nn.Module.compile`` stores the compiled call in ``_compiled_call_impl`` and compiles hooks
    into it, so that no public hook runs outside the compiled code.
    """
    compiled = module._compiled_call_impl
    if compiled is None:
        yield False
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        before(module, args, kwargs)
        output = compiled(*args, **kwargs)
        after(module, args, output)
        return output

    module._compiled_call_impl = call
    try:
        yield True
    finally:
        module._compiled_call_impl = compiled


def argument_effects(target: Any) -> list[tuple[str, bool, bool]] | None:
    """Per argument of an operation: (name, may be aliased by a result, is mutated). None without a
    schema.

    Uses ``_schema``, since aliases and mutations of an ``OpOverload`` are not public. Alias marks
    of results are not used, since list results, as of ``split``, lack them.
    """
    schema = getattr(target, "_schema", None)
    if schema is None:
        return None
    marks = [(arg.name, arg.alias_info) for arg in schema.arguments]
    return [(name, mark is not None, bool(mark and mark.is_write)) for name, mark in marks]


def is_metadata_assert(target: Any) -> bool:
    """True if an exported operation asserts a tensor's dtype and device.

    ``aten._assert_tensor_metadata`` has no public name.
    """
    return target is torch.ops.aten._assert_tensor_metadata.default


@contextmanager
def refusing(refuse: Callable[[str], None]) -> Iterator[None]:
    """Call ``refuse`` when code in this block does something that torch.export silently drops.

    Dropped are the backward of a user's ``autograd.Function``, hooks on tensors, and gradients
    computed inside a forward. None of them is an operation, and torch.export has no callback for
    them. Their functions are therefore replaced within the block.
    """
    function: Any = torch.autograd.Function
    apply = function.__dict__["apply"]

    def checked(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__ in LOST or not cls.__module__.startswith("torch."):
            refuse(f"the autograd function {cls.__qualname__} with its own backward")
        return apply.__get__(None, cls)(*args, **kwargs)

    def refused(name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: refuse(f"{name}, which takes gradients")

    replaced: list[tuple[Any, str, Any]] = [
        (function, "apply", classmethod(checked)),
        (torch.autograd, "grad", refused("torch.autograd.grad()")),
        (Tensor, "backward", refused("Tensor.backward()")),
    ]
    before = [(owner, name, owner.__dict__[name]) for owner, name, _ in replaced]
    try:
        for owner, name, value in replaced:
            setattr(owner, name, value)
        with HookWatch(lambda what: refuse(HOOK_KINDS[what])):
            yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


@contextmanager
def quietly() -> Iterator[None]:
    """Suppress the graphs that torch.export prints to stderr on failure; its error suffices.

    torch.export prints with ``print`` in ``torch.export._trace`` and with the loggers below, and
    has no public switch. Output of the model's own code is not suppressed.
    """
    from torch.export import _trace
    from torch.fx.experimental import symbolic_shapes

    loggers = [logging.getLogger(module.__name__) for module in (_trace, symbolic_shapes)]
    levels = [logger.level for logger in loggers]
    shadow: Any = _trace
    shadow.print = lambda *args, **kwargs: None  # shadows the builtin in that module only
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        yield
    finally:
        del shadow.print
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def shape_check(
    program: torch.export.ExportedProgram, argument: str, names: Sequence[str]
) -> Callable[[Sequence[Tensor]], str | None]:
    """Make a function that checks the shapes of tensors against an exported program.

    ``program.module()`` checks shapes too, but only for the whole program, and stages are parts of
    the program. ``_guards_code`` lists the relations between sizes as Python over ``SYMPY_INTERP``.

    Args:
        program: the program; its one argument is a list of tensors.
        argument: the name of that argument.
        names: the names of the tensors in the list.

    Returns:
        A function from such tensors to an error message, or None.
    """
    from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

    nodes = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    inputs = [nodes[name] for name in program.graph_signature.user_inputs if name in nodes]
    shapes = [tuple(node.meta["val"].shape) for node in inputs]
    sizes: list[tuple[int, int, float, float]] = []
    for i, shape in enumerate(shapes):
        for dim, size in enumerate(shape):
            if isinstance(size, int):
                sizes.append((i, dim, size, size))
            elif (known := program.range_constraints.get(size.node.expr)) is not None:
                sizes.append((i, dim, _bound(known.lower, 0), _bound(known.upper, float("inf"))))
    guards = []
    for code in program._guards_code:
        if "._base." in code:  # about the base of an example that is a view, not an input's shape
            continue
        text = code
        for i, name in enumerate(names):
            text = text.replace(f"L['{argument}'][{i}].size()", f"{name}.shape")
        guards.append((compile(code, "<guard>", "eval"), text))

    def check(tensors: Sequence[Tensor]) -> str | None:
        again = "; capture it with an example of these shapes"
        for name, tensor, shape in zip(names, tensors, shapes, strict=True):
            if tensor.dim() != len(shape):
                return (
                    f"input {name} has shape {tuple(tensor.shape)}, but the model was captured for "
                    f"{len(shape)} dimensions{again}"
                )
        for i, dim, low, high in sizes:
            if not low <= tensors[i].shape[dim] <= high:
                wanted = f"a size from {low:g} to {high:g}"
                if low == high:
                    wanted = f"size {low:g}"
                elif high == float("inf"):
                    wanted = f"a size of at least {low:g}"
                return (
                    f"input {names[i]} has shape {tuple(tensors[i].shape)}, but the model was "
                    f"captured for {wanted} in dimension {dim}{again}"
                )
        scope = {**SYMPY_INTERP, "L": {argument: tensors}}
        for compiled, text in guards:
            if not eval(compiled, scope):
                pairs = zip(names, tensors, strict=True)
                found = ", ".join(f"{name}: {tuple(tensor.shape)}" for name, tensor in pairs)
                return f"the inputs are {found}, but the model was captured for {text}{again}"
        return None

    return check


def _bound(value: Any, otherwise: float) -> float:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError, AttributeError):
        return otherwise

"""Every private name of torch that Penstock uses, and why public torch does not suffice.

All were seen on torch 2.11, 2.13, 2.14 and 2.15 (``SEEN`` of ``tests/test_torch.py``).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from operator import attrgetter, methodcaller
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

from penstock.errors import OUR_FILES

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

# -------------------- tensors and modules --------------------


# The number of in-place writes to a tensor's storage, which has no public counter.
version_of: Callable[[Tensor], int] = attrgetter("_version")

# Differentiable views: torch has no public test, and no public way to a view's base.
is_view: Callable[[Tensor], bool] = methodcaller("_is_view")
view_base: Callable[[Tensor], Tensor | None] = attrgetter("_base")

# False for a zero tensor without memory, as tangents may be; torch has no public test.
is_zero_tensor: Callable[[Tensor], bool] = methodcaller("_is_zerotensor")

# The registries of a module's own entries; the public ``named_*`` omit None and repeated entries.
children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
buffers_of: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
registries: Callable[[nn.Module], tuple[dict[str, Any], ...]] = attrgetter(
    "_parameters", "_buffers"
)

# The hooks that get a gradient, and those that run once it is accumulated; torch lists neither.
grad_hooks_of: Any = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")

# DDP's communication hooks, which it does not list, and the broadcast of the first replica's
# buffers, which it does in every forward.
comm_hooks_of: Callable[[DistributedDataParallel], list[Any]] = attrgetter("_comm_hooks")
broadcast_ddp_buffers: Callable[[DistributedDataParallel], Any] = methodcaller("_sync_buffers")


def reset_parameters(module: nn.Module) -> None:
    """Initialize a module's parameters as its constructor does, if it has a method for that.

    That of ``nn.MultiheadAttention`` and ``nn.Transformer`` is private.
    """
    is_private = isinstance(module, (nn.MultiheadAttention, nn.Transformer))
    reset = getattr(module, "_reset_parameters" if is_private else "reset_parameters", None)
    if callable(reset):
        reset()


def children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The direct children with their names; a module registered twice appears twice."""
    return [(name, child) for name, child in children_of(module).items() if child is not None]


# -------------------- stages and the deferral of weight gradients --------------------

# The attributes in which torch.compile and activation checkpointing store the wrapped module;
# neither has a public method to unwrap it.
WRAPPERS_KEEP_UNDER = ("_orig_mod", "_checkpoint_wrapped_module")

# The public torch.is_autocast_enabled(device) needs the device's name; looking that up costs more
# than the rest of an interception.
autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled

# The bodies of TorchFunctionMode's __enter__ and __exit__, without two Python calls each: a mode is
# entered for every intercepted operation.
push_mode: Callable[[Any], None] = torch._C._push_on_torch_function_stack
pop_mode: Callable[[], Any] = torch._C._pop_torch_function_stack

_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_engine = torch.autograd.Variable._execution_engine
_interpreters = torch._C._functorch.peek_interpreter_stack


# torch.compile looks these up on its argument, the second since 2.15; it has no hook to refuse.
_ORIGINAL = "_torchdynamo_orig_callable"
COMPILE_PROBES = (_ORIGINAL, "_dynamic_spec")


def is_compiled(module: nn.Module) -> bool:
    """True if ``module`` is the wrapper that ``torch.compile`` returns; its class is private."""
    return type(module).__name__ == "OptimizedModule" and "_orig_mod" in children_of(module)


def is_compiled_in_place(module: nn.Module) -> bool:
    """True if ``module.compile()`` was called."""
    return getattr(module, "_compiled_call_impl", None) is not None


class CompiledCall:
    """The call of a compiled module, for a time replaced by ``run(compiled, args, kwargs)``.

    No public hook surrounds a compiled call: hooks of a module compiled in place are compiled too.
    """

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        self._attributes = vars(module)
        self._name = "forward" if is_compiled(module) else "_compiled_call_impl"
        self._compiled = compiled = self._attributes[self._name]

        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():  # inlined into another compiled function
                return compiled(*args, **kwargs)
            return run(compiled, args, kwargs)

        self._call = call

    def replace(self) -> None:
        """Replace the call from now on."""
        self._attributes[self._name] = self._call

    def restore(self) -> None:
        """Restore the compiled call."""
        self._attributes[self._name] = self._compiled


def compiled_calls(module: nn.Module, run: Callable[..., Any]) -> list[CompiledCall]:
    """The calls of a module's outermost compiled submodules."""
    if is_compiled(module) or is_compiled_in_place(module):
        return [CompiledCall(module, run)]
    return [call for _, child in children(module) for call in compiled_calls(child, run)]


def compile_in_place(module: nn.Module, **options: Any) -> None:
    """``module.compile()``, which silently compiles nothing of a module of torch's own: the
    compiler skips calls that begin in torch's files."""
    module.compile(**options)
    if type(module).forward.__module__.startswith("torch.nn."):

        def call(*args: Any, **kwargs: Any) -> Any:
            return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

        vars(module)["_compiled_call_impl"] = torch.compile(call, **options)


def compile_graphs(
    backend: str,
    graph: Any,
    inputs: Sequence[Any],
    options: dict[str, Any] | None,
    *,
    backward: Callable[..., Any],
) -> Any:
    """Compile as a backend of ``torch.compile``; ``backward(graph, examples, compile)`` makes the
    backward from its graph.

    Torch offers backends the backward's graph through these modules alone. A donated buffer would
    be overwritten by the first of two callables that read it; a backward from torch's cache would
    be another than ours.
    """
    from torch._functorch import config

    with config.patch(donated_buffer=False, enable_autograd_cache=False):
        if backend == "inductor":
            from torch._inductor.compile_fx import compile_fx, compile_fx_inner

            def inner(part: Any, examples: Sequence[Any], **settings: Any) -> Any:
                if not settings.get("is_backward"):
                    return compile_fx_inner(part, examples, **settings)
                settings["static_input_idxs"] = ()
                return backward(part, examples, partial(compile_fx_inner, **settings))

            return compile_fx(graph, inputs, inner_compile=inner, config_patches=options)
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch._aot_autograd.utils import make_boxed_func
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        def boxed(part: Any, examples: Sequence[Any]) -> Any:
            return make_boxed_func(part.forward)

        return aot_autograd(
            fw_compiler=boxed,
            bw_compiler=partial(backward, compile=boxed),
            partition_fn=min_cut_rematerialization_partition,
        )(graph, inputs)


# The node whose backward autograd is running; a compiled backward is not told.
current_node: Callable[[], Any] = torch._C._current_autograd_node


def active_mode(kind: type) -> Any:
    """The innermost active function mode of a class; None if there is none."""
    for i in reversed(range(torch._C._len_torch_function_stack())):
        if isinstance(mode := torch._C._get_function_stack_at(i), kind):
            return mode
    return None


@contextmanager
def without_modes(kind: type) -> Iterator[None]:
    """Remove the function modes of one class within a block; torch can only disable all."""
    modes = [pop_mode() for _ in range(torch._C._len_torch_function_stack())][::-1]
    others = [mode for mode in modes if not isinstance(mode, kind)]
    for mode in others:
        push_mode(mode)
    try:
        yield
    finally:
        for _ in others:
            pop_mode()
        for mode in modes:
            push_mode(mode)


@contextmanager
def without_hooks(*leaves: Tensor) -> Iterator[None]:
    """Disable the gradient hooks of these leaves within a block; torch does not list hooks."""
    removed = [(each, dict(each)) for leaf in leaves for each in grad_hooks_of(leaf) if each]
    try:
        for each, _ in removed:
            each.clear()
        yield
    finally:
        for each, items in removed:
            each.update(items)


def run_backward(roots: Sequence[Any], grads: Sequence[Any]) -> None:
    """Run ``torch.autograd.backward(roots, grads)``, on the CPU without its Python checks.

    The engine repeats them. On other devices its threads need the context of the public function.
    """
    if not grads[0].is_cpu:
        torch.autograd.backward(roots, grads)
        return
    _engine.run_backward(
        tuple(roots), tuple(grads), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def saved_tensor_hooks_active() -> bool:
    """True if saved-tensor hooks are active; torch has functions to set these, none to query."""
    return _top_hooks(False) is not None


def deferrable_now() -> bool:
    """True if autograd records operations now, and no transform does: torch has no query."""
    return torch.is_grad_enabled() and _interpreters() is None and forward_ad._current_level < 0


def accumulator_of(leaf: Tensor) -> Node:
    """The node that accumulates a leaf's gradient; torch takes a view for it, unseen by modes."""
    with _disable_current_modes():
        return get_gradient_edge(leaf).node


def in_transform(value: object) -> bool:
    """True if ``value`` is a wrapper tensor of a ``torch.func`` transform; no public test."""
    return isinstance(value, Tensor) and torch._C._functorch.is_gradtrackingtensor(value)


class ObserverLast(dict[Any, Callable[..., Any]]):
    """The hooks of one tensor, with the observer last: others may replace the gradient."""

    __slots__ = ("__weakref__",)

    def __setitem__(self, key: Any, hook: Callable[..., Any]) -> None:
        observer = self.pop("observer")
        super().__setitem__(key, hook)
        super().__setitem__("observer", observer)


def observe_grad(tensor: Tensor, observer: Callable[[Tensor], None]) -> None:
    """Call ``observer`` with the gradient that reaches the operation behind ``tensor``.

    ``Tensor.register_hook`` costs three times as much, and later hooks would run after it. The
    tensor is the result of an operation, without hooks; ``observer`` returns None.
    """
    tensor._backward_hooks = ObserverLast(observer=observer)
    tensor.grad_fn._register_hook_dict(tensor)  # type: ignore[union-attr]


def observed(tensor: Tensor) -> bool:
    """True if ``observe_grad`` has been called on ``tensor``."""
    return type(tensor._backward_hooks) is ObserverLast


def observe_at_node(tensor: Tensor) -> None:
    """Move the observer of ``tensor`` behind the hooks of its graph node, which run later."""
    hooks: dict[Any, Callable[..., Any]] = tensor._backward_hooks  # type: ignore[assignment]
    observer = hooks["observer"]
    index = tensor.output_nr
    dict.__setitem__(hooks, "observer", lambda _: None)

    def at_node(_: Any, received: tuple[Tensor | None, ...]) -> None:
        observer(received[index])

    tensor.grad_fn.register_hook(at_node)  # type: ignore[union-attr]


_NO_OVERRIDES = {
    name: lambda *_: False
    for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
}


def without_override_check(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """A copy of a Python function of torch that runs its body under an active mode.

    The function itself would dispatch to the mode first, which then never sees the operations
    inside. None if ``function`` is not written in Python.
    """
    if not isinstance(function, FunctionType):
        return None
    scope = {**function.__globals__, **_NO_OVERRIDES}
    more = (function.__name__, function.__defaults__, function.__closure__)
    twin = FunctionType(function.__code__, scope, *more)
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


# Classes registered with torch's pytree that are leaves here: torch.Size, and the BlockMask of flex
# attention, whose tensors hold block indices rather than rows.
NO_TREES = ("torch.Size", "torch.nn.attention.flex_attention.BlockMask")


def pytree_node(
    cls: type[Any],
) -> tuple[Callable[[Any], tuple[Any, Any]], Callable[[Sequence[Any], Any], Any]] | None:
    """The functions that flatten and unflatten a class in torch's pytree; None if unregistered.

    Torch has a public function to register, but no lookup.
    """
    node = _pytree.SUPPORTED_NODES.get(cls)
    if node is None or f"{cls.__module__}.{cls.__qualname__}" in NO_TREES:
        return None
    unflatten = node.unflatten_fn
    return node.flatten_fn, lambda children, context: unflatten(list(children), context)


# -------------------- DDP, FSDP2 and replicate --------------------
# Wrappers reduce gradients in hooks of the last backward; the last weight gradient may come later.
# They are looked up in sys.modules, since an import takes a second.


def loaded(module_name: str, name: str) -> Any:
    return getattr(sys.modules.get(module_name), name, ())


def is_fsdp(module: object) -> TypeGuard[FSDPModule]:
    """True if ``fully_shard`` was applied to ``module``."""
    return isinstance(module, loaded("torch.distributed.fsdp", "FSDPModule"))


def is_composable_ddp(module: object) -> bool:
    """True if the DDP-based ``replicate`` was applied to ``module``; its class is not public."""
    return isinstance(module, loaded("torch.distributed._composable.replicate", "DDP"))


def ddp_parameters(module: DistributedDataParallel) -> list[nn.Parameter]:
    """The parameters that DDP reduces; it has no public list of them."""
    parameters: list[nn.Parameter] = module._module_parameters
    return [p for p in parameters if p.requires_grad]


def fsdp_finish_backward(root: FSDPModule, *, is_reduced: bool = False) -> None:
    """Add up, or reduce-scatter, gradients of ``root``, as FSDP does at the end of ``backward()``.

    Deferred weight gradients may come later than that. With ``is_reduced`` it only waits for the
    reductions, if ``root`` is at its last backward.
    """
    state: Any = root._get_fsdp_state()
    for group in _fsdp_groups(root):
        states = type(group._training_state)
        group._training_state = states.POST_BACKWARD if is_reduced else states.IDLE
    # Exists since torch 2.15, where the callback sets it too.
    context, manual = state._state_ctx, "manual_backward_finalization_active"
    setattr(context, manual, getattr(context, manual, None) or False)
    state._root_post_backward_final_callback()


def fsdp_drop_gathers(root: FSDPModule) -> None:
    """Drop the gathers that a failed step has begun, and whose other ranks may never join."""
    for group in _fsdp_groups(root):
        group._all_gather_result = None


def _fsdp_groups(root: FSDPModule) -> Iterator[Any]:
    for each in root._get_fsdp_state()._state_ctx.all_states:
        # Torch 2.11 has at most one group of parameters per module.
        groups = getattr(each, "_fsdp_param_groups", None)
        yield from filter(None, [each._fsdp_param_group] if groups is None else groups)


# -------------------- the runtime and process groups --------------------


def is_lost_connection(error: BaseException | None) -> bool:
    """True if a process is unreachable; Gloo's RuntimeErrors are recognizable only by text."""
    from_gloo = isinstance(error, RuntimeError) and "gloo/transport" in str(error)
    return from_gloo or isinstance(error, dist.DistError)


def takes_cpu_tensors(group: dist.ProcessGroup) -> bool:
    """True if a backend of the group handles CPU tensors; ``get_backend`` names only one."""
    return torch.device("cpu") in group._device_types


def profiler_is_on() -> bool:
    """True while ``torch.profiler`` records in this process: torch has no public query."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def make_group(
    ranks: Sequence[int], backend: str, name: str, *, timeout_s: float
) -> dist.ProcessGroup:
    """Create a group of some processes without a call on the others.

    ``name`` is unique, and the same on each of the processes. The public ``new_group`` sorts ranks
    and numbers groups by process. Of a default group that is bound to a device, torch would split
    the communicator, a call that all processes must join; so ``bound_device_id`` is cleared.
    """
    world = dist.group.WORLD
    assert world is not None, "there is a pipeline's group"
    _, store = distributed_c10d._world.pg_map[world]
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        made, _ = distributed_c10d._new_process_group_helper(
            *(len(ranks), ranks.index(world.rank()), list(ranks), dist.Backend(backend), store),
            group_name=distributed_c10d.GroupName(name),
            timeout=timedelta(seconds=timeout_s),
            group_desc="penstock",
        )
    finally:
        world.bound_device_id = bound
    distributed_c10d._world.pg_group_ranks[made] = {rank: i for i, rank in enumerate(ranks)}
    assert isinstance(made, dist.ProcessGroup)
    return made


# -------------------- cutting models by module --------------------

# The registries of a module's hooks, and all registries, which a copy must not share.
_BLANK = vars(nn.Module())
HOOKS = tuple(name for name in _BLANK if "ward_" in name and "hooks" in name)
REGISTRIES = tuple(name for name, value in _BLANK.items() if isinstance(value, (dict, set)))

# The prefix of the numbered attribute in which FSDP2 and replicate store their state on a module.
WRAPPERS_STATE = "__composable_api_state_key_"


def has_forward_hooks(module: nn.Module) -> bool:
    """True if ``module`` has forward or backward hooks of its own."""
    return bool(module._forward_pre_hooks or module._forward_hooks or has_backward_hooks(module))


def has_backward_hooks(module: nn.Module) -> bool:
    """True if ``module`` has backward hooks of its own."""
    return bool(module._backward_pre_hooks or module._backward_hooks)


def forward_of(module: nn.Module) -> Any:
    """The function that calling ``module`` runs; ``getattr`` fails for classes of torch.jit."""
    owners = (module, *type(module).__mro__)
    return next(vars(owner)["forward"] for owner in owners if "forward" in vars(owner))


def is_sequential(module: nn.Module) -> bool:
    """True if ``module`` runs its children in sequence, as ``nn.Sequential`` does."""
    calls: Any = type(module).__call__
    return forward_of(module) is nn.Sequential.forward and calls is nn.Module.__call__


def has_no_forward(module: nn.Module) -> bool:
    """True if ``module`` is a container without a forward, such as ``nn.ModuleList``."""
    inherited: Any = nn.Module.forward
    return forward_of(module) is inherited


def shallow_copy_module(module: nn.Module) -> nn.Module:
    """A shallow copy of ``module`` with registries of its own, which share their contents.

    ``copy.copy`` would share the registries, and ``copy.deepcopy`` would copy the parameters.
    """
    made: nn.Module = object.__new__(type(module))
    attributes = dict(vars(module))
    attributes |= {n: attributes[n].copy() for n in REGISTRIES if n in attributes}
    object.__setattr__(made, "__dict__", attributes)
    return made


def fused_by(module: nn.Module) -> str | None:
    """The compiler of a module's forward, such as torch.compile or torch.jit; None if uncompiled.

    A copy of a compiled module would run the original. Only private attributes mark it.
    """
    marked = any(hasattr(each, _ORIGINAL) for each in vars(module).values() if callable(each))
    if marked or is_compiled_in_place(module) or is_compiled(module):
        return "torch.compile"
    return "torch.jit" if isinstance(module, torch.jit.ScriptModule) else None


def run_uncompiled(copy: nn.Module) -> None:
    """Make a ``shallow_copy_module`` of a compiled module run its own children uncompiled."""
    vars(copy)["_compiled_call_impl"] = None
    if is_compiled(copy):
        vars(copy)["forward"] = lambda *args, **kwargs: copy._modules["_orig_mod"](*args, **kwargs)  # type: ignore[misc]


def without_torch_function(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call ``func`` without ``__torch_function__``, as torch's guide to subclasses documents."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def is_shared(tensor: Tensor) -> bool:
    """True if other tensors share the storage of ``tensor``, judged by its use count."""
    storage = tensor.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) > 2)


def same_storage(left: Tensor, right: Tensor) -> bool:
    """True if two tensors share a storage; meta tensors too, although they have no memory."""
    return left.untyped_storage() is right.untyped_storage()


def wrapper_subclass(cls: Any, like: Tensor, device: torch.device) -> Any:
    """A tensor of class ``cls`` with the shape, strides and dtype of ``like``, without storage."""
    layout: Any = {"strides": like.stride(), "storage_offset": like.storage_offset()}
    return Tensor._make_wrapper_subclass(cls, like.shape, **layout, dtype=like.dtype, device=device)


def is_data_dependent(func: Any, args: Sequence[Any]) -> bool:
    """True if an ATen call needs tensor values, if only for its result's shape."""
    if func is torch.ops.aten.index.Tensor:  # positions determine the result's shape
        return any(_is_mask(index) for index in args[1])
    tag, tags = torch.Tag, func.tags
    return tag.data_dependent_output in tags or tag.dynamic_output_shape in tags


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def by_positions(func: Any, args: tuple[Any, ...], has_value: Callable[[Tensor], bool]) -> Any:
    """The arguments of an ATen call, with masks of available value replaced by positions."""
    if func is not torch.ops.aten.index.Tensor:
        return args
    indices: list[Any] = []
    for index in args[1]:
        known = _is_mask(index) and index.dim() > 0 and has_value(index)
        indices += index.nonzero().unbind(1) if known else [index]
    return (args[0], indices)


def is_random(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if an ATen call draws random numbers; attention draws them only for its dropout."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = [argument.name for argument in func._schema.arguments]
    if "dropout_p" not in names:
        return True
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return bool(given.get("dropout_p", 0) != 0)


def mutated_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operation mutates, by its ``_schema``; none without a schema."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    given = {**dict(zip((each.name for each in schema.arguments), args, strict=False)), **kwargs}
    found = [given.get(each.name) for each in schema.arguments if each.is_write]
    lists = [value if isinstance(value, (list, tuple)) else [value] for value in found]
    return [value for values in lists for value in values if value is not None]


def in_backward() -> bool:
    """True where autograd runs a backward, as torch.utils.checkpoint asks: no public way tells."""
    return torch._C._current_graph_task_id() >= 0


def autocast_state(device: torch.device) -> tuple[Any, ...]:
    """The state of autocast on the CPU and on ``device``, to be compared."""
    kinds = sorted({"cpu", device.type} - {"meta"})
    return tuple((k, torch.get_autocast_dtype(k)) for k in kinds if torch.is_autocast_enabled(k))


# The folder of torch, with a separator at the end: torchvision's is none of torch's.
TORCH_FILES = f"{Path(torch.__file__).parent}{os.sep}"
_READ_GRAD_FN: Any = Tensor.grad_fn.__get__  # type: ignore[union-attr]
_HOOKING = {Tensor.register_hook: "registers a hook on a tensor"}
_DIFFERENTIATING = {
    torch.autograd.grad: "takes gradients by torch.autograd.grad()",
    Tensor.backward: "takes gradients by Tensor.backward()",
}


class HookWatch(TorchFunctionMode):
    """A mode that calls ``report`` for hooks registered on tensors, and for reads of ``grad_fn``.

    Hooks on graph nodes can't be observed, but registering one requires reading ``grad_fn``.
    """

    def __init__(self, report: Callable[[str], None], watched: Any = _HOOKING) -> None:
        self._report = report
        self._watched = watched

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run ``func`` and report it if it is watched, or if user code reads ``grad_fn``."""
        if func in self._watched:
            self._report(self._watched[func])
        elif func == _READ_GRAD_FN:
            frame: Any = sys._getframe(1)
            while frame.f_code.co_name == "__torch_function__":  # a frame of another mode
                frame = frame.f_back
            # Functions of this module inspect the graph on behalf of their callers.
            helps = frame.f_code.co_filename == torch.autograd.graph.__file__
            while frame.f_code.co_filename == torch.autograd.graph.__file__:
                frame = frame.f_back
            internal = (OUR_FILES,) if helps else (TORCH_FILES, OUR_FILES)
            if not frame.f_code.co_filename.startswith(internal):
                self._report("reads a tensor's grad_fn")
        return func(*args, **(kwargs or {}))

    def paused(self) -> AbstractContextManager[None]:
        """Suspend reports within a block."""
        return without_modes(HookWatch)


def in_function_forward() -> bool:
    """True within the forward of an autograd function, which makes its own graph, or none.

    There alone (and in inference mode) is forward-mode AD off; its query is not public.
    """
    return not (torch._C._is_fwd_grad_enabled() or torch.is_inference_mode_enabled())


# -------------------- torch.export --------------------

# Modules of torch whose autograd functions a graph of operations would lose.
LOST_BY_EXPORT = ("torch.utils.checkpoint", "torch.nn.modules._functions")

# The operation by which exported programs assert a tensor's dtype and device.
METADATA_ASSERT: Any = torch.ops.aten._assert_tensor_metadata.default


@contextmanager
def refusing(refuse: Callable[[str], None]) -> Iterator[None]:
    """Call ``refuse`` when code in this block does something that torch.export silently drops.

    Dropped are hooks on tensors, gradients taken inside a forward, and the backward of a user's
    ``autograd.Function``. No mode sees the last: ``Function.apply`` is replaced within the block.
    """
    function: Any = torch.autograd.Function
    apply = function.__dict__["apply"]

    def checked(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__ in LOST_BY_EXPORT or not cls.__module__.startswith("torch."):
            refuse(f"runs the autograd function {cls.__qualname__} with its own backward")
        return apply.__get__(None, cls)(*args, **kwargs)

    function.apply = classmethod(checked)
    try:
        with HookWatch(refuse, _HOOKING | _DIFFERENTIATING):
            yield
    finally:
        function.apply = apply


def shape_check(
    program: torch.export.ExportedProgram, argument: str, names: Sequence[str]
) -> Callable[[Sequence[Tensor]], str | None]:
    """Make a function from the inputs of an exported program to an error message, or None.

    ``program.module()`` checks shapes only with the whole program, of which stages are parts.
    ``_guards_code`` holds the relations of sizes as Python over ``SYMPY_INTERP``. The program's one
    argument is a list of tensors, which ``names`` names in the message.
    """
    from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

    nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    conditions = []
    for i, input_name in enumerate(program.graph_signature.user_inputs):
        shape, leaf = nodes[input_name].meta["val"].shape, f"L['{argument}'][{i}]"
        conditions.append(f"{leaf}.dim() == {len(shape)}")
        for dim, size in enumerate(shape):
            known = program.range_constraints.get(None if isinstance(size, int) else size.node.expr)
            if isinstance(size, int):
                conditions.append(f"{leaf}.size()[{dim}] == {size}")
            elif known is not None:
                conditions.append(f"{known.lower} <= {leaf}.size()[{dim}] <= {known.upper}")
    # A guard about the base of an example that is a view says nothing of other inputs.
    conditions += [code for code in program._guards_code if "._base." not in code]
    compiled = [compile(condition, "<guard>", "eval") for condition in conditions]

    def check(tensors: Sequence[Tensor]) -> str | None:
        scope = {**SYMPY_INTERP, "L": {argument: tensors}, "int_oo": float("inf")}
        pairs = zip(conditions, compiled, strict=True)
        unmet = next((text for text, code in pairs if not eval(code, scope)), None)
        if unmet is None:
            return None
        for i, name in enumerate(names):
            unmet = unmet.replace(f"L['{argument}'][{i}]", name).replace(".size()", ".shape")
        shapes = (f"{n}: {tuple(tensor.shape)}" for n, tensor in zip(names, tensors, strict=True))
        return (
            f"the inputs are {', '.join(shapes)}, but the model was captured for {unmet}; capture "
            "it with an example of these shapes"
        )

    return check

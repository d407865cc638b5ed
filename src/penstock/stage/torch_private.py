"""The private corners of torch that stages stand on: for the deferral of weight gradients, most
of them, and for the trees that torch knows.

``tests/test_torch.py`` names the versions of torch that they were seen to work on. Nothing else in
``penstock.stage`` but ``replica_private`` reaches below public torch. This module does not know
what the hooks and functions are for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, saved_tensors_hooks
from torch.utils import _pytree

from penstock.errors import PenstockError

__all__ = [
    "WRAPPERS_KEEP_UNDER",
    "autocast_enabled",
    "deferrable_now",
    "has_memory",
    "in_transform",
    "observe_grad",
    "pop_mode",
    "push_mode",
    "pytree_node",
    "run_backward",
    "saved_tensor_hooks_active",
    "saved_through",
    "without_hooks",
    "without_modes",
    "without_override_check",
]

# Where torch.compile and the wrapper of activation checkpointing hold the module that they wrap.
WRAPPERS_KEEP_UNDER = ("_orig_mod", "_checkpoint_wrapped_module")

# The public torch.is_autocast_enabled(device) wants the device's name, which costs more to ask
# for than all the rest of an interception.
autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled

top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
grad_enabled = torch._C.is_grad_enabled
# What TorchFunctionMode does on its way in and out, less two calls each.
push_mode: Callable[[Any], None] = torch._C._push_on_torch_function_stack
pop_mode: Callable[[], Any] = torch._C._pop_torch_function_stack
engine = torch.autograd.Variable._execution_engine
interpreters = torch._C._functorch.peek_interpreter_stack


@contextmanager
def without_modes(kind: type) -> Iterator[None]:
    """Take the function modes of one kind off the stack for a while.

    Args:
        kind: their class; modes of other classes stay active.

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
    """Call none of these leaves' hooks on gradients for a while.

    Example:
        >>> x = torch.ones(1, requires_grad=True)
        >>> handle = x.register_hook(lambda grad: grad * 2)
        >>> with without_hooks(x):
        ...     x.sum().backward()
        >>> x.sum().backward()
        >>> x.grad
        tensor([3.])
    """
    # The engine reads these dictionaries when it calls what is in them.
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
    """``torch.autograd.backward(roots, grads)``, without what it costs before the engine starts.

    What it checks in Python (shapes, symbolic ones among them), the engine checks again. On other
    devices than the CPU the engine has threads of its own, which torch hands more context to:
    call torch's there.

    Args:
        roots: where to start, on the CPU.
        grads: the gradient of each.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> run_backward([x * 3], [torch.ones(2)])
        >>> x.grad
        tensor([3., 3.])
    """
    engine.run_backward(
        tuple(roots), tuple(grads), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def saved_tensor_hooks_active() -> bool:
    """Whether saved tensors pass through hooks now: checkpointing, ``save_on_cpu``.

    Returns:
        True inside ``torch.autograd.graph.saved_tensors_hooks``.

    Example:
        >>> with torch.autograd.graph.save_on_cpu():
        ...     saved_tensor_hooks_active()
        True
    """
    return top_hooks(False) is not None


@contextmanager
def saved_through(
    pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor], refused: PenstockError
) -> Iterator[None]:
    """Let what autograd saves pass through hooks.

    Args:
        pack: called with each tensor that is saved.
        unpack: called with what ``pack`` returned, when it is needed again.
        refused: what to raise where ``torch.func.grad`` and its kin are met, which refuse hooks.
    """
    try:
        with saved_tensors_hooks(pack, unpack):
            yield
    except RuntimeError as error:
        if "torch.func" in str(error) and "saved tensor hooks" in str(error):
            raise refused from error
        raise


def deferrable_now() -> bool:
    """Whether an operation called now is recorded by autograd, and by nothing beside it.

    Returns:
        False under ``no_grad`` and inside functional transforms and forward-mode differentiation.

    Example:
        >>> with torch.no_grad():
        ...     deferrable_now()
        False
    """
    return grad_enabled() and interpreters() is None and forward_ad._current_level < 0


def in_transform(value: object) -> bool:
    """Whether ``value`` was computed inside of ``torch.func.grad``, ``vjp`` or the like.

    Example:
        >>> in_transform(torch.ones(()))
        False
    """
    return isinstance(value, Tensor) and torch._C._functorch.is_gradtrackingtensor(value)


def has_memory(tensor: Tensor) -> bool:
    """Whether there is memory behind ``tensor``: not where it stands for zeros, as tangents do.

    Example:
        >>> has_memory(torch.ones(())), has_memory(torch._efficientzerotensor(()))
        (True, False)
    """
    return not tensor._is_zerotensor()


class ObserverLast(dict[Any, Callable[..., Any]]):
    """The hooks of one tensor, run in insertion order, with the observer kept last.

    Hooks that a user adds later may replace the gradient, and the observer has to see what the
    operation itself receives.
    """

    __slots__ = ("__weakref__",)

    def __setitem__(self, key: Any, hook: Callable[..., Any]) -> None:
        observer = self.pop("observer")
        super().__setitem__(key, hook)
        super().__setitem__("observer", observer)


def observe_grad(tensor: Tensor, observer: Callable[[Tensor], None]) -> None:
    """Have ``observer`` called with the gradient that reaches the operation behind ``tensor``.

    The same as ``Tensor.register_hook`` at a third of its cost, and run after hooks that are
    registered later.

    Args:
        tensor: a result of an operation that no hook was registered on yet.
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
    """Whether ``observe_grad`` has been called on ``tensor``."""
    return type(tensor._backward_hooks) is ObserverLast


def observe_at_node(tensor: Tensor) -> None:
    """Move the observer of ``tensor`` behind the hooks of its graph node.

    Hooks registered on ``tensor.grad_fn`` itself run after those of the tensor. A node's
    post-hook is given the gradients as the operation received them, whatever came before.
    """
    hooks: dict[Any, Callable[..., Any]] = tensor._backward_hooks  # type: ignore[assignment]
    observer = hooks["observer"]
    index = tensor.output_nr
    dict.__setitem__(hooks, "observer", ignore)

    def at_node(_: Any, received: tuple[Tensor | None, ...]) -> None:
        observer(received[index])

    tensor.grad_fn.register_hook(at_node)  # type: ignore[union-attr]


def ignore(_: Tensor) -> None:
    """An observer that has moved elsewhere."""


NO_OVERRIDES = {
    name: lambda *_: False
    for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
}


def without_override_check(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """A twin of one of torch's Python functions that runs its body under an active mode.

    Such functions offer themselves whole to the active mode before they do anything, so that a
    mode never sees what happens inside. The twin shares code and defaults, and skips the offer.

    Args:
        function: a Python function of torch, such as ``F.multi_head_attention_forward``.

    Returns:
        The twin, or None where ``function`` is not written in Python.

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


# Registered with torch's pytree, and no trees of rows: torch's own sizes, and the mask of flex
# attention, whose tensors hold numbers of blocks.
NO_TREES = ("torch.Size", "torch.nn.attention.flex_attention.BlockMask")


def pytree_node(
    cls: type[Any],
) -> tuple[Callable[[Any], tuple[Any, Any]], Callable[[Sequence[Any], Any], Any]] | None:
    """How values of a class are opened and made, where it is registered with torch's pytree.

    Args:
        cls: the class; a subclass of a registered one is not registered by that.

    Returns:
        Two functions: one gives children and context of a value, the other a value of these.

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

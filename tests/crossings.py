"""What may cross from stage to stage: pairs of functions, one on each side of a boundary.

``give`` makes the value that crosses from a hidden tensor, ``take`` makes a hidden tensor of it
again, and asserts that it is what was given. All are at the top level, as classes that cross must
be; tests over one process and over several share them.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from torch.utils import _pytree

from tests.models import DIM

__all__ = ["CROSSINGS", "SUMMED", "Give", "Take", "crossing_model"]


@dataclass
class Hidden:
    value: Tensor
    mask: Tensor | None = None
    scale: float = 1.0
    extra: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    inner: Hidden
    name: str = "frozen"


@dataclass
class Counted:
    """Sets more than its fields, and is registered."""

    value: Tensor

    def __post_init__(self) -> None:
        self.rows = len(self.value)
        self.double = self.value * 2


_pytree.register_pytree_node(
    Counted, lambda counted: ([counted.value], None), lambda values, _: Counted(*values)
)


class Registered:
    """A class that torch's pytree knows; made of tensors alone."""

    def __init__(self, value: Tensor, settings: dict[str, Any]) -> None:
        assert isinstance(value, Tensor)
        self.value = value
        self.settings = settings


_pytree.register_pytree_node(
    Registered,
    lambda held: ([held.value], held.settings),
    lambda values, settings: Registered(*values, settings),
)


class Pair(NamedTuple):
    left: Tensor
    right: Any


def no_tensors_change(given: Any, taken: Any) -> None:
    assert type(given) is type(taken), (given, taken)
    assert given == taken or (given != given and taken != taken)


PLAIN = (
    3,
    -(2**70),
    2.5,
    float("nan"),
    math.inf,
    True,
    False,
    "text with ü and \0",
    1 + 2j,
    b"\x00\xff",
    torch.float16,
    torch.device("cpu"),
    torch.Size([2, 3]),
    None,
)


def take_plain(value: Any) -> Tensor:
    hidden, values = value
    assert len(values) == len(PLAIN)
    for given, taken in zip(PLAIN, values, strict=True):
        no_tensors_change(given, taken)
    return hidden


def take_dict(value: Any) -> Tensor:
    assert list(value) == ["b", "a", "nested"]
    assert list(value["nested"]) == [7, 3]
    assert value["a"] is None
    return value["b"] * value["nested"][7] + value["nested"][3][0]


def take_ordered(value: Any) -> Tensor:
    assert type(value) is OrderedDict
    assert list(value) == ["z", "y"]
    return value["z"] - value["y"]


def take_frozen(value: Any) -> Tensor:
    assert type(value) is Frozen
    assert type(value.inner) is Hidden
    assert (value.name, value.inner.scale) == ("mine", 2.0)
    assert value.inner.mask.dtype is torch.bool
    return torch.where(value.inner.mask, value.inner.value, value.inner.extra[0])


def take_pair(value: Any) -> Tensor:
    assert type(value) is Pair
    assert type(value.right) is Pair
    return value.left + value.right.left * value.right.right


def take_counted(value: Any) -> Tensor:
    assert type(value) is Counted
    assert value.rows == len(value.value)
    return value.value + value.double


def take_registered(value: Any) -> Tensor:
    first, second = value["held"]
    assert type(first) is Registered
    assert first.settings == {"scale": 2.0, "names": ("a", None)}
    return first.value * first.settings["scale"] + second.value


def pack(hidden: Tensor) -> PackedSequence:
    return PackedSequence(hidden, torch.ones(len(hidden), dtype=torch.int64))


def take_packed(value: Any) -> Tensor:
    assert type(value) is PackedSequence
    padded, lengths = pad_packed_sequence(value)
    assert lengths.tolist() == [len(padded)]
    return padded[:, 0]


def take_numbers(value: Any) -> Tensor:
    hidden, whole, byte, flags = value
    assert (whole.dtype, byte.dtype, flags.dtype) == (torch.int64, torch.uint8, torch.bool)
    return hidden * whole + byte - flags.float()


def take_float8(value: Any) -> Tensor:
    hidden, narrow = value
    assert narrow.dtype is torch.float8_e4m3fn
    return hidden * narrow.float()


def take_layouts(value: Any) -> Tensor:
    transposed, expanded, strided, flipped = value
    return transposed.t() + expanded + strided[:, 0] + flipped.flip(0)


def take_empty(value: Any) -> Tensor:
    hidden, nothing, wide, empties = value
    assert (nothing.shape, wide.shape) == ((0, DIM), (3, 0))
    assert empties == ((), [], {})
    return hidden + nothing.sum() + wide.sum()


def take_twice(value: Any) -> Tensor:
    first, second, again = value
    return first * 2 + second * 3 + again[0]


def take_complex(value: Any) -> Tensor:
    assert value.dtype is torch.complex64
    return value.real * value.imag


def take_conjugate(value: Any) -> Tensor:
    # A view that is only marked as conjugate must arrive conjugated, and its gradient go back so.
    conjugate, negative = value
    return conjugate.imag * 2 + conjugate.conj().real + negative


def take_scalars(value: Any) -> Tensor:
    hidden, scalar, count = value
    assert (scalar.shape, count.shape) == ((), ())
    return hidden * scalar + count


def take_half(value: Any) -> Tensor:
    wide, narrow = value
    assert (wide.dtype, narrow.dtype) == (torch.bfloat16, torch.float16)
    return wide.float() + narrow.float()


def take_partly_detached(value: Any) -> Tensor:
    detached, hidden = value
    assert not detached.requires_grad
    return detached * hidden


def take_only_first(value: Any) -> Tensor:
    # The second takes a gradient as far as its giver knows, but none ever comes.
    return value[0] * 2


def take_topk(value: Any) -> Tensor:
    return value.values.sum(-1, keepdim=True) * (1 + value.indices.sum(-1, keepdim=True))


def itself(value: Any) -> Tensor:
    return value


# name → (give, take). They use no randomness and no parameters; the stages around them do.
CROSSINGS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (itself, itself),
    "tuple": (lambda h: (h, h * 2), lambda v: v[0] * v[1]),
    "tuple of one": (lambda h: (h,), lambda v: v[0] if type(v) is tuple else 1 / 0),
    "list": (lambda h: [h, h * 2], lambda v: v[0] * v[1] if type(v) is list else 1 / 0),
    "nested": (lambda h: ((h, [h * 2]), ({"k": h.sin()},)), lambda v: v[0][1][0] * v[1][0]["k"]),
    "dict": (
        lambda h: {"b": h, "a": None, "nested": {7: h * 2, 3: (h * 3,)}},
        take_dict,
    ),
    "ordered dict": (lambda h: OrderedDict([("z", h * 2), ("y", h.tanh())]), take_ordered),
    "dataclass": (
        lambda h: Hidden(h, None, 1.5),
        lambda v: v.value * v.scale if type(v) is Hidden and v.mask is None else 1 / 0,
    ),
    "frozen dataclass": (
        lambda h: Frozen(inner=Hidden(h, h > 0, 2.0, [h * 3]), name="mine"),
        take_frozen,
    ),
    "more than fields": (Counted, take_counted),
    "registered": (
        lambda h: {
            "held": [Registered(h, {"scale": 2.0, "names": ("a", None)}), Registered(h.sin(), {})]
        },
        take_registered,
    ),
    "packed": (pack, take_packed),
    "named tuple": (lambda h: Pair(h, Pair(h * 2, 3.0)), take_pair),
    "plain values": (lambda h: (h, list(PLAIN)), take_plain),
    "numbers": (
        lambda h: (h, torch.arange(DIM), torch.full((DIM,), 200, dtype=torch.uint8), h > 0),
        take_numbers,
    ),
    "complex": (lambda h: torch.complex(h, h.sin()), take_complex),
    "conjugate": (
        lambda h: (torch.complex(h, h.sin()).conj(), torch.complex(h, h.cos()).conj().imag),
        take_conjugate,
    ),
    "half": (lambda h: (h.bfloat16(), (h * 2).half()), take_half),
    "float8": (lambda h: (h, h.detach().to(torch.float8_e4m3fn)), take_float8),
    "layouts": (
        lambda h: (h.t(), h[:1].expand(h.shape), torch.stack([h, h], 1)[:, ::2], h.flip(0)),
        take_layouts,
    ),
    "empty": (
        lambda h: (h, h[:0], h.new_zeros(3, 0), ((), [], {})),
        take_empty,
    ),
    "scalars": (lambda h: (h, h.mean(), torch.tensor(3)), take_scalars),
    "twice the same": (lambda h: (h, h, [h]), take_twice),
    "partly detached": (lambda h: (h.detach(), h), take_partly_detached),
    # More than fits into one message of the control plane.
    "much": (
        lambda h: ({f"key {i}": h.detach() * i for i in range(90)}, h, "x" * 9000),
        lambda v: v[0]["key 89"] * v[1] if v[2] == "x" * 9000 else 1 / 0,
    ),
    "unused": (lambda h: (h, h * 2), take_only_first),
    "topk": (lambda h: torch.topk(h, 2), take_topk),
}

# Several gradients come back for one tensor in these; autograd sums them in an order of its own,
# so theirs agree to rounding.
SUMMED = ("layouts", "twice the same")


class Give(nn.Module):
    """A layer, and then what crosses."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.name = name

    def forward(self, x: Tensor) -> Any:
        return CROSSINGS[self.name][0](torch.tanh(self.linear(x)))


class Take(nn.Module):
    """What has crossed, and then a layer."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.name = name

    def forward(self, value: Any) -> Tensor:
        hidden = CROSSINGS[self.name][1](value)
        assert torch.is_grad_enabled() <= hidden.requires_grad, "the gradient is cut"
        return self.linear(hidden.expand(-1, DIM))


class Between(nn.Module):
    """Passes on what it is given; has a layer beside it."""

    def forward(self, value: Any) -> Any:
        return value


def crossing_model(name: str) -> nn.Sequential:
    """Four stages: the value is given, passed through a stage unchanged, taken, and a last one."""
    torch.manual_seed(0)
    return nn.Sequential(Give(name), Between(), Take(name), nn.Linear(DIM, DIM))

"""Triton's interpreter without work that it repeats: a sixth of the time of the tests that run in it."""

from __future__ import annotations

import dataclasses
import inspect
import math
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    Patch = Callable[[Callable[..., object]], object]


def hasten() -> None:
    """Let a launch replace the functions of `triton.language` once for each file, and leave out what nothing reads.

    Triton 3.6 and 3.7 replace them again whenever a kernel calls a function of its own. What is replaced stays so until
    the launch ends. Another Triton that has no such parts is left as it is.
    """
    interpreter: Any = import_module("triton.runtime.interpreter")
    if {"_patch_lang", "_patch_builtin", "GridExecutor", "_get_np_dtype"} <= vars(interpreter).keys():
        core: Any = import_module("triton.language.core")
        _replace_once_a_launch(interpreter)
        _find_builtins_once(interpreter, core)
        _look_types_up_once(interpreter)
        _leave_out_unread_checks(interpreter)
        _make_handles_at_once(interpreter)
        _make_shapes_once(core)
        _broadcast_only_what_differs(import_module("triton.language.semantic").TritonSemantic)


def _replace_once_a_launch(interpreter: Any) -> None:
    patch: Patch = interpreter._patch_lang
    launch: Callable[..., object] = interpreter.GridExecutor.__call__
    replaced = set[int]()  # of a launch: the files of the functions that it has called, each by its globals

    def patch_once(function: Callable[..., object]) -> object:
        if id(function.__globals__) in replaced:
            return None  # no kernel restores what the call of a function has replaced
        replaced.add(id(function.__globals__))
        return patch(function)

    def launch_anew(executor: object, *args: object, **kwargs: object) -> object:
        replaced.clear()
        return launch(executor, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_anew


def _find_builtins_once(interpreter: Any, core: Any) -> None:
    """Each launch looks for the same functions among all that a module or class has, and makes what calls them.

    That gives each call the semantic, for which a function of Triton's around each asks again.
    """
    asking = core.builtin(lambda: None).__code__
    found = dict[int, list[tuple[str, Any, Any]]]()  # by the module or class: name, builtin, what stands for it

    def standing_for(member: Any) -> Callable[..., object]:
        function = member.__wrapped__ if getattr(member, "__code__", None) is asking else member

        def called(*args: object, **kwargs: object) -> object:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **kwargs)

        return called

    def replaced(place: Any, builder: object, scope: Any) -> None:
        if id(place) not in found:
            members = [(name, one) for name, one in inspect.getmembers(place) if core.is_builtin(one)]
            found[id(place)] = [(name, one, standing_for(one)) for name, one in members]
        for name, member, other in found[id(place)]:
            if getattr(place, name) is member:
                scope.set_attr(place, name, other)

    interpreter._patch_builtin = replaced


def _look_types_up_once(interpreter: Any) -> None:
    """Triton makes a dictionary of all types for each look-up."""
    look_up: Callable[[Any], np.dtype[Any]] = interpreter._get_np_dtype
    known = dict[str, np.dtype[Any]]()

    def looked_up(dtype: Any) -> np.dtype[Any]:
        if dtype.name not in known:
            known[dtype.name] = look_up(dtype)
        return known[dtype.name]

    interpreter._get_np_dtype = looked_up


def _leave_out_unread_checks(interpreter: Any) -> None:
    """Every sum of integers is computed in 64 bits too, and compared, for an assertion that only `debug` turns on."""
    options = interpreter.interpreter_builder.options
    if not options.debug and hasattr(options, "sanitize_overflow"):
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


def _make_handles_at_once(interpreter: Any) -> None:
    """A dataclass checks what it is given in two further calls."""
    pointer = import_module("triton.language.core").pointer_type

    def handle_made(self: Any, data: Any, dtype: Any, attr: dict[str, object] | None = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if data.itemsize > 1 and not isinstance(dtype, pointer) and data.itemsize * 8 > dtype.primitive_bitwidth:
            raise ValueError(f"numbers of {data.itemsize} bytes for {dtype}")

    interpreter.TensorHandle.__init__ = handle_made


def _make_shapes_once(core: Any) -> None:
    """Triton makes the same few shapes, and their names, for each type of a block and for each tensor."""
    make_type: Callable[[Any, Any, Any], None] = core.block_type.__init__
    types = dict[tuple[Any, ...], dict[str, Any]]()
    shapes = dict[tuple[int, ...], tuple[Any, Any, Any]]()  # of a type, of a tensor, and the number of its elements
    constexpr = core.constexpr

    def shaped(sizes: tuple[int, ...], own: Any) -> tuple[Any, Any, Any]:
        if sizes not in shapes:
            shapes[sizes] = own, core.tuple([constexpr(size) for size in sizes]), constexpr(math.prod(sizes))
        return shapes[sizes]

    def type_made(self: Any, element_ty: Any, shape: Any) -> None:
        given = shape.values if type(shape) is core.tuple else shape
        sizes = [one.value if type(one) is constexpr else one for one in given]
        key = (element_ty.name, *sizes)
        if (known := types.get(key)) is None:
            make_type(self, element_ty, shape)
            self.shape, *self.of_tensors = shaped((*sizes,), self.shape)
            types[key] = dict(self.__dict__)
        else:
            self.__dict__.update(known, element_ty=element_ty)

    of_scalars = shaped((), None)[1:]

    def tensor_made(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        if (made := type.__dict__.get("of_tensors")) is None:
            made = shaped((*type.shape,), type.shape)[1:] if type.is_block() else of_scalars
        self.shape, self.numel = made

    core.block_type.__init__, core.tensor.__init__ = type_made, tensor_made
    core.block_type.scalar = property(attrgetter("element_ty"))


def _broadcast_only_what_differs(semantic: Any) -> None:
    """Most operands have one shape, which Triton compares by making lists and constants of it."""
    broadcast: Callable[[Any, Any, Any], tuple[Any, Any]] = semantic.broadcast_impl_value

    def compared(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        one, other = lhs.type, rhs.type
        if not (one.is_block() and other.is_block()):
            return broadcast(self, lhs, rhs)
        if one.shape is other.shape:  # those that `type_made` has found
            return lhs, rhs
        left, right = one.shape.values, other.shape.values
        if left == right:
            return lhs, rhs
        if len(left) != len(right) or any(a != b and 1 not in (a, b) for a, b in zip(left, right, strict=True)):
            return broadcast(self, lhs, rhs)
        both = [b if a == 1 else a for a, b in zip(left, right, strict=True)]
        return tuple(
            operand if shape == both else self.broadcast_impl_shape(operand, both)
            for operand, shape in ((lhs, left), (rhs, right))
        )

    semantic.broadcast_impl_value = compared

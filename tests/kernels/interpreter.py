"""Triton's interpreter without work that it repeats: a sixth of the time of the tests that run in it."""

from __future__ import annotations

import dataclasses
import math
from importlib import import_module
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
    if {"_patch_lang", "GridExecutor", "_get_np_dtype"} <= vars(interpreter).keys():
        _replace_once_a_launch(interpreter)
        _look_types_up_once(interpreter)
        _leave_out_unread_checks(interpreter)
        core: Any = import_module("triton.language.core")
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


def _make_shapes_once(core: Any) -> None:
    """Triton makes the same few shapes, and their names, for each type of a block and for each tensor."""
    make_type: Callable[[Any, Any, Any], None] = core.block_type.__init__
    types = dict[tuple[Any, ...], dict[str, Any]]()
    tensors = dict[tuple[int, ...], tuple[Any, Any]]()

    def type_made(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *shape)
        if known := types.get(key):
            self.__dict__.update(known, element_ty=element_ty)
        else:
            make_type(self, element_ty, shape)
            types[key] = dict(self.__dict__)

    def tensor_made(self: Any, handle: Any, type: Any) -> None:
        shape = (*type.shape,) if type.is_block() else ()
        if shape not in tensors:
            sizes = [core.constexpr(size) for size in shape]
            tensors[shape] = core.tuple(sizes), core.constexpr(math.prod(shape))
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = tensors[shape]

    core.block_type.__init__, core.tensor.__init__ = type_made, tensor_made


def _broadcast_only_what_differs(semantic: Any) -> None:
    """Most operands have one shape, which Triton compares by making lists and constants of it."""
    broadcast: Callable[[Any, Any, Any], tuple[Any, Any]] = semantic.broadcast_impl_value

    def compared(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        one, other = lhs.type, rhs.type
        if not (one.is_block() and other.is_block()):
            return broadcast(self, lhs, rhs)
        if one.shape is other.shape:  # those that `type_made` has found
            return lhs, rhs
        left, right = [*one.shape], [*other.shape]
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

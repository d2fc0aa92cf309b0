"""Triton's interpreter without work that it repeats: a quarter of the time of the tests that run in it."""

from __future__ import annotations

import dataclasses
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

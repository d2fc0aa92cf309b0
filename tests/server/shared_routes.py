"""What all nodes of a process have alike, made once: it was most of making a node, and tests make thousands.

That is the OpenAPI document of all apps (26 ms of CPU), the bytes of each tokenizer's vocabulary (4 ms), and what
FastAPI reads off an endpoint (4 ms; each app's endpoints are closures of the same code).
"""

from __future__ import annotations

import functools
import inspect
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

import fastapi.dependencies.models
import fastapi.dependencies.utils
import fastapi.routing

from pd_cluster.models.token_texts import token_bytes
from pd_cluster.server.routes import meta_routes
from pd_cluster.server.routes.openapi import openapi_document
from pd_cluster.server.text import tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, ModuleType

T = TypeVar("T")


def _by_code(read: Callable[[Any], T]) -> Callable[[Any], T]:
    """`read`, once for each function's code, from which its result follows. With defaults, it is read each time."""
    known: dict[CodeType, T] = {}

    @functools.wraps(read)
    def read_once(call: Any) -> T:
        if type(call) is not FunctionType or call.__defaults__ or call.__kwdefaults__ or hasattr(call, "__wrapped__"):
            return read(call)
        if call.__code__ not in known:
            known[call.__code__] = read(call)
        return known[call.__code__]

    return read_once


def _replace(name: str, shared: Callable[[Callable[..., Any]], Callable[..., Any]], *modules: ModuleType) -> None:
    """In the module that has it and in those that import its name. A FastAPI without it is left as it is."""
    if all(inspect.isfunction(getattr(module, name, None)) for module in modules):
        one = shared(getattr(modules[0], name))
        for module in modules:
            setattr(module, name, one)


@functools.cache
def share() -> None:
    """Once a process."""
    _replace("openapi_document", lambda read: functools.cache(openapi_document), meta_routes)
    _replace("token_bytes", lambda read: functools.cache(token_bytes), tokenizer)
    utils, models, routing = fastapi.dependencies.utils, fastapi.dependencies.models, fastapi.routing
    _replace("get_typed_signature", _by_code, utils)
    _replace("get_typed_return_annotation", _by_code, utils, routing)
    for name in ("_is_gen_callable", "_is_async_gen_callable"):
        _replace(name, _by_code, models, utils, routing)
    _replace("compile_path", functools.cache, routing)

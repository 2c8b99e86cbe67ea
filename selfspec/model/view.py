"""Shallow views of modules: a view shares all weights and never changes its module; a child or `forward` may differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from selfspec.errors import UnsupportedModelError


def view_of(module: nn.Module, change: Callable[[nn.Module, Mapping[str, nn.Module]], nn.Module | None]) -> nn.Module:
    """Return a view of a module with parts replaced by `change(part, replaced children)`; itself if none is."""
    if has_other_forward(module) and not is_streamed(module):
        return module
    children = {name: view_of(child, change) for name, child in module._modules.items() if child is not None}
    others = {name: child for name, child in children.items() if child is not module._modules[name]}
    changed = change(module, others)
    if changed is not None:
        return changed
    return view_with(module, others) if others else module


def view_with_layers(module: nn.Module, names: Sequence[str], layers: Sequence[nn.Module]) -> nn.Module:
    """Return a view of a model whose decoder layers are replaced."""
    return view_with_parts(module, {".".join([*names, str(index)]): layer for index, layer in enumerate(layers)})


def view_with(module: nn.Module, children: Mapping[str, nn.Module]) -> nn.Module:
    """Return a view of `module` whose named children are replaced."""
    view = copied(module)
    # Iterate over a copy: in another thread `transformers` may set attributes on the module.
    for name, value in module.__dict__.copy().items():
        view.__dict__[name] = _rebound(value, module, view)
    if callable(module.__dict__.get("forward")) and view.__dict__["forward"] is module.__dict__["forward"]:
        raise UnsupportedModelError(
            f"the forward of {type(module).__name__} was replaced by a function that selfspec cannot look into; undo "
            "that before wrapping, or replace it by a bound method"
        )
    # Compiled for the module itself, with its own children inside.
    if view.__dict__.get("_compiled_call_impl") is not None:
        view.__dict__["_compiled_call_impl"] = None
    view.__dict__["_modules"] = {**module._modules, **children}
    return view


def view_with_parts(module: nn.Module, parts: Mapping[str, nn.Module]) -> nn.Module:
    """Return a view of `module` with the parts at some attribute paths, none within another, replaced."""
    children: dict[str, dict[str, nn.Module]] = {}
    for path, part in parts.items():
        name, _, rest = path.partition(".")
        children.setdefault(name, {})[rest] = part
    return view_with(
        module,
        {
            name: inside[""] if "" in inside else view_with_parts(module.get_submodule(name), inside)
            for name, inside in children.items()
        },
    )


def view_running(module: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """Return a view of `module` that runs `forward` instead; its own and global hooks still run."""
    view = copied(module)
    view.__dict__["forward"] = forward
    return view


def replaced(module: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """Return a view of `module` that runs `forward` instead, without its own or global hooks."""
    view = view_running(module, forward)
    # torch runs a compiled call as it is, without hooks.
    view.__dict__["_compiled_call_impl"] = forward
    return view


def has_other_forward(module: nn.Module) -> bool:
    """Return whether a module's own `forward` is replaced, by code that may not use the children of a view."""
    return "forward" in module.__dict__ or module.__dict__.get("_compiled_call_impl") is not None


def is_streamed(module: nn.Module) -> bool:
    """Return whether a module's weights, on the meta device, get their values whenever it runs."""
    return bool(module.__dict__.get("streams"))


def runs_as_written(function: Callable[..., Any], home: str) -> bool:
    """Return whether a function is defined in the module `home` or built in, not replaced by a kernel library."""
    # A wrapper takes over the wrapped function's `__module__`; its globals show its real module.
    space = getattr(function, "__globals__", {})
    return isinstance(function, BuiltinFunctionType) or space.get("__name__") == home


def hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the hidden states of a call, `[batch, tokens, hidden]`."""
    hidden: Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden


def call_with(module: Callable[..., Any], hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a module with the given arguments, but other hidden states."""
    if args:
        return module(hidden, *args[1:], **kwargs)
    return module(**{**kwargs, "hidden_states": hidden})


def copied(module: nn.Module) -> nn.Module:
    """Return a shallow copy of `module`, whose attributes may be set without changing the module."""
    copy: nn.Module = object.__new__(type(module))
    copy.__dict__.update(module.__dict__)
    return copy


def _rebound(value: Any, module: nn.Module, view: nn.Module) -> Any:
    # A `forward` shadowed on the instance (accelerate's hooks do this) is bound to the module it was put on.
    if isinstance(value, MethodType) and value.__self__ is module:
        return MethodType(value.__func__, view)
    if isinstance(value, partial) and any(bound is module for bound in [*value.args, *value.keywords.values()]):
        arguments = (view if bound is module else bound for bound in value.args)
        keywords = {name: view if bound is module else bound for name, bound in value.keywords.items()}
        return partial(value.func, *arguments, **keywords)
    # A compiled function would run the old children; rebind the function that was compiled.
    compiled = getattr(value, "_torchdynamo_orig_callable", None) if isinstance(value, FunctionType) else None
    if compiled is not None and (inside := _rebound(compiled, module, view)) is not compiled:
        return inside
    return value


def same_code(function: Any, other: Callable[..., Any]) -> bool:
    """Return whether two functions have the same code apart from their docstrings; both must have one."""
    if not isinstance(function, FunctionType) or not isinstance(other, FunctionType):
        return False
    return _operations(function.__code__) == _operations(other.__code__)


def _operations(code: CodeType) -> tuple[object, ...]:
    # The first constant is the docstring.
    return code.co_code, code.co_names, code.co_consts[1:], code.co_argcount

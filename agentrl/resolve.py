"""`module:Name` to the object it names, and calling it."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import reduce
from typing import Any, TypeVar

from agentrl.errors import ConfigError, RecipeCodeError

__all__ = ["called", "origin", "resolve"]

T = TypeVar("T")


def resolve(name: str) -> Any:
    """The object that `module:Name` (or `module:Outer.Inner`) names.

    Raises:
        ConfigError: the name is malformed, the module cannot be imported, or has no such member.
    """
    module_name, colon, path = name.partition(":")
    if not colon or not module_name or not path:
        raise ConfigError(f"expected module:Class, got {name!r}")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) and error.name != module_name else None
        hint = f"its import of {missing} failed" if missing else "is its folder on PYTHONPATH, or the current directory?"
        raise ConfigError(f"{name}: module {module_name} cannot be imported ({error}): {hint}") from error
    except Exception as error:  # the user's module may raise anything while it is imported
        raise ConfigError(f"{name}: importing {module_name} failed: {type(error).__name__}: {error}") from error
    try:
        return reduce(getattr, path.split("."), module)
    except AttributeError as error:
        public = ", ".join(sorted(member for member in vars(module) if not member.startswith("_"))) or "nothing"
        raise ConfigError(f"{name}: {module_name} ({module.__file__}) has no {path}; it has {public}") from error


def called(name: str, function: Callable[..., T], *arguments: Any) -> T:
    """What a function of the user's answers.

    Args:
        name: what the recipe calls it, e.g. "buffer.filter my.module:keep", for the error message.

    Raises:
        RecipeCodeError: it raised.
    """
    try:
        return function(*arguments)
    except Exception as error:  # the user's code may raise anything
        raise RecipeCodeError(f"{name} failed: {type(error).__name__}: {error}") from error


def origin(found: Any) -> str:
    """The file that defines `found`: where two processes resolve one name to different files, one shadows the other."""
    try:
        return inspect.getfile(found)
    except (OSError, TypeError):  # built in, or an instance
        return f"{type(found).__module__}.{type(found).__qualname__}"

"""Python imports this file at startup in processes that tests start: garbage is collected less often, and not at exit.

Importing torch makes a million objects that live as long as the process. Looking through them for garbage takes a
quarter of the import's time. torch's compiler is imported only where something is compiled.
"""

import atexit
import gc
import sys
from collections.abc import Callable
from functools import partial, wraps
from importlib.machinery import PathFinder
from typing import Any

gc.set_threshold(100_000)  # new objects between two collections; the default is 700
atexit.register(gc.freeze)


class WithoutCompiler:
    """Finds the module `torch._compile`, and changes its function that marks others as not to be compiled.

    The first call of a marked function, such as each method of an optimizer, would import torch's compiler, which takes
    as long as importing torch. Until something else has imported it, no code is being compiled.
    """

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch._compile":
            return None
        spec = PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def changed(module: Any) -> None:
            execute(module)
            module._disable_dynamo = partial(marked, module._disable_dynamo)

        spec.loader.exec_module = changed
        return spec


def marked(mark: Callable[..., Any], function: Any = None, recursive: bool = True) -> Any:
    """The function as `mark` of torch marks it, but called as it is in a process without torch's compiler."""
    if function is None:
        return partial(marked, mark, recursive=recursive)
    by_torch = mark(function, recursive)

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        return (by_torch if "torch._dynamo" in sys.modules else function)(*args, **options)

    # It stands in torch's file, as what it replaces does: whoever looks for a user's line passes over it.
    call.__code__ = call.__code__.replace(co_filename=mark.__code__.co_filename)
    return call


sys.meta_path.insert(0, WithoutCompiler)

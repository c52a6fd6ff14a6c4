"""Which tests are slow by what they, their fixtures and their helpers use.

They start a process, train, or ask MLflow, which starts git. Others that take seconds say so.
"""

import inspect
import os
import subprocess
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

TESTS = Path(__file__).parents[1]
ENGINES = ("joined_world", "open_engine", "open_session", "run_training")
STORES = ("begun", "open_store", "open_training_run", "recorded")
DOORS = frozenset(("fork", *ENGINES, *STORES))  # functions
LIBRARIES = frozenset(("multiprocessing", "subprocess"))
WORDS = frozenset(("train", "sweep", "workers"))  # of a command, or a setting by its name
# What all of them come to in the end.
STARTS = ((os, "fork"), (subprocess.Popen, "__init__"), (BaseProcess, "start"))


def is_slow(item):
    """Whether a test, a fixture of it or a helper of these goes through one of the doors."""
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    coming = [item.function, *(one.func for definitions in fixtures for one in definitions)]
    seen = set()
    while coming:
        one = coming.pop()
        if one in seen:
            continue
        seen.add(one)
        goes_through, helpers = looked_at(one)
        if goes_through:
            return True
        coming += helpers
    return False


@cache
def looked_at(used):
    """Whether a function or class names a door, and the functions and classes of tests it names."""
    functions = [used] if isinstance(used, FunctionType) else functions_of(used)
    helpers = set()
    for function in functions:
        names = names_in(function.__code__)
        known = [function.__globals__[name] for name in names if name in function.__globals__]
        for module in [one for one in known if isinstance(one, ModuleType) and is_ours(one)]:
            known += [vars(module)[name] for name in names if name in vars(module)]
        is_door = names & DOORS or WORDS & texts_in(function.__code__)
        if is_door or any(library_of(one) in LIBRARIES for one in known):
            return True, ()
        called = [inspect.unwrap(one) for one in known if callable(one)]
        helpers |= {one for one in called if isinstance(one, FunctionType | type) and is_ours(one)}
    return False, tuple(helpers)


def functions_of(kind):
    """The methods of a class."""
    bare = [
        getattr(one, "fget", None) or getattr(one, "__func__", one) for one in vars(kind).values()
    ]
    return [one for one in map(inspect.unwrap, bare) if isinstance(one, FunctionType)]


def names_in(code):
    """Every name in a function and the functions in it."""
    inner = [names_in(one) for one in code.co_consts if isinstance(one, CodeType)]
    return set(code.co_names).union(*inner)


def texts_in(code):
    """Every text in a function and the functions in it, also as a part of a tuple."""
    parts = [one if isinstance(one, tuple) else (one,) for one in code.co_consts]
    texts = {one for part in parts for one in part if isinstance(one, str)}
    return texts.union(*(texts_in(one) for one in code.co_consts if isinstance(one, CodeType)))


def is_ours(one):
    """Whether something was written for the tests."""
    path = vars(inspect.getmodule(one) or one).get("__file__")
    return path is not None and Path(path).is_relative_to(TESTS)


def library_of(one):
    """The library that a value is, or is from."""
    name = one.__name__ if isinstance(one, ModuleType) else getattr(one, "__module__", None)
    return str(name or type(one).__module__).partition(".")[0]

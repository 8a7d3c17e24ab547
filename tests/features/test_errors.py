"""The error tree in the module docstring is the tree in the code."""

import inspect
import re

from features import errors


def test_the_docstring_draws_the_real_tree() -> None:
    drawn, path = {}, ["Exception"]
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^    ((?:\|   |    )*)(\+-- )?(\w+Error)\b", line)
        if match:
            depth = len(match[1]) // 4 + bool(match[2])
            path[depth + 1 :] = [match[3]]
            drawn[match[3]] = path[depth]
    real = {
        name: cls.__base__.__name__
        for name, cls in inspect.getmembers(errors, inspect.isclass)
        if issubclass(cls, Exception) and cls.__base__ is not None
    }
    assert drawn == real

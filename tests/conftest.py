"""Which tests share a process when `make test` runs them in two."""

from typing import Any

import pytest

_DEMO_FILES = ("tests/e2e/test_demo.py", "tests/e2e/test_notebook.py")
"""Their demo takes minutes, so it runs in one process only."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep a file's tests together, since they share engines and servers, and all users of the demo."""
    from xdist.scheduler import LoadFileScheduling

    class TogetherByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", 1)[0]
            return _DEMO_FILES[0] if file in _DEMO_FILES else file

    return TogetherByFile(config, log)

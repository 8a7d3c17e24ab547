"""Which tests share a process when `make test` runs them on two cores."""

import pytest

DEMO = "demo"
"""The fixture that several files of end-to-end tests share: minutes, so it runs in one process only."""


@pytest.hookimpl(tryfirst=True)  # before the plugin that reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep a file's tests together, since they share engines and servers, and all users of the demo."""
    for item in items:
        users = getattr(item, "fixturenames", ())
        item.add_marker(pytest.mark.xdist_group(DEMO if DEMO in users else item.path.name))

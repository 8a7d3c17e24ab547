"""Decisions reach waiting runs where there is a server, and never depend on one."""

import importlib.metadata
import socket
import time
from types import SimpleNamespace

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

import pipelines.hooks
from flows import hooks as flow_hooks
from pipelines.hooks import Hooks, load_hooks, tell_hooks


def install(monkeypatch: pytest.MonkeyPatch, *found: object) -> None:
    entries = [SimpleNamespace(name=str(i), load=lambda value=value: value) for i, value in enumerate(found)]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: entries if "hooks" in group else [])


@pytest.fixture
def no_client(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("a Prefect client was opened: without a server it would start one")

    monkeypatch.setattr("prefect.client.orchestration.get_client", refuse)


def test_every_installed_hook_hears_of_a_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[str, str, str]] = []
    first = Hooks(on_decision=lambda artifact, decision: heard.append(("first", artifact, decision)))
    second = Hooks(on_decision=lambda artifact, decision: heard.append(("second", artifact, decision)))
    install(monkeypatch, first, Hooks(), second)
    tell_hooks("a" * 64, "approve")
    assert heard == [("first", "a" * 64, "approve"), ("second", "a" * 64, "approve")]


def test_an_entry_point_that_is_no_hooks_object_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, lambda *_: None)
    with pytest.raises(TypeError, match="is function, expected Hooks"):
        load_hooks()


def test_the_flows_hook_is_a_hooks_object_of_the_seam() -> None:
    assert isinstance(flow_hooks.hooks, pipelines.hooks.Hooks)
    assert flow_hooks.hooks.on_decision is flow_hooks.resume_waiting_runs


def test_without_a_configured_server_nothing_happens(no_client: None) -> None:
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        flow_hooks.resume_waiting_runs("a" * 64, "approve")


def test_a_server_that_is_down_neither_delays_nor_fails_a_decision(no_client: None) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/api"  # bound, but nobody listens
        began = time.monotonic()
        with temporary_settings({PREFECT_API_URL: url}):
            flow_hooks.resume_waiting_runs("a" * 64, "reject")
        assert time.monotonic() - began < 5


def test_without_prefect_nothing_happens(monkeypatch: pytest.MonkeyPatch, no_client: None) -> None:
    monkeypatch.setattr(flow_hooks.importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setattr(flow_hooks, "_server_answers", lambda: pytest.fail("asked for a server"))
    flow_hooks.resume_waiting_runs("a" * 64, "approve")

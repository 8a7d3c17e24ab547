"""What others may be told about decisions, through entry points.

A package that wants to hear of them (the flows, to resume a run that waits) names a ``Hooks``
object under the entry-point group ``draftlake.hooks``. A hook runs after the decision is in the
registry, so it can neither prevent nor undo it; it handles its own trouble, such as a server that
cannot be reached, and raises only for a bug.
"""

import importlib.metadata
import logging
from collections.abc import Callable
from dataclasses import dataclass

HOOK_GROUP = "draftlake.hooks"
"""Entry points here are ``Hooks`` objects."""


logger = logging.getLogger(__name__)


def _ignore(artifact: str, decision: str) -> None:
    del artifact, decision


@dataclass(frozen=True, slots=True)
class Hooks:
    """Callables to run when something has happened. Every one has a default that does nothing."""

    on_decision: Callable[[str, str], None] = _ignore
    """Called with an artifact's full digest after it was approved or rejected."""


def load_hooks() -> tuple[Hooks, ...]:
    """Every installed ``Hooks`` object, ordered by name.

    Raises:
        TypeError: an entry point of the group names something else.
    """
    found = []
    for entry in sorted(importlib.metadata.entry_points(group=HOOK_GROUP), key=lambda e: e.name):
        hooks = entry.load()
        if not isinstance(hooks, Hooks):
            found_type = type(hooks).__name__
            raise TypeError(f"entry point {entry.name!r} of {HOOK_GROUP} is {found_type}, expected Hooks")
        found.append(hooks)
    return tuple(found)


def tell_hooks(artifact: str, decision: str) -> None:
    """Tell every hook that an artifact (full digest) was decided on: ``approve`` or ``reject``."""
    for hooks in load_hooks():
        logger.debug("telling %s of %s: %s", hooks, artifact, decision)
        hooks.on_decision(artifact, decision)

"""Where an engine may read artifacts from: a list of roots that its operator sets, never its caller."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from publish.vllm_plugin.errors import EngineRefusedError

ROOTS_VARIABLE = "DRAFTLAKE_REGISTRY_ROOTS"
"""Environment variable with the folders or URLs that artifacts may come from, separated like ``PATH``."""

# A colon that starts "://" belongs to a URL.
_SEPARATOR = re.compile(re.escape(os.pathsep) + r"(?!//)")


def allowed_roots() -> tuple[str, ...]:
    """Roots from the environment; none means that nothing may be fetched."""
    return tuple(
        part.strip() for part in _SEPARATOR.split(os.environ.get(ROOTS_VARIABLE, "")) if part.strip()
    )


def joined_roots(roots: Sequence[str]) -> str:
    """The value of the variable for these roots.

    Raises:
        ValueError: a root holds the separator: it would be read as two others, and open both.
    """
    for root in roots:
        if [part.strip() for part in _SEPARATOR.split(root)] != [root.strip()] or not root.strip():
            raise ValueError(
                f"a registry root is a folder or URL without {os.pathsep!r}, got {root!r}; move it, or link to it"
            )
    return os.pathsep.join(roots)


def checked_uri(uri: str, roots: tuple[str, ...]) -> str:
    """``uri`` in a normal form, if it lies under one of ``roots``.

    Local paths are compared after resolving links, so that a link cannot lead outside.

    Raises:
        EngineRefusedError: it lies elsewhere, or climbs with ``..``.
    """
    wanted = _normal(uri)
    for root in roots:
        base = _normal(root)
        if wanted == base or wanted.startswith(base.rstrip("/") + "/"):
            return wanted
    raise EngineRefusedError(
        f"{uri!r} lies under none of the registry roots this engine may read "
        f"({', '.join(roots) or 'none are set'}). Publish from a registry there, or start the engine with "
        f"{ROOTS_VARIABLE} naming its root."
    )


def _normal(uri: str) -> str:
    parts = urlsplit(uri)
    if parts.scheme in ("", "file"):
        return str(Path(parts.path if parts.scheme else uri).resolve())
    if ".." in parts.path.split("/") or "%" in uri:
        raise EngineRefusedError(
            f"{uri!r} climbs with '..' or holds an escape; name the artifact's folder directly"
        )
    return f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/")

"""Paths of objects and urls of stores: checked, and fit to be printed."""

import re

_USER = re.compile(r"://[^/]*@")


def checked_path(path: str) -> str:
    """``path`` itself when it is relative, '/'-separated and stays under the root; else ``ValueError``."""
    segments = path.split("/")
    if any(segment in ("", ".", "..") for segment in segments) or "\\" in path or "\0" in path:
        raise ValueError(f"object paths are relative with plain segments, got {path!r}")
    return path


def without_credentials(url: str) -> str:
    """A url for people and logs: no user, no password, no query; in a chain (``a::b``) of none of its parts."""
    return _USER.sub("://", re.split("[?#]", str(url), maxsplit=1)[0])

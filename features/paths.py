"""Paths of objects and urls of stores: checked, and fit to be printed."""

from urllib.parse import urlsplit, urlunsplit


def checked_path(path: str) -> str:
    """``path`` itself when it is relative, '/'-separated and stays under the root; else ``ValueError``."""
    segments = path.split("/")
    if any(segment in ("", ".", "..") for segment in segments) or "\\" in path or "\0" in path:
        raise ValueError(f"object paths are relative with plain segments, got {path!r}")
    return path


def without_credentials(url: str) -> str:
    """A url for people and logs: no user, no password, no query."""
    parts = urlsplit(str(url))
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment=""))

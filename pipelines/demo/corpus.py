"""Text for the demo's target: two domains that ship with every CPython.

``code`` is the standard library's own source; ``prose`` is the language reference that
``pydoc`` carries. The target is born on ``code`` and later moves towards ``prose``, as a
policy moves under RL, so that a draft trained early goes stale.
"""

import hashlib
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

Domain = Literal["code", "prose"]

_SKIPPED_FOLDERS = {"test", "tests", "site-packages", "__pycache__", "idlelib", "lib2to3"}
_SKIPPED_FILES = {"topics.py"}
_MAX_FILE_BYTES = 200_000
"""Longer modules are generated tables more often than prose or code."""


def code_documents() -> list[str]:
    """Sources of the standard library in path order, without tests and tables."""
    root = Path(sysconfig.get_paths()["stdlib"])
    documents = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        skipped = _SKIPPED_FOLDERS.intersection(parts) or path.name in _SKIPPED_FILES
        generated = path.parent.name == "encodings" or path.name.startswith("_sysconfigdata")
        if skipped or generated or path.stat().st_size > _MAX_FILE_BYTES:
            continue
        documents.append(path.read_text(encoding="utf-8", errors="replace"))
    return documents


def prose_documents() -> list[str]:
    """The language reference's topics, in name order."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def documents(domain: Domain) -> list[str]:
    """All documents of one domain, in a fixed order."""
    return code_documents() if domain == "code" else prose_documents()


def split_documents(texts: Sequence[str], *, held_out_every: int = 20) -> tuple[list[str], list[str]]:
    """Split into (train, held out): every ``held_out_every``-th document is held out."""
    train = [t for i, t in enumerate(texts) if i % held_out_every]
    held_out = [t for i, t in enumerate(texts) if i % held_out_every == 0]
    return train, held_out


def corpus_digest(texts: Sequence[str]) -> str:
    """SHA-256 over the documents' bytes: tells whether two machines saw the same text."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(len(text).to_bytes(8, "little"))
        digest.update(text.encode("utf-8", errors="replace"))
    return digest.hexdigest()

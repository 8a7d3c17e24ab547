"""Draft methods: one explicit table, the only place a method is listed."""

from collections.abc import Mapping
from types import MappingProxyType

from training.methods.base import DraftMethod
from training.methods.eagle3 import EAGLE3

DRAFT_METHODS: Mapping[str, DraftMethod] = MappingProxyType({m.name: m for m in (EAGLE3,)})

__all__ = ["DRAFT_METHODS", "DraftMethod"]

"""Why the plugin refused. Carried over RPC as a dict, since vLLM turns exceptions into text."""

from typing import ClassVar


class PluginError(Exception):
    """Base of everything the plugin raises on purpose; ``kind`` tells the publisher what to do."""

    kind: ClassVar[str]


class LayoutRefusedError(PluginError):
    """The candidate does not fit the live draft; nothing in the engine was touched."""

    kind = "layout"


class EngineRefusedError(PluginError):
    """The engine cannot do what was asked, whatever the candidate."""

    kind = "engine"

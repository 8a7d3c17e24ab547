"""What Draftlake runs inside vLLM's processes.

Start a server with ``--worker-extension-cls publish.vllm_plugin.WorkerExtension`` and
``--weight-transfer-config '{"backend": "draftlake"}'``: vLLM then resolves ``WorkerExtension``
in each worker before it loads a model, which registers the backend. Nothing heavy is imported
before that attribute is read, so that tools outside the engine can use ``compat``'s table.

- ``compat``        every vLLM internal this package touches, with the releases it was run on
- ``cpu_sampling``  repairs sampled speculation in vLLM's CPU build, which is wrong as released
- ``fingerprints``  live parameters in checkpoint form, their digests and who owns them
- ``layout``        does a candidate fit the live draft? Pure checks with every reason
- ``checkpoint``    fetch an artifact from an allowed root, check it, hold it in host memory
- ``backend``       the weight-transfer backend: load, put back
- ``worker``        the methods a publisher calls

Imports torch, safetensors, fsspec, vLLM and the standard library only: engine hosts need no
other part of this project, and a training framework's own packages cannot shadow it.
"""

from typing import Any

BACKEND_NAME = "draftlake"
EXTENSION_CLASS = "publish.vllm_plugin.WorkerExtension"

__all__ = ["BACKEND_NAME", "EXTENSION_CLASS", "WorkerExtension"]


def __getattr__(name: str) -> Any:
    if name == "WorkerExtension":
        from publish.vllm_plugin.worker import WorkerExtension

        return WorkerExtension
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

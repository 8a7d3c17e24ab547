"""Start a vLLM server that can be swapped into: the command line, and a local server for demos and tests.

The routes that swapping needs are vLLM's development routes, which let a caller run methods
inside the engine. The server therefore listens on the loopback interface only.
"""

import json
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

from features.errors import EngineError
from publish.processes import STOP_GRACE_S, start_bound, stop_group
from publish.vllm_client import VllmEngine
from publish.vllm_plugin import BACKEND_NAME, EXTENSION_CLASS
from publish.vllm_plugin.compat import installed_release, internals_for
from publish.vllm_plugin.errors import EngineRefusedError
from publish.vllm_plugin.roots import ROOTS_VARIABLE, joined_roots

logger = logging.getLogger(__name__)

_HOST = "127.0.0.1"
# Two OpenMP threads were ten times slower than one on two shared cores.
_CPU_ENV: Mapping[str, str] = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@dataclass(frozen=True, slots=True)
class ServeCommand:
    """A server's command line and what it adds to the environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    base_url: str


def serve_command(
    target: Path,
    draft: Path | None,
    *,
    port: int,
    num_speculative_tokens: int = 3,
    registry_roots: Sequence[str] = (),
    method: str = "eagle3",
    device: Literal["cpu", "gpu"] = "cpu",
    dtype: str = "float32",
    max_model_len: int | None = None,
    max_num_seqs: int = 8,
    kv_cache_gib: int = 1,
    vllm_version: str | None = None,
) -> ServeCommand:
    """The command that serves ``target`` with ``draft`` and the Draftlake plugin.

    Args:
        draft: folder of the draft to boot with; None serves without speculation (nothing can be swapped).
        registry_roots: folders or URLs from which the engine may load drafts.
        kv_cache_gib: memory for KV, on a CPU only.
        vllm_version: release to write flags for; the installed one when None.

    Raises:
        EngineError: that vLLM release was never run with the plugin, or none is installed.
    """
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(target)]
    argv += ["--served-model-name", "target", "--host", _HOST, "--port", str(port), "--dtype", dtype]
    argv += ["--max-num-seqs", str(max_num_seqs), "--logprobs-mode", "raw_logprobs"]
    argv += ["--enforce-eager"]
    # Runs stay comparable, and no cached prefix outlives its weights.
    argv += ["--no-enable-prefix-caching"]
    if max_model_len is not None:
        argv += ["--max-model-len", str(max_model_len)]
    if draft is not None:
        # The method is always named: vLLM would guess it from the folder's name.
        speculative = {
            "method": method,
            "model": str(draft),
            "num_speculative_tokens": num_speculative_tokens,
        }
        argv += ["--speculative-config", json.dumps(speculative)]
    argv += ["--weight-transfer-config", json.dumps({"backend": BACKEND_NAME})]
    argv += ["--worker-extension-cls", EXTENSION_CLASS]
    argv += _release_flags(vllm_version)
    env = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # A folder of the user's named like one of our packages must not be imported instead.
        "PYTHONSAFEPATH": "1",
        "HF_HUB_OFFLINE": "1",
        ROOTS_VARIABLE: joined_roots(registry_roots),
    }
    if device == "cpu":
        env |= {**_CPU_ENV, "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib)}
    return ServeCommand(tuple(argv), env, f"http://{_HOST}:{port}")


class LocalServer:
    """A vLLM server as a child process, for demos and tests: a context manager.

    The server and the processes it spawns form one process group, which ``stop`` ends; the
    server is told to stop when this process dies without calling it.
    """

    def __init__(self, command: ServeCommand, *, log_path: Path, ready_timeout_s: float = 300.0) -> None:
        self.command = command
        self.log_path = log_path
        self.ready_timeout_s = ready_timeout_s
        self.start_seconds: float | None = None
        """Time from start to ready, once it is."""
        self._process: subprocess.Popen[bytes] | None = None
        self._engine: VllmEngine | None = None

    def start(self) -> VllmEngine:
        """Start and wait until requests are answered.

        Raises:
            EngineError: it died or was not ready in time; carries the end of its log.
        """
        started = time.monotonic()
        with self.log_path.open("wb") as log:
            self._process = start_bound(
                self.command.argv, stdout=log, stderr=log, death_signal=signal.SIGTERM, env=self.command.env
            )
        engine = VllmEngine(self.command.base_url)
        try:
            engine.wait_ready(self.ready_timeout_s, alive=self._is_alive)
        except EngineError as error:
            engine.close()
            self.stop()
            raise EngineError(f"{error}\nLog {self.log_path} ends with:\n{self.log_tail()}") from error
        except BaseException:
            engine.close()
            self.stop()
            raise
        self.start_seconds = time.monotonic() - started
        logger.info("vllm server ready url=%s seconds=%.1f", self.command.base_url, self.start_seconds)
        return engine

    def stop(self, *, grace_s: float = STOP_GRACE_S) -> None:
        """End the server's process group; harmless when it has ended."""
        process, self._process = self._process, None
        if process is None:
            return
        stop_group(process, grace_s=grace_s)

    def log_tail(self, lines: int = 30) -> str:
        """The last lines the server wrote."""
        if not self.log_path.is_file():
            return "(no log)"
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def _is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def __enter__(self) -> VllmEngine:
        self._engine = self.start()
        return self._engine

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._engine is not None:
            self._engine.close()
        self.stop()


def _release_flags(vllm_version: str | None) -> tuple[str, ...]:
    try:
        return internals_for(vllm_version or installed_release()).serve_flags
    except EngineRefusedError as error:
        raise EngineError(str(error)) from error

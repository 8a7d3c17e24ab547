"""Serve an earlier demo again: its newest target with its production draft."""

import time
from pathlib import Path

from features.errors import InputError
from features.lake import Lake
from pipelines.context import RunContext
from pipelines.demo.history import version_folder
from publish.launch import LocalServer, ServeCommand, serve_command
from publish.registry import Registry
from training.spec import TrainSpec


def demo_command(out: Path, *, port: int, num_speculative_tokens: int) -> ServeCommand:
    """The server of an earlier demo.

    Raises:
        InputError: ``out`` holds no finished demo.
    """
    lake = Lake.open(str(out / "lake"))
    head = Registry(lake.store, lake.target.target_id).channel(TrainSpec().method.method).head()
    versions = lake.versions()
    if head is None or not versions:
        raise InputError(f"{out} holds no finished demo; run: draftlake demo --out {out}")
    registry = (out / "lake" / "registry").resolve()
    return serve_command(
        version_folder(out.resolve() / "target", versions[-1].version.number),
        registry / "artifacts" / head.artifact,
        port=port,
        num_speculative_tokens=num_speculative_tokens,
        registry_roots=(str(registry),),
    )


def serve_demo(command: ServeCommand, out: Path, ctx: RunContext) -> None:
    """Serve until interrupted; the log goes to ``out``.

    Raises:
        EngineError: the server did not start; carries the end of its log.
    """
    ctx.progress.say(f"starting vLLM; log in {out / 'serve.log'}")
    with LocalServer(command, log_path=out / "serve.log"):
        ctx.progress.say(f"serving on {command.base_url}; Ctrl-C stops it")
        try:
            while True:
                time.sleep(1)
        except KeyboardInterrupt:
            ctx.progress.say("stopping")

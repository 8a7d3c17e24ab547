"""Some partitions of a backfill in a process of their own: a request file in, the report on stdout.

For whoever schedules backfills: a framework, an accelerator's context and a crash stay in here.
"""

import json
import sys
from pathlib import Path
from typing import Any

from features.errors import DraftlakeError
from pipelines.backfill import backfill
from pipelines.backfill_spec import BackfillSpec
from pipelines.context import RunContext
from pipelines.progress import OnConsole


def request(spec: BackfillSpec, partitions: tuple[str, ...]) -> str:
    """The text of a request file."""
    return json.dumps({"spec": spec.model_dump(mode="json"), "partitions": partitions})


def command(request_file: Path) -> list[str]:
    """The command line that serves a request."""
    return [sys.executable, "-P", "-m", "pipelines.backfill_process", str(request_file)]


def main() -> None:
    """Serve the request file that the first argument names; exit codes as the ``draftlake`` command has them."""
    asked: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    spec = BackfillSpec.model_validate(asked["spec"])
    try:
        report = backfill(spec, RunContext(progress=OnConsole()), only=asked["partitions"])
    except DraftlakeError as error:
        sys.stderr.write(f"draftlake: {error}\n")
        sys.exit(error.exit_code)
    sys.stdout.write(report.model_dump_json() + "\n")


if __name__ == "__main__":
    main()

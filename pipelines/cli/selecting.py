"""Options that narrow a selection: written once, mounted on every command that names one."""

import functools
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any

import typer

from pipelines.cli.output import parse_spec
from pipelines.narrowing import Narrowing

_Ids = list[str] | None
_Bound = float | None
_Count = int | None

OPTIONS: Mapping[str, Any] = MappingProxyType(
    {
        "samples": Annotated[_Ids, typer.Option("--sample", help="Only this sample id; repeatable.")],
        "groups": Annotated[_Ids, typer.Option("--group", help="Only this rollout group; repeatable.")],
        "domains": Annotated[_Ids, typer.Option("--domain", help="Only this domain; repeatable.")],
        "writers": Annotated[_Ids, typer.Option("--writer", help="Only this writer's windows; repeatable.")],
        "newest_versions": Annotated[
            _Count, typer.Option(min=1, help="Only so many of the newest versions in the lake.")
        ],
        "min_reward": Annotated[_Bound, typer.Option(help="Only windows with at least this reward.")],
        "max_reward": Annotated[_Bound, typer.Option(help="Only windows with at most this reward.")],
        "min_acceptance_length": Annotated[
            _Bound, typer.Option(help="Only windows with at least this recorded acceptance length.")
        ],
        "max_acceptance_length": Annotated[
            _Bound, typer.Option(help="Only windows with at most this recorded acceptance length.")
        ],
        "min_acceptance_rate": Annotated[
            _Bound, typer.Option(help="Only windows with at least this recorded acceptance rate.")
        ],
        "max_acceptance_rate": Annotated[
            _Bound, typer.Option(help="Only windows with at most this recorded acceptance rate.")
        ],
        "min_tokens": Annotated[_Count, typer.Option(min=1, help="Only windows of at least so many rows.")],
        "max_tokens": Annotated[_Count, typer.Option(min=1, help="Only windows of at most so many rows.")],
        "whole_sequences_only": Annotated[
            bool, typer.Option("--whole-sequences-only", help="Only windows that hold a whole rollout.")
        ],
        "max_windows": Annotated[
            _Count, typer.Option(min=1, help="At most so many, the same ones every time.")
        ],
    }
)
"""By field of :class:`Narrowing`."""


def narrowed(command: Callable[..., None]) -> Callable[..., None]:
    """The command with all of :data:`OPTIONS`; it is called with what they make as ``narrowing``."""
    own = inspect.signature(command, eval_str=True)

    @functools.wraps(command)
    def run(**values: Any) -> None:
        given = {name: values.pop(name) for name in OPTIONS}
        stated = {name: value for name, value in given.items() if value is not None}
        command(**values, narrowing=parse_spec(Narrowing, stated, where="selection"))

    mine = [parameter for name, parameter in own.parameters.items() if name != "narrowing"]
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=False if name == "whole_sequences_only" else None,
            annotation=option,
        )
        for name, option in OPTIONS.items()
    ]
    keyword_only = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in mine]
    run.__signature__ = own.replace(parameters=[*keyword_only[:-1], *options, keyword_only[-1]])  # type: ignore[attr-defined]
    return run

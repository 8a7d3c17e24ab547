"""The table of formats, and how a file's format is told from its first record."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from features.collect.rollout import ROLLOUT_FORMAT
from features.collect.sources import (
    draftlake,
    mapping,
    nemo_rl,
    normalised,
    prime_rl,
    skyrl,
    slime,
    text_only,
    verl,
    vllm_responses,
)
from features.collect.sources.records import Record
from features.collect.sources.row import Reader
from features.errors import InputError
from features.paths import without_credentials

MAPPING = "mapping"
"""Format of files that a column mapping describes."""
EMPTY = "empty"
"""Format of a file without a record: nothing is read from it, and its lines are counted."""


@dataclass(frozen=True, slots=True)
class SourceFormat:
    """How records of one source look and become rollouts."""

    read: Reader
    signature: Callable[[Record], bool] | None = None
    """Whether a record can only be of this source; None: the format must be named."""
    named_samples: bool = False
    """Records carry sample ids of the user: the same id may come again and is the collector's to judge."""


# The only place a format is listed; detection, errors and tests iterate over it.
FORMATS: Mapping[str, SourceFormat] = MappingProxyType(
    {
        ROLLOUT_FORMAT: SourceFormat(draftlake.read, draftlake.is_ours, named_samples=True),
        "draftlake-normalised": SourceFormat(normalised.read, normalised.is_normalised, named_samples=True),
        "prime-rl": SourceFormat(prime_rl.read_traces, prime_rl.is_traces),
        "prime-rl-tokens": SourceFormat(prime_rl.read_token_export, prime_rl.is_token_export),
        "nemo-rl": SourceFormat(nemo_rl.read, nemo_rl.is_nemo_rl),
        "slime": SourceFormat(slime.read, slime.is_slime),
        "vime": SourceFormat(slime.read),  # the same records: told as slime
        "verl": SourceFormat(verl.read, verl.is_verl),
        "verl-text": SourceFormat(text_only.read_verl, text_only.is_verl_text),
        "skyrl": SourceFormat(skyrl.read, skyrl.is_skyrl),
        "skyrl-evals": SourceFormat(text_only.read_skyrl_eval, text_only.is_skyrl_eval),
        "trl": SourceFormat(text_only.read_trl, text_only.is_trl),
        "vllm-generate": SourceFormat(vllm_responses.read_generate, vllm_responses.is_generate),
        "vllm-chat": SourceFormat(vllm_responses.read_chat, vllm_responses.is_chat),
        "vllm-completions": SourceFormat(vllm_responses.read_completion, vllm_responses.is_completion),
        MAPPING: SourceFormat(mapping.read, named_samples=True),
        EMPTY: SourceFormat(lambda record, row: ()),
    }
)


def known_format(name: str) -> str:
    """``name`` when it is a format.

    Raises:
        InputError: it is not.
    """
    if name not in FORMATS or name == EMPTY:
        raise InputError(f"no source format {name!r}; known are {', '.join(_names())}")
    return name


def detect(record: Record, url: str) -> str:
    """The one format whose signature the record has.

    Raises:
        InputError: no signature fits, or several.
    """
    fitting = [
        name for name, known in FORMATS.items() if known.signature is not None and known.signature(record)
    ]
    if len(fitting) == 1:
        return fitting[0]
    place = without_credentials(url)
    keys = ", ".join(sorted(map(str, record))[:12])
    if fitting:
        raise InputError(f"{place!r} could be {' or '.join(fitting)} (keys {keys}): say which with --format")
    raise InputError(
        f"cannot tell the format of {place!r} (keys {keys}): give --format, one of {', '.join(_names())}, or "
        f"--columns for a mapping of your own"
    )


def _names() -> Sequence[str]:
    return [name for name in FORMATS if name != EMPTY]

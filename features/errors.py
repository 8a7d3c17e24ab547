"""Every error this project raises on purpose.

Grouped by what a handler does::

    DraftlakeError
    +-- InputError              the caller's input is wrong: fix it and run again   (exit 2)
    |   +-- LakeNotFoundError
    |   +-- EmptySelectionError
    |   +-- TargetMismatchError
    +-- LakeContractError       stored or offered data break the schema; retrying cannot help (exit 1)
    |   +-- UnknownVersionError
    |   +-- HeadMissingError
    |   +-- VersionConflictError
    |   +-- PlanConflictError
    |   +-- CorruptDataError
    |   +-- ProofFailedError
    +-- ObjectExistsError       a create-only write met an existing object
    +-- StreamClosedError       a stream writer was stopped and takes nothing more  (exit 1)
    +-- DraftLayoutError        a draft does not fit where it is to be used         (exit 1)
    +-- TrainingFailedError     a training run gave nothing usable                  (exit 1)
    +-- EngineError             an engine refused, failed or cannot be reached      (exit 1)
    |   +-- EnginePausedError
    +-- GateRefusedError        measured, and not good enough                       (exit 3)
    +-- RegistryConflictError   somebody else moved the channel first               (exit 1)

Messages say what was expected, what was found, where, and the remedy. A test keeps the tree.
"""


class DraftlakeError(Exception):
    """Root of every error this project raises on purpose."""

    exit_code = 1


class InputError(DraftlakeError):
    """The caller's input is wrong; nothing was changed."""

    exit_code = 2


class LakeNotFoundError(InputError):
    """There is no lake at the given place."""

    def __init__(self, url: str) -> None:
        self.url = url
        super().__init__(
            f"no lake at {url!r}: expected an object 'lake.json' there and found none. "
            f"Check the path, or create one with: draftlake init {url} --target DIR --target-id NAME"
        )


class EmptySelectionError(InputError):
    """A selection resolved to no window at all."""


class TargetMismatchError(InputError):
    """The offered target, tokenizer or draft is not the one this lake was made for."""


class LakeContractError(DraftlakeError):
    """Data in the lake, or offered to it, break the schema. Retrying cannot help."""


class UnknownVersionError(LakeContractError):
    """A target version was never registered in the lake."""


class HeadMissingError(LakeContractError):
    """A version's head snapshot is absent."""


class VersionConflictError(LakeContractError):
    """A version number is already taken by other weights, or windows mix versions."""


class PlanConflictError(LakeContractError):
    """The same plan was committed with other tokens or masks."""


class CorruptDataError(LakeContractError):
    """Stored bytes are missing, too short, or fail their checksum."""


class ProofFailedError(LakeContractError):
    """An authenticity proof failed: features, tokens and weights do not belong together."""


class ObjectExistsError(DraftlakeError):
    """A create-only write met an existing object."""

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(f"{path!r} exists already; objects are created once and never overwritten")


class StreamClosedError(DraftlakeError):
    """A stream writer was stopped or closed and takes no more windows."""


class DraftLayoutError(DraftlakeError):
    """A draft checkpoint does not fit the target, the engine or the method it names."""


class TrainingFailedError(DraftlakeError):
    """A training run saw no usable step, or too many of its steps were not finite."""


class EngineError(DraftlakeError):
    """An engine refused a request, failed, or cannot be reached."""


class EnginePausedError(EngineError):
    """An engine was paused and could not be resumed: it may hold the right draft and serve nobody."""


class GateRefusedError(DraftlakeError):
    """A gate measured the candidate and found it not good enough."""

    exit_code = 3


class RegistryConflictError(DraftlakeError):
    """Somebody else moved the channel first; read it again and decide anew."""

"""What an S3 client raises, as the ``OSError`` that callers of a store know.

s3fs translates answers of the service, but lets through what its own clients raise about a broken
connection, a time limit or a body that does not fit its checksum. Recognised by package, so that
nothing of S3 is imported for other stores.
"""

from collections.abc import Mapping, Sequence

_CLIENTS = frozenset({"aiobotocore", "aiohttp", "botocore"})


_PASSING_CODES = frozenset({"InternalError", "OperationAborted", "ServiceUnavailable", "SlowDown"})


class UndeletedError(OSError):
    """The service answered a request to delete many objects with success, and did not delete some of them."""

    def __init__(self, url: str, refused: Sequence[Mapping[str, str]]) -> None:
        codes = sorted({str(answer.get("Code")) for answer in refused})
        self.passing = _PASSING_CODES.issuperset(codes)
        """Whether asking again may help."""
        super().__init__(
            f"{url}: {len(refused)} objects were not deleted ({', '.join(codes)}), {refused[0].get('Key')!r} among "
            f"them. Look at the bucket's policy for s3:DeleteObject, and run the command again."
        )


def as_os_error(error: Exception) -> OSError | None:
    """``error`` itself, or what stands for an exception of an S3 client; None for anything else."""
    if isinstance(error, OSError):
        return error
    if not any(base.__module__.partition(".")[0] in _CLIENTS for base in type(error).__mro__):
        return None
    translated = OSError(f"the object store could not be reached or gave a broken answer: {error}")
    translated.__cause__ = error
    return translated


def http_status(error: OSError) -> int | None:
    """The status that the service answered with, if it answered."""
    # s3fs keeps the client's answer as the cause of the OSError it translates to.
    response = getattr(error.__cause__, "response", None) or {}
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return int(status) if status is not None else None


def spoilt(error: OSError) -> bool:
    """Whether the answer came but its body was not what the service had sent; asking again may help."""
    return type(error.__cause__).__name__ == "FlexibleChecksumError"

"""Why a bucket cannot be used: credentials, address, region or rights, each with its remedy.

Recognised by the names of the client's exceptions and of the service's codes, so that nothing of S3
is imported. Messages name places and never quote what was sent, which may hold a session's token.
"""

from urllib.parse import urlsplit

_NO_CREDENTIALS = frozenset({
    "NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "NoAuthTokenError",
    "SSOTokenLoadError", "TokenRetrievalError", "UnauthorizedSSOTokenError",
})  # fmt: skip
_WRONG_SETTINGS = frozenset({"InvalidRegionError", "ProfileNotFound"})
_NOT_REACHED = frozenset({
    "ConnectTimeoutError", "EndpointConnectionError", "ProxyConnectionError", "SSLError",
})  # fmt: skip
_OTHER_REGION = frozenset({
    "301", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "PermanentRedirect",
})  # fmt: skip
_REFUSED = frozenset({401, 403})


class StoreAccessError(OSError):
    """The store cannot be used as it is addressed; asking again changes nothing."""


def access_error(error: OSError, *, url: str, endpoint: str | None) -> StoreAccessError | None:
    """What stands in the way of using the bucket, in words; None when ``error`` is of another kind.

    Args:
        error: as an S3 client's exception is translated, the exception itself as its cause.
        url: where the store is.
        endpoint: address of the service where it is not AWS's own.
    """
    cause = error.__cause__
    kinds = {kind.__name__ for kind in type(cause).__mro__}
    response = getattr(cause, "response", None) or {}
    code = str(response.get("Error", {}).get("Code", ""))
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    bucket = urlsplit(url).netloc
    service = f"the S3 service at {_host(endpoint)}" if endpoint else "AWS S3"
    if kinds & _NO_CREDENTIALS:
        said = (
            f"{url}: no usable credentials were found ({type(cause).__name__}). Set AWS_ACCESS_KEY_ID and "
            f"AWS_SECRET_ACCESS_KEY, or name a profile (AWS_PROFILE, or profile in draftlake.toml); for a "
            f"public bucket set anon = true"
        )
    elif kinds & _WRONG_SETTINGS:
        said = f"{url}: {cause}. Correct AWS_PROFILE, AWS_REGION, your AWS configuration or draftlake.toml"
    elif kinds & _NOT_REACHED:
        said = (
            f"{url}: {service} could not be reached ({type(cause).__name__}). Check that it runs, and the "
            f"address in AWS_ENDPOINT_URL or endpoint_url in draftlake.toml"
        )
    elif code == "NoSuchBucket":
        said = (
            f"{url}: {service} has no bucket {bucket!r}. Create it there, or correct the url or the "
            f"address (AWS_ENDPOINT_URL, or endpoint_url in draftlake.toml)"
        )
    elif code in _OTHER_REGION:
        said = (
            f"{url}: {service} keeps bucket {bucket!r} in another region ({code}). Set AWS_REGION, or region "
            f"in draftlake.toml, to the bucket's"
        )
    elif status in _REFUSED:
        said = (
            f"{url}: {service} refused the credentials or what they may do (HTTP {status}, {code}). Check "
            f"the key, and the rights on bucket {bucket!r}: s3:ListBucket, s3:GetObject, s3:PutObject, and "
            f"s3:DeleteObject for maintenance"
        )
    elif "ParamValidationError" in kinds:
        said = f"{url}: {bucket!r} is no name of a bucket. Correct the url, s3://BUCKET/PREFIX"
    else:
        return None
    found = StoreAccessError(f"{said}.")
    found.__cause__ = cause
    return found


def _host(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"

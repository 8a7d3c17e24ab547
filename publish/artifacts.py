"""Artifacts on the store: three files under a digest, complete or not there at all.

An artifact exists when its manifest does, and that is written last, so a killed import leaves
nothing visible and running it again completes it. Its digest is computed anew whenever it is
read whole: what was altered or cut short is refused.
"""

import logging
import re
import shutil
import uuid
from pathlib import Path

from features.errors import (
    CorruptDataError,
    DraftLayoutError,
    InputError,
    ObjectExistsError,
    TargetMismatchError,
)
from features.storage import Store
from training.artifact import (
    ARTIFACT_FILES,
    CONFIG_FILE,
    MANIFEST_FILE,
    WEIGHTS_FILE,
    DraftArtifact,
    TrainingManifest,
    check_artifact,
    load_artifact,
    read_artifact_files,
)

logger = logging.getLogger(__name__)

_ARTIFACTS = "registry/artifacts"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SHORTEST_PREFIX = 6


class ArtifactStore:
    """The artifacts of one target on one store. Holds no state of its own."""

    def __init__(self, store: Store, target_id: str) -> None:
        self._store = store
        self.target_id = target_id

    def import_artifact(self, folder: Path) -> str:
        """Register a draft directory and return its digest. Doing it again is harmless.

        Raises:
            DraftLayoutError: the folder is no complete draft artifact.
            TargetMismatchError: it was trained for another target.
            CorruptDataError: the registry holds other bytes under this digest.
        """
        # One read serves both the digest and the upload: a folder that changes meanwhile cannot
        # put other bytes under this digest.
        files = read_artifact_files(folder)
        artifact = check_artifact(files, where=str(folder))
        if artifact.manifest.target_id != self.target_id:
            raise TargetMismatchError(
                f"the draft in {folder} was trained for target {artifact.manifest.target_id!r}, and this "
                f"registry serves {self.target_id!r}. Import it into the lake it was trained from."
            )
        existed = False
        for name in (WEIGHTS_FILE, CONFIG_FILE, MANIFEST_FILE):  # the manifest last: it makes it visible
            try:
                self._store.create(f"{_ARTIFACTS}/{artifact.digest}/{name}", files[name])
            except ObjectExistsError:
                existed = True
        if existed:  # by an earlier or a concurrent import: what counts is what lies there
            self.artifact(artifact.digest)
        logger.info("artifact %s (%s) is registered", artifact.digest, artifact.manifest.method)
        return artifact.digest

    def artifact_uri(self, digest: str) -> str:
        """Where engines pull the artifact from: a folder URL on the lake's store."""
        return f"{self._store.url.rstrip('/')}/{_ARTIFACTS}/{self._known(digest)}"

    def artifact(self, digest: str) -> DraftArtifact:
        """Read an artifact whole and check it against its digest.

        Raises:
            InputError: there is no such artifact.
            CorruptDataError: stored files are missing, cut short or altered.
        """
        return self._checked(digest)[1]

    def fetch(self, digest: str, to: Path) -> Path:
        """Copy an artifact to the folder ``to``, which appears whole or not at all.

        Raises:
            InputError: there is no such artifact, or ``to`` holds something else.
            CorruptDataError: stored files are missing, cut short or altered.
        """
        files, _ = self._checked(digest)
        partial = to.parent / f".{to.name}.{uuid.uuid4().hex}"
        partial.mkdir(parents=True)
        try:
            for name, data in files.items():
                (partial / name).write_bytes(data)
            _move_into_place(partial, to, digest)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return to

    def manifest(self, digest: str) -> TrainingManifest:
        """The training manifest alone, without reading the weights.

        Raises:
            InputError: there is no such artifact.
            CorruptDataError: it cannot be read.
        """
        path = f"{_ARTIFACTS}/{self._known(digest)}/{MANIFEST_FILE}"
        try:
            return TrainingManifest.model_validate_json(self._store.read(path))
        except (FileNotFoundError, ValueError) as error:
            raise CorruptDataError(f"{path} cannot be read: {error}. Import the artifact again.") from error

    def digests(self) -> tuple[str, ...]:
        """Digests of all complete artifacts, sorted."""
        marker = re.compile(rf"{_ARTIFACTS}/([0-9a-f]{{64}})/{re.escape(MANIFEST_FILE)}")
        found = (marker.fullmatch(path) for path in self._store.list(_ARTIFACTS))
        return tuple(sorted(match[1] for match in found if match))

    def resolve(self, prefix: str) -> str:
        """The one artifact whose digest starts with ``prefix`` (6 digits at least).

        Raises:
            InputError: no artifact, or more than one, starts so.
        """
        digests = self.digests()
        matches = [digest for digest in digests if digest.startswith(prefix)]
        if len(matches) == 1 and len(prefix) >= _SHORTEST_PREFIX:
            return matches[0]
        found = f"{len(matches)} of {len(digests)} artifacts"
        raise InputError(
            f"{prefix!r} names {found} in the registry at {self._store.url}; give {_SHORTEST_PREFIX} or more "
            f"digits of one digest that `draftlake registry ls` prints"
        )

    def _known(self, digest: str) -> str:
        """``digest``, when it names a complete artifact."""
        if not _DIGEST.fullmatch(digest):
            raise InputError(
                f"an artifact digest is 64 hex digits, got {digest!r}; see: draftlake registry ls"
            )
        if not self._store.exists(f"{_ARTIFACTS}/{digest}/{MANIFEST_FILE}"):
            raise InputError(
                f"no artifact {digest} in the registry at {self._store.url}; `draftlake registry ls` lists "
                f"what is there, `draftlake import` adds one"
            )
        return digest

    def _checked(self, digest: str) -> tuple[dict[str, bytes], DraftArtifact]:
        where = f"{_ARTIFACTS}/{self._known(digest)}"
        try:
            files = {name: self._store.read(f"{where}/{name}") for name in ARTIFACT_FILES}
            artifact = check_artifact(files, where=where)
        except (FileNotFoundError, DraftLayoutError) as error:
            raise CorruptDataError(
                f"artifact {digest} is damaged in the registry at {self._store.url}: {error} "
                f"It must not be served; remove {where} and import the artifact again."
            ) from error
        if artifact.digest != digest:
            raise CorruptDataError(
                f"artifact {digest} was altered in the registry at {self._store.url}: its files now digest "
                f"to {artifact.digest}. It must not be served; remove {where} and import the artifact again."
            )
        return files, artifact


def _move_into_place(partial: Path, to: Path, digest: str) -> None:
    try:
        partial.rename(to)
    except OSError as error:  # something lies there: perhaps the same artifact, fetched before
        if not _holds(to, digest):
            raise InputError(
                f"{to} exists and does not hold artifact {digest[:12]}; fetch into a new folder ({error})"
            ) from error


def _holds(folder: Path, digest: str) -> bool:
    try:
        return load_artifact(folder).digest == digest
    except (OSError, DraftLayoutError):
        return False

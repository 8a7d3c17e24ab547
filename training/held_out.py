"""Was a draft trained on the groups it is to be measured on? Groups are held out by share of their hash.

A share of 10 % holds out a part of what 20 % holds out, so a draft trained with 10 and evaluated
with 20 has seen half of its test. The manifest records the share that training kept away from.
"""

import logging
from typing import TYPE_CHECKING

from features.errors import InputError
from features.schema import SelectionFilter, Split
from training.artifact import DraftArtifact

if TYPE_CHECKING:
    from features.catalog import Selection
    from features.lake import Lake

log = logging.getLogger(__name__)


def kept_out(wanted: SelectionFilter, parent: int | None) -> int:
    """Share of groups, in percent, that training on this selection has not seen; nor did its parent."""
    own = wanted.held_out_percent if wanted.split is Split.TRAIN else 0
    return own if parent is None else min(own, parent)


def kept_out_by(artifact: DraftArtifact, lake: "Lake") -> int | None:
    """The share that a draft kept away from; None when it was trained on another lake, or says nothing."""
    manifest = artifact.manifest
    return manifest.held_out_percent if lake.has_revision(manifest.lake_revision) else None


def check_held_out(artifact: DraftArtifact, selection: "Selection", lake: "Lake", *, where: str) -> None:
    """Refuse to measure a draft on held-out groups that it was trained on.

    Raises:
        InputError: naming both shares.
    """
    wanted = selection.filter
    if wanted.split is not Split.HELD_OUT:
        return
    kept = kept_out_by(artifact, lake)
    if kept is None:
        log.info("%s does not say which groups of this lake it was trained on: taken as none", where)
    elif kept < wanted.held_out_percent:
        remedy = f"evaluate with held_out_percent at most {kept}" if kept else "train it on split 'train'"
        raise InputError(
            f"{where} ({artifact.digest[:12]}) was trained with {kept} % of this lake's groups held out, and these "
            f"windows are of the {wanted.held_out_percent} % held out now: it has seen some of them. To measure it, "
            f"{remedy}."
        )

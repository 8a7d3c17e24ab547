"""What an export will do, known before a hidden state is read: windows, layers, version, bytes, files.

What a format cannot say is refused (several target versions, several sets of layers) or left out and
counted by reason.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from features.catalog import Catalog, Selection
from features.digests import canonical_json
from features.errors import InputError
from features.lake import Lake
from features.schema import FeatureDtype, SelectionFilter, Split, TargetVersion, VersionRange, VersionRecord
from pipelines.export_formats import TRAINERS
from pipelines.narrowing import Narrowing
from training.spec import MaskName, Spec

PLAN_FILE = "draftlake-export.json"
"""Written first: what is being exported, so that nothing else is ever put into the folder."""

_TOKEN_BYTES = 16
"""Token id and mask of one token, as these formats store them."""
_SELECTION = SelectionFilter()


class ExportSpec(Spec):
    """Which windows, in whose format, where to."""

    lake: str
    out: str
    """A local folder that is empty or absent, or holds the same export, begun."""
    to: Literal["speculators", "specforge"]
    version: Annotated[int, Field(ge=0)] | None = None
    """None: every selected window must be of one version."""
    split: Split = Split.TRAIN
    held_out_percent: Annotated[int, Field(ge=0, le=90)] = _SELECTION.held_out_percent
    verified_only: bool = False
    narrowing: Narrowing = Narrowing()
    layer_ids: tuple[int, ...] | None = None
    """Aux layers to export, ascending; None takes those of the windows, which must agree."""
    mask: MaskName = "sampled"
    partial: bool = False
    """Export windows that start after position 0 too, as sequences of their own."""
    target: str | None = None
    """Directory of that version's weights: checked, and asked for its final norm where the format needs it."""


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What an export wrote, or would write."""

    lake: str
    to: str
    out: str
    outcome: str
    """``written``, ``planned`` (dry run), ``complete`` (it was there already) or ``nothing`` (no window)."""
    version: int | None
    head_id: str | None
    layer_ids: tuple[int, ...]
    """Number of decoder blocks applied."""
    layer_ids_there: tuple[int, ...]
    """The same layers as that trainer numbers them."""
    selected: int
    exported: int
    """A dry run has looked at no mask and no value yet, so it may count windows that will be left out."""
    left_out: Mapping[str, int]
    """Windows by reason."""
    tokens: int
    nbytes: int
    """Of all files; a dry run leaves out their headers."""
    files: int
    supervised_tokens: int | None = None
    cut_sequences: int = 0
    """Exported sequences that end before their rollout does."""
    without_context: int = 0
    """Exported windows that start after position 0; the trainer numbers their tokens from 0."""
    files_present: int = 0
    """Of ``files``, those that an earlier run had written."""
    final_error: float | None = None
    """Largest relative L2 error of a row after the final norm that the trainer applies; None: it applies none."""
    notes: tuple[str, ...] = ()
    """What that trainer does otherwise than the target."""


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """Everything known before a hidden state is read."""

    lake: Lake
    catalog: Catalog
    selection: Selection
    record: VersionRecord
    report: ExportReport
    document: bytes
    """Content of ``PLAN_FILE``."""


def make_plan(spec: ExportSpec, *, revision: str | None) -> ExportPlan | ExportReport:
    """Everything about the export, or the report that there is nothing to do.

    Args:
        spec: what is asked for.
        revision: the pinned lake revision to select from; None takes the present one.

    Raises:
        InputError: the selection mixes what the format cannot name.
    """
    lake = Lake.open(spec.lake)
    catalog = Catalog.load(lake, revision)
    selection = catalog.select(_filter(spec))
    report = ExportReport(
        lake=lake.url, to=spec.to, out=spec.out, outcome="nothing", version=None, head_id=None, layer_ids=(),
        layer_ids_there=(), selected=len(selection), exported=0, left_out={}, tokens=0, nbytes=0, files=0,
    )  # fmt: skip
    if not len(selection):
        return report
    record = lake.version(_only_version(spec, selection))
    layer_ids = _layer_ids(spec, selection)
    there = TRAINERS[spec.to].layer_names(layer_ids)
    left_out: Counter[str] = Counter()
    tokens, nbytes, kept = 0, 0, 0
    for row, reason in judged(spec, selection, layer_ids):
        if reason is not None:
            left_out[reason] += 1
            continue
        kept += 1
        tokens += row["num_rows"]
        width = (len(layer_ids) + 1) * row["hidden_size"] * FeatureDtype(row["dtype"]).itemsize
        nbytes += row["num_rows"] * (width + _TOKEN_BYTES)
    report = replace(
        report, version=record.version.number, head_id=record.head_id, layer_ids=layer_ids, layer_ids_there=there,
        exported=kept, left_out=dict(left_out), tokens=tokens, nbytes=nbytes, files=_num_files(spec, kept),
        outcome="planned" if kept else "nothing",
    )  # fmt: skip
    document = _document(spec, lake, catalog, selection, record, report)
    return ExportPlan(lake, catalog, selection, record, report, document) if kept else report


def _document(
    spec: ExportSpec,
    lake: Lake,
    catalog: Catalog,
    selection: Selection,
    record: VersionRecord,
    report: ExportReport,
) -> bytes:
    return canonical_json(
        {
            "to": spec.to,
            "target_id": lake.target.target_id,
            "revision": catalog.revision.digest,
            "selection": selection.digest,
            "version": record.version.number,
            "head_id": record.head_id,
            "weights_digest": record.weights_digest,
            "layer_ids": report.layer_ids,
            "layer_ids_there": report.layer_ids_there,
            "last_hidden": "final norm's input" if TRAINERS[spec.to].before_final_norm else "LM head's input",
            "mask": spec.mask,
            "partial": spec.partial,
        }
    )


def _filter(spec: ExportSpec) -> SelectionFilter:
    one = VersionRange() if spec.version is None else VersionRange(spec.version, spec.version + 1)
    return spec.narrowing.filter(
        one, split=spec.split, held_out_percent=spec.held_out_percent, verified_only=spec.verified_only
    )


def _only_version(spec: ExportSpec, selection: Selection) -> TargetVersion:
    versions = selection.plan.versions
    if len(versions) > 1:
        raise InputError(
            f"the selection holds {len(versions)} target versions ({', '.join(map(str, versions[:8]))}"
            f"{' ...' if len(versions) > 8 else ''}), and {spec.to} scores all its data with one head: export one "
            f"of them, e.g. --version {versions[-1]}"
        )
    return TargetVersion(versions[0])


def _layer_ids(spec: ExportSpec, selection: Selection) -> tuple[int, ...]:
    recorded = sorted({tuple(row["layer_ids"]) for row in selection.rows})
    if spec.layer_ids is None:
        if len(recorded) > 1:
            raise InputError(
                f"the windows were recorded with different aux layers ({'; '.join(map(str, recorded))}), and "
                f"{spec.to} trains on one set: name it with --layer-ids"
            )
        return recorded[0]
    if not spec.layer_ids or list(spec.layer_ids) != sorted(set(spec.layer_ids)):
        raise InputError(f"layer ids {list(spec.layer_ids)} must be ascending and distinct")
    if not any(set(spec.layer_ids) <= set(ids) for ids in recorded):
        raise InputError(
            f"no selected window has aux layers {list(spec.layer_ids)}; recorded are "
            f"{'; '.join(map(str, recorded))} (decoder blocks applied)"
        )
    return spec.layer_ids


def judged(
    spec: ExportSpec, selection: Selection, layer_ids: tuple[int, ...]
) -> Iterator[tuple[dict[str, Any], str | None]]:
    """Rows of the selection, each with the reason to leave it out that its commit tells."""
    before: tuple[Any, ...] = ()
    for row in selection.rows:
        same = (row["sample_id"], row["start"], row["num_rows"])
        reason = None
        if row["start"] > 0 and not spec.partial:
            reason = "starts_after_0"
        elif not set(layer_ids) <= set(row["layer_ids"]):
            reason = "layer_ids_not_recorded"
        elif spec.mask == "sampled" and not row["num_sampled"]:
            reason = "nothing_supervised"
        elif same == before:
            reason = "same_window_twice"
        else:
            before = same
        yield row, reason


def _num_files(spec: ExportSpec, sequences: int) -> int:
    tokens = TRAINERS[spec.to].token_files
    return sequences + (-(-sequences // tokens.samples_per_file) + tokens.num_closing if tokens else 0)

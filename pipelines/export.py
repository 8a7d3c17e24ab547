"""A selection in another trainer's offline format, so that nobody is locked in.

Files are created and never overwritten: a killed export is completed by the same command, from the lake
revision that it began with.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

from features.digests import canonical_json
from features.errors import CorruptDataError, InputError, VersionConflictError
from features.heads import HeadSnapshot
from features.storage import LocalStore
from features.windows import Window
from pipelines.collect import describe_version
from pipelines.context import RunContext
from pipelines.export_formats import TRAINERS
from pipelines.export_formats.final_norm import read_final_norm
from pipelines.export_formats.writing import SampleWriter, Shape
from pipelines.export_plan import PLAN_FILE, ExportPlan, ExportReport, ExportSpec, judged, make_plan

REPORT_FILE = "draftlake-export-report.json"
"""Written last: the export is complete."""

_READERS = 4
_READ_AHEAD = 16
_TEMPORARY = re.compile(r"(^|/)\.[^/]+\.[0-9a-f]{32}\.partial$")
"""What a killed export leaves of a file it had not finished."""


def plan_export(spec: ExportSpec) -> ExportReport:
    """What :func:`export` would write; reads no hidden state and writes nothing.

    Raises:
        InputError, VersionConflictError: as :func:`export` would raise them.
    """
    store, begun = _folder(spec)
    plan = make_plan(spec, revision=_revision(store, begun))
    if isinstance(plan, ExportReport):
        return plan
    _require_same(spec, begun, plan.document)
    _shape(spec, plan)
    return plan.report


def export(spec: ExportSpec, ctx: RunContext) -> ExportReport:
    """Write the selection; running it again completes what a killed run began.

    Raises:
        InputError: the folder holds something else, or the selection mixes what the format cannot name.
        VersionConflictError: ``target`` does not hold the weights of that version.
        HeadMissingError: the version's head is not in the lake, so its windows cannot be scored.
        ProofFailedError: the final norm of ``target`` does not lead back to what is stored.
        CorruptDataError: a window cannot be read.
    """
    store, begun = _folder(spec)
    plan = make_plan(spec, revision=_revision(store, begun))
    if isinstance(plan, ExportReport):
        return plan
    _require_same(spec, begun, plan.document)
    for name in filter(_TEMPORARY.search, store.list_temporary()):
        store.delete(name)
    if store.exists(REPORT_FILE):
        return _complete(store, plan.report)
    writer = SampleWriter(store, _shape(spec, plan))
    notes = _notes(plan.lake.head_of(plan.record.version), spec.to)
    if begun is None:
        plan.catalog.pin(plan.lake)
        store.create(PLAN_FILE, plan.document)
    with ctx.progress.bar(f"export to {spec.to}", plan.report.exported) as advance:
        for window in _windows(plan, spec):
            writer.add(window)
            advance(1)
    done = asdict(writer.finish(plan.selection.digest))
    done["left_out"] = dict(Counter(plan.report.left_out) + Counter(done["left_out"]))
    if not done["exported"]:
        return replace(plan.report, outcome="nothing", exported=0, left_out=done["left_out"])
    present = done.pop("files_present")
    store.create(REPORT_FILE, canonical_json({**done, "notes": notes}))
    return replace(plan.report, **done, notes=notes, files_present=present, outcome="written")


def _complete(store: LocalStore, report: ExportReport) -> ExportReport:
    """What the run that completed this export reported, its files looked at again.

    Raises:
        CorruptDataError: files were removed or cut since. A trainer may have put others beside them.
    """
    done = _document(store.read(REPORT_FILE), where=f"{store.url}/{REPORT_FILE}")
    sizes = [facts.size for path, facts in store.scan("").items() if path not in (PLAN_FILE, REPORT_FILE)]
    if len(sizes) < done["files"] or sum(sizes) < done["nbytes"]:
        raise CorruptDataError(
            f"{store.url} holds {len(sizes)} files of {sum(sizes):,} bytes, and its export wrote {done['files']} of "
            f"{done['nbytes']:,}: some were removed or cut. Put them back, or export to an empty folder."
        )
    found = {**done, "notes": tuple(done["notes"]), "files_present": done["files"]}
    return replace(report, **found, outcome="complete")


def _document(raw: bytes, *, where: str) -> dict[str, Any]:
    try:
        return dict(json.loads(raw))
    except (TypeError, ValueError) as error:
        raise CorruptDataError(
            f"{where} is not as the export wrote it ({error}): export to an empty folder"
        ) from error


def _folder(spec: ExportSpec) -> tuple[LocalStore, bytes | None]:
    """The folder to write to, and the plan that an earlier run left there.

    Raises:
        InputError: it is no local folder, or holds something that is no export.
    """
    if "://" in spec.out or Path(spec.out).is_file():
        raise InputError(f"{spec.out!r} is no local folder, and {spec.to} reads one: name a folder")
    store = LocalStore(Path(spec.out))
    temporary = [name for name in store.list_temporary() if not _TEMPORARY.search(name)]
    found = [*store.list(""), *temporary]
    if PLAN_FILE in found:
        return store, store.read(PLAN_FILE)
    if found:
        raise InputError(
            f"{store.url} holds {len(found)} files, {found[0]!r} among them, and nothing is ever overwritten: name "
            f"an empty folder, or one that does not exist"
        )
    return store, None


def _revision(store: LocalStore, begun: bytes | None) -> str | None:
    if begun is None:
        return None
    return str(_document(begun, where=f"{store.url}/{PLAN_FILE}").get("revision"))


def _require_same(spec: ExportSpec, begun: bytes | None, document: bytes) -> None:
    if begun is None or begun == document:
        return
    before, here = json.loads(begun), json.loads(document)
    differing = sorted(name for name in {*before, *here} if before.get(name) != here.get(name))
    raise InputError(
        f"{spec.out} holds another export: {', '.join(differing)} differ. Repeat the command that began it, or "
        f"name an empty folder."
    )


def _shape(spec: ExportSpec, plan: ExportPlan) -> Shape:
    """What every sequence has in common, ``target`` checked.

    Raises:
        InputError: the trainer wants the final norm's input, and it is neither stored nor to be computed.
        VersionConflictError: ``target`` does not hold the weights of that version.
    """
    norm = None
    trainer, last = TRAINERS[spec.to], plan.lake.target.num_layers
    stored = all(last in ids for ids in {tuple(row["layer_ids"]) for row in plan.selection.rows})
    if spec.target is not None:
        folder = Path(spec.target)
        _require_version(plan, folder)
        norm = read_final_norm(folder) if trainer.before_final_norm and not stored else None
    elif trainer.before_final_norm and not stored:
        raise InputError(
            f"{spec.to} applies the target's final norm itself, and these windows hold what the norm gave, not what "
            f"it was given (aux layer {last} is not recorded). Give the weights of {plan.record.version} with --target"
        )
    return Shape(
        trainer=trainer,
        layer_ids=plan.report.layer_ids,
        mask=spec.mask,
        norm_input_layer=last if trainer.before_final_norm and stored else None,
        norm=norm,
    )


def _require_version(plan: ExportPlan, folder: Path) -> None:
    found, _ = describe_version(plan.lake, folder, plan.record.version)
    if found.head_id != plan.record.head_id:
        raise VersionConflictError(
            f"{folder} has head {found.head_id[:12]}, and {plan.record.version} of {plan.lake.url} was collected "
            f"with {plan.record.head_id[:12]}: give --target the weights of that version"
        )


def _notes(head: HeadSnapshot, trainer: str) -> tuple[str, ...]:
    differs = {
        "a bias": head.bias is not None,
        f"logit scale {head.logit_scale:g}": head.logit_scale != 1.0,
        f"softcap {head.softcap}": head.softcap is not None,
    }
    return tuple(
        f"the target's LM head has {what}, which the frozen head of {trainer} does not apply: its teacher differs"
        for what, present in differs.items()
        if present
    )


def _windows(plan: ExportPlan, spec: ExportSpec) -> Iterator[Window]:
    """Windows to export in the order of the selection, some read ahead."""
    kept = (row for row, reason in judged(spec, plan.selection, plan.report.layer_ids) if reason is None)
    with ThreadPoolExecutor(_READERS, "export-read") as pool:
        while rows := list(islice(kept, _READ_AHEAD)):
            yield from pool.map(plan.lake.read_window, rows)

"""What the replay driver calls inside vLLM's worker: a collector next to the rows.

Start the engine with ``worker_extension_cls="features.collect.taps.vllm_worker.ReplayExtension"``.
vLLM mixes the class into its worker and reaches it with ``collective_rpc``, in this process,
from another one or over HTTP: arguments and answers are plain JSON values. Every answer is a
dict with ``ok``; a refusal carries ``kind``, the name of an error class of ours, and ``message``.
"""

import base64
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer import get_kv_transfer_group

from features.bfloat16 import Float32
from features.collect.collector import Collector
from features.collect.proofs import LogprobTolerance
from features.collect.report import CollectReport
from features.collect.rollouts import Reason, Rollout, rollout_from_record
from features.collect.run import record_refusals
from features.collect.sampling import SamplingPolicy, WindowSpan
from features.collect.taps.vllm_connector import ReplayConnector, engine_layer_ids, replay_faults
from features.collect.taps.vllm_weights import FinalNorm, keep_cpu_weights, weights_checksum
from features.errors import DraftlakeError, EngineError, VersionConflictError
from features.lake import Lake
from features.quarantine import Refusal
from features.schema import FeatureDtype, FragmentLayout, HeadId, TargetVersion

log = logging.getLogger(__name__)

# vLLM resolves the extension class before it loads a model, which is the moment for this.
keep_cpu_weights()

Answer = dict[str, Any]


class ReplaySession:
    """One version's replay inside the worker: admits rollouts, takes their rows, commits fragments.

    Rows of a batch are handed to the collector only after the weights were seen unchanged
    since the session began, so a target sync in the middle cannot mix versions.
    """

    def __init__(self, spec: Mapping[str, Any], extractor: "Extractor") -> None:
        self.name = str(spec["session"])
        self._extractor, self._checksum = extractor, str(spec["weights_checksum"])
        self._lake = Lake.open(spec["lake"])
        self._version = TargetVersion(spec["version"])
        self._layer_ids = tuple(spec["layer_ids"])
        self._longest = int(spec["longest"])
        self._record = self._lake.version(self._version)
        layout = FragmentLayout(
            layer_ids=self._layer_ids, dtype=FeatureDtype(spec["dtype"]), hidden_size=self._record.hidden_size
        )
        self._collector = Collector(
            self._lake,
            version=self._version,
            head_id=HeadId(spec["head_id"]),
            layout=layout,
            policy=SamplingPolicy.from_mapping(spec["policy"]),
            writer_id=spec["writer_id"],
            fragment_tokens=spec["fragment_tokens"],
            tolerance=LogprobTolerance(**spec["tolerance"]),
        )
        self._waiting: list[tuple[Rollout, tuple[WindowSpan, ...]]] = []
        self._require_same_weights()

    def admit(self, items: Sequence[Mapping[str, Any]]) -> list[list[list[int]]]:
        """Spans wanted of each item, as ``[start, stop]``; an empty list where nothing is to be computed."""
        return [[[s.start, s.stop] for s in self._admit(item)] for item in items]

    def settle(self) -> CollectReport:
        """Hand the rows of everything admitted since the last call to the collector."""
        self._require_same_weights()
        for rollout, spans in self._waiting:
            pieces, fault = self._extractor.pieces(rollout.sample_id, self._layer_ids, spans)
            if fault:
                self._collector.refuse(rollout, Reason.FEATURE_SHAPE, fault)
            else:
                self._collector.add_windows(rollout, pieces)
        self._waiting = []
        return self._collector.report()

    def close(self) -> CollectReport:
        """Commit the last fragment and quarantine what was refused."""
        self.settle()
        report = self._collector.close()
        record_refusals(self._lake, self._collector.refusals, self._record)
        return report

    def _admit(self, item: Mapping[str, Any]) -> tuple[WindowSpan, ...]:
        if "refusal" in item:
            return self._collector.admit(Refusal(**item["refusal"]))
        rollout = rollout_from_record(item["rollout"])
        spans = self._collector.admit(rollout)
        if spans and len(rollout.token_ids) > self._longest:
            detail = f"{len(rollout.token_ids)} tokens, the engine replays at most {self._longest}"
            self._collector.refuse(rollout, Reason.TOO_LONG, detail)
            return ()
        if spans:
            self._waiting.append((rollout, spans))
        return spans

    def _require_same_weights(self) -> None:
        if self._extractor.checksum() != self._checksum:
            raise VersionConflictError(
                f"the engine's target weights changed while {self._version} was replayed: the "
                f"{len(self._waiting)} rollouts in flight and what was not committed yet were dropped, earlier "
                "fragments are of the right weights. Hold target syncs during a replay and run it again"
            )


class Extractor:
    """Rows of replayed sequences in the form the lake wants, with the live model's final norm."""

    def __init__(self, worker: Any) -> None:
        connector = get_kv_transfer_group()
        if not isinstance(connector, ReplayConnector):
            raise EngineError(
                f"this engine's KV connector is {type(connector).__name__}, expected ReplayConnector. Start it "
                "with the arguments of features.collect.taps.vllm_arguments.engine_arguments"
            )
        self._store, self._model = connector.rows, worker.model_runner.get_model()
        config = worker.vllm_config
        self._ids = engine_layer_ids(config)
        self._num_layers = int(config.model_config.get_total_num_hidden_layers())
        faults = replay_faults(config)
        if self._num_layers not in self._ids:
            faults.append(
                f"the engine extracts ids {self._ids} without {self._num_layers}, the last block's output from "
                "which the final hidden state is derived"
            )
        if faults:
            raise EngineError("this engine cannot be replayed on: " + "; ".join(faults))
        self._norm = FinalNorm.of(self._model)

    def forget(self) -> None:
        """Drop rows that an earlier session left behind."""
        self._store.clear()

    def checksum(self) -> str:
        """Checksum of the target weights that the engine serves at this moment."""
        return weights_checksum(self._model)

    def pieces(
        self, ticket: str, layer_ids: Sequence[int], spans: Sequence[WindowSpan]
    ) -> tuple[list[tuple[Float32, Float32]], str]:
        """``(aux [R, m * H], final [R, H])`` of each span, float32, or what is wrong with them."""
        absent = sorted(set(layer_ids) - set(self._ids))
        if absent:
            raise EngineError(
                f"the engine extracts layer ids {self._ids}, asked were {list(layer_ids)}: {absent} are absent. "
                "Start it with all of them"
            )
        rows, fault = self._store.fetch(ticket)
        if rows is None:
            return [], fault
        states_RnH = rows.float()
        aux = states_RnH[:, [self._ids.index(k) for k in layer_ids]].flatten(1).contiguous().numpy()
        final = self._norm(states_RnH[:, self._ids.index(self._num_layers)]).numpy()
        ends = np.cumsum([span.num_rows for span in spans])
        parts = zip(ends - [span.num_rows for span in spans], ends, strict=True)
        return [(aux[a:b], final[a:b]) for a, b in parts], ""


class ReplayExtension:
    """Mixed into vLLM's worker; every name starts with ``draftlake_replay`` to stay clear of its own."""

    draftlake_replay_session: ReplaySession | None = None
    """The open session, if there is one."""

    def draftlake_replay_facts(self) -> Answer:
        """What the engine is: ids, sizes, precision, and a checksum of the target weights."""

        def work() -> Answer:
            extractor, config = Extractor(self), self.vllm_config  # type: ignore[attr-defined]
            model = config.model_config
            return {
                "layer_ids": engine_layer_ids(config),
                "num_layers": int(model.get_total_num_hidden_layers()),
                "hidden_size": int(model.get_hidden_size()),
                "vocab_size": int(model.get_vocab_size()),
                "max_model_len": int(model.max_model_len),
                "dtype": str(model.dtype).removeprefix("torch."),
                "weights_checksum": extractor.checksum(),
            }

        return _answered(work)

    def draftlake_replay_open(self, spec: Mapping[str, Any]) -> Answer:
        """Begin a session; it takes the place of one that is open, which drops what it had not committed."""

        def work() -> Answer:
            extractor = Extractor(self)
            extractor.forget()
            self.draftlake_replay_session = ReplaySession(spec, extractor)
            return {}

        return _answered(work)

    def draftlake_replay_admit(self, session: str, items: Sequence[Mapping[str, Any]]) -> Answer:
        """Spans wanted of each ``{"rollout": ...}`` or ``{"refusal": ...}``."""
        return _answered(lambda: {"spans": self._draftlake_replay_session(session).admit(items)})

    def draftlake_replay_settle(self, session: str) -> Answer:
        """Take the rows of what was admitted; answers with the counts so far."""
        return _answered(lambda: {"report": _report(self._draftlake_replay_session(session).settle())})

    def draftlake_replay_close(self, session: str) -> Answer:
        """Commit, quarantine and report; the session is over."""

        def work() -> Answer:
            report = self._draftlake_replay_session(session).close()
            self.draftlake_replay_session = None
            return {"report": _report(report)}

        return _answered(work)

    def draftlake_replay_rows(self, ticket: str, layer_ids: Sequence[int], num_tokens: int) -> Answer:
        """All rows of one sequence: ``aux`` and ``final`` as base64 of float32, row-major."""

        def work() -> Answer:
            pieces, fault = Extractor(self).pieces(ticket, layer_ids, [WindowSpan(0, num_tokens)])
            if fault:
                raise EngineError(f"sequence {ticket}: {fault}")
            aux, final = pieces[0]
            return {"aux": _packed(aux), "final": _packed(final)}

        return _answered(work)

    def _draftlake_replay_session(self, name: str) -> ReplaySession:
        session = self.draftlake_replay_session
        if session is None or session.name != name:
            raise EngineError(
                "this replay's session is not open in the engine: another replay began there, or the engine was "
                "restarted. What was committed stays. Run one replay per engine at a time, and this one again"
            )
        return session


def _answered(work: Callable[[], Answer]) -> Answer:
    """The dict that goes over RPC. Unforeseen exceptions become engine errors, with their type."""
    try:
        return {"ok": True, **work()}
    except DraftlakeError as error:
        return {"ok": False, "kind": type(error).__name__, "message": str(error)}
    except Exception as error:  # crosses a process border, where vLLM would keep only the text
        log.exception("a replay call failed")
        return {"ok": False, "kind": "EngineError", "message": f"{type(error).__name__}: {error}"}


def _report(report: CollectReport) -> Answer:
    """A report as JSON values; NaN, which JSON lacks, becomes null."""
    return _without_nan(asdict(report))


def _without_nan(value: Any) -> Any:
    if isinstance(value, float) and value != value:
        return None
    if isinstance(value, Mapping):
        return {name: _without_nan(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(entry) for entry in value]
    return value


def _packed(rows: Float32) -> str:
    return base64.b64encode(np.ascontiguousarray(rows, dtype=np.float32).tobytes()).decode()

"""The seam between the training loop and a draft method."""

from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from features.schema import TargetIdentity
from training.batches import DraftBatch
from training.heads import FrozenHead
from training.losses import LossTerms
from training.spec import MethodSpec
from training.vocab import VocabMap


class DraftMethod(Protocol):
    """What a draft method is to the loop, the evaluation and the exporter.

    Models are plain ``nn.Module``s whose ``parameters()`` are exactly what is trained: the
    frozen embedding and head come with each batch, from the windows' own version.
    """

    @property
    def name(self) -> str: ...

    @property
    def spec_type(self) -> type[MethodSpec]: ...

    def default_layer_ids(self, num_layers: int) -> tuple[int, ...]:
        """Aux layer ids (blocks applied, ascending) for a target of ``num_layers`` blocks."""
        ...

    def draft_vocab_size(self, spec: MethodSpec) -> int | None:
        """Entries of the draft vocabulary; None for the target's whole one."""
        ...

    def supervised_tokens(self, mask: Tensor) -> Tensor:
        """Which entries of a token mask ``[..., T + 1]`` this method can predict at all."""
        ...

    def build(
        self,
        target: TargetIdentity,
        target_config: dict[str, Any],
        spec: MethodSpec,
        vocab: VocabMap,
        layer_ids: tuple[int, ...],
        *,
        seed: int,
        head: FrozenHead | None = None,
    ) -> nn.Module:
        """A new model; ``head`` gives its own head a start where the method has one."""
        ...

    def load(self, folder: Path) -> nn.Module:
        """The float32 model of an exported folder; refuses missing, unknown or misshapen tensors."""
        ...

    def vocab_of(self, model: nn.Module) -> VocabMap: ...

    def layer_ids_of(self, model: nn.Module) -> tuple[int, ...]: ...

    def loss(self, model: nn.Module, batch: DraftBatch, spec: MethodSpec) -> LossTerms: ...

    def propose(self, model: nn.Module, batch: DraftBatch, k: int) -> Tensor:
        """Draft ``k`` tokens greedily from every row as a round's start.

        Entry ``[b, p]`` of the int64 ``[B, R, k]`` result holds target ids for positions
        ``p + 2 ... p + 1 + k`` of window b, given tokens up to ``p + 1`` and features up to row
        p: what an engine drafts when token ``p + 1`` is its newest. -1 where token ``p + 1`` is absent.
        """
        ...

    def export_tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """Every tensor of the checkpoint by the engine's names, float32 where float."""
        ...

    def export_config(self, model: nn.Module) -> dict[str, Any]:
        """``config.json`` as the engine reads it."""
        ...

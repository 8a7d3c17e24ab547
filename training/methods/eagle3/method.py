"""EAGLE-3 behind the seam of draft methods."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from features.schema import TargetIdentity
from features.target import default_layer_ids
from training.batches import DraftBatch
from training.heads import FrozenHead
from training.losses import LossTerms
from training.methods.eagle3.checkpoint import export_config, export_tensors, load_model
from training.methods.eagle3.collate import predictable
from training.methods.eagle3.model import Eagle3Config, Eagle3Draft
from training.methods.eagle3.propose import propose
from training.methods.eagle3.ttt import ttt_loss
from training.spec import Eagle3Spec, MethodSpec
from training.vocab import VocabMap


@dataclass(frozen=True, slots=True)
class Eagle3Method:
    """See :class:`training.methods.base.DraftMethod`."""

    name: str = "eagle3"
    spec_type: type[MethodSpec] = Eagle3Spec

    def default_layer_ids(self, num_layers: int) -> tuple[int, ...]:
        return default_layer_ids(num_layers)

    def draft_vocab_size(self, spec: MethodSpec) -> int | None:
        return cast(Eagle3Spec, spec).draft_vocab_size

    def supervised_tokens(self, mask: Tensor) -> Tensor:
        return predictable(mask)

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
    ) -> Eagle3Draft:
        """A new draft; its head starts as the target's rows of the draft vocabulary when given."""
        config = Eagle3Config.for_target(target, target_config, cast(Eagle3Spec, spec), vocab, layer_ids)
        model = Eagle3Draft(config, vocab).initialize(seed)
        if head is not None:
            with torch.no_grad():
                model.lm_head.weight.copy_(
                    head.lm_head[torch.from_numpy(vocab.target_ids).to(head.lm_head.device)]
                )
        return model

    def load(self, folder: Path) -> Eagle3Draft:
        return load_model(folder)

    def vocab_of(self, model: nn.Module) -> VocabMap:
        return cast(Eagle3Draft, model).vocab

    def layer_ids_of(self, model: nn.Module) -> tuple[int, ...]:
        return cast(Eagle3Draft, model).config.layer_ids

    def loss(self, model: nn.Module, batch: DraftBatch, spec: MethodSpec) -> LossTerms:
        return ttt_loss(cast(Eagle3Draft, model), batch, cast(Eagle3Spec, spec))

    def propose(self, model: nn.Module, batch: DraftBatch, k: int) -> Tensor:
        return propose(cast(Eagle3Draft, model), batch, k)

    def export_tensors(self, model: nn.Module) -> dict[str, Tensor]:
        return export_tensors(cast(Eagle3Draft, model))

    def export_config(self, model: nn.Module) -> dict[str, Any]:
        return export_config(cast(Eagle3Draft, model))


EAGLE3 = Eagle3Method()

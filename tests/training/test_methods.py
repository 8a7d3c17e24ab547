"""The table of methods, and a second method through the same seam."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor, nn

from features.errors import InputError
from training.batches import DraftBatch
from training.evaluate import evaluate_draft
from training.loop import train_draft
from training.losses import LossTerms, masked_sum
from training.methods import DRAFT_METHODS
from training.spec import Eagle3Spec, MethodSpec, TrainSpec
from training.testing import TARGET_CONFIG, ToyLake, make_window
from training.vocab import VocabMap


class BigramSpec(MethodSpec):
    method: Literal["bigram"] = "bigram"


class Bigram(nn.Module):
    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(vocab_size, vocab_size))


@dataclass(frozen=True)
class BigramMethod:
    """Predicts a token from the one before it; reads no feature at all."""

    name: str = "bigram"
    spec_type: type[MethodSpec] = BigramSpec

    def default_layer_ids(self, num_layers: int) -> tuple[int, ...]:
        return (1,)

    def draft_vocab_size(self, spec: MethodSpec) -> int | None:
        return None

    def supervised_tokens(self, mask: Tensor) -> Tensor:
        kept = mask.clone()
        kept[..., 0] = False
        return kept

    def build(
        self, target: Any, target_config: Any, spec: Any, vocab: VocabMap, layer_ids: Any, **_: Any
    ) -> Bigram:
        return Bigram(vocab.size)

    def load(self, folder: Path) -> Bigram:
        model = Bigram(json.loads((folder / "config.json").read_text())["vocab_size"])
        model.load_state_dict(load_file(folder / "model.safetensors"))
        return model

    def vocab_of(self, model: Any) -> VocabMap:
        return VocabMap.identity(len(model.table))

    def layer_ids_of(self, model: Any) -> tuple[int, ...]:
        return (1, 2, 3)

    def loss(self, model: Any, batch: DraftBatch, spec: MethodSpec) -> LossTerms:
        window, place = self.supervised_tokens(batch.supervised).nonzero(as_tuple=True)
        logits = model.table[batch.token_ids[window, place - 1]]
        rows = nn.functional.cross_entropy(logits, batch.token_ids[window, place], reduction="none")
        total, count, dropped = masked_sum(rows)
        return LossTerms(torch.ones(1), total[None], count[None], {}, count, dropped)

    def propose(self, model: Any, batch: DraftBatch, k: int) -> Tensor:
        token, drafted = batch.token_ids[:, 1:], []
        for _ in range(k):
            token = model.table[token].argmax(-1)
            drafted.append(token)
        return torch.stack(drafted, -1)

    def export_tensors(self, model: Any) -> dict[str, Tensor]:
        return {"table": model.table.detach()}

    def export_config(self, model: Any) -> dict[str, Any]:
        return {"architectures": ["Bigram"], "vocab_size": len(model.table)}


METHODS = {**DRAFT_METHODS, "bigram": BigramMethod()}


@pytest.mark.parametrize("name", sorted(DRAFT_METHODS))
def test_every_method_is_listed_under_its_own_name_with_its_own_spec(name: str) -> None:
    method = DRAFT_METHODS[name]
    assert method.name == name
    assert method.spec_type().method == name


def test_another_method_trains_and_evaluates_through_the_same_seam(tmp_path: Path) -> None:
    cycle = [3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4, 1, 5, 9, 2, 6]
    lake = ToyLake([make_window(f"s{i}", tokens=cycle, prompt=2, seed=i) for i in range(4)])
    spec = TrainSpec(method=BigramSpec(), epochs=30, learning_rate=0.1, save_dtype="float32")
    result = train_draft(
        lake, lake.select(), spec, out=tmp_path / "a", target_config=TARGET_CONFIG, methods=METHODS
    )
    assert result.artifact.manifest.method == "bigram"
    report = evaluate_draft(lake, lake.select(), result.folder, k=2, mode="sampled-onehot", methods=METHODS)
    assert report.overall.tau.value > 2, "a cycle is all but given by its bigrams"


def test_a_method_outside_the_table_is_refused_with_the_list(tmp_path: Path) -> None:
    lake = ToyLake([make_window()])
    with pytest.raises(InputError, match="'bigram'; known: eagle3"):
        train_draft(
            lake,
            lake.select(),
            TrainSpec(method=BigramSpec()),
            out=tmp_path / "a",
            target_config=TARGET_CONFIG,
        )


def test_a_spec_reads_back_to_its_method_s_own_type() -> None:
    spec = TrainSpec(method=Eagle3Spec(ttt_steps=3, draft_vocab_size=100), epochs=2)
    assert TrainSpec.model_validate_json(spec.model_dump_json()) == spec
    other = TrainSpec.model_validate({"method": {"method": "bigram"}}, context={"methods": METHODS})
    assert isinstance(other.method, BigramSpec)


@pytest.mark.parametrize(
    "document",
    [
        {"epoch": 3},
        {"method": {"method": "eagle4"}},
        {"method": {"method": "eagle3", "ttt": 3}},
        {"learning_rate": 0},
    ],
)
def test_an_unknown_key_method_or_value_is_refused(document: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TrainSpec.model_validate(document)

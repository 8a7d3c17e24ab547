"""What a training run is told: frozen, typed, and an unknown key is an error.

Every default is here and nowhere else.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializeAsAny,
    ValidationInfo,
    field_validator,
    model_validator,
)

LossName = Literal["kl", "ce", "reverse_kl", "tv", "overlap", "hybrid"]
"""See ``training.losses.row_loss`` for the formulas."""

MaskName = Literal["sampled", "loss"]

DtypeName = Literal["float32", "bfloat16"]


class Spec(BaseModel):
    """Base of everything parsed from YAML, the CLI or a flow's parameter."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class MethodSpec(Spec):
    """Base of a draft method's own settings; ``method`` names the entry of ``DRAFT_METHODS``."""

    method: str


class Eagle3Spec(MethodSpec):
    """EAGLE-3: one decoder layer trained on its own outputs (training-time test, TTT)."""

    method: Literal["eagle3"] = "eagle3"
    draft_vocab_size: Annotated[int, Field(ge=1)] | None = None
    """Rows of the draft's head; None is the target's whole vocabulary (no map is written)."""
    ttt_steps: Annotated[int, Field(ge=1, le=16)] = 7
    """Steps unrolled from every row; step 0 reads the target's features, later steps the draft's own."""
    step_decay: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Step i weighs ``step_decay ** i``."""
    loss: LossName = "kl"
    num_attention_heads: Annotated[int, Field(ge=1)] | None = None
    """None: the target's."""
    num_key_value_heads: Annotated[int, Field(ge=1)] | None = None
    """None: the target's."""
    head_dim: Annotated[int, Field(ge=2, multiple_of=2)] | None = None
    """None: the target's."""
    intermediate_size: Annotated[int, Field(ge=1)] | None = None
    """Width of the MLP; None: the target's."""


class TrainSpec(Spec):
    """One training run. Holds no path, host or clock: it goes into the artifact's manifest."""

    method: SerializeAsAny[MethodSpec] = Eagle3Spec()
    epochs: Annotated[int, Field(ge=1)] = 1
    batch_tokens: Annotated[int, Field(ge=1)] = 4096
    """Rows per process and optimizer step, padding included; a longer window goes alone."""
    max_steps: Annotated[int, Field(ge=1)] | None = None
    """Stop (and end the schedule) after so many optimizer steps."""
    learning_rate: Annotated[float, Field(gt=0)] = 4e-4
    """Peak of a linear warm-up followed by a cosine to zero (AdamW)."""
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.04
    """Share of all steps."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    """Maximal global gradient norm."""
    mask: MaskName = "sampled"
    """Which tokens are predicted: those the target sampled, or those its RL loss counted."""
    seed: Annotated[int, Field(ge=0)] = 0
    compute_dtype: DtypeName = "float32"
    """Autocast type of the forward pass; parameters and optimizer state stay float32."""
    save_dtype: DtypeName = "bfloat16"
    """Type of the saved float tensors. An engine casts to its own; equal types compare by digest."""
    max_skipped_share: Annotated[float, Field(ge=0, le=1)] = 0.1
    """A run whose share of steps skipped for non-finite gradients exceeds this stops with an error."""
    deterministic: bool = True
    """Ask torch for deterministic kernels: the same inputs then give the same artifact digest."""

    @field_validator("method", mode="before")
    @classmethod
    def _resolve_method(cls, value: Any, info: ValidationInfo) -> Any:
        """Turn a mapping into its method's own spec; ``context={"methods": ...}`` replaces the table."""
        if not isinstance(value, Mapping):
            return value
        from training.methods import DRAFT_METHODS  # the table imports this module

        methods = (info.context or {}).get("methods", DRAFT_METHODS)
        name = value.get("method", Eagle3Spec().method)
        if name not in methods:
            raise ValueError(f"unknown draft method {name!r}; known: {', '.join(sorted(methods))}")
        return methods[name].spec_type.model_validate(dict(value))

    @model_validator(mode="after")
    def _method_is_concrete(self) -> "TrainSpec":
        if type(self.method) is MethodSpec:
            raise ValueError("method must be a method's own spec (for example Eagle3Spec), not its base")
        return self

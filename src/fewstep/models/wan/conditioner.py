"""What a Wan network is told about a sample: tokens of text, or of a class with a learned null."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Float, Int64
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from fewstep.section import Section

ContextTokens = Float[Tensor, "b l text_dim"]


@dataclass(frozen=True)
class LabelCond:
    """The class of every sample; the number of classes stands for "none"."""

    label: Int64[Tensor, "b"]


@dataclass(frozen=True)
class EmbeddingCond:
    """Text embeddings that were computed before training."""

    tokens: Float[Tensor, "b l d"]


class ClassLabelSection(Section):
    """Conditions on the class of an image; a further, learned row stands for "no class"."""

    name: Literal["class_label"] = "class_label"
    classes: PositiveInt
    """Number of classes."""
    tokens: PositiveInt = 1
    """Learned tokens per class that the network attends to."""


class EmbeddingSection(Section):
    """Conditions on embeddings of a text encoder, of any length, ``text_dim`` wide."""

    name: Literal["embedding"] = "embedding"


ConditionerSection = Annotated[ClassLabelSection | EmbeddingSection, Field(discriminator="name")]


class ClassLabelConditioner(nn.Module):
    """A learned table of tokens: one row a class and, last, one for "none"."""

    def __init__(self, section: ClassLabelSection, text_dim: int):
        super().__init__()
        self.classes = section.classes
        self.table = nn.Parameter(torch.empty(section.classes + 1, section.tokens, text_dim))

    def forward(self, cond: Any) -> ContextTokens:
        """The tokens of a ``LabelCond``. Raises TypeError for the cond of another conditioner."""
        _expect(cond, LabelCond, "class_label")
        return nn.functional.embedding(cond.label, self.table.flatten(1)).unflatten(1, self.table.shape[1:])

    def condition(self, label: Int64[Tensor, "b"]) -> LabelCond:
        """The cond of labels 0 to classes - 1. Raises ValueError for others."""
        if label.device.type == "cpu" and ((label < 0) | (label >= self.classes)).any():
            raise ValueError(
                f"labels {int(label.min())} to {int(label.max())} do not fit a model of {self.classes} classes, "
                f"numbered 0 to {self.classes - 1}"
            )
        return LabelCond(label)

    def null(self, num: int, device: torch.device | str = "cpu") -> LabelCond:
        """The uncond of ``num`` samples: the learned row that stands for "no class"."""
        return LabelCond(torch.full((num,), self.classes, dtype=torch.int64, device=device))


class EmbeddingConditioner(nn.Module):
    """Hands precomputed embeddings on."""

    def __init__(self, section: EmbeddingSection, text_dim: int):
        super().__init__()
        self.text_dim = text_dim

    def of(self, negative: Float[Tensor, "l d"] | None) -> Texts:
        """What makes its conds, where ``negative`` stands for "none"."""
        return Texts(negative)

    def forward(self, cond: Any) -> ContextTokens:
        """The tokens of an ``EmbeddingCond``. Raises TypeError for another cond, ValueError for another width."""
        _expect(cond, EmbeddingCond, "embedding")
        if cond.tokens.shape[-1] != self.text_dim:
            raise ValueError(
                f"embeddings of width {cond.tokens.shape[-1]} do not fit a model with text_dim {self.text_dim}"
            )
        return cond.tokens


@dataclass(frozen=True)
class Texts:
    """Makes conds of embeddings, as a ``ClassLabelConditioner`` does of labels; the embedding of a negative prompt
    stands for "none"."""

    negative: Float[Tensor, "l d"] | None

    def condition(self, text: Float[Tensor, "b l d"]) -> EmbeddingCond:
        """The cond of embeddings."""
        return EmbeddingCond(text)

    def null(self, num: int, device: torch.device | str = "cpu") -> EmbeddingCond | None:
        """The uncond of ``num`` samples, all the same memory; None where there is no negative prompt."""
        if self.negative is None:
            return None
        return EmbeddingCond(self.negative.to(device).expand(num, -1, -1))


def build_conditioner(section: ConditionerSection, text_dim: int) -> ClassLabelConditioner | EmbeddingConditioner:
    """The conditioner of the section, giving tokens of width ``text_dim``."""
    if isinstance(section, ClassLabelSection):
        return ClassLabelConditioner(section, text_dim)
    return EmbeddingConditioner(section, text_dim)


def _expect(cond: Any, kind: type, name: str) -> None:
    if not isinstance(cond, kind):
        raise TypeError(f"the conditioner '{name}' takes {kind.__name__}, not {type(cond).__name__}")

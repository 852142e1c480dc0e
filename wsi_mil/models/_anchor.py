"""The anchor of ASMIL: a slow copy of the model that keeps attention from wandering. Ye et al., ICLR 2026,
arXiv:2603.06658.

Target t = sigmoid(e / tau) / sum over the bag's tiles, e the anchor's attention logits. Term = weight * mean over bags
and columns of attention of KL(t || a), summed over tiles. After each optimiser step the anchor becomes
momentum * anchor + (1 - momentum) * model. It starts as a copy.
Reference code: Linfeng-Ye/ASMIL@5d06227.

Where published code and paper differ, and what is taken here:
- The code never updates its anchor (the update waits for a weight that is NaN) and starts it at random: as released
  the term is a pull to equal attention. The paper's moving average is taken; kind="frozen" and kind="uniform" are the
  first weights for ever, and equal attention.
- The code's term is the cross-entropy -t log a averaged over tiles, without a weight: scaling="released".
Differs on purpose: tiles that a method hides in training (masked logits) are left out of the target.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from wsi_mil.bags import BagBatch, full_precision, no_autocast, split
from wsi_mil.errors import ConfigError
from wsi_mil.models._base import MILModel, MILOutput, recorded_outputs
from wsi_mil.settings import Amount, Positive, Share, Weight

Kind = Literal["ema", "frozen", "uniform"]
Scaling = Literal["sum", "released"]
_EPSILON = 1e-8


class Anchor(nn.Module):
    """The slow copy, its state and its term. The state is there from `start` on, and is part of the checkpoint."""

    def __init__(
        self, *, weight: Weight, momentum: Share, temperature: Positive, kind: Kind, scaling: Scaling, warm_up: Amount
    ) -> None:
        super().__init__()
        if kind not in ("ema", "frozen", "uniform") or scaling not in ("sum", "released"):
            raise ConfigError(f"anchor: kind={kind!r}, scaling={scaling!r}; ema, frozen or uniform; sum or released")
        self.weight, self.momentum, self.temperature = weight, momentum, temperature
        self.kind, self.scaling, self.warm_up = kind, scaling, warm_up
        self.tensors: dict[str, Tensor] = {}
        self.steps = 0

    def start(self, model: nn.Module) -> None:
        """Copy the model, unless there is an anchor already."""
        if not self.tensors:
            self.replace(model)

    def replace(self, model: nn.Module) -> None:
        """Make the anchor equal to this model."""
        self.tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}

    @torch.no_grad()
    def attention_logits(self, model: MILModel, batch: BagBatch) -> Tensor | None:
        """(total, m) what the anchor answers, without anything random; None while it has no say.

        To be asked before the model itself, so that the model's own answer is the last one.
        """
        self.start(model)
        if self.kind == "uniform" or self.weight == 0 or self.steps < self.warm_up:
            return None
        tensors = {name: tensor.to(batch.features.device) for name, tensor in self.tensors.items()}
        with recorded_outputs(model) as outputs:
            functional_call(model, tensors, (batch,))
        found = outputs[-1].attention_logits
        if found is None:
            raise ConfigError("anchor needs attention_logits, and the model's output has none")
        return found

    def term(self, output: MILOutput, slow: Tensor | None) -> Tensor:
        """The weighted term, a scalar in fp32.

        output: what the model answered.  slow: (total, m) what the anchor answered to the same bags.
        Raises ConfigError when the two are not about the same tiles.
        """
        online = output.attention_logits
        if online is None:
            raise ConfigError("anchor needs attention_logits, and the model's output has none")
        if self.weight == 0 or self.steps < self.warm_up:
            return online.new_zeros((), dtype=torch.float32)
        slow = torch.zeros_like(online) if slow is None else slow
        if slow.shape != online.shape:
            raise ConfigError(
                f"anchor compares attention over all tiles; in training this method answers about {len(online)} of "
                f"{len(slow)}"
            )
        return self.weight * self.distance(online, slow.detach(), output.offsets)

    def distance(self, online: Tensor, anchor: Tensor, offsets: Tensor) -> Tensor:
        """Mean over bags and columns. online, anchor: (total, m) attention logits."""
        with no_autocast(online):
            each = []
            for rows, slow in zip(split(full_precision(online), offsets), split(anchor, offsets), strict=True):
                shown = rows > torch.finfo(rows.dtype).min / 2
                target = normalised_sigmoid(slow.to(rows) / self.temperature, shown)
                cross = -torch.where(shown, target * rows.log_softmax(dim=0), 0).sum(dim=0)
                if self.scaling == "released":
                    each.append((cross / len(rows)).mean())
                else:
                    each.append((cross - torch.special.entr(target).sum(dim=0)).mean())
            return torch.stack(each).mean()

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Count the step, and take one of the moving average; during the warm-up that follows the model."""
        self.steps += 1  # of every kind: the warm-up of an anchor that does not move ends too
        if self.kind != "ema":
            return
        if self.steps <= self.warm_up:
            self.replace(model)
            return
        for name, new in model.state_dict().items():
            old = self.tensors[name].to(new.device)
            moves = new.is_floating_point()
            self.tensors[name] = self.momentum * old + (1 - self.momentum) * new if moves else new.clone()

    def get_extra_state(self) -> dict[str, Any]:
        """The copy, and how many steps it has taken."""
        return {"tensors": self.tensors, "steps": self.steps}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take up a stored copy."""
        self.tensors, self.steps = dict(state["tensors"]), state["steps"]


def normalised_sigmoid(logits: Tensor, shown: Tensor | None = None) -> Tensor:
    """sigmoid(e) / sum, over the rows of one bag. shown: bool, like `logits`; rows that are hidden get 0."""
    weights = logits.sigmoid()
    weights = weights if shown is None else torch.where(shown, weights, 0)
    return weights / (weights.sum(dim=0) + _EPSILON)

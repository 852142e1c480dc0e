"""A law that nothing can break shows nothing: one broken method for each, and the law that must catch it."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from wsi_mil.bags import segment_map, segment_mean, segment_softmax, segment_weighted_sum, split
from wsi_mil.contracts import LAWS, check_model, law_name
from wsi_mil.models._base import BagObjective, MILModel, MILOutput


class Sound(MILModel):
    """Attention and an additive head; obeys every law. Each method below breaks one."""

    summary = "a toy"
    family = "attention"
    paper = "none"
    score_kinds = ("attention", "contribution")

    def __init__(self, *, in_dim: int, n_outputs: int) -> None:
        super().__init__(in_dim=in_dim, n_outputs=n_outputs)
        self.attend = nn.Linear(in_dim, 2)
        self.head = nn.Linear(in_dim, n_outputs)

    def forward(self, batch, *, generator=None):
        return self.answer(batch.features, batch.offsets)

    def answer(self, features, offsets, **changes):
        logits = self.attend(features)
        attention = segment_softmax(logits, offsets)
        embedding = segment_weighted_sum(attention, features, offsets)
        output = MILOutput(
            logits=self.head(embedding.mean(dim=1)),
            offsets=offsets,
            attention_logits=logits,
            attention=attention,
            instance_logits=self.head(features),
            bag_embedding=embedding,
        )
        return replace(output, **changes)


class Undescribed(Sound):
    paper = ""


class Forgetful(Sound):
    def __init__(self, *, in_dim: int, n_outputs: int, width: int = 3) -> None:
        super().__init__(in_dim=in_dim, n_outputs=n_outputs)


class Positional(Sound):
    def __init__(self, in_dim: int, n_outputs: int) -> None:
        super().__init__(in_dim=in_dim, n_outputs=n_outputs)


class Misshapen(Sound):
    def forward(self, batch, *, generator=None):
        output = self.answer(batch.features, batch.offsets)
        return replace(output, logits=output.logits.mean(dim=0))


class Embedded(Sound):
    def forward(self, batch, *, generator=None):
        output = self.answer(batch.features, batch.offsets)
        return replace(output, bag_embedding=output.bag_embedding[:, 0])


class Labelled(Sound):
    def forward(self, batch, *, generator=None, label=None):
        return self.answer(batch.features, batch.offsets)


class NameReader(Sound):
    def forward(self, batch, *, generator=None):
        output = self.answer(batch.features, batch.offsets)
        return replace(output, logits=output.logits + sum(map(len, batch.ids)))


class Ordered(Sound):
    def forward(self, batch, *, generator=None):
        position = torch.cat([torch.arange(n) for n in batch.lengths])
        return self.answer(batch.features + 0.1 * position[:, None], batch.offsets)


class Leaking(Sound):
    def forward(self, batch, *, generator=None):
        output = self.answer(batch.features, batch.offsets)
        return replace(output, logits=output.logits + 1e-3 * output.logits.mean())


class BatchNormed(Sound):
    def __init__(self, *, in_dim: int, n_outputs: int) -> None:
        super().__init__(in_dim=in_dim, n_outputs=n_outputs)
        self.norm = nn.BatchNorm1d(in_dim)

    def forward(self, batch, *, generator=None):
        return self.answer(self.norm(batch.features) if len(batch.features) > 1 else batch.features, batch.offsets)


class Squeezing(Sound):
    def forward(self, batch, *, generator=None):
        spread = segment_map(lambda rows: rows.std(dim=0), batch.features, batch.offsets)
        output = self.answer(batch.features, batch.offsets)
        return replace(output, logits=output.logits + self.head(spread))


class Greedy(Sound):
    def forward(self, batch, *, generator=None):
        for rows in split(batch.features, batch.offsets):
            rows[:, 0].topk(10)
        return self.answer(batch.features, batch.offsets)


class TopOnly(Sound):
    """Keeps one of the tiles of greatest first feature, whichever comes first."""

    def forward(self, batch, *, generator=None):
        output = self.answer(batch.features, batch.offsets)
        kept = torch.zeros_like(output.instance_logits)
        for start, rows in zip(batch.offsets[:-1].tolist(), split(batch.features, batch.offsets), strict=True):
            kept[start + int(rows[:, 0].argmax())] = 1
        return replace(output, instance_logits=output.instance_logits + kept)


class Unnormalised(Sound):
    def forward(self, batch, *, generator=None):
        output = self.answer(batch.features, batch.offsets)
        return replace(output, attention=output.attention_logits.sigmoid())


class Boastful(Sound):
    score_kinds = ("attention", "contribution", "probability")

    def _instance_probabilities(self, output):
        return output.instance_logits


class Chatty(Sound):
    score_kinds = ("attention",)

    def instance_scores(self, output, kind, index=None):
        return output.attention[:, 0]


class Miscounting(Sound):
    def _instance_contributions(self, output):
        return output.attention.mean(dim=1)[:, None] * (output.instance_logits - self.head.bias)


class Overflowing(Sound):
    def forward(self, batch, *, generator=None):
        scale = (batch.features.to(self.attend(batch.features).dtype) * 3e4).square().mean()
        output = self.answer(batch.features, batch.offsets)
        return replace(output, logits=output.logits + 0 * scale)


class HalfAttention(Sound):
    def forward(self, batch, *, generator=None):
        logits = self.attend(batch.features)
        attention = torch.cat([rows.softmax(dim=0).to(logits.dtype) for rows in split(logits, batch.offsets)])
        return self.answer(batch.features, batch.offsets, attention=attention)


class RandomInEval(Sound):
    random_in_training = True

    def forward(self, batch, *, generator=None):
        output = self.answer(batch.features, batch.offsets)
        noise = 0 if generator is None else torch.rand((), generator=generator)
        return replace(output, logits=output.logits + noise)


class GlobalRandom(Sound):
    random_in_training = True

    def forward(self, batch, *, generator=None):
        output = self.answer(batch.features, batch.offsets)
        noise = torch.rand(()) if self.training and generator is not None else 0
        return replace(output, logits=output.logits + noise)


class Undeclared(Sound):
    def forward(self, batch, *, generator=None):
        output = self.answer(batch.features, batch.offsets)
        noise = torch.rand((), generator=generator) if self.training and generator is not None else 0
        return replace(output, logits=output.logits + noise)


class Overdeclared(Sound):
    random_in_training = True


class Idle(Sound):
    def __init__(self, *, in_dim: int, n_outputs: int) -> None:
        super().__init__(in_dim=in_dim, n_outputs=n_outputs)
        self.unused = nn.Linear(2, 2)


class Detached(Sound):
    def forward(self, batch, *, generator=None):
        output = self.answer(batch.features, batch.offsets)
        attention = output.attention.detach()
        embedding = segment_weighted_sum(attention + 0 * output.attention, batch.features, batch.offsets)
        return replace(output, logits=self.head(embedding.mean(dim=1)))


class HiddenState(Sound):
    """Draws a direction at construction and does not write it down."""

    def __init__(self, *, in_dim: int, n_outputs: int) -> None:
        super().__init__(in_dim=in_dim, n_outputs=n_outputs)
        self.direction = torch.randn(in_dim)

    def forward(self, batch, *, generator=None):
        return self.answer(batch.features * self.direction, batch.offsets)


class NotANumber(Sound):
    def objective(self, criterion):
        class Infinite(BagObjective):
            def loss(self, model, batch, target, progress):
                terms = super().loss(model, batch, target, progress)
                spread = segment_mean((batch.features - batch.features[:1]).square(), batch.offsets).sum()
                return {**terms, "spread": 1 / spread}

        return Infinite(criterion)


class Absentminded(Sound):
    def objective(self, criterion):
        class Counting(BagObjective):
            """Takes later steps more seriously, and does not write down how many there were."""

            steps = 0

            def loss(self, model, batch, target, progress):
                self.steps += 1
                return {"bag": super().loss(model, batch, target, progress)["bag"] / self.steps}

        return Counting(criterion)


CASES = [
    (Undescribed, "says what it is"),
    (Forgetful, "says what it is"),
    (Positional, "says what it is"),
    (Misshapen, "is well formed"),
    (Embedded, "is well formed"),
    (Labelled, "sees no label"),
    (NameReader, "sees no label"),
    (Ordered, "ignores order"),
    (Leaking, "ignores neighbours"),
    (BatchNormed, "ignores neighbours"),
    (Squeezing, "takes one tile"),
    (Greedy, "takes few tiles"),
    (TopOnly, "treats equals equally"),
    (NotANumber, "treats equals equally"),
    (Unnormalised, "attention sums to one"),
    (Boastful, "scores every tile"),
    (Chatty, "scores every tile"),
    (Miscounting, "contributions sum to the logit"),
    (Overflowing, "is finite in half precision"),
    (HalfAttention, "is finite in half precision"),
    (RandomInEval, "is fixed in eval"),
    (GlobalRandom, "draws from its generator only"),
    (Undeclared, "draws from its generator only"),
    (Overdeclared, "draws from its generator only"),
    (Idle, "trains every parameter"),
    (Detached, "trains every parameter"),
    (HiddenState, "survives a checkpoint"),
    (Absentminded, "resumes where it stopped"),
]


def test_the_sound_method_obeys_every_law():
    assert [result for result in check_model(Sound) if not result.passed] == []


@pytest.mark.filterwarnings("ignore:std\\(\\).*degrees of freedom:UserWarning")
@pytest.mark.parametrize(("cls", "law"), CASES, ids=[cls.__name__ for cls, _ in CASES])
def test_a_broken_method_is_caught_by_its_law(cls, law):
    broken = {result.name: result.message for result in check_model(cls) if not result.passed}
    assert law in broken
    assert broken[law]


def test_every_law_has_a_method_that_breaks_it():
    assert {law_name(law) for law in LAWS} == {law for _, law in CASES}

"""A law that nothing can break shows nothing: one broken method for each, and the law that must catch it."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from wsi_mil.bags import pack, segment_map, segment_mean, segment_softmax, segment_weighted_sum, split
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


class TargetReader(Sound):
    """Its objective hands the labels to the model behind the back of `forward`."""

    hint = 0.0

    def forward(self, batch, *, generator=None):
        output = self.answer(batch.features, batch.offsets)
        return replace(output, logits=output.logits + self.hint)

    def objective(self, criterion):
        class Telling(BagObjective):
            def loss(self, model, batch, target, progress):
                model.hint = target[:, None].float()
                return super().loss(model, batch, target, progress)

        return Telling(criterion)


class OrderedInTraining(Sound):
    """Long bags are cut, in training only."""

    def forward(self, batch, *, generator=None):
        output = self.answer(batch.features, batch.offsets)
        if not self.training:
            return output
        late = torch.cat([torch.arange(n) >= 64 for n in batch.lengths])
        kept = output.attention_logits.masked_fill(late[:, None], -20)
        embedding = segment_weighted_sum(segment_softmax(kept, batch.offsets), batch.features, batch.offsets)
        return replace(output, logits=self.head(embedding.mean(dim=1)))


class Overordered(Sound):
    order_matters = True


class Placed(Sound):
    def forward(self, batch, *, generator=None):
        return self.answer(batch.features + 0.1 * batch.grid_xy[:, :1], batch.offsets)


class Overplaced(Sound):
    uses_positions = True


class AcrossSlides(Placed):
    uses_positions = True


class CentredInTraining(Sound):
    def forward(self, batch, *, generator=None):
        drawn = self.training and generator is not None
        features = batch.features - batch.features.mean(dim=0) if drawn else batch.features
        return self.answer(features, batch.offsets)


class HalfSums(Sound):
    def forward(self, batch, *, generator=None):
        logits = self.attend(batch.features)
        with torch.autocast("cpu", enabled=False):
            attention = torch.cat(
                [(rows.softmax(dim=0)).to(logits.dtype).float() for rows in split(logits, batch.offsets)]
            )
        return self.answer(batch.features, batch.offsets, attention=attention)


class DampedInTraining(Sound):
    def forward(self, batch, *, generator=None):
        output = self.answer(batch.features, batch.offsets)
        return replace(output, logits=output.logits * (0.9 if self.training else 1))


class FearsPositives(Sound):
    def objective(self, criterion):
        class Fearful(BagObjective):
            def loss(self, model, batch, target, progress):
                bag = super().loss(model, batch, target, progress)["bag"]
                return {"bag": bag / (target == 0).sum().float()}

        return Fearful(criterion)


class Halfhearted(Sound):
    def objective(self, criterion):
        class HeadOnly(BagObjective):
            def parameter_groups(self, model):
                return [{"params": list(model.head.parameters())}]

        return HeadOnly(criterion)


class HiddenScale(Sound):
    """Draws the scale of its scores at construction and does not write it down."""

    score_kinds = ("attention", "probability")

    def __init__(self, *, in_dim: int, n_outputs: int) -> None:
        super().__init__(in_dim=in_dim, n_outputs=n_outputs)
        self.scale = torch.rand(())

    def _instance_probabilities(self, output):
        return (self.scale * output.instance_logits).softmax(dim=1)


class NeedsClasses(Sound):
    def forward(self, batch, *, generator=None):
        output = self.answer(batch.features, batch.offsets)
        return replace(output, instance_logits=output.instance_logits[:, :2].repeat(1, 2)[:, : max(self.n_outputs, 2)])


CASES = [
    (Undescribed, "says what it is", "does not say paper"),
    (Forgetful, "says what it is", "not kept as attributes: width"),
    (Positional, "says what it is", "not so: in_dim, n_outputs"),
    (Misshapen, "is well formed", "logits is (1,), not (3, 1)"),
    (Embedded, "is well formed", "bag_embedding is (3, 32)"),
    (Labelled, "sees no label", "forward takes 'label'"),
    (NameReader, "sees no label", "under other names"),
    (Ordered, "ignores order", "logits of shuffled tiles"),
    (Leaking, "ignores neighbours", "beside a wild bag (eval mode)"),
    (BatchNormed, "ignores neighbours", "beside a wild bag (training mode)"),
    (Squeezing, "takes one tile", "logits is not finite"),
    (Greedy, "takes few tiles", "out of range"),
    (TopOnly, "treats equals equally", "instance_logits of identical tiles"),
    (NotANumber, "treats equals equally", "loss is not finite"),
    (Unnormalised, "attention sums to one", "sum of attention"),
    (Boastful, "scores every tile", "outside of [0, 1]"),
    (Chatty, "scores every tile", "which score_kinds does not name"),
    (Miscounting, "contributions sum to the logit", "sum of contributions to class 0"),
    (Overflowing, "is finite in half precision", "logits under torch.float16 is not finite"),
    (HalfAttention, "is finite in half precision", "attention is torch.bfloat16"),
    (RandomInEval, "is fixed in eval", "in eval mode: not the same"),
    (GlobalRandom, "draws from its generator only", "the global random state"),
    (Undeclared, "draws from its generator only", "does not declare random_in_training"),
    (Overdeclared, "draws from its generator only", "declares random_in_training, but"),
    (Idle, "trains every parameter", "unused.weight gets no gradient"),
    (Detached, "trains every parameter", "attend.weight is zero everywhere"),
    (HiddenState, "survives a checkpoint", "logits after a checkpoint"),
    (Absentminded, "resumes where it stopped", "another one after an interruption"),
    (TargetReader, "sees no label", "with other labels"),
    (OrderedInTraining, "ignores order", "logits of shuffled tiles"),
    (Overordered, "ignores order", "declares order_matters"),
    (Placed, "ignores places", "does not declare uses_positions"),
    (Overplaced, "ignores places", "declares uses_positions, but"),
    (AcrossSlides, "ignores places", "whose second slide is moved"),
    (CentredInTraining, "ignores neighbours", "tiles of other bags"),
    (HalfSums, "is finite in half precision", "sum of attention under torch.bfloat16"),
    (DampedInTraining, "is fixed in eval", "in training without a generator"),
    (FearsPositives, "takes a step of one class", "bags of class 1 alone"),
    (Halfhearted, "optimises every parameter", "attend.weight is in 0 groups"),
    (HiddenScale, "survives a checkpoint", "probability scores after a checkpoint"),
    (NeedsClasses, "is well formed", "instance_logits is (34, 2)"),
]


def test_the_sound_method_obeys_every_law():
    assert [result for result in check_model(Sound) if not result.passed] == []


@pytest.mark.filterwarnings("ignore:std\\(\\).*degrees of freedom:UserWarning")
@pytest.mark.parametrize(("cls", "law", "words"), CASES, ids=[cls.__name__ for cls, _, _ in CASES])
def test_a_broken_method_is_caught_by_its_law(cls, law, words):
    broken = {result.name: result.message for result in check_model(cls) if not result.passed}
    assert words in broken[law]


def test_every_law_has_a_method_that_breaks_it():
    assert {law_name(law) for law in LAWS} == {law for _, law, _ in CASES}


class PositivesFirst(Sound):
    """Its objective asks about the positive bags before all of them; no label gets into the model."""

    def objective(self, criterion):
        class Twice(BagObjective):
            def loss(self, model, batch, target, progress):
                positive = [bag for bag, label in zip(batch.bags(), target.tolist(), strict=True) if label]
                if positive:
                    model(pack(positive), generator=progress.generator)
                return super().loss(model, batch, target, progress)

        return Twice(criterion)


def test_an_objective_may_choose_by_label_which_bags_it_asks_about():
    assert [result for result in check_model(PositivesFirst) if not result.passed] == []

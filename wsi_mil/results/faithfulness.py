"""Takes a trained model's bags apart, to see whether the tiles that its heat map marks are those that it uses.

What the figures mean is told in `wsi_mil.statistics.faithfulness`. The cost is bounded: at most BAGS bags of a model,
and for each at most 38 answers, most of them of a part of the bag, in all about 20 times the whole bag. With 50 bags to
train on for 20 epochs that is about a twentieth of the training.
"""

import zlib
from collections.abc import Callable

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from wsi_mil.bags import Bag, pack
from wsi_mil.fitting.datasets import BagDataset
from wsi_mil.methods import score_columns
from wsi_mil.models._base import MILModel
from wsi_mil.statistics.faithfulness import CURVES, STEPS, Perturbed
from wsi_mil.statistics.ranking import Floats, Ints
from wsi_mil.tasks import Task

BAGS = 8
"""Bags of one model that are measured, drawn by the seed."""
ORDERS = 2
"""Random orders that the scores are compared with."""

Answer = Callable[[Bag], float]
"""What a model says of any part of a bag, as the one number that the scores explain; higher is more of it."""
Judge = Callable[[Bag], tuple[Floats, Answer]]
"""The score of each tile of a bag, and the answer that these scores explain."""


def perturb(bag: Bag, scores: Floats, answer: Answer, *, min_tiles: int = 1, seed: int = 0) -> Perturbed:
    """The answers without the top tiles and with them alone, and the same of random tiles.

    scores: (n,), higher is more important; equal ones are ordered at random.   A step takes at least one tile and never
    leaves fewer than `min_tiles` (at least 1), so no empty bag is ever asked for. The draws depend on the seed and the
    bag's id alone.
    """
    rng = np.random.default_rng([seed, zlib.crc32(bag.id.encode())])
    shuffled = rng.permutation(len(bag))
    top = shuffled[np.argsort(-np.asarray(scores)[shuffled], kind="stable")]
    random = [rng.permutation(len(bag)) for _ in range(ORDERS)]
    least = max(1, min_tiles)
    return Perturbed(
        without_top=_answers(bag, top, answer, keep=False, least=least),
        without_random=np.mean([_answers(bag, order, answer, keep=False, least=least) for order in random], axis=0),
        only_top=_answers(bag, top, answer, keep=True, least=least),
        only_random=np.mean([_answers(bag, order, answer, keep=True, least=least) for order in random], axis=0),
    )


def measure_bags(dataset: BagDataset, judge: Judge, *, min_tiles: int = 1, seed: int = 0) -> pd.DataFrame:
    """One row a measured bag, at most BAGS: patient, bag, tiles, answer, deletion, insertion, faithfulness, and the
    curves `without_top_5` (answer without the top 5 % of the tiles), `without_random_5`, `only_top_5`, `only_random_5`.

    Empty where too few tiles would have been left.
    """
    chosen = np.random.default_rng(seed).permutation(len(dataset))[:BAGS]
    rows = []
    for i in np.sort(chosen).tolist():
        bag = dataset[i]
        scores, answer = judge(bag)
        found = perturb(bag, scores, answer, min_tiles=min_tiles, seed=seed)
        row = {"patient": dataset.items[i].patient, "bag": bag.id, "tiles": len(bag), "answer": answer(bag)}
        row |= {"deletion": found.deletion, "insertion": found.insertion, "faithfulness": found.faithfulness}
        rows.append(row | _curves(found))
    return pd.DataFrame(rows, columns=COLUMNS)


def judge_of_classes(model: MILModel, *, task: Task, device: torch.device | str = "cpu") -> Judge:
    """The scores that a heat map draws, the first stored column, and the probability of the class they speak of.

    Of two classes, probabilities and contributions of tiles speak of the positive one, whatever is predicted of the
    bag; in a bag that is called negative there is then little to take away, and the figures are near 0. Attention, and
    any score with more classes, speaks of the class that is predicted of the whole bag.
    task: of classes.   The model is left in eval mode.
    """
    column = score_columns(model, task)[0]

    def judge(bag: Bag) -> tuple[Floats, Answer]:
        with torch.inference_mode():
            output = model.eval()(pack([bag]).to(device))
            scores = model.instance_scores(output, column.kind, column.index).double().cpu().numpy()
            predicted = int(task.probabilities(output.logits.double())[0].argmax())
        judged = predicted if column.label is None else task.classes.index(column.label)

        def answer(part: Bag) -> float:
            with torch.inference_mode():
                logits = model.eval()(pack([part]).to(device)).logits
                return float(task.probabilities(logits.double())[0, judged])

        return scores, answer

    return judge


COLUMNS = ["patient", "bag", "tiles", "answer", "deletion", "insertion", "faithfulness"] + [
    f"{curve}_{step}" for curve in CURVES for step in STEPS
]
"""Of the table of one model."""


def _answers(bag: Bag, order: Ints, answer: Answer, *, keep: bool, least: int) -> NDArray[np.float64]:
    """(6,) the answers for the first tiles of an order alone, or for all the others; NaN where too few are left."""
    found: dict[int, float] = {}
    values = np.full(len(STEPS), np.nan)
    for place, step in enumerate(STEPS):
        taken = max(1, round(len(bag) * step / 100))
        rows = order[:taken] if keep else order[taken:]
        if len(rows) < least:
            continue
        if taken not in found:
            found[taken] = answer(bag.take(torch.from_numpy(np.sort(rows))))
        values[place] = found[taken]
    return values


def _curves(found: Perturbed) -> dict[str, float]:
    return {f"{curve}_{step}": getattr(found, curve)[place] for curve in CURVES for place, step in enumerate(STEPS)}

"""docs/methods.md: the page that helps to choose a method."""

from collections.abc import Mapping, Sequence

from wsi_mil.guide.cards import of_plug_in
from wsi_mil.guide.facts import MEANINGS, facts, linked
from wsi_mil.models._base import MILModel, Regulariser

RENEW = "wsi-mil list models --page docs/methods.md"
"""The command that writes the page anew."""
_FAMILIES = {
    "pooling": "A mean of some kind. Few parameters; the honest first line of every table, and hard to beat on signs "
    "that are all over the tissue. Small lesions are diluted, by mean_pool most.",
    "max-pooling": "One tile decides for each class. For small foci that are clear when seen; learns slowly, since "
    "only that tile gets a gradient.",
    "instance probability": "Each tile gets a probability, and the bag's is pooled from them. For maps that are read "
    "tile by tile.",
    "instance": "A tile classifier is trained under the bags' labels. Needs bags that are free of the other classes.",
    "additive": "Each tile adds its share to the answer.",
    "attention": "A learned weight for each tile. The usual choice: begin with abmil. Those with several branches, "
    "heads or tokens are meant to spread their attention over more of the lesion.",
    "transformer": "Tiles, or learned tokens, look at each other. For signs that lie in the arrangement or the mixture "
    "of tissue; they need more patients, more time and more care than attention does.",
    "AUC maximisation": "Trains the order of the bags instead of each bag's probability. For rare classes; needs bags "
    "of both classes in each step, and its probabilities are not calibrated.",
}
_INTRODUCTION = f"""# Choosing a method

Made by `{RENEW}` from what each method's file says of itself:
change the file, not this page. `wsi-mil list models NAME` tells all of one method: settings, defaults, plug-ins that go
with it. Runnable settings with their sources lie in `configs/methods/`; [parity.md](parity.md) describes the agreement
with published code.

No method is best everywhere. Published gains were measured with other encoders, splits and rules of selection than
yours, and change with them. Choose by what you need:

- **A first answer, or fewer than about 100 patients:** mean_pool, max_pool and abmil, all on the same folds. Go on
  only when the report's paired test shows that another method is better on *your* patients.
- **Small lesions in much tissue:** the families max-pooling and instance probability, dsmil, clam_sb, or acmil.
- **Few patients and small lesions:** `configs/small_cohort.yaml` (mean_pool, abmil, abmil+aem, acmil and focusmil, a
  fixed number of epochs), and max_pool beside them; the others of the line above when there are more patients.
  `configs/large_cohort.yaml` is for some hundred patients or more: validation chooses the epoch, three seeds a fold.
- **A map that is evidence:** `contribution` sums to the answer, `probability` speaks of each tile alone. `attention`
  says where the model looked, not what it saw there. rrt and psa mix each tile with its window or its neighbours before
  they pool, and so does `+sm` on features: there a tile's contribution or attention is that of the mixture, and part of
  it belongs to the tiles around.
- **More than two classes:** every method takes them. The head then has an output a class, also where the column
  *outputs* says 1. midam trains each class against the rest and is not calibrated; the tile probabilities of the
  prob_* methods are one against the rest too and need not sum to 1; ins takes the first class for background.
- **Survival, numbers, ordered classes, several targets** ([targets.md](targets.md)): every method that is not marked
  *classes only*, with its defaults; dsmil (loss bce, prediction mean), dtfd (distillation MaxS, MaxMinS) and mhim
  (score class, baseline dsmil) refuse them. Count events, not patients: around a C-index of 0.65 the 95 %
  interval is at best ±0.13 with 20 events in all test parts together, ±0.09 with 50, ±0.06 with 100 and ±0.045 with 200
  (simulated, 40 to 70 % censored); with fewer than 50 hardly any two methods can be told apart. `--loss cox` compares
  the bags of a step with each other and needs 8 or more (`train.bags_per_step`), better many more where events are
  rare; the default, hazards of intervals, takes any number. Maps of such targets are of attention and contribution
  only.
- **Attention that sits on a handful of tiles:** `+aem` or `+anchor` behind an attention method, or acmil, asmil, mhim.
- **Signs in the arrangement of tissue:** smabmil and psa use positions. A method whose *order matters* reads the order
  of the file as if it were an arrangement; shuffled tiles give another answer.
- **Several slides a patient:** spatial methods never look across slides; all others take the slides as one bag.
- **Very long bags:** no method holds every tile against every other in memory; abmilx and rrt still take time that
  grows with the square of the tiles. A method with a limit in the column *bags* refuses longer ones, and rrt those
  with more than `max_window` tiles a window (262,144 tiles a bag, as it is set).
  `train.tile_cap` draws tiles while training; evaluation uses all.

The scores of tiles (the first kind is drawn by default):

"""
_NUMBERS = """
The numbers lie in `RUN/instance_scores/METHOD/MODEL/SLIDE.h5`: dataset `scores` (tiles, columns), places in `coords`
and `grid_xy`, the names of the columns as JSON in the attribute `columns`. `wsi-mil heatmap RUN --column
probability:tumour` draws one of them. Every slide is scored by the model that did not see its patient. A probability
for each tile: """
_TRAITS = """
The columns: *order* says whether the order of tiles matters, and whether their positions are used. *Outputs* is the
width of the head for two classes (files always hold one probability a class). *Targets* says what can be predicted:
any kind, or classes only (one target, no order between the classes). *Bags* says how a step of several bags
is processed: packed (all tiles at once) or one by one, which costs time, not memory; and the limit of tiles, if any.
"""
_WORKED = """
## Several published settings on the same folds

Each file of `configs/methods/` trains one method as published. To compare some of them, put their `methods` into one
file, with their `train` settings inside the method: these hold for it alone, those at the end for all. Settings of
`folds` and `task` are shared by all methods of a run, so a published `task` (clam_sb draws classes equally often) holds
for every one of them or for none. With few patients add `--selection none`: too small a validation part chooses
nothing (each file of `configs/methods/` says where that begins).

```yaml
# wsi-mil crossval labels.csv --config three.yaml --bags work/bags_* --out run --target label
methods:
- name: acmil
  params: {n_branches: 5, top_k: 10, mask_drop: 0.6}
  train: {epochs: 50, lr: 1.0e-4, weight_decay: 1.0e-5, schedule: cosine, metric: auc, patience: null}
- name: dsmil
  params: {nonlinear: true, query_dim: 128}
  objective: {max_weight: 0.5}
  train: {epochs: 50, lr: 1.0e-4, weight_decay: 1.0e-3, schedule: cosine, metric: auc, patience: 10}
- name: transmil
  params: {heads: 8, dropout: 0.1}
  train: {epochs: 200, lr: 2.0e-4, weight_decay: 1.0e-5, schedule: constant, metric: loss, patience: 10, accumulate: 2}
folds: {n_folds: 5, validation: 0.2, seed: 0}
train: {bags_per_step: 1, selection: validation, seeds: [0, 1, 2]}
```
"""


def methods_page(models: Mapping[str, type[MILModel]], regularisers: Mapping[str, type[Regulariser]]) -> str:
    """The page that helps to choose a method, in Markdown."""
    of_tiles = [name for name, model in models.items() if "probability" in model.score_kinds]
    parts = [_INTRODUCTION, *(f"- `{kind}`: {text}.\n" for kind, text in MEANINGS.items())]
    parts += [_NUMBERS, f"{', '.join(of_tiles)}.\n", _TRAITS]
    told = {name: facts(name, model) for name, model in models.items()}
    for family in _in_order({fact.family.split(",")[0] for fact in told.values()}):
        parts.append(f"\n## {family[0].upper()}{family[1:]}\n\n")
        if family in _FAMILIES:
            parts.append(f"{_FAMILIES[family]}\n\n")
        parts.append(
            _row("method", "what it is", "scores of tiles", "order", "outputs", "targets", "bags", "paper", "year")
        )
        parts.append("|" + "---|" * 9 + "\n")
        for name, fact in told.items():
            if fact.family.split(",")[0] == family:
                told_of = (fact.summary, fact.scores, fact.order, str(fact.outputs), fact.targets, fact.memory)
                parts.append(_row(f"`{name}`", *told_of, linked(fact.paper), str(fact.year or "")))
    parts.append("\n## Plug-ins\n\nWritten behind a method's name, several if need be: `abmil+aem`. ")
    parts.append("`wsi-mil list regularisers NAME` tells which methods one goes with.\n\n")
    parts += [_row("plug-in", "what it does", "source"), "|---|---|---|\n"]
    for name, plug_in in regularisers.items():
        does, source = of_plug_in(plug_in)
        parts.append(_row(f"`+{name}`", does, linked(source)))
    return "".join([*parts, _WORKED])


def _in_order(families: set[str]) -> Sequence[str]:
    """The families that are described above in that order, then all others by the alphabet."""
    return [*(name for name in _FAMILIES if name in families), *sorted(families - set(_FAMILIES))]


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"

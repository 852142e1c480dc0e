"""Where labels say nothing about the tiles, cross-validation must find nothing: 40 freshly drawn cohorts of 60 bags."""

import numpy as np

from wsi_mil.fitting.spec import TrainSpec
from wsi_mil.runs import RunDir
from wsi_mil.splits import FoldSpec
from wsi_mil.stages.crossval import crossval
from wsi_mil.statistics.concordance import concordance
from wsi_mil.tasks import TaskSpec

N_COHORTS = 40
TRAIN = TrainSpec(epochs=4, lr=2e-2, device="cpu", bags_per_step=8, metric="auc")


def within_fold_auc(run: RunDir) -> float:
    rows = run.predictions()
    places = np.arange(len(rows))
    found = concordance(
        (rows["target"] == "tumour").to_numpy(),
        rows["prob_tumour"].to_numpy(),
        groups=rows["fold"].to_numpy(),
        patients=places,
        n_patients=len(rows),
    )
    return found.auc


def test_pure_noise_has_an_auc_of_a_half(make_study, tmp_path):
    """Validation chooses epoch, threshold and calibration in every fold (ten patients a class), test nothing."""
    aucs = []
    for cohort in range(N_COHORTS):
        folder = tmp_path / str(cohort)
        table, bags = make_study(folder, patients=60, signal=0.0, dim=8, tiles=(2, 5), seed=cohort)
        folds = FoldSpec(n_folds=3, validation=0.5, seed=cohort)
        task = TaskSpec(target="label")
        crossval(table, bags=bags, out=folder / "run", task=task, methods=["mean_pool"], folds=folds, train=TRAIN)
        run = RunDir(folder / "run")
        assert run.selection("mean_pool", run.keys("mean_pool")[0]).chosen_by == "validation auc"
        aucs.append(within_fold_auc(run))
    error = np.std(aucs, ddof=1) / np.sqrt(N_COHORTS)
    assert error < 0.02, "or the test could not tell"
    assert abs(np.mean(aucs) - 0.5) < 4 * error

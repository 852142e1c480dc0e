import pytest

from wsi_mil.runs import FoldKey, RunDir
from wsi_mil.splits import FoldSpec
from wsi_mil.stages.train import train, whole_cohort
from wsi_mil.tasks import TaskSpec
from wsi_mil.train_spec import TrainSpec

KEY = FoldKey(0, 0, 0)


@pytest.fixture(scope="module")
def study(make_study, tmp_path_factory):
    return make_study(tmp_path_factory.mktemp("study"), patients=12)


def train_on(study, out, *, folds=FoldSpec(), **spec):  # noqa: B008
    settings = TrainSpec(epochs=2, device="cpu", **spec)
    options = {"bags": study[1], "out": out, "task": TaskSpec(target="label"), "methods": ["mean_pool"]}
    train(study[0], **options, folds=folds, train=settings)
    return RunDir(out)


def test_everybody_trains_or_validates_and_nobody_is_tested(study, tmp_path):
    run = train_on(study, tmp_path / "run")
    parts = run.folds().set_index("patient")["part"]
    assert parts.value_counts().to_dict() == {"train": 9, "validation": 3} or parts.value_counts().to_dict() == {
        "train": 10,
        "validation": 2,
    }
    assert run.predictions().empty
    assert set(run.validation("mean_pool", KEY)["patient"]) == set(parts[parts == "validation"].index)
    assert "fewer than 10" in run.selection("mean_pool", KEY).chosen_by


def test_without_selection_the_validation_part_trains_too(study, tmp_path):
    run = train_on(study, tmp_path / "run", selection="none")
    assert run.validation("mean_pool", KEY).empty
    assert run.checkpoint_path("mean_pool", KEY).is_file()


def test_a_site_stays_whole(study):
    classes = {f"p{i}": {"ab"[i % 2]} for i in range(20)}
    sites = {f"p{i}": f"site{i // 4}" for i in range(20)}
    fold = whole_cohort(classes, FoldSpec(validation=0.2), sites=sites)
    assert not {sites[p] for p in fold.train} & {sites[p] for p in fold.validation}
    assert len(fold.train) + len(fold.validation) == 20
    assert fold.validation


def test_no_validation_part_where_none_is_wished():
    fold = whole_cohort({"p": {"a"}, "q": {"b"}}, FoldSpec(validation=0.0), sites=None)
    assert (fold.train, fold.validation, fold.test) == (("p", "q"), (), ())

import pytest

from apps.arguments import parse, parser_for
from wsi_mil.errors import ConfigError, RunError
from wsi_mil.fitting.spec import TrainSpec
from wsi_mil.results.cases import check_tested
from wsi_mil.runs import FoldKey, RunDir
from wsi_mil.splits import HoldOutSpec
from wsi_mil.stages.heatmap import heatmap
from wsi_mil.stages.train import train, whole_cohort
from wsi_mil.tasks import TaskSpec

KEY = FoldKey(0, 0, 0)


@pytest.fixture(scope="module")
def study(make_study, tmp_path_factory):
    return make_study(tmp_path_factory.mktemp("study"), patients=12)


def train_on(study, out, *, folds=HoldOutSpec(), **spec):  # noqa: B008
    settings = TrainSpec(epochs=2, device="cpu", **spec)
    options = {"bags": study[1], "out": out, "task": TaskSpec(target="label"), "methods": ["mean_pool"]}
    train(study[0], **options, folds=folds, train=settings)
    return RunDir(out)


def test_everybody_trains_or_validates_and_nobody_is_tested(study, tmp_path):
    run = train_on(study, tmp_path / "run")
    parts = run.folds().set_index("patient")["part"]
    assert parts.value_counts().to_dict() == {"train": 10, "validation": 2}
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
    fold = whole_cohort(classes, HoldOutSpec(validation=0.2), sites=sites)
    assert not {sites[p] for p in fold.train} & {sites[p] for p in fold.validation}
    assert len(fold.train) + len(fold.validation) == 20
    assert fold.validation


def test_no_validation_part_where_none_is_wished():
    fold = whole_cohort({"p": {"a"}, "q": {"b"}}, HoldOutSpec(validation=0.0), sites=None)
    assert (fold.train, fold.validation, fold.test) == (("p", "q"), (), ())


@pytest.mark.parametrize("validation", [0.05, 0.1, 0.3, 0.4, 0.5, 0.7])
def test_the_wished_fraction_validates_in_each_class(validation):
    classes = {f"p{i:03d}": {"aab"[i % 3]} for i in range(120)}
    fold = whole_cohort(classes, HoldOutSpec(validation=validation), sites=None)
    of_class = {name: [p for p in fold.validation if classes[p] == {name}] for name in "ab"}
    assert abs(len(of_class["a"]) - validation * 80) <= 1
    assert abs(len(of_class["b"]) - validation * 40) <= 1
    assert sorted((*fold.train, *fold.validation)) == sorted(classes)
    assert fold == whole_cohort(classes, HoldOutSpec(validation=validation), sites=None)
    assert fold != whole_cohort(classes, HoldOutSpec(validation=validation, seed=1), sites=None)


@pytest.mark.parametrize("validation", [-0.1, 1.0, 1.5])
def test_a_fraction_that_cannot_be_is_refused(validation):
    with pytest.raises(ConfigError, match="validation is"):
        whole_cohort({"p": {"a"}, "q": {"b"}}, HoldOutSpec(validation=validation), sites=None)


def test_what_train_would_not_heed_it_does_not_take():
    words = ["labels.csv", "--bags", "b", "--out", "o", "--target", "label", "--methods", "abmil"]
    assert parse(parser_for("train", train), [*words, "--folds.validation", "0.3"])["folds"].validation == 0.3
    with pytest.raises(ConfigError, match="n_folds"):
        parse(parser_for("train", train), [*words, "--folds.n_folds", "3"])


def test_a_run_that_tested_nobody_is_neither_drawn_nor_shown(study, tmp_path):
    run = train_on(study, tmp_path / "run")
    with pytest.raises(RunError, match="wsi-mil predict"):
        check_tested(run)
    with pytest.raises(RunError, match="wsi-mil predict"):
        heatmap(run.path, slides=tmp_path)

"""Stage bench methods: every measurement in a process of its own, nothing lost to one that dies, nothing done twice."""

import pandas as pd
import pytest

from apps import cli
from wsi_mil.errors import ConfigError
from wsi_mil.measuring.costs import CostJob, MethodCost, Unmeasured, made_up_bag, measure, measure_apart, peak_mib
from wsi_mil.methods import MethodSpec
from wsi_mil.stages import bench_methods as stage
from wsi_mil.stages.bench_methods import as_markdown, bench_methods

TROUBLED = '''
import os
import signal
import time

from wsi_mil.errors import ConfigError
from wsi_mil.models.mean_pool import MeanPool


class Troubled(MeanPool):
    """Mean pooling that comes to grief in a way of its own with some lengths of bags."""

    def forward(self, batch, *, generator=None):
        n = len(batch.features)
        if n == 11:
            raise ConfigError("no bag of 11")
        if n == 12:
            raise RuntimeError("12 is too much")
        if n == 13:
            os.kill(os.getpid(), signal.SIGKILL)
        if n == 14:
            time.sleep(120)
        return super().forward(batch, generator=generator)
'''


@pytest.fixture
def troubled(tmp_path):
    path = tmp_path / "troubled.py"
    path.write_text(TROUBLED)
    return str(path)


def test_a_process_that_dies_costs_its_own_figure_and_finished_ones_are_kept(troubled, tmp_path, monkeypatch):
    out = tmp_path / "out"
    sizes = [10, 11, 12, 13]
    summary = bench_methods(out=out, methods=[troubled], tiles=sizes, width=8, limit=100.0, threads=1)
    table = pd.read_csv(out / "bench_methods.csv", dtype={"tiles": str}).set_index("tiles")
    assert summary.exit_code == 3
    assert [(f.item, f.outcome) for f in summary.failures] == [
        ("troubled 12 tiles", "failed"),
        ("troubled 13 tiles", "killed"),
    ]
    assert summary.done == ("troubled 10 tiles", "troubled 11 tiles", "troubled packed")
    assert table.loc["11", "reason"] == "no bag of 11"
    assert (table.loc["10", ["train_s", "train_cpu_s", "eval_s", "eval_cpu_s", "train_mib", "eval_mib"]] > 0).all()
    assert table.loc["10", "train_mib"] >= table.loc["10", "eval_mib"]
    assert table.loc["packed", "packed_ratio"] > 0
    assert (out / "bench_methods.md").read_text() == summary.notes[0]

    asked = []
    monkeypatch.setattr(
        stage, "measure_apart", lambda job, **_: asked.append(job.tiles) or MethodCost(train_cpu_s=1.0, eval_cpu_s=1.0)
    )
    again = bench_methods(out=out, methods=[troubled], tiles=sizes, width=8, limit=100.0, threads=1)
    assert asked == [12, 13]
    assert again.reused == ("troubled 10 tiles", "troubled 11 tiles", "troubled packed")
    bench_methods(out=out, methods=[troubled], tiles=[10], width=8, limit=100.0, threads=2)
    assert asked == [12, 13, 10, None], "figures of other threads are others"


def test_what_takes_too_long_is_ended_and_tried_again_only_with_more_time(troubled, tmp_path, monkeypatch):
    job = CostJob(method=MethodSpec(name=troubled), tiles=14, width=8)
    assert measure_apart(job, limit=1.0) == Unmeasured(outcome="over the limit", reason="not done after 1 s")
    late, asked = Unmeasured(outcome="over the limit", reason="not done"), []
    monkeypatch.setattr(stage, "measure_apart", lambda job, limit: asked.append(limit) or late)
    for limit in (5.0, 5.0, 3.0, 9.0):
        bench_methods(out=tmp_path / "out", methods=["mean_pool"], tiles=[10], limit=limit)
    assert asked == [5.0, 5.0, 9.0, 9.0], "once for each of the two rows, then with more time"


def test_packing_is_compared_only_where_a_method_packs():
    packed = measure(CostJob(method=MethodSpec(name="max_pool"), tiles=None, width=8))
    assert packed.packed_ratio is not None
    assert packed.packed_ratio > 0
    assert measure(CostJob(method=MethodSpec(name="rrt"), tiles=None, width=8)) == MethodCost()


def test_the_peak_grows_with_what_is_held():
    before = peak_mib()
    held = made_up_bag(50_000, 1024, seed=0)
    assert peak_mib() >= before
    assert peak_mib() * 2**20 > held.features.nbytes


def test_the_table_says_what_it_says():
    row = {"width": 8, "version": "1", "torch": "2", "threads": 1, "outcome": "", "reason": ""}
    cost = {"train_cpu_s": 1.25, "eval_cpu_s": 0.5, "train_mib": 2048, "eval_mib": 1024, "packed_ratio": None}
    none = dict.fromkeys(cost)
    rows = [
        row | cost | {"method": "a", "tiles": "1000"},
        row | none | {"method": "a", "tiles": "packed", "packed_ratio": 0.876},
        row | none | {"method": "b", "tiles": "1000", "outcome": "refused", "reason": "at most 900 tiles"},
        row | none | {"method": "b", "tiles": "packed"},
    ]
    lines = as_markdown(rows).splitlines()
    assert lines[0] == "| method | 1,000 tiles: train s | eval s | peak GiB | packed / single |"
    assert lines[2:4] == ["| a | 1.2 | 0.5 | 2.0 | 0.88 |", "| b | refused |  |  | loops |"]
    assert lines[-1] == "- b 1,000 tiles: refused: at most 900 tiles"


def test_the_command_and_what_it_refuses(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(stage, "measure_apart", lambda job, limit: MethodCost(train_cpu_s=1.0, eval_cpu_s=1.0))
    words = ["bench", "methods", "--out", str(tmp_path / "o"), "--tiles", "10", "20", "--methods", "gem", "abmil+aem"]
    assert cli.main(words) == 0
    assert "bench methods: 6 done" in capsys.readouterr().out
    assert cli.main(words) == 0
    assert "bench methods: 0 done, 6 finished before" in capsys.readouterr().out
    assert cli.main([*words, "--limit", "0"]) == 2
    (tmp_path / "o" / "bench_methods.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="no table of this command"):
        bench_methods(out=tmp_path / "o", methods=["gem"])

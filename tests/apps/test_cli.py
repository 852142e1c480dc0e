"""The command line is built from the stages' signatures, so a small stage shows all of its rules."""

import sys
import types
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from apps import cli
from apps.arguments import parse, parser_for
from wsi_mil.errors import CohortError, ConfigError
from wsi_mil.outcomes import Failure, Summary


@dataclass(frozen=True, kw_only=True)
class Inner:
    mpp: float = 8.0
    """Microns per pixel of the thumbnail."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    mpp: float = 0.5
    """Microns per pixel of a tile."""
    tile_px: int = 224
    """Side of a tile."""
    allow: tuple[str, ...] = ()
    """What is allowed."""
    inner: Inner = field(default_factory=Inner)


def stage(
    slides: Path,
    *,
    out: Path,
    tiles: Spec = Spec(),
    methods: list[str] | None = None,
    workers: int = 2,
    deep: bool = False,
) -> Summary:
    """Do something.

    Args:
        slides: folder of slides
        out: folder to write to
        methods: names
        workers: how many
        deep: look closer
    """
    return Summary(stage="stage", out=out, done=("x",))


def parsed(*words: str) -> dict[str, object]:
    return parse(parser_for("stage", stage), words)


def test_short_names_and_hyphens_reach_the_group_that_has_them() -> None:
    values = parsed("in", "--out", "o", "--mpp", "0.25", "--tile-px=256")
    assert values["tiles"] == Spec(mpp=0.25, tile_px=256)
    assert values["slides"] == Path("in")


def test_list_options_take_several_values_and_may_be_repeated() -> None:
    assert parsed("in", "--methods", "a", "b", "--out", "o")["methods"] == ["a", "b"]
    assert parsed("in", "--methods", "a", "--methods", "b", "--out", "o")["methods"] == ["a", "b"]
    assert parsed("in", "--methods", "[c, d]", "--out", "o")["methods"] == ["c", "d"]


def test_tuples_inside_groups_take_several_values_too() -> None:
    assert parsed("in", "--out", "o", "--allow", "mpp", "tile_px", "--deep")["tiles"] == Spec(allow=("mpp", "tile_px"))


def test_a_switch_needs_no_value_and_may_have_one() -> None:
    assert parsed("in", "--deep", "--out", "o")["deep"] is True
    assert parsed("in", "--deep", "false", "--out", "o")["deep"] is False
    assert parsed("in", "--out", "o", "--deep")["deep"] is True


def test_yaml_and_flags_say_the_same(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("out: o\ntiles: {mpp: 0.25, inner: {mpp: 4}}\nmethods: [a, b]\n")
    values = parsed("in", "--config", str(config))
    assert values["tiles"] == Spec(mpp=0.25, inner=Inner(mpp=4.0))
    assert values["methods"] == ["a", "b"]


@pytest.mark.parametrize(
    ("yaml", "nearest"), [("tiles: {mmp: 1}", "mpp"), ("worker: 1", "workers"), ("tiles: {tile_pixel: 3}", "tile_px")]
)
def test_an_unknown_key_names_the_nearest_spelling(tmp_path: Path, yaml: str, nearest: str) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(f"out: o\n{yaml}\n")
    with pytest.raises(ConfigError, match=f"unknown option.*{nearest}"):
        parsed("in", "--config", str(config))


def test_an_unknown_flag_names_the_nearest_spelling() -> None:
    with pytest.raises(ConfigError, match=r"'tiles.tile_pixels'.*tile_px"):
        parsed("in", "--out", "o", "--tiles.tile_pixels", "3")


def test_wrong_type_and_missing_value_are_refused() -> None:
    with pytest.raises(ConfigError, match="workers"):
        parsed("in", "--out", "o", "--workers", "two")
    with pytest.raises(ConfigError, match="out"):
        parsed("in")


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch):
    def put(function: object) -> None:
        module = types.ModuleType("wsi_mil_test_stage")
        module.run = function
        monkeypatch.setitem(sys.modules, "wsi_mil_test_stage", module)
        monkeypatch.setitem(cli.COMMANDS, "stage", ("wsi_mil_test_stage:run", "a test"))

    return put


def run_cli(*words: str) -> int:
    return cli.main(words)


def test_exit_codes_follow_the_outcome(install, capsys: pytest.CaptureFixture[str]) -> None:
    def failing(*, out: Path) -> Summary:
        """Fail on one."""
        bad = Failure(item="s<1>", outcome="no tissue", reason="nothing [there]")
        return Summary(stage="tile", out=out, done=("a",), failures=(bad,))

    install(failing)
    assert run_cli("stage", "--out", "o") == 3
    printed = capsys.readouterr().out
    assert "1 done" in printed
    assert "no tissue  s<1>: nothing [there]" in printed


def test_a_users_mistake_gives_a_message_and_no_traceback(install, capsys: pytest.CaptureFixture[str]) -> None:
    def refusing(*, out: Path) -> Summary:
        """Refuse."""
        raise CohortError("labels.csv: no column 'slide'. Map it.")

    install(refusing)
    assert run_cli("stage", "--out", "o") == 1
    error = capsys.readouterr().err
    assert "no column 'slide'" in error
    assert "Traceback" not in error


def test_a_full_disk_is_told_with_the_cure(install, capsys: pytest.CaptureFixture[str]) -> None:
    def full(*, out: Path) -> Summary:
        """Run out of space."""
        raise OSError(28, "No space left on device", "some/file.h5")

    install(full)
    assert run_cli("stage", "--out", "o") == 1
    assert "free some space and run the same command again" in capsys.readouterr().err


def test_an_unknown_command_is_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("crosval") == 2
    assert "crossval" in capsys.readouterr().err


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("--help") == 0
    printed = capsys.readouterr().out
    assert all(command in printed for command in cli.COMMANDS)

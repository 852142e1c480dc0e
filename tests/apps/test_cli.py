"""The command line is built from the stages' signatures, so a small stage shows all of its rules."""

import ast
import re
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from jsonargparse import ArgumentParser

from apps import cli
from apps.arguments import _full_name, _spellings, parse, parser_for
from wsi_mil.encode_settings import check_spec
from wsi_mil.encoders import EncodeSpec
from wsi_mil.errors import CohortError, ConfigError
from wsi_mil.methods import MethodSpec
from wsi_mil.outcomes import Failure, Summary

ROOT = Path(__file__).resolve().parents[2]


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


def parser_of(command: str) -> ArgumentParser:
    module, function = cli.COMMANDS[command][0].split(":")
    return parser_for(command, getattr(import_module(module), function))


def test_short_names_and_hyphens_reach_the_group_that_has_them() -> None:
    values = parsed("in", "--out", "o", "--mpp", "0.25", "--tile-px=256")
    assert values["tiles"] == Spec(mpp=0.25, tile_px=256)
    assert values["slides"] == Path("in")


def test_list_options_take_several_values_and_may_be_repeated() -> None:
    assert parsed("in", "--methods", "a", "b", "--out", "o")["methods"] == ["a", "b"]
    assert parsed("in", "--methods", "a", "--methods", "b", "--out", "o")["methods"] == ["a", "b"]
    assert parsed("in", "--methods", "[c, d]", "--out", "o")["methods"] == ["c", "d"]
    assert parsed("in", "--methods", "e,f", "--out", "o")["methods"] == ["e", "f"]


@pytest.mark.parametrize(
    "words",
    [
        ("--methods=abmil", "--methods=acmil"),
        ("--methods=[abmil]", "--methods=[acmil]"),
        ("--methods=abmil,acmil",),
        ("--methods", "abmil, acmil"),
    ],
)
def test_every_spelling_of_a_list_gives_the_same(words: tuple[str, ...]) -> None:
    assert crossval(*words)["methods"] == ["abmil", "acmil"]


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


def crossval(*words: str) -> dict[str, Any]:
    given = ("labels.csv", "--bags", "b", "--out", "r", "--target", "label")
    return parse(parser_of("crossval"), (*given, *words))


WRONG_METHODS = [
    ("[{name: abmil, parms: {hidden: 3}}]", "entry 1: there is no setting 'parms'. There are name, label, params, o"),
    ("[gem, {name: abmil, gated: true}]", "entry 2: there is no setting 'gated'. There are name, label, params, o"),
    ("[{label: abmil}]", "entry 1: 'name' is missing. There are name, label, params, o"),
    ("[{name: abmil, params: 3}]", "entry 1: params is 3; it must be a mapping"),
    ("[{name: 3}]", "entry 1: name is 3; it must be str."),
    ("[3]", "entry 1 is 3; a name or a mapping is expected."),
    (
        "[{name: absent/my.py}]",
        "entry 1: there is no file absent/my.py. Its path is relative to the folder where the c",
    ),
    ("[absent/my.py+aem]", "entry 1: there is no file absent/my.py. "),
]


@pytest.mark.parametrize(("value", "told"), WRONG_METHODS)
def test_a_wrong_method_is_told_in_one_sentence_in_a_file_as_on_the_command_line(
    value: str, told: str, tmp_path: Path
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(f"methods: {value}\n")
    for where, words in ((f"{config}, methods, ", ("--config", str(config))), ("--methods, ", ("--methods", value))):
        with pytest.raises(ConfigError) as refused:
            crossval(*words)
        assert str(refused.value).startswith(where + told)
        assert "\n" not in str(refused.value)
        assert "parms" not in value or "Did you mean 'params'?" in str(refused.value)


def test_one_method_in_a_file_is_asked_for_as_a_list(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("methods: abmil\n")
    with pytest.raises(ConfigError, match=r"c\.yaml, methods is 'abmil'; a list is expected: \[abmil\]\.$"):
        crossval("--config", str(tmp_path / "c.yaml"))


def test_a_wrong_further_target_is_told_likewise() -> None:
    with pytest.raises(ConfigError, match=r"^--task\.others, entry 2: kind is 'clases'; it must be .*'classes'"):
        crossval("--methods", "abmil", "--others", "grade", "{target: age, kind: clases}")


def test_methods_with_settings_may_stand_beside_names_on_the_command_line() -> None:
    gated = MethodSpec(name="abmil", params={"gated": True})
    text = "{name: abmil, params: {gated: true}}"
    assert crossval("--methods", text, "gem")["methods"] == [gated, "gem"]
    assert crossval("--methods", "gem", "--methods", f"[{text}]")["methods"] == ["gem", gated]
    assert crossval("--methods", f"[{text}]", "--methods", "gem")["methods"] == [gated, "gem"]


def test_two_files_with_methods_are_refused_with_both_names(tmp_path: Path) -> None:
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text("methods: [abmil]\ntrain: {epochs: 3}\n")
    two.write_text("methods: [gem]\n")
    words = ("--config", str(one), f"--config={two}")
    with pytest.raises(ConfigError) as refused:
        crossval(*words)
    assert str(refused.value).startswith(f"methods stands in {one} and in {two}")
    assert "each with its own `train:`" in str(refused.value)
    values = crossval(*words, "--methods", "acmil")
    assert (values["methods"], values["train"].epochs) == (["acmil"], 3)


def test_the_command_line_counts_more_than_a_file_wherever_it_stands(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("methods: [abmil]\ntrain: {selection: validation}\n")
    for words in (("--config", str(config), "--selection", "none"), ("--selection", "none", f"--config={config}")):
        assert crossval(*words)["train"].selection == "none"


def test_an_advertised_help_of_keys_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    helps = [(c, option) for c in cli.COMMANDS for option in _spellings(parser_of(c)) if option.endswith(".help")]
    assert ("crossval", "methods.help") in helps
    for command, option in helps:
        with pytest.raises(SystemExit) as left:
            run_cli(command, f"--{option}")
        assert left.value.code == 0
        assert f"--{option.removesuffix('help')}" in capsys.readouterr().out


def test_a_help_of_keys_is_never_the_nearest_spelling() -> None:
    with pytest.raises(ConfigError, match=r"'model'\. Did you mean 'methods'"):
        crossval("--model", "abmil")
    with pytest.raises(ConfigError) as refused:
        crossval("--methods.halp", "abmil")
    assert ".help'" not in str(refused.value)


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


def test_a_failure_is_one_line_whatever_the_name(install, capsys: pytest.CaptureFixture[str]) -> None:
    def failing(*, out: Path) -> Summary:
        """Fail on one."""
        bad = Failure(item="new\nline", outcome="failed", reason="new\nline.svs: gone")
        return Summary(stage="tile", out=out, failures=(bad,))

    install(failing)
    assert run_cli("stage", "--out", "o") == 1
    assert r"failed  new\nline: new\nline.svs: gone" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [("--tile-px", "0"), ("--stride-px", "-5"), ("--mpp", "0"), ("--min-tissue", "2"), ()]
)
def test_a_setting_out_of_range_is_wrong_use(words: tuple[str, ...], tmp_path: Path) -> None:
    assert run_cli("tile", str(tmp_path / "absent"), "--out", str(tmp_path / "out"), *words) == 2


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


FLAG = re.compile(r"(?<![\w-])--([a-z][\w.-]*\w)")
COMMAND = re.compile(r"(?:`|: |\()wsi-mil ([a-z]+(?:-[a-z]+)?)\b")
ENCODES = ("wsi_mil.encode_settings", "wsi_mil.encoding", "wsi_mil.encoders", "wsi_mil.stages.encode")


def texts(path: Path) -> Iterator[str]:
    """Every text in a file; what is filled in later reads `...`."""
    tree = ast.parse(path.read_text())
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.value


def takes(parser: ArgumentParser, flag: str) -> bool:
    spellings = _spellings(parser)
    return _full_name(flag.replace("-", "_"), spellings) in spellings


def test_messages_name_options_and_commands_that_exist() -> None:
    parsers = {command: parser_of(command) for command in cli.COMMANDS}
    foreign = {"version", "pyramid", "tile"}  # our own without a stage, and those of vips
    wrong = []
    for path in sorted(p for room in ("tiling", "wsi_mil", "apps") for p in (ROOT / room).rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        able = [parsers["encode"]] if module.startswith(ENCODES) else list(parsers.values())
        for text in texts(path):
            flags = [flag for flag in FLAG.findall(text) if flag not in foreign]
            wrong += [f"{module}: --{flag}" for flag in flags if not any(takes(parser, flag) for parser in able)]
            commands = [word for word in COMMAND.findall(text) if word not in cli.COMMANDS]
            wrong += [f"{module}: wsi-mil {word}" for word in commands]
    assert not wrong


@pytest.mark.parametrize(
    "wish",
    [{"accept_contract_breach": ("x",)}, {"batch_size": 0}, {"readers": 0}, {"input_px": 0}, {"max_failed_tiles": 2}],
)
def test_a_refused_encoding_names_the_option_as_the_command_line_takes_it(wish: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        check_spec(EncodeSpec(**wish))
    flags = FLAG.findall(str(refused.value))
    assert flags
    assert all(takes(parser_of("encode"), flag) for flag in flags)

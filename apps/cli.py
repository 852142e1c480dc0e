"""`wsi-mil ...`: parse, call a stage, print what it did."""

import errno
import logging
import sys
import unicodedata
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from rich.console import Console
from rich.markup import escape

from wsi_mil.errors import ConfigError, UserError, WrongUse
from wsi_mil.malloc import keep_freed_memory
from wsi_mil.outcomes import Failure, Summary

COMMANDS = {
    "tile": ("wsi_mil.stages.tile:tile", "Find tissue on slides and lay a grid of tiles over it"),
    "encode": ("wsi_mil.stages.encode:encode", "Turn tiles into features with a frozen encoder"),
    "import": ("wsi_mil.stages.import_bags:import_bags", "Bring bags of another form into a study"),
    "train": ("wsi_mil.stages.train:train", "Train one model on a whole cohort"),
    "crossval": ("wsi_mil.stages.crossval:crossval", "Cross-validate MIL methods"),
    "export-bundle": ("wsi_mil.stages.export_bundle:export_bundle", "Pack trained models for use elsewhere"),
    "predict": ("wsi_mil.stages.predict:predict", "Score slides from outside with a bundle or a finished run"),
    "heatmap": ("wsi_mil.stages.heatmap:heatmap", "Draw out-of-fold heatmaps as PNG and GeoJSON"),
    "report": ("wsi_mil.stages.report:report", "Write the report of a run: one HTML file, JSON and CSV"),
    "view": ("apps.viewer.launch:view", "Look at a run in the browser"),
    "check": (
        "wsi_mil.stages.check:check",
        "Explain a cohort, slide, grid, bag, run or method, and say what is wrong with it",
    ),
    "list": ("wsi_mil.stages.listing:listing", "List models, encoders or regularisers"),
    "bench": ("wsi_mil.stages.bench:bench", "Measure reading and encoding on this machine"),
    "bench methods": ("wsi_mil.stages.bench_methods:bench_methods", "Measure what MIL methods cost on this machine"),
    "bench mil": ("wsi_mil.stages.bench_mil:bench_mil", "Run methods on benchmark bags that are no slides"),
    "demo": ("wsi_mil.stages.demo:demo", "Run the whole path on a small cohort composed from real tissue"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Exit code: 0 done, 3 finished with listed failures, 1 nothing usable, 2 wrong use."""
    keep_freed_memory()  # works fully only before the first large allocation
    words = list(sys.argv[1:] if arguments is None else arguments)
    if " ".join(words[:2]) in COMMANDS:  # `bench mil` is a command of its own; a folder of that name is ./mil
        words[:2] = [" ".join(words[:2])]
    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    try:
        if not words or words[0] in ("-h", "--help"):
            _print_help()
            return 0
        if words[0] in ("-V", "--version"):
            from wsi_mil import __version__

            print(__version__)
            return 0
        summary = _run(words[0], words[1:])
    except UserError as error:
        errors.print(f"[bold red]wsi-mil {escape(words[0])}:[/] {escape(str(error))}")
        return 2 if isinstance(error, WrongUse) else 1
    except OSError as error:
        errors.print(f"[bold red]wsi-mil {escape(words[0])}:[/] {escape(_explain_os_error(error))}")
        return 1
    except KeyboardInterrupt:
        errors.print("Stopped. What was finished is kept; the same command goes on from there.")
        return 130
    if summary is None:
        return 0
    _print_summary(summary)
    return summary.exit_code


def _run(command: str, arguments: list[str]) -> Summary | None:
    from apps.arguments import parse, parser_for

    if command not in COMMANDS:
        import difflib

        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"there is no command {command!r}.{hint} Commands: {', '.join(COMMANDS)}.")
    module, function = COMMANDS[command][0].split(":")
    stage: Any = getattr(import_module(module), function)
    parser = parser_for(command, stage)
    result: Summary | None = stage(**parse(parser, arguments))
    return result


def _print_help() -> None:
    from wsi_mil import __version__

    console = Console(highlight=False)
    console.print(
        f"[bold]wsi-mil {__version__}[/]  From whole-slide images and labels to a study that can be trusted.\n"
    )
    width = max(map(len, COMMANDS))
    for name, (_, text) in COMMANDS.items():
        console.print(f"  [bold]{name:<{width}}[/]  {text}")
    console.print("\nwsi-mil COMMAND --help tells what a command takes. The first look: wsi-mil demo --out demo")
    console.print("Exit code: 0 done, 3 finished with listed failures, 1 nothing usable, 2 wrong use.")


def _print_summary(summary: Summary) -> None:
    console = Console(highlight=False, soft_wrap=True)
    counts = [f"{len(summary.done)} done"]
    if summary.reused:
        counts.append(f"{len(summary.reused)} finished before")
    if summary.failures:
        counts.append(f"[bold red]{len(summary.failures)} with problems[/]")
    if summary.done or summary.reused or summary.failures:
        console.print(f"[bold]{summary.stage}[/]: {', '.join(counts)}. {escape(str(summary.out))}")
    for failure in summary.failures:
        console.print(f"  [red]{escape(failure.outcome)}[/]  {escape(_in_one_line(failure))}")
    for note in summary.notes:
        console.print(escape(note))


def _in_one_line(failure: Failure) -> str:
    """One line a failure, whatever a file's name holds."""
    text = f"{failure.item}: {failure.reason}"
    return "".join(c if unicodedata.category(c) not in ("Cc", "Cs") else repr(c)[1:-1] for c in text)


def _explain_os_error(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    what = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"{where}{what}. Nothing finished is lost: free some space and run the same command again."
    return f"{where}{what}."


if __name__ == "__main__":
    sys.exit(main())

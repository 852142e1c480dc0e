"""Configuration, versions, digests of weights and files, and what could not be shown."""

import hashlib
import json
from typing import Any

import yaml

from wsi_mil.report.findings import SharedFindings
from wsi_mil.report.pseudonyms import Names

TITLE = "Appendix"
_DIGESTS = ("sha256", "digest")


def context(found: SharedFindings, names: Names) -> dict[str, Any]:
    """Texts as the run has them, without paths and ids where these are to be hidden."""
    run = found.study.run
    paths = (run.config_path, run.cohort_path, run.folds_path, run.predictions_path, run.environment_path)
    environment = run.environment() if run.environment_path.is_file() else {}
    config = names.facts(found.study.config)
    return {
        "failures": [(names.item(f.item), f.outcome, names.text(f.reason)) for f in found.failures],
        "config": yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=110),
        "environment": json.dumps(names.facts(environment), indent=2, ensure_ascii=False) if environment else "",
        "digests": [(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in paths if path.is_file()],
        "recorded": _recorded(config),
    }


def _recorded(value: Any, name: str = "") -> list[tuple[str, str]]:
    """Every digest that stands in the configuration: of the encoder's weights, the labels, the bags, the folds."""
    if isinstance(value, dict):
        inner = [(f"{name}.{key}" if name else str(key), item) for key, item in value.items()]
        return [found for key, item in inner for found in _recorded(item, key)]
    return [(name, str(value))] if value and any(word in name for word in _DIGESTS) else []

"""Fabricates finished runs that predict numbers, times to an event, ordered classes, or several targets at once."""

import sys
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import yaml

from wsi_mil.runs import FoldKey, RunDir, Selection, write_frame

fabricated = sys.modules["fabricated_run"]

NUMBER = {"name": "ki67", "kind": "regression"}
TIME = {"name": "months", "kind": "survival", "event": "died"}
DISCRETE = {**TIME, "loss": "discrete"}
GRADE = {"name": "grade", "kind": "ordinal", "classes": ["G1", "G2", "G3"]}
YES = {"name": "tp53", "kind": "binary", "classes": ["no", "yes"]}
ALSO = {"name": "kras", "kind": "binary", "classes": ["no", "yes"]}
CUTS = (6.0, 12.0, 24.0, 48.0)


@dataclass(frozen=True, kw_only=True)
class KindsWish:
    """What kind of run. Methods are (label, signal); a signal of 0 is a guess."""

    targets: tuple[dict, ...] = (NUMBER,)
    patients: int = 60
    n_folds: int = 5
    repeats: int = 1
    seeds: tuple[int, ...] = (0,)
    signal: tuple[tuple[str, float], ...] = (("mean_pool", 0.5), ("acmil", 2.0))
    level: str = "patient"
    slides_per_patient: int = 1
    validation: int = 12
    censored: float = 0.4
    missing: int = 0
    """Of each target but the first one, so many patients have no label; of a single target too."""
    fold_shift: float = 0.0
    scores: bool = False
    slides: bool = False
    patient_name: str = "P{:03d}"
    seed: int = 3
    truth: dict = field(default_factory=dict)
    """Target -> what its patients have, instead of what is drawn; for survival pairs of time and event."""


def fabricate_kinds(folder, wish: KindsWish) -> RunDir:
    """Write the run into folder/run; return it."""
    generator = np.random.default_rng(wish.seed)
    patients = [wish.patient_name.format(place) for place in range(wish.patients)]
    hidden = generator.normal(size=wish.patients)
    truth = {one["name"]: _truth(one, hidden, wish, generator) for one in wish.targets}
    plain = fabricated.Wish(
        patients=wish.patients,
        n_folds=wish.n_folds,
        repeats=wish.repeats,
        seeds=wish.seeds,
        signal=wish.signal,
        level=wish.level,
        slides_per_patient=wish.slides_per_patient,
        validation=wish.validation,
        scores=wish.scores,
        slides=wish.slides,
        patient_name=wish.patient_name,
        seed=wish.seed,
    )
    run = fabricated.fabricate(folder, plain)
    _rewrite_config(run, wish)
    _rewrite_cohort(run, wish, patients, truth)
    folds = pd.read_csv(run.folds_path, dtype=str).astype({"repeat": int, "fold": int})
    rows = [_predict(run, wish, folds, patients, truth, label, s, generator) for label, s in wish.signal]
    write_frame(run.predictions_path, pd.concat(rows, ignore_index=True))
    return run


def _truth(target, hidden, wish, generator):
    if target["name"] in wish.truth:
        return list(wish.truth[target["name"]])
    n = len(hidden)
    if target["kind"] == "regression":
        values = [float(round(20 + 8 * h, 2)) for h in hidden]
    elif target["kind"] == "survival":
        times = 30 * np.exp(-0.7 * hidden) * generator.exponential(size=n) + 0.5
        events = generator.random(n) > wish.censored
        values = [(float(round(t, 2)), bool(e)) for t, e in zip(times, events, strict=True)]
    else:
        k = len(target["classes"])
        ranks = np.argsort(np.argsort(hidden + generator.normal(size=n) * 0.3))
        values = [target["classes"][int(rank * k // n)] for rank in ranks]
    if target is not wish.targets[0] or len(wish.targets) == 1:
        for place in range(wish.missing):
            values[place * 2 + 1] = None
    return values


def _rewrite_config(run, wish) -> None:
    config = yaml.safe_load(run.config_path.read_text())
    first = wish.targets[0]
    several = len(wish.targets) > 1
    config["task"] = {
        "target": "+".join(one["name"] for one in wish.targets),
        "level": wish.level,
        "classes": [] if several else list(first.get("classes", [])),
        "kind": "several" if several else first["kind"],
        "positive": None,
        "balance": "none",
        "targets": [dict(one) for one in wish.targets],
    }
    run.write_config(config)


def _cell(value) -> str:
    return "" if value is None else str(value[0] if isinstance(value, tuple) else value)


def _rewrite_cohort(run, wish, patients, truth) -> None:
    cohort = run.cohort()
    first, *others = wish.targets
    places = {patient: place for place, patient in enumerate(patients)}

    def cells(name):
        return [_cell(truth[name][places[p]]) if p in places else "" for p in cohort["patient"]]

    cohort["target"] = cells(first["name"])
    for one in others:
        cohort[f"value:{one['name']}"] = cells(one["name"])
    for one in wish.targets:
        if one["kind"] == "survival":
            seen = {p: truth[one["name"]][place] for p, place in places.items()}
            cohort[f"value:{one['event']}"] = [str(int(seen[p][1])) if seen.get(p) else "" for p in cohort["patient"]]
    write_frame(run.cohort_path, cohort)


def _predict(run, wish, folds, patients, truth, label, signal, generator) -> pd.DataFrame:
    rows = []
    for seed in wish.seeds:
        for (repeat, fold), part in folds.groupby(["repeat", "fold"]):
            key = FoldKey(int(repeat), int(fold), seed)
            members = {name: set(part["patient"][part["part"] == name]) for name in ("validation", "test")}
            frames = {
                name: _rows(wish, own, patients, truth, label, key, signal, generator) for name, own in members.items()
            }
            held = frames["validation"] if len(frames["validation"]) else frames["test"].iloc[:0]
            write_frame(run.validation_path(label, key), held)
            run.write_selection(
                label,
                key,
                Selection(epoch=5 + fold, chosen_by="validation loss", metric="loss", value=0.4, epochs_run=20),
            )
            rows.append(frames["test"])
    return pd.concat(rows, ignore_index=True)


def _rows(wish, members, patients, truth, label, key, signal, generator) -> pd.DataFrame:
    rows = []
    for place, patient in enumerate(patients):
        if patient not in members:
            continue
        own = [f"{patient}_S{n}" for n in range(wish.slides_per_patient)] if wish.level == "slide" else [""]
        for slide in own:
            for target in wish.targets:
                value = truth[target["name"]][place]
                rows.append(
                    {
                        "method": label,
                        "target_name": target["name"],
                        "repeat": key.repeat,
                        "fold": key.fold,
                        "seed": key.seed,
                        "level": wish.level,
                        "patient": patient,
                        "slide": slide,
                        "target": _cell(value),
                        **_answer(target, value, signal, wish.fold_shift * key.fold, generator),
                    }
                )
    frame = pd.DataFrame(rows).astype(object)
    return frame.where(frame.notna(), "")


def _answer(target, value, signal, shift, generator) -> dict:
    noise = float(generator.normal())
    if target["kind"] == "regression":
        weight = signal**2 / (1 + signal**2)
        measured = 20.0 if value is None else value
        return {"prediction": 20 + weight * (measured - 20) + 8 * np.sqrt(weight * (1 - weight)) * noise}
    if target["kind"] == "survival":
        time, event = (20.0, False) if value is None else value
        risk = -signal * np.log(time / 20) + noise + shift
        answer = {"event": "" if value is None else int(event), "risk": float(risk)}
        if target.get("loss") == "discrete":
            scale = 30 * np.exp(-0.5 * (risk - shift))
            for number, cut in enumerate(CUTS, start=1):
                answer |= {f"survival_{number}": float(np.exp(-cut / scale)), f"cut_{number}": cut}
        return answer
    classes = target["classes"]
    centre = (len(classes) - 1) / 2 if value is None else classes.index(value)
    middle = centre + noise * 1.2 / max(signal, 0.1)
    logits = -((np.arange(len(classes)) - middle) ** 2) + shift * np.arange(len(classes))
    odds = np.exp(logits - logits.max())
    probabilities = odds / odds.sum()
    return {f"logit_{name}": float(x) for name, x in zip(classes, logits, strict=True)} | {
        f"prob_{name}": float(x) for name, x in zip(classes, probabilities, strict=True)
    }

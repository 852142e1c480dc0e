"""Intervals: DeLong on the logit scale, a score interval for small samples, and a bootstrap over patients.

None of them is a t-interval over folds: folds share training data, so their spread is no standard error.
All are conditional on the trained models.
"""

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from wsi_mil.statistics.concordance import Concordance
from wsi_mil.statistics.ranking import Bools, Floats, Ints

FEW = 10
"""Below this many patients in a class the normal approximation of DeLong is not trusted."""

SMALL_SAMPLE_RULE = (
    "Wilson's score interval over disjoint pairs: k positive-negative pairs that share no patient are independent "
    "trials with success probability AUC, so the interval for k trials needs no variance estimate; with very few pairs "
    "it is approximate"
)


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A two-sided interval; NaN ends where the figure is not defined."""

    low: float
    high: float
    level: float
    method: str


def auc_interval(part: Concordance, *, level: float = 0.95) -> Interval:
    """DeLong's interval on the logit scale, or the score interval of `SMALL_SAMPLE_RULE`.

    The latter stands in at AUC 0 or 1, with fewer than 10 patients in a class, and where the variance is zero
    (all scores equal), so that no width is ever zero.
    """
    if not np.isfinite(part.auc):
        return Interval(low=float("nan"), high=float("nan"), level=level, method="not defined")
    few = min(part.n_positive, part.n_negative) < FEW
    if few or part.auc in (0.0, 1.0) or part.variance <= 1e-15:
        return wilson_interval(part.auc, part.disjoint_pairs, level=level)
    logit = np.log(part.auc / (1 - part.auc))
    reach = _quantile(level) * np.sqrt(part.variance) / (part.auc * (1 - part.auc))
    low, high = 1 / (1 + np.exp(-(logit - reach))), 1 / (1 + np.exp(-(logit + reach)))
    return Interval(low=float(low), high=float(high), level=level, method=f"{part.source}, logit scale")


def wilson_interval(share: float, trials: int, *, of: str = "disjoint pairs", level: float = 0.95) -> Interval:
    """Score interval of a share over `trials` independent trials; 0 to 1 without a trial. of: what a trial is.

    Its coverage is 95 % on average over the true shares and not at each: with 10 trials it falls to 90 % at a true
    share below 0.95, and lower still nearer to 1, since few outcomes are possible (Brown, Cai and DasGupta 2001). An
    AUC has exactly that coverage when each fold holds one pair; with more pairs than disjoint ones it has more.
    """
    method = f"Wilson score interval, {trials} {of}"
    if trials < 1:
        return Interval(low=0.0, high=1.0, level=level, method=method)
    z = _quantile(level)
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    reach = z * np.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials)) / (1 + z * z / trials)
    return Interval(
        low=float(max(0.0, min(centre - reach, share))),
        high=float(min(1.0, max(centre + reach, share))),
        level=level,
        method=method,
    )


def patient_weights(strata: Ints, *, classes: Ints | None = None, draws: int = 2000, seed: int = 0) -> Floats:
    """How often each patient is drawn in each bootstrap sample (draws, n_patients).

    classes: (n_patients,) of each patient; all the same when not given. Strata never cross classes.
    Within a stratum of size s, s - 1 patients are drawn and weighted s / (s - 1), which keeps the variance right in
    small strata. A stratum of one joins the next of its class; a patient who is alone in a class always counts once.
    """
    classes = np.zeros_like(strata) if classes is None else classes
    generator = np.random.default_rng(seed)
    weights = np.zeros((draws, len(strata)))
    for members in (part for own in _members(classes) for part in _strata_of_two(strata, own)):
        size = len(members)
        if size == 1:
            weights[:, members] = 1.0
            continue
        drawn = generator.multinomial(size - 1, np.full(size, 1 / size), size=draws)
        weights[:, members] = drawn * (size / (size - 1))
    return weights


def percentile_interval(samples: Floats, *, level: float = 0.95) -> Interval:
    """Percentiles of bootstrap samples; undefined samples (a class was not drawn) are left out.

    For small samples and figures near their end they are somewhat too narrow: 0.88 instead of 0.95 for an AUC of 0.95
    with 20 patients a class, where `bca_interval` is better.
    """
    defined = samples[np.isfinite(samples)]
    if not len(defined):
        return Interval(low=float("nan"), high=float("nan"), level=level, method="not defined")
    low, high = np.quantile(defined, [(1 - level) / 2, (1 + level) / 2])
    return Interval(low=float(low), high=float(high), level=level, method="patient bootstrap")


def bca_interval(samples: Floats, *, value: float, influence: Floats, level: float = 0.95) -> Interval:
    """Percentiles moved for bias and skewness (BCa, Efron 1987); undefined samples are left out.

    value: the figure itself.   influence: (n,) how far each patient moves it, as in `Concordance`.
    For an AUC of 0.95 with 20 patients a class it covers about 0.95, where plain percentiles cover about 0.88; plain
    ones stand in where the samples do not surround the value.
    """
    defined = samples[np.isfinite(samples)]
    skew = float(np.sum(influence**3) / max(6 * float(np.sum(influence**2)) ** 1.5, 1e-300))
    below = float(((defined < value) + 0.5 * (defined == value)).mean()) if len(defined) else 0.0
    if not 0 < below < 1:
        return percentile_interval(samples, level=level)
    normal = NormalDist()
    bias = normal.inv_cdf(below)
    places = []
    for tail in ((1 - level) / 2, (1 + level) / 2):
        shifted = bias + normal.inv_cdf(tail)
        places.append(normal.cdf(bias + shifted / max(1 - skew * shifted, 1e-9)))
    low, high = np.quantile(defined, places)
    return Interval(low=float(low), high=float(high), level=level, method="patient bootstrap, BCa")


def bootstrap_auc(positive: Bools, scores: Floats, *, groups: Ints, weights: Floats) -> Floats:
    """Within-group AUC of each bootstrap sample.

    weights: (draws, n) of the rows: a patient's weight stands at each of its rows.   Returns (draws,).
    """
    concordant, pairs = np.zeros(len(weights)), np.zeros(len(weights))
    for group in np.unique(groups):
        up = np.flatnonzero((groups == group) & positive)
        down = np.flatnonzero((groups == group) & ~positive)
        if not len(up) or not len(down):
            continue
        down = down[np.argsort(scores[down], kind="stable")]
        below = np.zeros((len(weights), len(down) + 1))
        np.cumsum(weights[:, down], axis=1, out=below[:, 1:])
        left = np.searchsorted(scores[down], scores[up], side="left")
        right = np.searchsorted(scores[down], scores[up], side="right")
        concordant += np.einsum("bi,bi->b", weights[:, up], (below[:, left] + below[:, right]) / 2)
        pairs += weights[:, up].sum(axis=1) * below[:, -1]
    return _divided(concordant, pairs)


def bootstrap_curves(positive: Bools, scores: Floats, *, weights: Floats) -> tuple[Floats, Floats, Floats]:
    """Weighted hits and false alarms at each distinct score, from the highest down, in every bootstrap sample.

    Returns hits and false alarms (draws, points), and the distinct scores (points,).
    """
    distinct, place = np.unique(-scores, return_inverse=True)
    last = np.searchsorted(np.sort(place, kind="stable"), np.arange(len(distinct)), side="right") - 1
    order = np.argsort(place, kind="stable")
    truth = positive[order].astype(np.float64)
    hits = np.cumsum(weights[:, order] * truth, axis=1)[:, last]
    false_alarms = np.cumsum(weights[:, order] * (1 - truth), axis=1)[:, last]
    return hits, false_alarms, -distinct


def bootstrap_average_precision(positive: Bools, scores: Floats, *, weights: Floats) -> Floats:
    """Average precision of each bootstrap sample (draws,)."""
    hits, false_alarms, _ = bootstrap_curves(positive, scores, weights=weights)
    called = hits + false_alarms
    precision = np.divide(hits, called, out=np.ones_like(hits), where=called > 0)
    steps = np.diff(hits, axis=1, prepend=0.0)
    total = hits[:, -1]
    return _divided((steps * precision).sum(axis=1), total)


def bootstrap_mean(values: Floats, *, weights: Floats) -> Floats:
    """Weighted mean of `values` (n,) in each bootstrap sample (draws,)."""
    return _divided(weights @ values, weights.sum(axis=1))


def _divided(above: Floats, below: Floats) -> Floats:
    undefined: Floats = np.full(len(above), np.nan)
    return np.divide(above, below, out=undefined, where=below > 0)


def _quantile(level: float) -> float:
    return NormalDist().inv_cdf((1 + level) / 2)


def _members(groups: Ints) -> list[Ints]:
    return [np.flatnonzero(groups == group) for group in np.unique(groups)]


def _strata_of_two(strata: Ints, own: Ints) -> list[Ints]:
    """Members of each stratum among the patients `own`, with single ones joined to the next."""
    joined: list[Ints] = []
    for members in (own[places] for places in _members(strata[own])):
        if joined and len(joined[-1]) == 1:
            joined[-1] = np.concatenate([joined[-1], members])
        else:
            joined.append(members)
    if len(joined) > 1 and len(joined[-1]) == 1:
        joined[-2:] = [np.concatenate(joined[-2:])]
    return joined

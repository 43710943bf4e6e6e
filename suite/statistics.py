"""Statistics over seeds: means, differences, their confidence intervals and p-values."""

from typing import NamedTuple

import numpy as np

LEVEL = 0.025  # of each tail: together a 95% confidence interval
ENOUGH = 3  # seeds per sample


def bootstrap_interval(values):
    """The paper's interval of a mean: 95% percentile bootstrap. The plots show it."""
    resampled = np.random.default_rng(0).choice(np.float64(values), (10_000, len(values)))
    return np.percentile(resampled.mean(axis=1), [2.5, 97.5])


# -- Student's t distribution
ANGLES = np.linspace(-np.pi / 2, np.pi / 2, 20_001)


def t_cdf(dof):
    """P(t < sqrt(dof) tan(angle)) for each of ANGLES.

    Over the angle, the density is proportional to cos(angle) ** (dof - 1).
    """
    density = np.cos(ANGLES) ** (dof - 1)
    below = np.cumsum(density) - density / 2  # trapezoidal rule
    return below / below[-1]


def t_tail(t, dof):
    """P(T > t), which equals P(T < -t)."""
    angle = np.arctan(-t / np.sqrt(dof))
    return float(np.interp(angle, ANGLES, t_cdf(dof)))


def t_quantile(tail, dof):
    """The t with P(T > t) = tail."""
    angle = np.interp(tail, t_cdf(dof), ANGLES)
    return float(-np.sqrt(dof) * np.tan(angle))


# -- Means and differences of means
class Estimate(NamedTuple):
    """A mean, or a sum and difference of means, over seeds."""

    value: float
    error: float  # its standard error
    dof: float  # degrees of freedom (Welch-Satterthwaite)
    n: int  # seeds in the smallest sample

    def interval(self):
        """The 95% confidence interval."""
        margin = self.margin()
        return self.value - margin, self.value + margin

    def margin(self):
        return t_quantile(LEVEL, self.dof) * self.error

    def p_above(self):
        """One-sided p-value of the claim that the true value is above 0."""
        return self._tail(self.value)

    def p_below(self):
        return self._tail(-self.value)

    def p(self):
        """Two-sided."""
        return min(1.0, 2 * min(self.p_above(), self.p_below()))

    def _tail(self, distance):
        if self.error == 0:  # all values of each sample are equal
            return 0.0 if distance > 0 else 1.0
        return t_tail(distance / self.error, self.dof)


def estimate(plus, minus=()):
    """The sum of the means of the samples in `plus` minus that of those in `minus`.

    None where a sample has fewer than ENOUGH values. Two samples: Welch's t-test.
    """
    samples = [*plus, *minus]
    n = min(map(len, samples))
    if n < ENOUGH:
        return None
    means, squares = zip(*map(mean_and_squared_error, samples))
    value = sum(means[: len(plus)]) - sum(means[len(plus) :])
    total = sum(squares)
    terms = [square**2 / (len(sample) - 1) for square, sample in zip(squares, samples)]
    dof = total**2 / sum(terms) if total else n  # any, where there is no error
    return Estimate(float(value), float(np.sqrt(total)), float(dof), n)


def mean_and_squared_error(sample):
    """A mean and its squared standard error, both exact where all values are equal."""
    shifted = np.subtract(sample, sample[0])
    return sample[0] + shifted.mean(), shifted.var(ddof=1) / len(sample)


# -- Several tests
def all_above(estimates):
    """One-sided p-values: every value is above 0; at least one is below 0 (Bonferroni)."""
    p_above = max(e.p_above() for e in estimates)
    p_below = min(1.0, len(estimates) * min(e.p_below() for e in estimates))
    return p_above, p_below


def holm(p_values):
    """Holm's correction of the p-values of one family."""
    corrected, largest = [1.0] * len(p_values), 0.0
    for rank, i in enumerate(np.argsort(p_values, kind="stable")):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = largest
    return corrected

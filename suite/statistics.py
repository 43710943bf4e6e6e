"""Statistics over seeds: means, differences, their confidence intervals and p-values."""

from typing import NamedTuple

import numpy as np

LEVEL = 0.025  # of each tail: together a 95% confidence interval
ENOUGH = 3  # seeds per sample


# -- Student's t distribution
ANGLES = np.linspace(-np.pi / 2, np.pi / 2, 20_001)


def t_cdf(dof):
    """P(t < sqrt(dof) tan(angle)) for each of ANGLES.

    Over the angle, the density is proportional to cos(angle) ** (dof - 1).
    """
    density = np.cos(ANGLES) ** (dof - 1)
    below = np.cumsum(density) - density / 2  # trapezoidal rule
    return below / below[-1]


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
    margin: float  # half the width of the 95% confidence interval
    p_below: float  # one-sided p-value of the claim that the true value is below 0

    def interval(self):
        return self.value - self.margin, self.value + self.margin

    def p(self):
        """Two-sided."""
        return 2 * min(self.p_below, 1 - self.p_below)


def estimate(samples, signs=(1,)):
    """The sum of the samples' means, each with its sign; None where seeds are too few.

    For two samples with the signs 1 and -1: Welch's t-test.
    """
    if min(map(len, samples)) < ENOUGH:
        return None
    means, squares = np.transpose([mean_and_squared_error(sample) for sample in samples])
    value = np.dot(signs, means)
    error = np.sqrt(squares.sum())
    dofs = [len(sample) - 1 for sample in samples]
    # Without any error all degrees of freedom are alike
    dof = error**4 / (squares**2 / dofs).sum() if error else dofs[0]
    margin = t_quantile(LEVEL, dof) * error
    angle = np.arctan2(value, error * np.sqrt(dof))
    p_below = np.interp(angle, ANGLES, t_cdf(dof))
    return Estimate(*map(float, (value, error, dof, margin, p_below)))


def mean_and_squared_error(sample):
    """A mean and its squared standard error, both exact where all values are equal."""
    shifted = np.subtract(sample, sample[0])
    return sample[0] + shifted.mean(), shifted.var(ddof=1) / len(sample)


# -- Several tests
def all_above(estimates):
    """One-sided p-values: every value is above 0; at least one is below 0 (Bonferroni)."""
    p_below = min(found.p_below for found in estimates)
    return 1 - p_below, min(1.0, p_below * len(estimates))


def holm(p_values):
    """Holm's correction of the p-values of one family."""
    order = np.argsort(p_values)
    scaled = np.sort(p_values) * np.arange(len(p_values), 0, -1)
    corrected = np.empty(len(p_values))
    corrected[order] = np.maximum.accumulate(scaled).clip(max=1)
    return corrected

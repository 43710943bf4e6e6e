"""Statistics over seeds: means, differences, their confidence intervals and p-values."""

from typing import NamedTuple

import numpy as np

ALPHA = 0.05  # of tests and of 95% confidence intervals
MIN_SEEDS = 3  # seeds per sample


# -- Student's t distribution
ANGLES = np.linspace(-np.pi / 2, np.pi / 2, 20_001)


def t_cdf_table(dof):
    """Return Student's t CDF, P(T < sqrt(dof) tan(angle)), at each of ANGLES.

    This needs no SciPy. The density of the angle is proportional to cos(angle) ** (dof - 1).
    """
    density = np.cos(ANGLES) ** (dof - 1)
    below = np.cumsum(density) - density / 2  # trapezoidal rule
    return below / below[-1]


# -- Means and differences of means
class Estimate(NamedTuple):
    """A mean over seeds, or a signed sum of such means."""

    value: float
    stderr: float  # standard error
    dof: float  # degrees of freedom (Welch-Satterthwaite)
    margin: float  # half the width of the 95% confidence interval
    p_below: float  # one-sided p-value; alternative: the true value is below 0

    def interval(self):
        return self.value - self.margin, self.value + self.margin

    def p(self):
        """Return the two-sided p-value."""
        return 2 * min(self.p_below, 1 - self.p_below)


def estimate(samples, signs=(1,)):
    """Return the Estimate of a signed sum of sample means; None if there are too few seeds.

    Signs 1 and -1 give Welch's t-test.
    """
    if min(map(len, samples)) < MIN_SEEDS:
        return None
    means, squared_stderrs = np.transpose([*map(mean_and_squared_stderr, samples)])
    value = np.dot(signs, means)
    stderr = np.sqrt(squared_stderrs.sum())
    dofs = [len(sample) - 1 for sample in samples]
    # Without variance, the Welch-Satterthwaite formula is 0 / 0
    dof = stderr**4 / (squared_stderrs**2 / dofs).sum() if stderr else dofs[0]
    cdf, scale = t_cdf_table(dof), np.sqrt(dof)
    # P(T > margin / stderr) = ALPHA / 2
    margin = -scale * np.tan(np.interp(ALPHA / 2, cdf, ANGLES)) * stderr
    p_below = np.interp(np.arctan2(value, stderr * scale), ANGLES, cdf)
    return Estimate(value, stderr, dof, margin, p_below)


def mean_and_squared_stderr(sample):
    """Return the mean and its squared standard error, both exact if all values are equal."""
    shifted = np.subtract(sample, sample[0])
    return sample[0] + shifted.mean(), shifted.var(ddof=1) / len(sample)


# -- Multiple tests
def claim_p_values(estimates):
    """Return p-values for the alternatives "all contrasts are positive", "any is negative".

    The first is the largest one-sided p-value (an intersection-union test). The second is the
    smallest, times their number (Bonferroni). Both are doubled, as for two-sided tests, and may
    therefore exceed 1; `holm` clips them.
    """
    smallest = min(x.p_below for x in estimates)
    return 2 * (1 - smallest), 2 * smallest * len(estimates)


def holm(p_values):
    """Return the Holm-corrected p-values of one family."""
    order = np.argsort(p_values)
    scaled = np.sort(p_values) * np.arange(len(p_values), 0, -1)
    corrected = np.maximum.accumulate(scaled).clip(max=1)
    return corrected[np.argsort(order)]  # in the order of p_values

"""Beyond the paper: what in the clock helps? Mamba. The end of training.

These are figures of reverse.py and delayed_add.py.

python delayed_add.py --scale desk --all clocks     # parts of the sinusoid, other clocks, fewer steps
python reverse.py --scale desk --all mamba          # Mamba of one block and of two
python reverse.py --scale desk --all fig2-end       # does the clock only make learning faster?
"""

import numpy as np

from suite.task import BOTH, SEEDS, WITH_CONSTANT, cross
from suite.verdicts import all_of, better, crossing, difference, each_seed, gain, higher, number, with_article

THIRDS = {"0:0.3334": "fast", "0.3334:0.6667": "middle", "0.6667:1": "slow"}
PHASES = {"input": "reading", "output": "answering"}


def add_to(task, title, cell, thirds=False):
    """Two figures at desk scale; `cell` holds all trials' flags; `thirds`: parts of the sinusoid too."""
    rows = cross(**cell, pe=["none", "dup", "sin", "random", "ramp", "counter", "shuffled"], seed=SEEDS)
    rows += cross(**cell, pe="sin", encode=list(PHASES), seed=SEEDS)
    if thirds:
        rows += cross(**cell, pe="sin", bands=list(THIRDS), seed=SEEDS)
    today = cross(**cell | dict(model="mingru"), pe=["none", "dup", "sin"], seed=SEEDS)
    today += cross(**cell | dict(model="mamba"), pe=["none", "dup", "sin"], seed=SEEDS)

    @task.figure("clocks", f"{title}: which clock", {"desk": rows}, x=("pe", "encode", "bands"))
    def clocks(runs):
        whole = runs.where(encode=None, bands=None)
        for pe, missing in (("random", "order"), ("ramp", "a period"), ("shuffled", "continuity")):
            text = f"{title}: the clock is better than one without {missing} ({pe})."
            yield higher(text, whole.values(pe="sin"), whole.values(pe=pe))
        controls = {pe: whole.values(pe=pe) for pe in ("none", "dup")}
        for encode, phase in PHASES.items():
            text = f"{title}: the clock while {phase} alone helps."
            yield better(text, runs.values(encode=encode), controls)
        for bands in runs.levels("bands")[1:]:
            text = f"{title}: the {THIRDS[bands]} third of its frequencies alone helps."
            yield better(text, runs.values(bands=bands), controls)

    @task.figure("models-of-today", f"{title}: minGRU; one block of Mamba", {"desk": today}, picture=False)
    def models_of_today(runs):
        yield gain(runs, f"{title}: the clock helps a minGRU.", model="mingru")
        yield gain(runs, f"{title}: the clock helps one block of Mamba.", model="mamba")


ONE_BLOCK = dict(model="mamba", length=32, hidden=64, embed=64, lr=2e-2, iterations=2000)
DEPTH = dict(model="mamba", length=32, hidden=64, embed=64, iterations=4000)
DEPTHS = (1, 16, 3e-2), (2, 16, 1e-2), (2, 256, 1e-2)  # blocks, K, the rate best for pe none on seed 100


def mamba(task):
    """The figures of Mamba in reverse ordering."""
    rows = cross(**ONE_BLOCK, pe=["none", "constant", "dup", "sin"], vocab=[16, 64, 256, 1024], seed=SEEDS)
    deep = []
    for blocks, vocab, lr in DEPTHS:
        deep += cross(**DEPTH, blocks=blocks, vocab=vocab, lr=lr, pe=WITH_CONSTANT, seed=SEEDS)

    @task.figure("mamba-vocab", "One block of Mamba, L = 32", {"desk": rows})
    def of_one_block(runs):
        for vocab in runs.levels("vocab"):
            yield gain(runs, f"The clock helps one block of Mamba at K = {vocab}.", vocab=vocab)

    @task.figure("mamba", "Mamba of one block and of two", {"desk": deep}, x=("pe", "blocks", "vocab"))
    def of_depth(runs):
        for blocks, vocab, _ in DEPTHS:
            text = f"The clock helps Mamba of {blocks} block{'s' * (blocks > 1)} at K = {vocab}."
            yield gain(runs, text, blocks=blocks, vocab=vocab)
        value = lambda pe, blocks: runs.values(pe=pe, blocks=blocks, vocab=16)
        more = difference([value("sin", 1), value("none", 2)], [value("none", 1), value("sin", 2)])
        yield all_of("The clock helps one block more than two, at K = 16.", {"over none": more})


# -- The end of training. All of this was fixed before its trials: RESULTS.md, Protocol
CELLS = {  # model: K, the usual rate and iterations, multiples of these, seeds
    "gru": (32, 3e-3, 30_000, (1, 4), range(11, 15)),
    "lstm": (64, 3e-3, 30_000, (1, 4), range(11, 15)),
    "s4d": (256, 1e-2, 10_000, (1, 4, 8), range(11, 17)),
}
BEST_RATE = {}  # model: {"none": rate, "sin": rate}, from fig2-rates; fig2-end has these models


def to_find_rates():
    rows = []
    for model, (vocab, rate, usual, _, _) in CELLS.items():
        cell = dict(model=model, vocab=vocab, length=32, iterations=usual, seed=100)
        rows += cross(**cell, pe=BOTH, lr=[rate / 2, rate, rate * 2])
    return rows


def to_the_end():
    rows = []
    for model, best in BEST_RATE.items():
        vocab, _, usual, multiples, seeds = CELLS[model]
        cell = dict(model=model, vocab=vocab, length=32, seed=seeds)
        iterations = [usual * times for times in multiples]
        for pe in BOTH:
            rows += cross(**cell, pe=pe, lr=best[pe], iterations=iterations)
        rows += cross(**cell, pe="constant", lr=best["none"], iterations=iterations[-1])
    return rows


def best_rates(runs):
    for model in runs.levels("model"):
        for pe in BOTH:
            tried = runs.where(model=model, pe=pe)
            if tried and len(tried) == len(tried.rows):
                best = max(tried, key=lambda result: number(result, "token_accuracy"))
                yield f"The best rate of {with_article(model)} with {pe} is {best.flags['lr']:g}."


def worths(runs):
    """How much training `none` needs for what the clock has at 1 time, log2 of its multiple, of each seed.

    Between the lengths of training `none` goes along a straight line in log2.
    """
    iterations = sorted(runs.levels("iterations"))
    places, found = np.log2(np.divide(iterations, iterations[0])), []
    for seed, none in each_seed(runs, "iterations", pe="none").items():
        for clock in runs.values(pe="sin", iterations=iterations[0], seed=seed):
            found.append(crossing(places, np.negative(none), -clock))
    return found


def worth_in_training(runs):
    for model in runs.levels("model"):
        of, name = runs.where(model=model), with_article(model)
        found = worths(of)
        if worth := difference([found]):
            mean, low, high = np.exp2([worth.value, *worth.interval()])
            most = max(of.levels("iterations")) // min(of.levels("iterations"))
            ends = sum(at in (0, np.log2(most)) for at in found)
            text = f"What {name} has with the clock at 1 time the training, it has without at"
            times = f"{mean:.2f} [{low:.2f}, {high:.2f}] times"
            yield f"{text} {times}; {ends} of {len(found)} seeds at an end (1 or {most} times)."


def readings(runs):
    """What one model's claim at the longest training means: if it is yes, and if not.

    What `none` gains is paired: a seed's trials share their first weights, data and held-out set.
    """
    none, sin = (each_seed(runs, "iterations", pe=pe).values() for pe in BOTH)
    ends = [accuracies[-1] for accuracies in none]
    lead = difference([[accuracies[-1] for accuracies in sin]], [ends])
    last_gain = difference([[accuracies[-1] - accuracies[-2] for accuracies in none]])
    if lead is None or last_gain is None:
        return "", ""
    if np.mean(ends) > 0.97:
        return ("left out, none ends above .97",) * 2
    times = max(runs.levels("iterations")) // min(runs.levels("iterations"))
    yes = f"still ahead after {times} times the training; the end was not reached"
    if last_gain.interval()[1] < 0.01:
        yes = "the clock raises where training ends"
    low, high = lead.interval()
    otherwise = "a speed-up alone" if -0.02 <= low and high <= 0.02 else "undecided"
    gained = f"(none gained {last_gain.words()} from the last lengthening)"
    return f"{yes} {gained}", f"{otherwise} {gained}"


def end_of_training(task):
    """The figures of how far training goes, in reverse ordering."""
    rates, rows = {"desk": to_find_rates()}, {"desk": to_the_end()}
    told = dict(x="iterations", notes=(worth_in_training,))

    @task.figure("fig2-rates", "Rates, seed 100", rates, notes=(best_rates,), picture=False)
    def of_rates(runs):
        """No verdicts: a rate is the best that was seen."""
        return []

    @task.figure("fig2-end", "Reverse ordering, the end of training", rows, **told)
    def of_the_end(runs):
        for model, (vocab, _, usual, multiples, _) in CELLS.items():
            of, times = runs.where(model=model), multiples[-1]
            name = with_article(model)
            text = f"After {times} times the training the clock helps {name} at K = {vocab}."
            claim = gain(of, text, primary="end", iterations=times * usual)
            yield claim._replace(readings=readings(of))

"""Beyond the paper: what in the clock helps? And Mamba. Figures of reverse.py and delayed_add.py.

python delayed_add.py --scale desk --all clocks     # parts of the sinusoid, other clocks, fewer steps
python reverse.py --scale desk --all mamba          # Mamba of one block and of two
"""

from suite.task import SEEDS, WITH_CONSTANT, cross
from suite.verdicts import all_of, better, difference, gain, higher

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

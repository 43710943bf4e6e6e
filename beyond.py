"""Beyond the paper: what in the clock helps? Figures and claims that reverse.py and delayed_add.py share.

python delayed_add.py --scale quick --all amplitude     # how long its vectors are
python delayed_add.py --scale quick --all bands         # fast frequencies or slow ones
python reverse.py --scale quick --all phases            # while the input is read, or answered
python reverse.py --scale quick --all clocks            # that it is smooth, that it returns
python reverse.py --scale quick --all models-of-today   # recurrences of 2023 and 2024
"""

from cli import SEEDS, WITH_DUP, cross

from report import ACCURACY, NONE, SIN, Claim, Figure, accuracy, helps

SHARED = ["amplitude", "phases", "clocks", "models-of-today"]
EVERY = ["bands", *SHARED]
THIRDS = {"0:0.3334": "fast", "0.3334:0.6667": "middle", "0.6667:1": "slow"}
WORDS = THIRDS | {"0:1": "all", "input": "reading", "output": "answering", "both": "in both"}
UNIT, LONG = 1.0, 8.0  # of 64 columns: the length of learned vectors as they start


def grids(cell, names):
    """{figure: trials} of a model and a vocabulary; None leaves a flag at its default."""
    lengths, phases = [UNIT, LONG], ["input", "output", "both"]
    found = {
        "amplitude": cross(**cell, pe=["none", "dup"], amplitude=None, seed=SEEDS)
        + cross(**cell, pe=["sin", "random", "learned"], amplitude=lengths, seed=SEEDS),
        "bands": cross(**cell, pe="none", bands=None, seed=SEEDS)
        + cross(**cell, pe="sin", bands=[*THIRDS, "0:1"], seed=SEEDS),
        "phases": cross(**cell, pe="none", encode=None, seed=SEEDS)
        + cross(**cell, pe="sin", encode=phases, seed=SEEDS),
        "clocks": cross(**cell, pe=[*WITH_DUP, "random", "ramp", "counter", "shuffled"], seed=SEEDS),
        "models-of-today": cross(**cell | dict(model=["mingru", "mamba"]), pe=WITH_DUP, seed=SEEDS),
    }
    return {name: found[name] for name in names}


def points(flag=None):
    """Curves that are points side by side, each with the name of its encoding and its value of the flag."""

    def curves(flags, metrics):
        value = flags.get(flag)
        name = flags["pe"] if value is None else f"{flags['pe']}\n{WORDS.get(value, value)}"
        yield flags["model"].upper(), flags["pe"], {name: accuracy(metrics)}

    return curves


FIGURES = {  # name: what the title says, the x axis, the flag that it stands for beside the encoding
    "amplitude": ("which length", "length", "amplitude"),
    "bands": ("which frequencies", "frequencies", "bands"),
    "phases": ("which steps", "encoded steps", "encode"),
    "clocks": ("which clock", "encoding", None),
    "models-of-today": ("models of today", "encoding", None),
}


def figures(names, task):
    found = {}
    for name in names:
        what, x, flag = FIGURES[name]
        found[name] = Figure(f"{task}: {what}", ACCURACY, x, points(flag), beyond=True)
    return found


LONG_SIN, LONG_LEARNED = SIN | dict(amplitude=LONG), dict(pe="learned", amplitude=LONG)
READING, ANSWERING, ALWAYS = (SIN | dict(encode=phase) for phase in ("input", "output", "both"))
ROWS = [  # figure, what it says, better, worse
    ("amplitude", "a longer sin is better", LONG_SIN, SIN | dict(amplitude=UNIT)),
    ("bands", "the fast third of the frequencies alone helps", SIN | dict(bands="0:0.3334"), NONE),
    ("bands", "the middle third alone helps", SIN | dict(bands="0.3334:0.6667"), NONE),
    ("bands", "the slow third alone helps", SIN | dict(bands="0.6667:1"), NONE),
    ("phases", "the encoding helps while reading alone", READING, NONE),
    ("phases", "the encoding helps while answering alone", ANSWERING, NONE),
    ("phases", "both phases are better than reading alone", ALWAYS, READING),
    ("phases", "both phases are better than answering alone", ALWAYS, ANSWERING),
    ("clocks", "more than telling steps apart: sin is better than random", SIN, dict(pe="random")),
    ("clocks", "continuity helps: sin is better than shuffled", SIN, dict(pe="shuffled")),
    ("clocks", "smoothness helps: sin is better than counter", SIN, dict(pe="counter")),
    ("clocks", "periods help: sin is better than ramp", SIN, dict(pe="ramp")),
]
OF_LEARNED = "learned vectors are not better than a sin as long"
CLAIMS = [Claim(figure, text, accuracy, better, worse) for figure, text, better, worse in ROWS]
CLAIMS += [
    Claim("amplitude", OF_LEARNED, accuracy, LONG_LEARNED, LONG_SIN, no_gain=True),
    *helps("models-of-today", "{model}", per="model"),
]


def claims(names):
    return [claim for claim in CLAIMS if claim.figure in names]

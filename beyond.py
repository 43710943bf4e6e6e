"""Beyond the paper: what in the clock helps? Figures and claims that reverse.py and delayed_add.py share.

python delayed_add.py --scale quick --all amplitude     # how long its vectors are
python delayed_add.py --scale quick --all bands         # fast frequencies or slow ones
python reverse.py --scale quick --all phases            # while the input is read, or answered
python reverse.py --scale quick --all clocks            # that it is smooth, that it returns
python reverse.py --scale quick --all models-of-today   # recurrences of 2023 and 2024
"""

from suite.claims import (
    ACCURACY,
    NO_GAIN,
    SIN,
    Claim,
    Figure,
    accuracy,
    gains,
    helps,
    name_of,
    uniform_chance,
)
from suite.flags import SEEDS, WITH_DUP, cross

SHARED = ["amplitude", "phases", "clocks", "models-of-today"]
EVERY = ["bands", *SHARED]
THIRDS = {"0:0.3334": "fast", "0.3334:0.6667": "middle", "0.6667:1": "slow"}
WORDS = THIRDS | {"0:1": "all", "input": "reading", "output": "answering", "both": "in both"}
UNIT, LONG = 1.0, 8.0  # --amplitude: the sinusoid's, and that of learned vectors of 64 columns as they start


def grids(cell, names):
    """{figure: trials} of a model and a vocabulary; None leaves a flag at its default."""

    def beside_controls(pe, flag, values):
        controls = cross(**cell, pe=["none", "dup"], **{flag: None}, seed=SEEDS)
        return controls + cross(**cell, pe=pe, **{flag: values}, seed=SEEDS)

    found = {
        "amplitude": beside_controls(["sin", "random", "learned"], "amplitude", [UNIT, LONG]),
        "bands": beside_controls("sin", "bands", [*THIRDS, "0:1"]),
        "phases": beside_controls("sin", "encode", ["input", "output", "both"]),
        "clocks": cross(**cell, pe=[*WITH_DUP, "random", "ramp", "counter", "shuffled"], seed=SEEDS),
        "models-of-today": cross(**cell | dict(model=["mingru", "mamba"]), pe=WITH_DUP, seed=SEEDS),
    }
    return {name: found[name] for name in names}


def points(flag=None):
    """Curves that are points side by side, each with the name of its encoding and its value of the flag."""

    def curves(outcome):
        flags = outcome.flags
        value = flags.get(flag)
        name = flags["pe"] if value is None else f"{flags['pe']}\n{WORDS.get(value, value)}"
        yield name_of(flags["model"]), flags["pe"], {name: accuracy(outcome)}

    return curves


FIGURES = {  # name: what the title says, the x axis, the flag that it stands for beside the encoding
    "amplitude": ("how long vectors", "encoding, length of its vectors", "amplitude"),
    "bands": ("which frequencies", "encoding, its frequencies", "bands"),
    "phases": ("which steps", "encoding, its steps", "encode"),
    "clocks": ("which clock", "encoding", None),
    "models-of-today": ("models of today", "encoding", None),
}


def figures(names, task):
    found = {}
    for name in names:
        what, x, flag = FIGURES[name]
        found[name] = Figure(f"{task}: {what}", ACCURACY, x, points(flag), beyond=True, chance=uniform_chance)
    return found


def sin(**flags):
    return SIN | flags


READING, ANSWERING, ALWAYS = (sin(encode=phase) for phase in ("input", "output", "both"))
FAST, MIDDLE, SLOW = (sin(bands=third) for third in THIRDS)
ALONE = [  # figure, what helps, the trials that have it
    ("bands", "the fast third of the frequencies alone", FAST),
    ("bands", "the middle third alone", MIDDLE),
    ("bands", "the slow third alone", SLOW),
    ("phases", "the encoding while reading alone", READING),
    ("phases", "the encoding while answering alone", ANSWERING),
]
ROWS = [  # figure, what it says, better, worse
    ("amplitude", "a longer sin is better", sin(amplitude=LONG), sin(amplitude=UNIT)),
    ("bands", "the fast third alone is better than all frequencies", FAST, sin(bands="0:1")),
    ("phases", "both phases are better than reading alone", ALWAYS, READING),
    ("phases", "both phases are better than answering alone", ALWAYS, ANSWERING),
    ("phases", "reading alone is better than answering alone", READING, ANSWERING),
    ("clocks", "more than telling steps apart: sin is better than random", SIN, dict(pe="random")),
    ("clocks", "continuity helps: sin is better than shuffled", SIN, dict(pe="shuffled")),
    ("clocks", "smoothness helps: sin is better than counter", SIN, dict(pe="counter")),
    ("clocks", "periods help: sin is better than ramp", SIN, dict(pe="ramp")),
]
CLAIMS = [Claim(figure, text, accuracy, better, worse) for figure, text, better, worse in ROWS]
for figure, what, trials in ALONE:
    CLAIMS += gains(figure, f"{what} helps", trials)
for length in (dict(amplitude=UNIT), dict(amplitude=LONG)):
    text = f"learned vectors are not better than sin, both of length {length['amplitude']:g}"
    CLAIMS += [Claim("amplitude", text, accuracy, dict(pe="learned") | length, sin(**length), margin=NO_GAIN)]
CLAIMS += helps("models-of-today", "{model}", per="model")


def claims(names):
    return [claim for claim in CLAIMS if claim.figure in names]

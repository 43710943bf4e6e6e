"""Beyond the paper: what in the clock helps? Figures and claims that reverse.py and delayed_add.py share.

python delayed_add.py --scale quick --all amplitude     # how long its vectors are
python delayed_add.py --scale quick --all bands         # fast frequencies or slow ones
python reverse.py --scale quick --all phases            # at the steps that read, or at those that answer
python reverse.py --scale quick --all clocks            # its smoothness, its periods
python reverse.py --scale quick --all models-of-today   # recurrences of 2023 and 2024
python reverse.py --scale quick --all mamba             # Mamba, whose states rotate or do not
python reverse.py --scale quick --all mamba-vocab       # Mamba at several vocabularies
"""

from suite.claims import (
    ACCURACY,
    CONSTANT,
    DUP,
    NO_GAIN,
    NONE,
    SIN,
    Claim,
    Figure,
    accuracy,
    gains,
    grows,
    helps,
    name_of,
    uniform_chance,
)
from suite.flags import BOTH, SEEDS, WITH_CONTROLS, WITH_DUP, cross

SHARED = ["amplitude", "phases", "clocks", "models-of-today", "mamba"]
IN_REVERSAL, IN_ADDITION = [*SHARED, "mamba-vocab"], ["bands", *SHARED]
THIRDS = {"0:0.3334": "fast", "0.3334:0.6667": "middle", "0.6667:1": "slow"}
WORDS = THIRDS | {"0:1": "all", "input": "reading", "output": "answering", "both": "in both"}
LONGER = 4  # times the iterations
UNIT, LONG = 1.0, 8.0  # --amplitude: the sinusoid's, and that of learned vectors of 64 columns as they start


def mamba(vocab, iterations, lr):
    """Mamba plain; trained longer; with rotating or slow states; without its convolution."""
    cell = dict(model="mamba", vocab=vocab, lr=lr)
    unchanged = dict(rotate=None, slow=None, no_conv=None)
    plain, longer = unchanged | dict(iterations=iterations), unchanged | dict(iterations=LONGER * iterations)
    encodings = [*WITH_CONTROLS, "random", "ramp", "counter", "shuffled"]
    return [
        *cross(**cell, **plain, pe=encodings, seed=SEEDS),
        *cross(**cell, **longer, pe=["none", "dup"], seed=SEEDS),
        *cross(**cell, **plain | dict(rotate=True), pe=[*WITH_DUP, "random"], seed=SEEDS),
        *cross(**cell, **plain | dict(slow=True), pe=BOTH, seed=SEEDS),
        *cross(**cell, **plain | dict(no_conv=True), pe=BOTH, seed=SEEDS),
    ]


def grids(cell, names, for_mamba):
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
        "mamba": mamba(**for_mamba),
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


def kinds(outcome):
    """As points, with a panel for every kind of Mamba."""
    flags = outcome.flags
    panel = "Mamba"
    if flags["rotate"]:
        panel = "Mamba, rotating states"
    elif flags["slow"]:
        panel = "Mamba, slow states"
    elif flags["no_conv"]:
        panel = "Mamba without its convolution"
    yield panel, flags["pe"], {f"{flags['pe']}\n{flags['iterations']:,}": accuracy(outcome)}


FIGURES = {  # name: what the title says, the x axis, the curves
    "amplitude": ("how long vectors", "encoding, length of its vectors", points("amplitude")),
    "bands": ("which frequencies", "encoding, its frequencies", points("bands")),
    "phases": ("which steps", "encoding, its steps", points("encode")),
    "clocks": ("which clock", "encoding", points()),
    "models-of-today": ("models of today", "encoding", points()),
    "mamba": ("Mamba", "encoding, iterations", kinds),
    "mamba-vocab": ("Mamba's vocabulary", "vocab", None),
}


def figures(names, task):
    found = {}
    for name in names:
        what, x, curves = FIGURES[name]
        found[name] = Figure(f"{task}: {what}", ACCURACY, x, curves, beyond=True, chance=uniform_chance)
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
ROWS = [  # figure, what it says, the trials above, the trials below
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
CLAIMS = [Claim(figure, text, accuracy, higher, lower) for figure, text, higher, lower in ROWS]
for figure, what, trials in ALONE:
    CLAIMS += gains(figure, f"{what} helps", trials)
for length in (dict(amplitude=UNIT), dict(amplitude=LONG)):
    text = f"learned vectors are not better than sin, both of length {length['amplitude']:g}"
    CLAIMS += [Claim("amplitude", text, accuracy, dict(pe="learned") | length, sin(**length), margin=NO_GAIN)]
CLAIMS += helps("models-of-today", "{model}", per="model")

PLAIN = dict(rotate=None, slow=None, no_conv=None, iterations=min)
ROTATING, SLOW_STATES, NO_CONV = (PLAIN | {flag: True} for flag in ("rotate", "slow", "no_conv"))
LONG_TRAINED = PLAIN | dict(iterations=max)
RANDOM, RAMP, COUNTER, SHUFFLED = (dict(pe=pe) | PLAIN for pe in ("random", "ramp", "counter", "shuffled"))
MAMBA_ROWS = [  # what it says, the trials above, the trials below
    ("the convolution helps without a clock", NONE | PLAIN, NONE | NO_CONV),
    ("slow states help without a clock", NONE | SLOW_STATES, NONE | PLAIN),
    ("rotating states help without a clock", NONE | ROTATING, NONE | PLAIN),
    (
        "that states rotate, not that they are slow, helps without a clock",
        NONE | ROTATING,
        NONE | SLOW_STATES,
    ),
    ("a ramp is a worse clock than random vectors", RANDOM, RAMP),
    ("a ramp is a worse clock than a counter", COUNTER, RAMP),
    ("a ramp is a worse clock than shuffled sinusoids", SHUFFLED, RAMP),
]
NOT_BETTER = [
    ("as many inputs without a clock do not help (dup)", DUP | PLAIN, NONE | PLAIN),
    ("as many inputs without a clock do not help (constant)", CONSTANT | PLAIN, NONE | PLAIN),
    ("four times the training does not help without a clock", NONE | LONG_TRAINED, NONE | PLAIN),
    ("leaving the convolution out does not help without a clock", NONE | NO_CONV, NONE | PLAIN),
    ("a clock does not do more than rotating states", SIN | PLAIN, NONE | ROTATING),
    ("sin is not better than random vectors", SIN | PLAIN, RANDOM),
]
CLAIMS += helps("mamba", "Mamba", primary=True, **PLAIN)
SHRINKS = "Mamba: rotating states shrink the clock's help"
CLAIMS += [
    Claim("mamba", SHRINKS, accuracy, SIN | PLAIN, SIN | ROTATING, over=NONE, controls=(DUP,), primary=True),
    Claim("mamba", "Mamba: half is right after four times the training", accuracy, NONE | LONG_TRAINED, 0.5),
    Claim(
        "mamba",
        "Mamba: a clock is worth more than four times the training",
        accuracy,
        SIN | PLAIN,
        NONE | LONG_TRAINED,
        controls=(DUP,),
    ),
]
CLAIMS += [Claim("mamba", f"Mamba: {text}", accuracy, higher, lower) for text, higher, lower in MAMBA_ROWS]
CLAIMS += [
    Claim("mamba", f"Mamba: {text}", accuracy, higher, lower, margin=NO_GAIN)
    for text, higher, lower in NOT_BETTER
]
CLAIMS += helps("mamba", "Mamba with rotating states", **ROTATING)
CLAIMS += helps("mamba", "Mamba without its convolution", **NO_CONV)
CLAIMS += helps("mamba-vocab", "Mamba at K = {vocab}", per="vocab")
CLAIMS += grows("mamba-vocab")


def claims(names):
    return [claim for claim in CLAIMS if claim.figure in names]

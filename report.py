"""Tables, pictures and verdicts of trials.

    python report.py                                   # all figures
    python report.py reverse.py fig2                   # one figure; without its name all
    python report.py reverse.py --scale desk --out results
    python report.py runs                              # every finished trial in a folder
    python report.py --write RESULTS.md --out results  # desk scale, between its two markers

Other flags choose trials, as with --all. yes: the 95% interval of the difference (Welch's t)
lies above zero, for a gain over each of the encodings named; no: below zero, of a gain over
one of them, whose p is multiplied by their number; undecided: neither is shown. "Does not
help" is yes where the interval lies below a margin. p is two-sided. In tables the interval is
the paper's, of a mean, by percentile bootstrap.
"""

import argparse
import functools
import importlib
import itertools
import json
import math
import os
import sys
import textwrap
from collections import defaultdict
from pathlib import Path

import numpy as np

import bench
from common import Refused
from lm_shakespeare import Shakespeare
from stability import Stability
from suite import cli, files, pictures
from suite.verdicts import Result, Results, bootstrap_interval, holm, number

TASKS = [*bench.OF_THE_PAPER, Stability, Shakespeare]
BEGIN = "<!-- made by python report.py --write from here on: edit above this line only -->"
END = "<!-- made by python report.py --write up to here: edit below this line only -->"


# -- Finished trials
def make_result(trial, content, figure):
    """The Result in a file; raises where it has other flags, or lacks what a report says."""
    # A file that does not name these is of other flags
    named = dict.fromkeys(["seed", *trial.task.folder_words])
    if what := files.compare_flags(named | content | content["config"], trial.task.config):
        raise ValueError(what)
    result = Result(
        flags=trial.row,
        metrics=content.get("metrics", content),
        folder=trial.folder,
        config=content["config"],
        seconds=float(content["seconds"]),
        processes=(*map(dict, content.get("earlier", [])), content),
    )
    for name, metric in figure.metrics.items():
        x = number(result, metric)
        if not math.isfinite(x) or ("accuracy" in name and not 0 <= x <= 1):
            raise ValueError(f"{name} {x}")
    if figure.curves:
        list(figure.curves(result))  # raises where they cannot be drawn
    return result


@functools.cache
def load(kind, name, scale, out, words):
    """A figure's trials, and the Results of those done. What cannot be used is named."""
    args, given = cli.parse(kind, ["--scale", scale, "--out", str(out), *words])
    trials = cli.trials_of_figure(kind, args, given, name)
    found = []
    for trial in trials:
        path = trial.folder / trial.task.file
        try:
            if content := files.read_json(path):
                found.append(make_result(trial, content, kind.figures[name]))
        except Exception as error:  # noqa: BLE001 - whatever it is, the others are shown
            print(f"left out: {path}: {error!r}")
    fingerprints = "text_sha256", "tokens_sha256"
    texts = {str([result.config.get(name) for name in fingerprints]) for result in found}
    if len(texts) > 1:
        print(f"left out: all {len(found)} trials, which are of {len(texts)} different texts")
        found = []
    return trials, Results(found, [trial.row for trial in trials])


def figures_at(scale, kinds=TASKS):
    """Yields (kind, name) of every figure that has trials at this scale."""
    for kind in kinds:
        for name, figure in kind.figures.items():
            if figure.grids.get(scale):
                yield kind, name


@functools.cache
def verdicts_at(scale, out):
    """{(script, figure): [Verdict]}, each family of primary ones corrected (Holm)."""
    keys = []
    verdicts = []
    for kind, name in figures_at(scale):
        _, results = load(kind, name, scale, out, ())
        for verdict in kind.figures[name].verdicts(results):
            keys.append((kind.script(), name))
            verdicts.append(verdict)
    found = defaultdict(list)
    for key, verdict in zip(keys, holm(verdicts)):
        found[key].append(verdict)
    return found


# -- What a report says of a figure
def short(x, digits=3):
    """A number in few characters."""
    if abs(x) >= 1000:
        return f"{x:,.0f}"
    if abs(x) >= 10:
        return f"{x:.4g}"
    written = f"{x:.{digits}f}"
    return written.replace("0.", ".", 1) if abs(x) < 1 else written


def align(rows):
    """Lines of columns."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        yield "  ".join(word.ljust(width) for word, width in zip(row, widths)).rstrip()


def table(figure, results):
    """A row for each cell: trials that differ in their seed alone."""
    flags = dict.fromkeys(flag for row in results.rows for flag in row)
    flags = [flag for flag in flags if flag not in ("seed", "model")]
    models = results.levels("model")
    varying = []
    for flag in flags:
        if any(len(results.levels(flag, model=model)) > 1 for model in models):
            varying.append(flag)
    for model in models:
        same = {flag: results.levels(flag, model=model)[0] for flag in flags}
        kept = {k: v for k, v in same.items() if k not in varying and v is not None}
        if words := cli.as_words(kept):
            yield f"{model or 'all'}: {' '.join(words)}"
    if len(models) > 1:
        varying.insert(0, "model")
    names = [flag.replace("_", "-") for flag in varying]
    first, *others = figure.metrics
    rows = [[*names, first, "interval", "n", *others, "each seed"]]
    for cell in dict.fromkeys(tuple(row.get(flag) for flag in varying) for row in results.rows):
        there = results.where(**dict(zip(varying, cell)))
        if there:
            words = ["-" if value is None else str(value) for value in cell]
            rows.append([*words, *describe_cell(figure, there)])
    yield from align(rows)


def describe_cell(figure, results):
    """Mean, interval, how many, the means of the other metrics, and each seed's number."""
    first, *others = figure.metrics.values()
    values = results.values(first)
    interval = ""
    if len(values) > 1:
        interval = "-".join(map(short, bootstrap_interval(values)))
    means = [short(np.mean(results.values(metric))) for metric in others]
    each = " ".join(short(value, 2) for value in values)
    return [short(np.mean(values)), interval, str(len(values)), *means, each]


def sentence(verdict):
    """A verdict in one line."""
    line = verdict.word
    if verdict.primary:
        line += " (primary, p corrected)"
    line += f": {verdict.text}"
    if verdict.numbers:
        p = "< .001" if verdict.p < 0.001 else f"= {verdict.p:.3f}"
        line += f" {verdict.numbers}, p {p}"
    if_yes, if_not = verdict.readings
    reading = if_yes if verdict.word == "yes" else if_not
    if reading:
        line += f"; read as: {reading}"
    return line


def made_by(results):
    """How many trials, how long they took, and what made them."""
    n = f"{len(results)} of {len(results.rows)} trials"
    if not results:
        return n
    seconds = np.median([result.seconds for result in results])
    processes = []
    changed = 0
    for result in results:
        processes += result.processes
        changed += any(process.get("dirty") for process in result.processes)

    def list_different(name, length=40):
        return ", ".join(sorted({str(process.get(name))[:length] for process in processes}))

    changes = f" with local changes ({changed} of {len(results)})" if changed else ""
    where = f"{list_different('device')}; torch {list_different('torch')}"
    made = f"commit {list_different('commit', 7)}{changes}"
    return f"{n}, median {seconds:,.0f} s; {where}; {made}"


def judge(kind, name, scale, out, trials, results):
    """Yields verdicts: of a figure's own seeds corrected, of other seeds not."""
    whole, _ = load(kind, name, scale, out, ())
    these = {trial.folder for trial in trials}
    grid = {trial.folder for trial in whole}
    if {folder.parent for folder in these} != {folder.parent for folder in grid}:
        yield "No verdicts: these are not all cells of the figure, or they have other flags."
    elif kind not in TASKS or these != grid:
        for verdict in kind.figures[name].verdicts(results):
            yield sentence(verdict._replace(primary=""))
    elif scale != "quick":  # a first look has no verdicts
        yield from map(sentence, verdicts_at(scale, out)[kind.script(), name])


def section(kind, name, scale, out, words=(), folder="."):
    """The lines about a figure, on the screen or on a page in this folder."""
    figure = kind.figures[name]
    trials, results = load(kind, name, scale, out, words)
    yield f"\n### {kind.script()} {name}"
    yield f"{figure.title}, {scale} scale. {made_by(results)}."
    if not results:
        return
    part = "-part" if words else ""
    path = Path(out, "figures", f"{kind.name}-{name}-{scale}{part}.svg")
    if figure.picture:
        if pictures.CAN_DRAW:
            pictures.draw(figure, results, path)
        if path.exists():
            yield f"\n![{figure.title}]({os.path.relpath(path, folder)})"
        else:
            yield "`pip install matplotlib` draws this."
    yield "```text"
    yield from table(figure, results)
    yield "```"
    verdicts = judge(kind, name, scale, out, trials, results)
    for line in itertools.chain(figure.notes(results), verdicts):
        yield f"- {line}"


# -- Trials that belong to no figure
def list_trials(folder):
    """A line for every finished trial in a folder: where it is, and its numbers."""
    rows = []
    for path in sorted(Path(folder).rglob("result.json")):
        numbers = []
        try:
            for name, x in files.read_json(path)["metrics"].items():
                if isinstance(x, int | float):
                    numbers.append(f"{name.replace('_', ' ')} {short(x)}")
        except Exception as error:  # noqa: BLE001 - whatever it is, the others are shown
            print(f"left out: {path}: {error!r}")
        else:
            rows.append([str(path.parent.relative_to(folder)), ", ".join(numbers)])
    if not rows:
        raise Refused(f"{folder} has no finished trial")
    yield from align(rows)


# -- RESULTS.md: made between two markers; a person wrote what is above and below them
def page(out, folder):
    """The lines between the markers."""
    for kind, name in figures_at("desk"):
        yield from section(kind, name, "desk", out, folder=folder)
    for path in sorted(Path(out).glob("bench/*.json")):
        content = json.loads(path.read_text())
        yield f"\n### bench.py, {path.stem}"
        yield "```text"
        yield from bench.table(content)
        yield from bench.costs(content)
        yield "```"


def write_page(path, out):
    """Make the page anew between its markers, whole or not at all."""
    path = Path(path).resolve()
    head, _, rest = path.read_text().partition(BEGIN)
    _, marker, tail = rest.partition(END)
    if not marker:
        raise Refused(f"{path} needs two lines, {BEGIN} and {END}")
    made = "\n".join(page(out, path.parent))
    files.write(path, f"{head}{BEGIN}\n{made}\n\n{END}{tail}".encode())


# -- The command line
def find_kind(script):
    """The subclass of Task in a script, be it one of this suite's or a user's."""
    path = Path(script)
    if not path.is_file():
        raise Refused(f"there is no {script}")
    sys.path.insert(0, str(path.resolve().parent))
    for found in vars(importlib.import_module(path.stem)).values():
        here = isinstance(found, type) and found.__module__ == path.stem
        if here and "figures" in vars(found):
            return found
    raise Refused(f"{script} has no figures")


def main():
    parser = cli.Parser(
        "report.py",
        usage="report.py [SCRIPT [FIGURE]] [flags]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--scale", default="paper", help="of figures (paper)")
    parser.add_argument("--out", default="runs", help="folder of all trials (runs)")
    parser.add_argument("--write", metavar="FILE", help="make this page")
    # Names end at the first flag: argparse would take a value of a script's flags for one
    names = list(itertools.takewhile(lambda word: not word.startswith("-"), sys.argv[1:]))
    args, words = parser.parse_known_args(sys.argv[1 + len(names) :])
    return cli.exit_code("report.py", lambda: dispatch(args, names, tuple(words)))


def dispatch(args, names, words):
    if args.write:
        write_page(args.write, args.out)
        return 0
    if names and Path(names[0]).is_dir():
        print(*list_trials(names[0]), sep="\n")
        return 0
    kinds = [find_kind(names[0])] if names else TASKS
    figures = [(kinds[0], name) for name in names[1:]] or figures_at(args.scale, kinds)
    found = False
    for kind, name in figures:
        if name not in kind.figures:
            known = ", ".join(kind.figures)
            raise Refused(f"{names[0]} has no figure {name}: choose from {known}")
        try:
            lines = list(section(kind, name, args.scale, args.out, words))
        except Refused:  # it has no such trials
            if names[1:]:
                raise
            continue
        found = True
        for line in lines:
            if line.startswith("- "):
                line = textwrap.fill(line, 79, subsequent_indent="  ")
            print(line)
    if not found:
        raise Refused(f"no figure has trials of {' '.join(['--scale', args.scale, *words])}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

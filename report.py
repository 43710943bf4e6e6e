"""Tables, pictures and verdicts of trials.

    python report.py                                        # all figures
    python report.py reverse.py fig2                        # one figure; without its name all
    python report.py reverse.py --scale desk --out results  # other flags choose trials, as with --all
    python report.py --write RESULTS.md --out results       # desk scale, between the page's two markers

yes: the 95% interval of the difference (Welch's t) lies above zero, for a gain over each of the encodings
named; no: below zero, of a gain over one of them, at twice its p; undecided: neither is shown. p is
two-sided. In tables the interval is the paper's, of a mean, by percentile bootstrap.
"""

import argparse
import contextlib
import functools
import importlib
import itertools
import json
import os
import sys
import textwrap
from pathlib import Path

import numpy as np

import bench
from common import Refused
from delayed_add import DelayedAddition
from lm_shakespeare import Shakespeare
from lm_wikitext import WikiText
from predecessor import Predecessor
from reverse import Reverse
from sort import Sort
from stability import Stability
from suite import pictures, run, trial
from suite.verdicts import Run, Runs, Verdict, bootstrap_interval, holm, number

TASKS = [Reverse, Sort, DelayedAddition, Predecessor, Stability, WikiText, Shakespeare]
BEGIN = "<!-- made by python report.py --write from here on: edit above this line only -->"
END = "<!-- made by python report.py --write up to here: edit below this line only -->"


# -- Finished trials
@functools.cache
def load(task, name, scale, out, words=()):
    """A figure's trials, and the Runs of those done. A result that cannot be used is named, and left out."""
    args, given = run.parse(task, ["--scale", scale, "--out", str(out), *words])
    trials, figure, found = run.listed(task, args, given, name), task.figures[name], []
    for one in trials:
        path = one.folder / one.file
        try:
            content = trial.read_json(path)
            if content is None:
                continue
            if what := trial.differences(content | content["config"], one.config):
                raise ValueError(what)
            done = Run(one.row, content.get("metrics", content), content, one.folder)
            for metric in figure.metrics.values():
                number(done, metric)
            made_by(Runs([done], []))
            found.append(done)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, trial.End) as error:
            print(f"left out: {path}: {error!r}")
    texts = {one.about["config"].get("text_sha256") for one in found}
    if len(texts) > 1:
        print(f"left out: all {len(found)} trials, which are of {len(texts)} different texts")
        found = []
    return trials, Runs(found, [one.row for one in trials])


def figures_at(scale):
    return [(task, *one) for task in TASKS for one in task.figures.items() if one[1].grids.get(scale)]


@functools.cache
def verdicts_at(scale, out):
    """{(task, figure): [Verdict]} of all scripts, each family of primary ones corrected (Holm).

    A primary claim is judged when all trials of its figure are done.
    """
    found = {}
    for task, name, figure in figures_at(scale):
        _, runs = load(task, name, scale, out)
        verdicts = list(figure.verdicts(runs))
        if len(runs) < len(runs.rows):
            verdicts = [Verdict(one.text, primary=one.primary) if one.primary else one for one in verdicts]
        found[task.name, name] = verdicts
    corrected = iter(holm([one for verdicts in found.values() for one in verdicts]))
    return {key: [next(corrected) for _ in verdicts] for key, verdicts in found.items()}


# -- What is told of a figure
def short(x, digits=3):
    """A number in few characters."""
    if abs(x) >= 10:
        return f"{x:,.4g}" if abs(x) < 1000 else f"{x:,.0f}"
    return f"{x:.{digits}f}".replace("0.", ".", 1) if abs(x) < 1 else f"{x:.{digits}f}"


def table(figure, runs):
    """A row for each cell, which is the trials that differ in their seed alone."""
    flags = list(dict.fromkeys(flag for row in runs.rows for flag in row if flag not in ("seed", "model")))
    models = runs.all("model")
    varying = [flag for flag in flags if any(len(runs.all(flag, model=one)) > 1 for one in models)]
    for model in models:
        same = {flag: runs.all(flag, model=model)[0] for flag in flags if flag not in varying}
        if words := run.as_words({flag: value for flag, value in same.items() if value is not None}):
            yield f"{model or 'all'}: {' '.join(words)}"
    varying = ["model"] * (len(models) > 1) + varying
    first, *others = figure.metrics
    rows = [[*(flag.replace("_", "-") for flag in varying), first, "interval", "n", *others, "each seed"]]
    for cell in dict.fromkeys(tuple(row.get(flag) for flag in varying) for row in runs.rows):
        there = runs.where(**dict(zip(varying, cell)))
        if there:
            values = there.values(figure.metrics[first])
            interval = "-".join(map(short, bootstrap_interval(values))) if len(values) > 1 else ""
            means = [short(np.mean(there.values(figure.metrics[name]))) for name in others]
            words = ["-" if value is None else str(value) for value in cell]
            each = " ".join(short(value, 2) for value in values)
            rows.append([*words, short(np.mean(values)), interval, str(len(values)), *means, each])
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        yield "  ".join(word.ljust(w) for word, w in zip(row, widths)).rstrip()


def sentence(verdict):
    """A verdict in one line."""
    p = f", p {'< .001' if verdict.p < 0.001 else f'= {verdict.p:.3f}'}" if verdict.numbers else ""
    primary = " (primary, p corrected)" if verdict.primary else ""
    reading = verdict.readings[0 if verdict.word == "yes" else 1]
    read = f"; read as: {reading}" if reading else ""
    return f"{verdict.word}{primary}: {verdict.text} {verdict.numbers}{p}{read}".rstrip()


def made_by(runs):
    """How many trials, how long they took, and what made them."""
    n = f"{len(runs)} of {len(runs.rows)} trials"
    if not runs:
        return n
    seconds = np.median([one.about["seconds"] for one in runs])
    by_trial = [(one.about, *one.about.get("earlier", [])) for one in runs]
    parts = [part for of_trial in by_trial for part in of_trial]
    each = lambda name: ", ".join(sorted({str(part.get(name))[:40] for part in parts}))
    commits = ", ".join(sorted({str(part.get("commit"))[:7] for part in parts}))
    changed = sum(any(part.get("dirty") for part in of_trial) for of_trial in by_trial)
    changes = f" with local changes ({changed} of {len(runs)})" if changed else ""
    where = f"{each('device')}; torch {each('torch')}; commit {commits}{changes}"
    return f"{n}, median {seconds:,.0f} s; {where}"


def judged(task, name, scale, out, trials, runs):
    """The verdicts: corrected of the figure's own trials, as they are of other seeds, none of a part."""
    these, grid = ({one.folder for one in x} for x in (trials, load(task, name, scale, out)[0]))
    if {one.parent for one in these} != {one.parent for one in grid}:
        return []
    if task not in TASKS or these != grid:
        return [one._replace(primary="") for one in task.figures[name].verdicts(runs)]
    return verdicts_at(scale, out)[task.name, name] if scale != "quick" else []  # quick is a first look


def section(task, name, scale, out, words=(), folder="."):
    """The lines about a figure, on the screen or on a page in this folder."""
    figure, (trials, runs) = task.figures[name], load(task, name, scale, out, words)
    yield from (f"\n### {task.name}.py {name}", f"{figure.title}, {scale} scale. {made_by(runs)}.")
    if not runs:
        return
    path = Path(out, "figures", f"{task.name}-{name}-{scale}{'-part' if words else ''}.svg")
    if figure.picture and pictures.CAN_DRAW:
        pictures.draw(figure, runs, path)
    if figure.picture and path.exists():
        yield from ("", f"![{figure.title}]({os.path.relpath(path, folder)})")
    elif figure.picture:
        yield "`pip install matplotlib` draws this."
    yield from ("```text", *table(figure, runs), "```")
    notes = [line for note in figure.notes for line in note(runs)]
    verdicts = map(sentence, judged(task, name, scale, out, trials, runs))
    yield from (f"- {line}" for line in (*notes, *verdicts))


# -- RESULTS.md: between two markers all is made, above and below them is what a person wrote
def page(out, folder):
    """The lines between the markers."""
    for task, name, _ in figures_at("desk"):
        yield from section(task, name, "desk", out, folder=folder)
    for path in sorted(Path(out).glob("bench/*.json")):
        content = json.loads(path.read_text())
        lines = *bench.table(content), *bench.costs(content)
        yield from (f"\n### bench.py, {path.stem}", "```text", *lines, "```")


def write_page(path, out):
    """Make the page anew between its markers, whole or not at all."""
    path = Path(path).resolve()
    head, _, rest = path.read_text().partition(BEGIN)
    _, marker, tail = rest.partition(END)
    if not marker:
        raise Refused(f"{path} needs two lines, {BEGIN} and {END}")
    made = "\n".join(page(out, path.parent))
    trial.write(path, f"{head}{BEGIN}\n{made}\n\n{END}{tail}".encode())


# -- The command line
def task_in(script):
    """The task of a script, be it one of this suite's or a user's."""
    path = Path(script)
    if not path.is_file():
        raise Refused(f"there is no {script}")
    sys.path.insert(0, str(path.resolve().parent))
    for one in vars(importlib.import_module(path.stem)).values():
        if isinstance(one, type) and one.__module__ == path.stem and "figures" in vars(one):
            return one
    raise Refused(f"{script} has no figures")


def main():
    parser = run.Parser("report.py", usage="report.py [SCRIPT [FIGURE]] [flags]", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--scale", choices=Reverse.scales, default="paper", help="of which figures (paper)")
    parser.add_argument("--out", default="runs", help="folder of all trials (runs)")
    parser.add_argument("--write", metavar="FILE", help="make this page")
    # Names end at the first flag: argparse would take a value of the script's flags for one
    names = list(itertools.takewhile(lambda word: not word.startswith("-"), sys.argv[1:]))
    args, words = parser.parse_known_args(sys.argv[1 + len(names) :])
    return run.exit_code("report.py", lambda: obey(args, names, words))


def obey(args, names, words):
    if args.write:
        write_page(args.write, args.out)
        return 0
    tasks = [task_in(names[0])] if names else TASKS
    if wrong := [name for name in names[1:] if name not in tasks[0].figures]:
        raise Refused(f"{names[0]} has no figure {wrong[0]}: choose from {', '.join(tasks[0].figures)}")
    found = False
    for task in tasks:
        for name in names[1:] or task.figures:
            with contextlib.nullcontext() if names[1:] else contextlib.suppress(Refused):
                for line in section(task, name, args.scale, args.out, tuple(words)):  # Refused: no such trial
                    print(textwrap.fill(line, 79, subsequent_indent="  ") if line.startswith("- ") else line)
                found = True
    if not found:
        raise Refused(f"no figure has trials of {' '.join(['--scale', args.scale, *words])}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

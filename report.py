"""Tables, pictures and verdicts of trials.

    python report.py                                        # how many trials of every figure are done
    python report.py reverse.py fig2                        # one figure; without its name all of the script
    python report.py reverse.py --scale desk --out results  # other flags choose trials, as with --all
    python report.py --write RESULTS.md --out results       # desk scale, between the page's two markers

yes: the 95% interval of the difference (Welch's t) lies above zero, for a gain over each of the encodings
named; no: below zero, of a gain over one of them, at twice its p; undecided: neither is shown. p is
two-sided. In tables the interval is the paper's, of a mean, by percentile bootstrap.
"""

import argparse
import functools
import importlib
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
from suite.verdicts import Run, Runs, bootstrap_interval, holm, number

TASKS = [Reverse, Sort, DelayedAddition, Predecessor, Stability, WikiText, Shakespeare]
BEGIN = "<!-- made by python report.py --write from here on: edit above this line only -->"
END = "<!-- made by python report.py --write up to here: edit below this line only -->"


# -- Finished trials -----------------------------------------------------------------------------------------
def load(task, name, scale, out, words=()):
    """The Runs of a figure. A result that cannot be used is named, and left out."""
    args, given = run.parse(task, ["--scale", scale, "--out", str(out), *words])
    trials, found, metrics = run.listed(task, args, given, name), [], task.figures[name].metrics
    for row, _, one in trials:
        path = one.folder / one.file
        try:
            content = trial.read_json(path)
            if content is None:
                continue
            if what := trial.differences(content["config"], one.config):
                raise ValueError(what)
            done = Run(row, content.get("metrics", content), content, one.folder)
            for metric in metrics.values():
                number(done, metric)
            found.append(done)
        except (OSError, ValueError, LookupError, TypeError, trial.End) as error:
            print(f"left out: {path}: {error!r}")
    texts = {one.about["config"].get("text_sha256") for one in found}
    if len(texts) > 1:
        print(f"left out: all {len(found)} trials, which are of {len(texts)} different texts")
        found = []
    return Runs(found, [one.row for one in trials])


def figures_at(scale):
    for task in TASKS:
        for name, figure in task.figures.items():
            if scale in figure.grids:
                yield task, name, figure


@functools.cache
def verdicts_at(scale, out):
    """{(task, figure): [Verdict]} of all scripts, the primary ones corrected as one family (Holm)."""
    found = {}
    for task, name, figure in figures_at(scale):
        found[task.name, name] = list(figure.verdicts(load(task, name, scale, out)))
    corrected = iter(holm([one for verdicts in found.values() for one in verdicts]))
    return {key: [next(corrected) for _ in verdicts] for key, verdicts in found.items()}


# -- What is told of a figure --------------------------------------------------------------------------------
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
    yield from aligned(rows)


def aligned(rows):
    """Rows of words -> lines in which they stand in columns."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(word.ljust(w) for word, w in zip(row, widths)).rstrip() for row in rows]


def sentence(verdict):
    """A verdict in one line."""
    p = "" if verdict.shown is None else f", p {'< .001' if verdict.p < 0.001 else f'= {verdict.p:.3f}'}"
    primary = " (primary, p corrected)" if verdict.primary else ""
    return f"{verdict.word}{primary}: {verdict.text} {verdict.numbers}{p}".rstrip()


def made_by(runs):
    """How many trials, how long they took, and what made them."""
    seconds = np.median([one.about["seconds"] for one in runs])
    parts = [part for one in runs for part in (one.about, *one.about.get("earlier", []))]
    each = lambda name: ", ".join(sorted({str(part.get(name))[:40] for part in parts}))
    commits = ", ".join(sorted({str(part.get("commit"))[:7] for part in parts}))
    n = f"{len(runs)} of {len(runs.rows)} trials, median {seconds:,.0f} s"
    return f"{n}; {each('device')}; torch {each('torch')}; commit {commits}"


def notes(figure, runs):
    return [line for note in figure.notes for line in note(runs)]


def show(task, name, scale, out, words):
    """Print a figure's table and verdicts, and draw its picture."""
    figure, runs = task.figures[name], load(task, name, scale, out, words)
    done = f"{len(runs)} of {len(runs.rows)} trials done"
    print(f"\n{task.name}.py {name}, {scale} scale: {figure.title}. {done}")
    if not runs:
        return
    print(*table(figure, runs), "", *notes(figure, runs), sep="\n")
    if scale != "quick" or task not in TASKS:  # of ours a first look: nothing is judged
        whole = None if words else verdicts_at(scale, out).get((task.name, name))
        for one in whole or [one._replace(primary=False) for one in figure.verdicts(runs)]:
            print(textwrap.fill(f"- {sentence(one)}", 79, subsequent_indent="  "))
    path = Path(out, "figures", f"{task.name}-{name}-{scale}")
    if pictures.CAN_DRAW and figure.picture:
        for kind in (".svg", ".png"):
            pictures.draw(figure, runs, f"{figure.title}, {scale} scale", path.with_suffix(kind))
        print(f"written: {path}.svg, .png")


def overview(scales, out):
    """How many trials of every figure are done."""
    rows = [["script", "figure", "scale", "done", "of"]]
    for scale in scales:
        for task, name, _ in figures_at(scale):
            runs = load(task, name, scale, out)
            rows.append([f"{task.name}.py", name, scale, str(len(runs)), str(len(runs.rows))])
    print(*aligned(rows), sep="\n")


# -- RESULTS.md: between two markers all is made, above and below them is what a person wrote ----------------
def page(out, folder):
    """The lines between the markers."""
    for task, name, figure in figures_at("desk"):
        if not (runs := load(task, name, "desk", out)):
            continue
        yield from (f"### {task.name}.py {name}", f"{figure.title}. {made_by(runs)}.")
        path = Path(out, "figures", f"{task.name}-{name}-desk.svg")
        if figure.picture:
            if pictures.CAN_DRAW:
                pictures.draw(figure, runs, figure.title, path)
            yield from ("", f"![{figure.title}]({os.path.relpath(path, folder)})")
        yield from ("```text", *table(figure, runs), "```")
        verdicts = map(sentence, verdicts_at("desk", out)[task.name, name])
        yield from (*(f"- {line}" for line in (*notes(figure, runs), *verdicts)), "")
    for path in sorted(Path(out).glob("bench/*.json")):
        lines = bench.table(json.loads(path.read_text()))
        yield from (f"### bench.py, {path.stem}", "```text", *lines, "```", "")


def write_page(path, out):
    """Make the page anew between its markers, whole or not at all."""
    path = Path(path).resolve()
    head, _, rest = path.read_text().partition(BEGIN)
    _, marker, tail = rest.partition(END)
    if not marker:
        raise Refused(f"{path} needs two lines, {BEGIN} and {END}")
    made = "\n".join(page(out, path.parent))
    trial.write(path, f"{head}{BEGIN}\n\n{made}\n{END}{tail}".encode())


# -- The command line ----------------------------------------------------------------------------------------
def task_in(script):
    """The task of a script, be it one of this suite's or a user's."""
    path = Path(script)
    sys.path.insert(0, str(path.resolve().parent))
    found = [one for one in vars(importlib.import_module(path.stem)).values() if isinstance(one, type)]
    return next(one for one in found if one.__module__ == path.stem and "figures" in vars(one))


def main(argv=None):
    raw = argparse.RawDescriptionHelpFormatter
    parser = run.Parser("report.py", description=__doc__, formatter_class=raw)
    parser.add_argument("script", nargs="?", metavar="SCRIPT")
    parser.add_argument("figure", nargs="?", metavar="FIGURE")
    parser.add_argument("--scale", help="paper, desk, quick or smoke (paper)")
    parser.add_argument("--out", default="runs", help="folder of all trials (runs)")
    parser.add_argument("--write", metavar="FILE", help="make this page")
    args, words = parser.parse_known_args(argv)
    return run.exit_code("report.py", lambda: obey(args, words))


def obey(args, words):
    if args.write:
        write_page(args.write, args.out)
    elif args.script is None:
        overview([args.scale] if args.scale else ["paper", "desk", "quick"], args.out)
    else:
        task, scale = task_in(args.script), args.scale or "paper"
        if args.figure and args.figure not in task.figures:
            raise Refused(f"{task.name} has no figure {args.figure}: choose from {', '.join(task.figures)}")
        for name in [args.figure] if args.figure else task.figures:
            if scale in task.figures[name].grids:
                show(task, name, scale, args.out, words)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

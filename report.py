"""How far every figure of every script is; RESULTS.md.

    python report.py                                                        # how far every figure is
    python report.py --write RESULTS.md --out results --scale desk quick    # all verdicts, tables, pictures

What a script prints of its own figures: python reverse.py --report.
"""

from suite import cli, files, flags, tables
from suite.claims import LEVEL, correct
from suite.flags import Parser, file_path, flag_in_folder, seed_or_range, trials_of_scale
from suite.progress import duration
from suite.tables import Broken, aligned, checked, curve_of, progress_of

import itertools
import json
import os
import re
import shlex
from collections import Counter
from pathlib import Path
from urllib.parse import quote

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

TASKS = [Reverse, Sort, DelayedAddition, Predecessor, Stability, WikiText, Shakespeare]
SCALES = list(dict.fromkeys(scale for task in TASKS for scale in task.scales))
STATES = ["done", "running", "stopped", "not finite", "missing"]

# ------------------------------------------------------------------------------------------------------------
# How far every figure is
# ------------------------------------------------------------------------------------------------------------


def progress(folder):
    """-> (state, iterations done, seconds spent, what is wrong with its files), as of its last save."""
    try:
        return progress_in(folder)
    except OSError as error:  # another user's folder
        return "missing", 0, 0.0, [str(error)]


def progress_in(folder):
    faults, state = [], "stopped" if folder.exists() else "missing"
    if (folder / files.DIVERGED).exists():
        state = "not finite"
    if (path := folder / "result.json").exists():
        try:
            return "done", *checked(path, progress_of), faults
        except Broken as error:
            faults.append(str(error))
    if files.is_locked(folder / "lock"):
        state = "running"
    iterations, seconds = 0, 0.0
    if (path := folder / "curve.csv").exists():
        try:
            curve = checked(path, curve_of)
            if curve["iteration"]:  # it has its first row after --log-every iterations
                iterations, seconds = int(curve["iteration"][-1]), curve["seconds"][-1]
        except Broken as error:
            faults.append(str(error))
    return state, iterations, seconds, faults


def show_progress(out, scales, seeds):
    """A line per figure: how many trials are in each state, time spent, time left at the speed so far."""
    rows, faults = [["script", "figure", "scale", "trials", *STATES, "spent", "left"]], {}
    tasks, finished = [task for task in TASKS if not task.trials_of], 0
    for scale in scales:
        for task in tasks:
            for name, trials in trials_of_scale(task, out, scale, seeds).items():
                states, iterations, seconds, wrong = zip(*(progress(one.task.folder) for one in trials))
                faults |= dict.fromkeys(line for lines in wrong for line in lines)  # figures share trials
                finished += states.count("done")
                counts = [len(trials), *(states.count(state) for state in STATES)]
                done, wanted = sum(iterations), sum(one.task.args.iterations for one in trials)
                spent = sum(seconds)
                left = duration(spent * max(0, wanted - done) / done) if done > 0 else "unknown"
                rows.append([f"{task.name}.py", name, scale, *map(str, counts), duration(spent), left])
    print(*aligned(rows), sep="\n")
    print(*(f"cannot be read: {line}" for line in faults), sep="\n", end="\n" if faults else "")
    print("stopped: interrupted, to be continued by the same command; figures may share trials.")
    print("Fig. 5 is computed from the snapshots of Fig. 3's trials: python stability.py --report")
    if not finished and (line := cli.other_scales(tasks, out, scales, seeds)):
        print(line)


# ------------------------------------------------------------------------------------------------------------
# RESULTS.md: between two markers all is made, above and below them is what a person wrote
# ------------------------------------------------------------------------------------------------------------

BEGIN = "<!-- made by python report.py --write from here on: edit above this line only -->"
END = "<!-- made by python report.py --write up to here: edit below this line only -->"
BEYOND = "Beyond the paper"


LEGEND = """\
- **yes**: the 95% interval of the difference lies above zero; of a primary claim, the corrected p too is
  below .05.
- **no**: the same below zero; the opposite is shown.
- **undecided**: neither is shown.
- **not enough trials**: fewer than three on a side.

Where a claim says that something does *not* help, *no* means that it does help, however little, and *yes*
that a gain as large as the margin is excluded. Intervals and p-values (two-sided) are those of Welch's t
test; of a paired one where two numbers of the same trials are compared, of a one-sample one where they are
compared with a fixed number. Of a claim with a margin there are two tests, against zero and against the
margin, and p is the smaller one's. A claim over `none` and a control (`constant`, or `dup` where that has
not run) has to be true of both: the numbers are those of the weaker comparison, then the other's
difference. Its opposite is shown where either comparison shows it, at twice the p, since there are two. In
tables and pictures the interval is the paper's, of a mean, by percentile bootstrap.

Claims in bold are **primary**: the few of the paper's sentences that its title rests on and, a family of
their own, a few on what is beyond it. Their p-values are corrected by Holm's method among those of a scale,
for *yes* and for *no* apart; the interval beside it is not.
"""


def heading_of(section):
    return f"{section.task.name}.py {section.name}, {section.scale} scale"


def part_of(section):
    """The part of the page in which a section stands."""
    return BEYOND if section.figure.beyond else f"{section.task.name}.py"


def anchor(heading):
    """What GitHub makes of a heading in a link."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def link(heading):
    return f"[{heading}](#{anchor(heading)})"


def sections(out, scales, seeds):
    """-> [tables.Section] of all figures; primary claims are corrected among those of their scale, the
    paper's and those beyond it apart."""
    found = []
    chosen = [] if seeds is None else [flag_in_folder("seed", seeds)]
    for task in TASKS:
        for scale in scales:
            for name, trials in trials_of_scale(task, out, scale, seeds).items():
                found.append(tables.section(task, scale, name, chosen, trials))
    for scale, beyond in itertools.product(scales, (False, True)):
        together = [one for one in found if one.scale == scale and one.figure.beyond is beyond]
        corrected = iter(correct([verdict for one in together for verdict in one.verdicts]))
        for one in together:
            one.verdicts = [next(corrected) for _ in one.verdicts]
    return found


def verdict_lines(found, scales):
    """All verdicts in one table, the primary claims of every scale first."""
    rows = [(one, verdict) for one in found if one.outcomes.finished() for verdict in one.verdicts]
    rows.sort(key=lambda row: (not row[1].claim.primary, scales.index(row[0].scale)))
    others = [verdict for _, verdict in rows if verdict.difference and not verdict.claim.primary]
    gains = sum(not verdict.claim.margin for verdict in others)  # the others claim that there is none
    lines = [
        *["## All verdicts", "", LEGEND],
        "All others are exploratory, and not corrected: were there no effect at all, chance alone would let",
        f"at most about {gains * LEVEL:.0f} of the {gains} claims of a gain come out as *yes*, and as many",
        "as *no*. Some of them are of the same trials.",
        "",
        *count_lines(rows, scales),
        "",
        "| claim | scale | verdict | numbers | figure |",
        "|---|---|---|---|---|",
    ]
    for one, verdict in rows:
        text = f"**{verdict.claim.text}**" if verdict.claim.primary else verdict.claim.text
        figure = f"[{one.task.name}.py {one.name}](#{anchor(heading_of(one))})"
        lines.append(f"| {text} | {one.scale} | {verdict.word} | {verdict.numbers} | {figure} |")
    return [*lines, ""]


def count_lines(rows, scales):
    lines = []
    for scale in scales:
        for primary, kind in ((True, "primary"), (False, "exploratory")):
            words = Counter(v.word for one, v in rows if one.scale == scale and v.claim.primary is primary)
            if words:
                counts = ", ".join(f"{count} {word}" for word, count in words.most_common())
                lines.append(f"- {scale} scale, {kind}: {counts}")
    return lines


def section_lines(section, out, folder):
    """A section of a page in `folder`."""
    lines = [f"### {heading_of(section)}", "", f"{section.figure.title}. `{command(section)}`", ""]
    for title, path, fault in section.draw(out, [".svg"]):
        if fault:
            print(f"{path.name} is not drawn: {fault}")
        elif path.exists():
            place = Path(out.parent.resolve(), out.name, path.relative_to(out))  # `out` itself may be a link
            lines += [f"![{title}]({quote(os.path.relpath(place, folder), safe='/=')})", ""]
    body = "\n".join(line.removeprefix("  ") for line in section.lines()).strip("\n")
    return [*lines, "```text", body, "```", "", origin(section.outcomes), ""]


def command(section):
    """What runs its trials, with the text that they read where that is not the usual one."""
    usual = flags.declare(section.task).defaults.get("data")
    texts = {one.about.get("run", {}).get("data", usual) for one in section.outcomes.finished()}
    words = flags.command_line({"scale": section.scale, "all": section.name})
    words += [f"--{one}" for one in section.chosen]
    if "train" in flags.declare(section.task).defaults:  # it evaluates trials of another script
        words.append("--train")
    words += [word for text in sorted(texts - {usual}) for word in flags.as_words("data", text)]
    return f"python {section.task.name}.py {shlex.join(words)}"


def origin(outcomes):
    """How many trials there are, how long they took, and what they ran on."""
    found = outcomes.finished()
    seconds = np.median([one.seconds for one in found])
    took = f"{seconds:.3g}" if seconds < 100 else f"{seconds:,.0f}"
    n = f"{len(found)} of {len(outcomes.trials)} trials, median {took} s each"
    return f"{n}; {tables.made_by(outcomes)}."


def bench_parts(out):
    """-> {heading: lines} of the files of bench.py, and what is wrong with the others."""
    parts, broken = {}, []
    for path in sorted(out.glob("bench/*.json")):
        try:
            table = checked(path, lambda text: bench.table(json.loads(text)))
            parts[f"bench.py, {path.stem}"] = ["```text", *table, "```", ""]
        except Broken as error:
            broken.append(f"cannot be read, left out: {error}")
    return parts, broken


def page_lines(out, scales, seeds, folder, tail):
    """-> (the lines between the markers, what is wrong with files); `tail` stands below them."""
    found = sections(out, scales, seeds)
    if not any(one.outcomes.finished() for one in found):
        raise Refused(f"no trial of {' or '.join(scales)} scale is finished in --out {out}")
    benches, broken = bench_parts(out)
    by_part = {}
    for one in found:
        if one.outcomes.finished():
            by_part.setdefault(part_of(one), []).append(one)
    order = [part for part in by_part if part != BEYOND] + [BEYOND] * (BEYOND in by_part)
    contents = ["## Contents", "", f"- {link('All verdicts')}"]
    for part in order:
        contents.append(f"- {link(part)}")
        contents += [f"  - {link(heading_of(one))}: {one.figure.title}" for one in by_part[part]]
    written = [line.removeprefix("## ") for line in tail if line.startswith("## ")]
    contents += [f"- {link(heading)}" for heading in (*benches, *written)]
    unfinished = [one for one in found if not one.outcomes.finished()]
    waiting = [heading_of(one) for one in unfinished if not one.broken]
    contents += ["", f"Nothing has run yet of: {'; '.join(waiting)}."] if waiting else []
    for one in unfinished:  # all that has run is left out
        contents += ["", f"Of {heading_of(one)} nothing is reported:", ""] if one.broken else []
        contents += [f"- {line}" for line in one.broken]
    lines = ["", *contents, "", *verdict_lines(found, scales)]
    for part in order:
        lines += [f"## {part}", ""]
        for one in by_part[part]:
            lines += section_lines(one, out, folder)
    for heading, table in benches.items():
        lines += [f"## {heading}", "", *table]
    return lines, list(dict.fromkeys(line for one in found for line in one.broken)) + broken


def kept(path):
    """-> the lines of a page above its first marker, and those below its second one."""
    if not path.exists():
        return ["# Results", ""], [""]
    try:
        lines = path.read_bytes().decode().split("\n")
    except UnicodeDecodeError:
        raise Refused(f"{path} is not UTF-8") from None
    places = [[n for n, line in enumerate(lines) if line.strip() == marker] for marker in (BEGIN, END)]
    if list(map(len, places)) != [1, 1] or places[0] > places[1]:
        what = "in lines of their own, once each and in this order; what is between them is made anew"
        raise Refused(f"{path} needs two markers, {BEGIN} and {END}, {what}")
    return lines[: places[0][0]], lines[places[1][0] + 1 :]


def write_page(path, out, scales, seeds):
    """Make RESULTS.md anew between its markers, whole or not at all."""
    path = Path(os.path.realpath(path))  # a symbolic link stays one
    head, tail = kept(path)
    lines, broken = page_lines(out, scales, seeds, path.parent, tail)
    files.put(path, "\n".join([*head, BEGIN, *lines, END, *tail]))
    print(*broken, sep="\n", end="\n" if broken else "")
    if not tables.CAN_DRAW:
        print("matplotlib is not installed, so no picture was drawn: those that were there are shown")


def main(argv=None):
    parser = Parser("report.py", description="How far every figure of every script is.")
    parser.add_argument("--out", default="runs", type=flags.place, help="folder of all trials (runs)")
    scales = dict(choices=SCALES, nargs="+", action="extend")
    parser.add_argument("--scale", **scales, help="of which figures (all that have trials)")
    parser.add_argument(
        "--seed", type=seed_or_range, metavar="N", help="such as 0-9: in place of the grids' own"
    )
    parser.add_argument(
        "--write", metavar="FILE", type=file_path, help="make FILE, such as RESULTS.md, instead"
    )
    args = parser.parse_args(argv)
    return cli.exit_code(parser, lambda: obey(args))


def obey(args):
    out = Path(args.out)
    scales = list(dict.fromkeys(args.scale or cli.finished_of_scales(TASKS, out, args.seed) or ["paper"]))
    if args.write:
        write_page(args.write, out, scales, args.seed)
    else:
        show_progress(out, scales, args.seed)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

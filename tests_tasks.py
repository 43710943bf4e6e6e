"""Sorting, delayed addition and predecessor query: drawing, targets, held-out data, refusals, whole runs."""

import argparse
import contextlib
import io
import itertools
import json
import os
import re
import tempfile
from collections import Counter
from pathlib import Path

import torch

import common
import delayed_add
import predecessor
import report
import reverse
import sort
import trial

CPU = torch.device("cpu")
SCRIPTS = (sort, delayed_add, predecessor)


def data_of(script, vocab, length, held_out=4, batch=64, seed=0):
    args = argparse.Namespace(vocab=vocab, length=length, held_out=held_out, batch=batch, seed=seed)
    return script.TASK.build(args, CPU)


def run(script, *words):
    """-> (exit code, stdout, stderr, what exists afterwards) of a command line, in a folder of its own."""
    out, err, home = io.StringIO(), io.StringIO(), os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = trial.main(script.TASK, report.show, list(words))
        except SystemExit as stop:
            code = stop.code
        finally:
            os.chdir(home)
        files = {str(p.relative_to(folder)): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}
    return code, out.getvalue(), err.getvalue(), files


def model_of(script, *words):
    """The model of a command line, as its trial begins."""
    _, args, _ = trial.parse(script.TASK, ["--scale", "smoke", *words])
    trial.complete(script.TASK, args)
    return trial.State(script.TASK, args, CPU).model


def assert_uniform(outcomes, cells):
    """Pearson's chi-square below a bound that a fair draw passes with a probability of 1 - 3e-5."""
    counts = Counter(outcomes)
    assert len(counts) == cells, f"{len(counts)} of {cells} outcomes"
    n, free = sum(counts.values()), cells - 1
    statistic = sum((c - n / cells) ** 2 for c in counts.values()) / (n / cells)
    bound = free * (1 - 2 / (9 * free) + 4 * (2 / (9 * free)) ** 0.5) ** 3  # Wilson-Hilferty
    assert statistic < bound, f"chi-square {statistic:.1f} with {free} degrees of freedom"


# ------------------------------------------------------------------------------------------------------------
# Targets
# ------------------------------------------------------------------------------------------------------------


def test_sort_targets_are_the_inputs_in_order_with_ties():
    data = data_of(sort, vocab=6, length=9)
    for i in range(1, 4):
        episode = data.training_episode(i)
        for inputs, targets in zip(episode.inputs.tolist(), episode.targets.tolist()):
            assert targets == sorted(inputs[:9]) and inputs[9:] == [6] * 9
            assert len(set(targets)) < 9  # nine of six integers: there are ties
        assert episode.steps == slice(9, 18) and episode.weight is None


def test_delayed_addition_targets_use_both_phases_and_wrap():
    vocab, length, wrapped = 7, 5, 0
    data = data_of(delayed_add, vocab, length)
    for i in range(1, 4):
        episode = data.training_episode(i)
        for inputs, targets in zip(episode.inputs.tolist(), episode.targets.tolist()):
            for j in range(1, length + 1):  # the paper's numbers from 1
                total = inputs[length + 1 - j - 1] + inputs[length + j - 1]
                assert targets[j - 1] == total - vocab * (total >= vocab)
                wrapped += total >= vocab
        assert episode.inputs.shape == (64, 2 * length) and episode.steps == slice(length, 2 * length)
        assert episode.inputs.max() == vocab - 1  # the command, K, is never fed
    assert wrapped > 100


def test_predecessor_targets_precede_the_query():
    data = data_of(predecessor, vocab=12, length=5)
    for i in range(1, 4):
        episode = data.training_episode(i)
        for (*x, query), (target,) in zip(episode.inputs.tolist(), episode.targets.tolist()):
            assert [a for a, b in itertools.pairwise(x) if b == query] == [target]  # one answer, no other
        assert episode.inputs.shape == (64, 6) and episode.steps == slice(5, 6)


def test_worked_examples_of_the_docstrings():
    for script in SCRIPTS:
        example = re.search(
            r"^ +in   ([\d _]+?)(?:   .*)?\n +out  ([\d .]+?)(?:   .*)?$", script.__doc__, re.MULTILINE
        )
        inputs, outputs = (words.split() for words in example.groups())
        assert len(inputs) == len(outputs)
        length = len(inputs) - 1 if script is predecessor else len(inputs) // 2
        data = data_of(script, vocab=10, length=length)
        episode = data.episode(torch.tensor([[int(x) for x in inputs if x != "_"]]))
        assert episode.inputs[0].tolist() == [10 if x == "_" else int(x) for x in inputs]
        answered = ["."] * len(inputs)
        answered[episode.steps] = [str(x) for x in episode.targets[0].tolist()]
        assert answered == outputs, script.__name__


# ------------------------------------------------------------------------------------------------------------
# Drawing
# ------------------------------------------------------------------------------------------------------------


def test_predecessor_rows_are_all_different_and_uniform_at_paper_size():
    data = data_of(predecessor, vocab=1024, length=16)
    rows = data.draw(common.key(1), (40_000,))
    x, ordered = rows[:, :16], rows[:, :16].sort(1).values
    assert (ordered[:, 1:] > ordered[:, :-1]).all() and x.min() == 0 and x.max() == 1023
    for t in (0, 1, 8, 15):
        assert_uniform(x[:, t].tolist(), 1024)
    asked = (x == rows[:, 16:]).nonzero()  # one (row, position) for each row
    assert asked[:, 0].tolist() == list(range(40_000))
    assert_uniform(asked[:, 1].tolist(), 15)
    assert asked[:, 1].min() == 1  # 0-based: the first integer is never queried


def test_predecessor_draws_every_ordered_choice_and_query_alike():
    for vocab, length, exist in ((5, 3, 5 * 4 * 3 * 2), (4, 4, 4 * 3 * 2 * 3), (3, 2, 3 * 2)):
        data = data_of(predecessor, vocab, length, held_out=1)
        assert predecessor.queries(argparse.Namespace(vocab=vocab, length=length)) == exist
        assert_uniform(map(tuple, data.draw(common.key(7), (200, 200)).flatten(0, 1).tolist()), exist)


def test_sort_and_delayed_addition_draw_uniform_integers():
    for script, width in ((sort, 4), (delayed_add, 8)):
        rows = data_of(script, vocab=32, length=4).draw(common.key(3), (10_000,))
        assert rows.shape == (10_000, width)
        for t in range(width):
            assert_uniform(rows[:, t].tolist(), 32)
        assert_uniform(zip(rows[:, 0].tolist(), rows[:, -1].tolist()), 32 * 32)  # ends: independent


def test_drawing_never_waits_for_the_device():
    for script in SCRIPTS:
        data = data_of(script, vocab=16, length=4)
        # a tensor without values: whatever needs one of them on the host raises
        rows = data.draw(torch.empty((), dtype=torch.int64, device="meta"), (8,))
        assert data.episode(rows).targets.device.type == "meta"


# ------------------------------------------------------------------------------------------------------------
# Held-out data
# ------------------------------------------------------------------------------------------------------------


def test_held_out_sequences_are_never_drawn_however_few_exist():
    for script, vocab, length, count, exist in (
        (sort, 2, 4, 6, 16),
        (delayed_add, 2, 2, 6, 16),
        (predecessor, 4, 3, 16, 48),
    ):
        data = data_of(script, vocab, length, held_out=count, batch=1000)
        held_out = set(map(tuple, data.held_out.rows.tolist()))
        assert len(held_out) == count
        drawn = data.draw(common.key(data.held_out.seed, common.TRAINING, 1), (20_000,)).tolist()
        assert sum(tuple(row) in held_out for row in drawn) > 4000  # collisions are real
        trained = [tuple(row) for i in range(1, 21) for row in data.held_out.training_rows(i, 1000).tolist()]
        assert not held_out & set(trained)
        assert_uniform(trained, exist - count)


def test_held_out_sequences_depend_on_the_seed_alone_and_are_all_tested():
    for script in SCRIPTS:
        data = data_of(script, 16, 4, held_out=50, batch=8)
        assert torch.equal(data.held_out.rows, data_of(script, 16, 4, held_out=50, batch=64).held_out.rows)
        assert not torch.equal(data.held_out.rows, data_of(script, 16, 4, held_out=50, seed=1).held_out.rows)
        episode = data.episode(data.held_out.rows)

        def knows_the_answers(inputs, steps, data=data):
            """Right everywhere but in the first row of each part of at most 8 rows."""
            targets = data.episode(inputs[:, : data.held_out.rows.shape[1]]).targets.clone()
            targets[0] = (targets[0] + 1) % 16
            return 100.0 * torch.nn.functional.one_hot(targets.T, 16).float()  # (M, B, K)

        metrics = data.evaluate(knows_the_answers)
        right = 1 - 7 / 50  # 50 rows are seven parts
        name = "accuracy" if script is predecessor else "token_accuracy"
        assert abs(metrics[name] - right) < 1e-9, (script.__name__, metrics)
        assert abs(metrics["cross_entropy"] - 100 * 7 / 50) < 1e-3
        if script is not predecessor:
            assert abs(metrics["sequence_accuracy"] - right) < 1e-9
            assert metrics["damerau_levenshtein"] > 0
        assert len(episode.targets) == 50


# ------------------------------------------------------------------------------------------------------------
# Hidden encodings
# ------------------------------------------------------------------------------------------------------------


def test_hide_encoding_zeroes_the_vectors_of_one_phase_only():
    for pe in ("sin", "random", "learned"):
        whole = model_of(sort, "--pe", pe).encoding(16)
        for phase, hidden, shown in (
            ("input", slice(0, 8), slice(8, 16)),
            ("output", slice(8, 16), slice(0, 8)),
        ):
            model = model_of(sort, "--pe", pe, "--hide-encoding", phase)
            vectors = model.encoding(16)
            assert (vectors[hidden] == 0).all() and torch.equal(vectors[shown], whole[shown])
            assert (whole != 0).any(1).all()
            read = model.represent(torch.zeros(3, 16, dtype=torch.int64))  # (T, B, 2E)
            assert torch.equal(read[..., 16:], vectors[:, None].expand(-1, 3, -1).to(read.dtype))
            if pe == "learned":
                vectors.sum().backward()
                gradient = model.encoding.table.grad
                assert (gradient[hidden] == 0).all() and (gradient[shown] == 1).all()


def test_hide_encoding_names_the_folder_and_goes_into_every_command():
    _, args, _ = trial.parse(sort.TASK, ["--hide-encoding", "input"])
    trial.complete(sort.TASK, args)
    assert (
        str(trial.trial_folder(sort.TASK, args)) == "runs/sort/lstm-sin-K16384-L64-hide-encoding=input/seed0"
    )
    code, out, _, _ = run(sort, "--list", "fig8", "--pe", "sin", "--hide-encoding", "output")
    assert code == 0 and len(out.splitlines()) == 55
    assert all("--hide-encoding output" in line for line in out.splitlines())


# ------------------------------------------------------------------------------------------------------------
# Command lines
# ------------------------------------------------------------------------------------------------------------


def test_defaults_and_grids_are_the_papers():
    for script, vocab, length, iterations, steps in (
        (sort, 16384, 64, 300_000, 128),
        (delayed_add, 1024, 16, 600_000, 32),
        (predecessor, 1024, 16, 300_000, 17),
    ):
        _, args, _ = trial.parse(script.TASK, [])
        trial.complete(script.TASK, args)
        assert (args.vocab, args.length, args.iterations) == (vocab, length, iterations)
        assert (args.model, args.pe, args.seed, args.batch, args.held_out) == ("lstm", "sin", 0, 512, 1024)
        assert script.TASK.positions(args) == steps
    for script, figure, trials in (
        (sort, "fig8", (4 + 7) * 2 * 5),
        (sort, "fig12", 3 * 5),
        (delayed_add, "fig7", 4 * 2 * 5),
        (predecessor, "fig10", 5 * 2 * 5),
    ):
        code, out, _, files = run(script, "--list", figure)
        assert code == 0 and len(set(out.splitlines())) == trials and not files


def test_bad_input_is_refused_in_one_line_and_creates_nothing():
    wrong = (
        (predecessor, "--vocab 8 --length 9", "need as large a vocabulary"),
        (predecessor, "--length 1", "at least 2"),
        (predecessor, "--vocab 4 --length 3 --held-out 49", "the 48 sequences and queries that exist"),
        (predecessor, "--vocab 4 --length 3 --held-out 48", "half is the limit"),
        (delayed_add, "--vocab 2 --length 2 --held-out 17", "the 16 sequences"),
        (delayed_add, "--vocab 2 --length 2 --held-out 9", "half is the limit"),
        (sort, "--vocab 2 --length 4 --held-out 17", "the 16 sequences"),
        (sort, "--vocab 2 --length 4 --held-out 9", "half is the limit"),
        (sort, "--hide-encoding input --pe none", "needs an encoding"),
        (sort, "--hide-encoding output --pe dup", "needs an encoding"),
        (sort, "--hide-encoding both", "invalid choice"),
        (sort, "--list fig7", "choose from fig8, fig12"),
        (delayed_add, "--hide-encoding input", "unrecognized arguments"),
        (predecessor, "--vocab 1", "whole number from 2"),
    )
    for script, words, expected in wrong:
        code, _, err, files = run(script, *words.split())
        assert code == 2 and not files, words
        assert err.count("\n") == 1 and expected in err, err


def test_every_model_with_every_encoding_runs_every_task():
    for script, model, pe in itertools.product(SCRIPTS, common.LAYERS, common.ENCODINGS):
        words = ["--scale", "smoke", "--model", model, "--pe", pe, "--iterations", "2"]
        code, _, err, files = run(script, *words)
        assert code == 0 and any(name.endswith("result.json") for name in files), (words, err)


def test_smoke_scale_end_to_end():
    metrics = {"token_accuracy", "sequence_accuracy", "cross_entropy", "damerau_levenshtein"}
    for script, trials, expected in (
        (sort, 9, metrics),
        (delayed_add, 4, metrics),
        (predecessor, 4, {"accuracy", "cross_entropy"}),
    ):
        code, out, err, files = run(script, "--scale", "smoke", "--all")
        results = [json.loads(text) for name, text in files.items() if name.endswith("result.json")]
        assert code == 0 and len(results) == trials, err
        assert all(set(r["metrics"]) == expected and r["iterations"] == 20 for r in results)
        for figure in script.FIGURES:
            assert f"{figure} (smoke scale)" in out
        assert "the encoding helps" in out and "not enough trials" in out


def test_the_reports_shared_with_reverse_ordering():
    flags = dict(model="lstm", vocab=16)
    trials = [
        (
            flags | dict(pe=pe, seed=seed),
            {"token_accuracy": mean + seed / 100, "damerau_levenshtein": 1 - mean},
        )
        for pe, mean in (("none", 0.3), ("dup", 0.3), ("sin", 0.6))
        for seed in range(3)
    ]
    cells = report.Cells(trials)
    assert [claim.check(cells)[0] for claim in report.DUP_CLAIMS] == [True, True]
    (claim,) = report.helps_at_each_vocab("fig7", report.accuracy, {"quick": {"fig7": [flags]}})
    assert claim.where == dict(vocab=16) and claim.check(cells)[0] is True
    panels = report.gather(sort.FIGURES["fig8"], cells)
    assert panels["LSTM", "token accuracy"]["sin"] == {16: [0.6, 0.61, 0.62]}
    assert panels["LSTM", "Damerau-Levenshtein distance"]["none"] == {16: [0.7] * 3}
    assert panels == report.gather(reverse.FIGURES["fig2"], cells)

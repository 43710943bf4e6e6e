"""Gradient stability against the released code's numbers and against torch.func.jacrev of the models."""

import contextlib
import io
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import common
import reverse
import stability
import trial

torch.set_num_threads(1)  # tiny tensors: more threads only wait for one another
FIXTURE = Path(__file__).with_name("released_code.npz")


def released(case, name):
    return torch.from_numpy(np.asarray(np.load(FIXTURE)[f"{case}/{name}"]))


def released_model(case):
    """The released code's tiny model, in double precision."""
    kind, pe = case.split("-")
    (vocab, hidden), embed = released(case, "readout_w").shape, released(case, "embedding").shape[1]
    model = common.Model(kind, pe, vocab, embed, hidden, positions=10).double()
    layer = model.layer
    weights = {"embedding": model.embedding.weight, "readout_w": model.readout.weight}
    if kind == "s4d":
        weights |= {n: getattr(layer, n) for n in ("log_dt", "C", "log_A_real", "A_imag", "D")}
        weights |= {"in_proj_w": layer.project.weight, "in_proj_b": layer.project.bias}
        weights |= {"mix_w": layer.mix.weight, "mix_b": layer.mix.bias}
    else:
        weights |= {n: getattr(layer, n.replace("w_", "weight_").replace("b_", "bias_") + "_l0") for n in RNN}
    with torch.no_grad():
        for name, parameter in weights.items():
            parameter.copy_(released(case, name))
    return model


RNN = ("w_ih", "w_hh", "b_ih", "b_hh")


def test_numbers_of_the_released_code():
    for case in ("gru-none", "gru-sin", "lstm-none", "lstm-sin", "s4d-none", "s4d-sin"):
        model, target, tolerance = released_model(case), 1, 1e-9
        if model.layer.__class__ is common.S4D:
            model, target, tolerance = model.float(), int(released(case, "stab_prefix")) + 1, 1e-4
        found = stability.stability(model, released(case, "stab_a"), released(case, "stab_b"), target)
        assert (found - released(case, "stability")).abs().max() < tolerance, case


# The plain way: the Jacobian of the model's own forward pass, one sequence after the other.


def jacobian(model, row, target):
    """(D, numbers in the state) for one row (T,), in the model's precision."""
    layer, x = model.layer, model.represent(row[None])  # (T, 1, E)
    if isinstance(layer, common.S4D):
        u = layer.project(x)[:, 0]  # (T, H)
        dtA, weights = layer.discretised()
        C = torch.view_as_complex(layer.C)
        state = torch.zeros_like(dtA)
        for step in u[:target]:
            state = dtA.exp() * state + (weights / C) * step[:, None]

        def output(parts):
            state = torch.view_as_complex(parts)
            for step in u[target:]:
                state = dtA.exp() * state + (weights / C) * step[:, None]
            y = 2 * (C * state).sum(1).real + layer.D * u[-1]
            return F.glu(layer.mix(F.gelu(y)), dim=0)

        expected = layer(x, slice(len(x) - 1, len(x)))[0, 0]
        state = torch.view_as_real(state).detach()
    else:
        plain = torch.nn.LSTM if isinstance(layer, torch.nn.LSTM) else torch.nn.GRU
        state = plain.forward(layer, x[:target])[1]
        state = torch.cat(state).flatten() if plain is torch.nn.LSTM else state.flatten()

        def output(z):
            start = tuple(z.view(2, 1, 1, -1)) if plain is torch.nn.LSTM else z.view(1, 1, -1)
            return plain.forward(layer, x[target:], start)[0][-1, 0]

        expected = plain.forward(layer, x)[0][-1, 0]
    assert torch.allclose(output(state), expected, rtol=1e-4, atol=1e-6)  # the right state, the right output
    return torch.func.jacrev(output)(state.detach()).flatten(1).detach()


def stability_of(A, B):
    """SPEC's sum_i w_i cos(J_i^A, J_i^B), with a loop over the rows."""
    norms = [(a.norm() * b.norm()).item() for a, b in zip(A, B)]
    terms = [n / sum(norms) * ((a @ b).item() / n) for n, a, b in zip(norms, A, B) if n > 0]
    return sum(terms)


def plain_stability(model, a, b, target):
    rows = zip(a, b)
    return torch.tensor(
        [stability_of(jacobian(model, x, target), jacobian(model, y, target)) for x, y in rows],
        dtype=torch.double,
    )


def some(kind, pe, length=6, target=1, count=1, combine="concat", seed=0, hidden=12, embed=8):
    torch.manual_seed(seed)
    model = common.Model(kind, pe, 10, embed, hidden, 2 * length, combine).double()
    pairs = stability.draw_pairs(seed, 10, length, target, count).flatten(0, 1)
    return model, *pairs.unbind(1), target


def test_equals_jacrev_of_the_model():
    for seed, kind in enumerate(common.LAYERS):
        for pe, combine in (("none", "concat"), ("sin", "concat"), ("learned", "add"), ("dup", "concat")):
            for length, target in ((3, 1), (6, 4), (4, 4)):
                case = some(kind, pe, length, target, 1, combine, seed, hidden=9 + seed)
                error = (stability.stability(*case) - plain_stability(*case)).abs().max()
                assert error < 1e-10, (kind, pe, combine, length, target, error)


def test_same_sequence_symmetry_bounds():
    for kind in common.LAYERS:
        model, a, b, target = some(kind, "sin", target=2, count=8)
        for precise in (True, False):
            model = model if precise else model.float()
            same = stability.stability(model, a, a, target)
            assert torch.allclose(same, torch.ones_like(same), rtol=0, atol=1e-12), same
            found = stability.stability(model, a, b, target)
            assert torch.allclose(found, stability.stability(model, b, a, target), rtol=0, atol=1e-6)
            assert (found.abs() <= 1).all() and (found < 1 - 1e-6).any(), found
    rounded = torch.tensor([[1.0, 1.0 + 1e-6], [-1.0, -1.0 - 1e-6]])
    assert (stability.weighted_cosine(rounded, rounded.abs() > 0, rounded.abs() > 0).abs() <= 1).all()


def silence(model, rows):
    """Set weights so that these outputs do not depend on the state at all."""
    layer, H = model.layer, model.readout.in_features
    with torch.no_grad():
        if isinstance(layer, common.S4D):
            layer.mix.bias[H:][rows] = -1e4
        elif isinstance(layer, torch.nn.LSTM):
            layer.bias_ih_l0[3 * H :][rows] = -1e4  # the output gate
        else:
            layer.bias_ih_l0[H : 2 * H][rows] = -1e4  # no carry, and the candidate saturated
            layer.bias_ih_l0[2 * H :][rows] = 1e4
    return model


def test_zero_rows_count_for_nothing():
    for kind in common.LAYERS:
        model, a, b, target = some(kind, "sin", count=2)
        silence(model, slice(0, 5))
        A = jacobian(model, a[0], target)
        assert (A[:5] == 0).all() and A[5:].abs().sum(1).gt(0).all()
        found = stability.stability(model, a, b, target)
        assert (found - plain_stability(model, a, b, target)).abs().max() < 1e-10
        nothing = stability.stability(silence(model, slice(None)), a, b, target)
        assert (nothing == 0).all(), nothing


def loses(model, length, way):
    """Check single precision; what it would be off by if Jacobians were not rescaled in this way."""
    a, b = stability.draw_pairs(1, 16, length, 1, 1).flatten(0, 1).unbind(1)
    exact = stability.stability(model.double(), a, b, 1)
    model.float()
    found = stability.stability(model, a, b, 1)
    assert found.isfinite().all() and (found - exact).abs().max() < 1e-4, (found, exact)
    before = {name: getattr(stability, name) for name in way}
    try:
        for name, value in way.items():
            setattr(stability, name, value)
        return (stability.stability(model, a, b, 1) - exact).abs().max()
    finally:
        for name, value in before.items():
            setattr(stability, name, value)


def test_gradients_that_underflow():
    never, only_at_the_end = {"rescale": lambda *parts: None}, {"RESCALED": 10**9}
    for kind in ("gru", "lstm"):
        torch.manual_seed(1)
        model = common.Model(kind, "none", 16, 32, 64)
        loses(model, 64, never)
        if kind == "lstm":  # at initial weights a GRU's gradients last longer
            assert loses(model, 64, never) > 0.1
            assert loses(model, 128, only_at_the_end) > 0.1
        with torch.no_grad():  # nearly closed gates: too small after seven steps
            model.layer.bias_ih_l0[: -64 if kind == "gru" else 128] -= 7
            if kind == "lstm":
                model.layer.bias_ih_l0[192:] -= 7
        assert loses(model, 4, never) > 0.1 or kind == "gru"


def test_chunks_and_memory():
    for kind in common.LAYERS:
        model, a, b, target = some(kind, "sin", count=4)
        whole = stability.stability(model, a, b, target)
        one_by_one = stability.stability(model, a, b, target, memory=1e-9)
        assert torch.allclose(whole, one_by_one, rtol=0, atol=1e-12)
    words = """
import sys, torch, common, stability
def peak():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
torch.set_num_threads(1)
model = common.Model("lstm", "sin", 16, 128, 256, 16)
a, b = stability.draw_pairs(0, 16, 5, 1, 32).flatten(0, 1).unbind(1)
stability.stability(model, a[:1], b[:1], 1)
before = peak()
stability.stability(model, a, b, 1, float(sys.argv[1]))
print(peak() - before)
"""
    kilobytes = int(subprocess.check_output([sys.executable, "-c", words, "0.125"]))
    assert 0.125 * 2**20 / 2 < kilobytes < 0.125 * 2**20 * 1.1, kilobytes


def test_pairs():
    vocab, length, target = 10, 12, 5
    pairs = stability.draw_pairs(3, vocab, length, target, 50)
    assert pairs.shape == (4, 50, 2, 2 * length + 1 - target) and (pairs[..., length:] == vocab).all()
    a, b = pairs[..., :length].unbind(2)
    assert (a[..., :target] == b[..., :target]).all() and (a[..., target:] != b[..., target:]).any(-1).all()
    rare = pairs[..., :length] >= vocab // 2
    for condition, name in enumerate(reverse.CONDITIONS):
        kinds = [word == "rare" for word in name.split("/")]
        assert (rare[condition, ..., target - 1] == kinds[0]).all()
        assert (rare[condition, ..., : target - 1] == kinds[1]).all()
        assert (rare[condition, ..., target:] == kinds[1]).all()
    assert (a[0] != a[1] % (vocab // 2)).any() and (a[2] != a[3] - vocab // 2).any()
    assert all(len(part.unique()) == vocab // 2 for part in (a[0], b[3]))
    assert (stability.draw_pairs(3, vocab, length, target, 9) == pairs[:, :9]).all()
    assert (stability.draw_pairs(4, vocab, length, target, 50) != pairs).any()
    defaults = [stability.default_target("s4d", n) for n in (64, 8, 1)]
    assert defaults == [23, 3, 1] and stability.default_target("gru", 64) == 1


# The command line, on a smoke trial


def evaluate(*words):
    return stability.main(list(words))


def command(*words, main=evaluate):
    """-> (exit code, stdout, stderr), in the current folder."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(*words)
        except SystemExit as stop:
            code = stop.code
    return code, out.getvalue(), err.getvalue()


def train(*words):
    return trial.main(reverse.TASK, None, ["--scale", "smoke", *words])


def trained(*words):
    return command(*words, main=train)[0] == 0


def folder_of(*words):
    _, args, _ = trial.parse(reverse.TASK, ["--scale", "smoke", *words])
    trial.complete(reverse.TASK, args)
    return trial.trial_folder(reverse.TASK, args)


def refused(*words):
    code, _, err = command(*words)
    assert code == 2 and err.count("\n") == 1 and err.startswith("stability.py: error: "), (code, err)
    return err


def test_refusals():
    with tempfile.TemporaryDirectory() as empty, contextlib.chdir(empty):
        smoke = ("--scale", "smoke", "--model", "gru")
        assert "no trial in runs/reverse/gru-sin-K8-L8" in refused(*smoke)
        assert "no trial in elsewhere" in refused("--trial", "elsewhere")
        assert "choose from 1 to 8" in refused(*smoke, "--target", "9")
        assert "at least 1" in refused(*smoke, "--target", "0")
        assert "multiple of 4" in refused(*smoke, "--pairs", "6")
        assert "leave out" in refused(*smoke, "--min-length", "4")
        assert "leave out" in refused("--trial", "elsewhere", "--train")
        assert not list(Path().iterdir())

        plain = ("--model", "gru", "--iterations", "2")
        dual = (*plain, "--dual-freq", "--snapshot-every", "0")
        assert trained(*plain) and trained(*dual)
        assert "not a dual-frequency trial" in refused("--trial", str(folder_of(*plain)))
        assert "no snapshots" in refused("--trial", str(folder_of(*dual)))
        assert "no snapshots" in refused(*smoke, "--iterations", "2")
        snapshots = folder_of(*dual) / "snapshots"
        snapshots.mkdir()
        (snapshots / "000002.pt").write_bytes(b"torn")
        assert "000002.pt cannot be used" in refused(*smoke, "--iterations", "2")
        assert "choose from 1 to 8" in refused("--trial", str(folder_of(*dual)), "--target", "9")


def test_smoke_trial_to_report():
    with tempfile.TemporaryDirectory() as empty, contextlib.chdir(empty):
        smoke = ("--scale", "smoke", "--model", "s4d", "--pairs", "8")
        code, out, err = command(*smoke, "--train")
        assert code == 0, err
        folder = folder_of("--model", "s4d", "--dual-freq")
        saved = json.loads((folder / "stability.json").read_text())
        result = json.loads((folder / "result.json").read_text())
        assert set(result) - set(saved) <= {"metrics", "iterations", "iterations_per_second"}
        assert saved["config"] == result["config"] and (saved["pairs"], saved["target"]) == (8, 3)
        assert list(saved["by_condition"]) == reverse.CONDITIONS

        # The numbers of the last snapshot, from the weights in last.pt and a jacrev of the model
        model = common.Model("s4d", "sin", 8, 16, 16, 16)
        model.load_state_dict(trial.unpack(folder / "last.pt", "cpu")["model"])
        pairs = stability.draw_pairs(0, 8, 8, 3, 2)
        for rows, values in zip(pairs, saved["by_condition"].values()):
            assert list(values) == ["5", "10", "15", "20"]
            expected = plain_stability(model.double(), *rows.unbind(1), 3).mean().item()
            assert abs(values["20"] - expected) < 1e-5

        # Only snapshots without numbers are evaluated; all are with --overwrite or another target
        (folder / "snapshots" / "000010.pt").rename(folder / "snapshots" / "000012.pt")
        code, out, _ = command("--trial", str(folder), "--pairs", "8")
        assert code == 0 and "iteration 12 " in out and "iteration 5 " not in out
        again = json.loads((folder / "stability.json").read_text())["by_condition"]["rare/rare"]
        assert again["12"] == saved["by_condition"]["rare/rare"]["10"]
        code, out, _ = command(*smoke)
        assert code == 0 and "iteration 12 " not in out
        code, out, _ = command(*smoke, "--overwrite")
        assert code == 0 and out.count("iteration ") == 4
        code, out, _ = command(*smoke, "--target", "1")
        assert code == 0 and out.count("iteration ") == 4 and "target at t = 1" in out

        assert command(*smoke, "--pe", "none", "--train")[0] == 0
        code, out, err = command("--scale", "smoke", "--report")
        assert code == 0, err
        last = json.loads((folder / "stability.json").read_text())["by_condition"]["rare/rare"]["20"]
        assert f"{last:.4f}" in out and "2 of 6 trials" in out and "s4d trials differ in (pairs" in out
        assert out.count("not enough trials") == 5, out
        assert Path("figures/stability-fig5-smoke.png").stat().st_size > 10_000

        code, out, err = command("--scale", "smoke", "--list", "fig5", "--pairs", "8")
        assert code == 0 and out.count("\n") == 6 and "--pairs 8" in out and "--dual-freq" in out
        code, out, err = command("--scale", "smoke", "--all", "--model", "s4d", "--pairs", "8")
        assert code == 0 and out.count("has them all") == 2, err


def test_claims():
    """A trial set that shows the paper's finding holds all claims; its opposite fails them."""

    def content(early, late):
        values = {"5000": early, "10000": late}
        rare = {c: values for c in reverse.AMONG_RARE}
        frequent = {c: {"5000": 0.99, "10000": 0.99} for c in reverse.CONDITIONS if c not in rare}
        return {"by_condition": rare | frequent, "pairs": 4, "target": 1, "seconds_per_snapshot": 1}

    stable, falls, rises = content(0.95, 0.95), content(0.95, 0.3), content(0.8, 0.95)
    vanilla = {"gru": (falls, stable), "lstm": (falls, stable), "s4d": (rises, falls)}
    for claim in stability.CLAIMS:
        for expected in (True, False):
            trials = []
            for model, contents in vanilla.items():
                for pe in ("none", "sin"):
                    shown = contents[0 if expected else 1] if pe == "none" else stable if expected else falls
                    trials += [(dict(model=model, pe=pe, seed=seed), shown) for seed in range(3)]
            cells = stability.report.Cells(trials).where(**claim.where)
            holds, numbers = claim.check(cells)
            assert holds is expected, (claim.text, expected, numbers)


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
            test()
            print(f"{name}: {resource.getrusage(resource.RUSAGE_SELF).ru_utime - before:.1f} s")

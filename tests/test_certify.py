"""`idn certify`: proofs for sound flows, refusal of broken ones, one-line errors for anything else."""

import json
import math
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

import idn
from idn.certify import rounded_up
from idn.cli import main
from idn.flows.bounds import prove
from idn.models import find_model
from idn.streams import stream
from tests.flows.helpers import perturb, small_image_flow, small_toy_flow


def break_norms(flow):
    """Singular vectors that have nothing to do with the weights, as if the power iteration had never run."""
    generator = stream(0, "broken")
    with torch.no_grad():
        for _, layer in flow.spectral_layers():
            noise = torch.randn(layer.u.shape, generator=generator)
            layer.u.copy_(noise / noise.norm())
            layer.slack.zero_()
    return flow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flows")
    flow = small_image_flow("idensenet-lc", dtype=torch.float32)
    flow.save(folder / "sound.safetensors")
    average = {name: parameter.detach().clone() for name, parameter in flow.named_parameters()}
    break_norms(flow).save(folder / "broken.safetensors")
    flow.save(folder / "averaged.safetensors", ema=average)
    return folder


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_sound_flow_is_proven(folder, capsys, precision):
    assert main(["certify", str(folder / "sound.safetensors"), "--precision", precision]) == 0
    title, head, *rows, verdict = capsys.readouterr().out.splitlines()
    assert title.endswith(f"sound.safetensors: raw weights, {precision}")
    assert head.split() == ["block", "estimate", "Lip(g)", "<="]
    assert [row.split()[0] for row in rows] == ["scale1.block1", "scale2.block1", "fc.block1"]
    assert all(0 < float(row.split()[1]) <= float(row.split()[2]) < 1 for row in rows)
    assert verdict.startswith("proven: Lip(g) <= 0.")


def test_a_broken_norm_is_refused(folder, capsys):
    assert main(["certify", str(folder / "broken.safetensors")]) == 1
    out = capsys.readouterr().out
    assert "NOT PROVEN: layer" in out
    assert "allowed 0.98" in out
    assert "NOT PROVEN for 3 of 3 blocks" in out


def test_averaged_weights_are_certified_unless_raw_ones_are_asked_for(folder, capsys):
    assert main(["certify", str(folder / "averaged.safetensors")]) == 0
    assert "averaged weights" in capsys.readouterr().out
    assert main(["certify", str(folder / "averaged.safetensors"), "--raw"]) == 1
    assert "raw weights" in capsys.readouterr().out


def test_an_underestimated_norm_is_found_out(tmp_path, capsys):
    """The estimate says all is well, because v misses the largest singular value; the proof does not."""
    flow = small_toy_flow("residual", dtype=torch.float32, blocks=(1,), activation="identity")
    (block,) = flow.blocks
    layer = next(block.branch.spectral_layers())
    with torch.no_grad():
        u, _, v = torch.linalg.svd(layer.weight, full_matrices=False)
        layer.weight.copy_(u @ torch.diag(torch.tensor([3.0, 0.9])) @ v)
        layer.u.copy_(u[:, 1:].T)
        layer.v.copy_(v[1:])
        layer.slack.zero_()
    flow.save(tmp_path / "flow.safetensors")
    assert main(["certify", str(tmp_path / "flow.safetensors")]) == 1
    row = capsys.readouterr().out.splitlines()[2].split()
    assert float(row[1]) < 1 < float(row[2])
    assert "layer1 3.00" in " ".join(row)


def test_json_tells_layer_by_layer(folder, tmp_path):
    file = tmp_path / "bounds.json"
    assert main(["certify", str(folder / "sound.safetensors"), "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert (found["precision"], found["weights"], found["proven"]) == ("fp32", "raw", True)
    flow = idn.load(folder / "sound.safetensors")
    for block, row in zip(flow.blocks, found["blocks"], strict=True):
        proof = prove(block.branch)
        assert (row["name"], row["bound"], row["proven"]) == (block.name, proof.bound, True)
        assert [layer["bound"] for layer in row["layers"]] == [layer.bound for layer in proof.layers]
    assert [entry.name for entry in tmp_path.iterdir()] == ["bounds.json"]


def test_weights_that_are_not_numbers_are_refused(tmp_path, capsys):
    flow = small_toy_flow("idensenet", dtype=torch.float32)
    with torch.no_grad():
        next(flow.parameters()).fill_(math.nan)
    flow.save(tmp_path / "flow.safetensors")
    assert main(["certify", str(tmp_path), "--json", str(tmp_path / "bounds.json")]) == 1
    assert "none" in capsys.readouterr().out.splitlines()[2]
    assert json.loads((tmp_path / "bounds.json").read_text())["blocks"][0]["bound"] is None


def test_a_folder_stands_for_the_best_or_the_newest_flow_in_it(tmp_path):
    for step in ("step-000000200-b", "step-000001200-a"):
        (tmp_path / step).mkdir()
        (tmp_path / step / "flow.safetensors").touch()
    assert find_model(tmp_path) == tmp_path / "step-000001200-a" / "flow.safetensors"
    assert find_model(tmp_path / "step-000000200-b").parent.name == "step-000000200-b"
    (tmp_path / "best.safetensors").touch()
    assert find_model(tmp_path) == tmp_path / "best.safetensors"


def test_printed_bounds_are_rounded_up():
    assert rounded_up(0.123451) == "0.12346"
    assert rounded_up(0.9999999) == "1.00000"


@pytest.mark.parametrize("make", ["missing", "text", "foreign", "empty folder", "no folder for json"])
def test_bad_input_is_one_line(folder, tmp_path, capsys, make):
    model, options = tmp_path / "model", []
    match make:
        case "text":
            model.write_text("no flow")
        case "foreign":
            save_file({"a": torch.zeros(1)}, model)
        case "empty folder":
            model.mkdir()
        case "no folder for json":
            model, options = folder / "sound.safetensors", ["--json", str(tmp_path / "none" / "bounds.json")]
    assert main(["certify", str(model), *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("idn: error: ")
    assert captured.err.count("\n") == 1


def test_the_command_itself(folder):
    command = [sys.executable, "-c", "import sys; from idn.cli import main; sys.exit(main())", "certify"]
    done = subprocess.run([*command, str(folder / "broken.safetensors")], capture_output=True, text=True)
    assert done.returncode == 1
    assert "NOT PROVEN" in done.stdout
    assert "scale1.block1" in done.stderr, "the progress bar names the block it is at"


@pytest.mark.slow
@pytest.mark.parametrize("model", ["idensenet-lc", "residual"])
@pytest.mark.parametrize("moved", [False, True])
def test_the_papers_models_are_proven(model, moved):
    flow = idn.build("cifar10", model, "paper")
    if moved:
        perturb(flow, size=0.05)
        flow.update_norms()
    for precision in ("fp32", "bf16"):
        flow.set_precision(precision)
        assert all(prove(block.branch).proven for block in flow.blocks)

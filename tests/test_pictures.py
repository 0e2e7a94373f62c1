"""`idn sample`, `idn reconstruct`, `idn interpolate`, `idn plot`: pictures that show what they claim to show."""

import numpy as np
import pytest
import torch
from PIL import Image

import idn
from idn import curves, plots
from idn.cli import main
from idn.data import toy
from idn.models import open_model
from idn.plot import read_records
from idn.splits import Split, matching
from idn.streams import stream
from idn.views import density_grid, draw_samples, layer_norms, pixels, walk
from tests.flows.helpers import small_image_flow
from tests.trained import moons_run


@pytest.fixture(scope="module")
def moons(tmp_path_factory):
    return moons_run(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    path = tmp_path_factory.mktemp("images") / "small.safetensors"
    small_image_flow("idensenet-lc", dtype=torch.float32, shape=(3, 8, 8)).save(path)
    return path


def picture(path):
    return np.asarray(Image.open(path).convert("RGB")).astype(int)


def share(image, colour, tolerance=40):
    """Share of a picture's pixels that are close to a colour."""
    return float((np.abs(image - np.array(colour)).max(-1) < tolerance).mean())


def test_the_density_is_one_of_moons(moons):
    density = density_grid(open_model(moons).flow, grid=100, extent=5.0)
    cell = (10 / 99) ** 2
    assert density.sum() * cell == pytest.approx(1, abs=0.02)
    data = toy.sample("moons", 20_000, stream(0, "picture"))
    counts, _, _ = np.histogram2d(*data.T.numpy(), bins=100, range=[(-5, 5), (-5, 5)])
    # Where the data is, the flow is denser than elsewhere.
    assert density[counts > 0].mean() > 4 * density[counts == 0].mean()


def test_samples_look_like_the_data(moons):
    samples = draw_samples(open_model(moons).flow, 9000, stream(0, "samples"))
    data = toy.sample("moons", 9000, stream(0, "data"))
    assert samples.shape == (9000, 2)
    assert torch.allclose(samples.mean(0), data.mean(0), atol=0.15)
    assert torch.allclose(torch.cov(samples.T), torch.cov(data.T), atol=0.5)


def test_sample_repeats_and_obeys_its_temperature(moons, tmp_path, capsys):
    words = ["sample", str(moons), "-n", "300", "--out"]
    for name, more in (("a", []), ("b", []), ("cold", ["--temperature", "0.1"]), ("other", ["--seed", "9"])):
        assert main([*words, str(tmp_path / f"{name}.png"), *more]) == 0
    made = {path.stem: picture(path) for path in tmp_path.glob("*.png")}
    assert (made["a"] == made["b"]).all()
    assert (made["a"] != made["other"]).any()
    blue = (31, 119, 180)
    right = made["a"].shape[1] // 2
    # 300 cold samples lie on top of each other.
    assert share(made["cold"][:, right:], blue, 90) < 0.5 * share(made["a"][:, right:], blue, 90)
    assert str(tmp_path / "a.png") in capsys.readouterr().out


def test_sample_sheets_hold_the_flow_s_images(images, tmp_path):
    target = tmp_path / "grid.png"
    assert main(["sample", str(images), "-n", "9", "--out", str(target), "--seed", "4"]) == 0
    drawn = pixels(draw_samples(idn.load(images), 9, stream(4, "samples")))
    sheet = picture(target)
    # The sheet is pixel for pixel in the picture: find the first image's corner colours in reading order.
    flat = {tuple(colour) for colour in sheet.reshape(-1, 3)}
    wanted = {tuple(colour) for colour in drawn.astype(int).reshape(-1, 3)}
    assert len(wanted & flat) / len(wanted) > 0.9


def test_grid_puts_images_in_reading_order():
    shades = np.arange(5, dtype=np.uint8)[:, None, None, None] * 50 * np.ones((5, 2, 3, 1), np.uint8)
    sheet = np.asarray(plots.grid(shades, columns=3, scale=1, gap=1))
    assert sheet.shape == (5, 11, 3)
    assert [sheet[0, 0, 0], sheet[0, 4, 0], sheet[0, 8, 0], sheet[3, 0, 0], sheet[3, 4, 0]] == [0, 50, 100, 150, 200]
    assert (sheet[2] == 255).all() and (sheet[3:, 8:] == 255).all()


def test_reconstruct_says_how_small_the_error_is(images, moons, tmp_path, capsys):
    target = tmp_path / "again.png"
    assert main(["reconstruct", str(images), "--data", "cifar10-sample", "-n", "5", "--out", str(target)]) == 0
    out = capsys.readouterr().out
    assert float(out.split("max ")[1].split()[0]) < 1e-4
    assert "pixel values that differ: 0 of 960" in out
    shown = picture(target)
    # Three rows of five 8x8 images at scale 2, the last one black: nothing differs.
    assert share(shown, (0, 0, 0), 1) > 0.8 * 5 * 16 * 16 / (shown.shape[0] * shown.shape[1])
    assert main(["reconstruct", str(moons), "-n", "50", "--out", str(target)]) == 0
    assert float(capsys.readouterr().out.split("max ")[1].split()[0]) < 1e-4


def test_a_wrong_reconstruction_would_be_seen():
    black, white = np.zeros((2, 8, 8, 3), np.uint8), np.full((2, 8, 8, 3), 9, np.uint8)
    same, other = (np.asarray(plots.reconstructions(black, again, 0.5)) for again in (black, white))
    assert share(other.astype(int), (0, 0, 0), 1) < share(same.astype(int), (0, 0, 0), 1)


def test_walks_begin_and_end_at_the_data(moons, images, tmp_path):
    flow = open_model(images).flow
    x = matching(Split("cifar10-sample", limit=4), flow.shape).first(4)
    with torch.no_grad():
        z, _ = flow.encode(x)
    ways = walk(z[:2], z[2:], 5)
    assert ways.shape == (2, 5, 192)
    ends = flow.decode(ways[:, [0, -1]].flatten(0, 1))
    assert torch.allclose(ends, x[[0, 2, 1, 3]], atol=1e-4)
    # Lengths on the way lie between those of the ends, up to the angle between them.
    assert (ways.norm(dim=2) > 0.6 * z.norm(dim=1).min()).all()
    for model, more in ((moons, []), (images, ["--data", "cifar10-sample"])):
        target = tmp_path / f"{model.stem}.png"
        assert main(["interpolate", str(model), "-n", "3", "--steps", "5", "--out", str(target), *more]) == 0
        assert len(np.unique(picture(target).reshape(-1, 3), axis=0)) > 100


def test_plot_draws_everything_a_run_has(moons):
    assert main(["plot", str(moons)]) == 0
    made = {path.stem: picture(path) for path in (moons / "plots").glob("*.png")}
    assert set(made) == {"density", "eta1", "eta2", "norms", "curves"}
    for name, image in made.items():
        assert min(image.shape[:2]) >= 350, name
        assert 0.01 < 1 - share(image, (255, 255, 255), 5) < 0.95, name
    # The blue training curve, the orange validation and the red bound are really there.
    assert share(made["curves"], (31, 119, 180)) > 0.001 and share(made["curves"], (255, 127, 14)) > 0.0005
    assert share(made["norms"], (214, 39, 40)) > 0.001
    # The density panel is as bright in the middle of a moon as it is dark in a corner.
    panel = made["density"][:, 500:900]
    assert share(panel, (68, 1, 84)) > 0.3 and share(panel, (253, 231, 37), 60) > 0.002


def test_heat_maps_show_their_numbers():
    etas = [
        {"scale": scale, "block": block, "layer": layer, "eta1": value, "eta2": 1 - value}
        for scale in ("scale1", "scale2", "scale3", "fc")
        for block in (1, 2, 3, 4)
        for layer, value in ((1, 0.0), (2, 0.5), (3, 1.0))
    ]
    dark, middle, bright = (68, 1, 84), (33, 145, 140), (253, 231, 37)
    shown = np.asarray(plots.eta_maps(etas, "eta1", "title")).astype(int)
    shares = [share(shown, colour, 6) for colour in (dark, middle, bright)]
    assert min(shares) > 0.1 and max(shares) < 1.3 * min(shares)
    rows = [np.abs(shown - np.array(colour)).max(-1).__lt__(6).sum(1).argmax() for colour in (dark, middle, bright)]
    assert rows == sorted(rows), "layers a, b, c from top to bottom"
    other = np.asarray(plots.eta_maps(etas, "eta2", "title")).astype(int)
    upside_down = [np.abs(other - np.array(c)).max(-1).__lt__(6).sum(1).argmax() for c in (dark, middle, bright)]
    assert upside_down == sorted(upside_down, reverse=True)


def test_norms_never_pass_their_bound(moons):
    norms = layer_norms(open_model(moons).flow)
    assert len(norms) == 12 and norms[0].name == "block1.layer1"
    assert all(0 < norm.used <= norm.bound == 0.9 for norm in norms)
    assert any(norm.learned > norm.bound for norm in norms)


def test_curves_survive_a_line_cut_short(moons, tmp_path):
    lines = (moons / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(lines[:-20])
    records = read_records(tmp_path)
    assert len(records) == len(lines.splitlines()) - 1
    drawn = curves.learning_curves(records[:40], "nats", "title")
    assert drawn.width > 800
    (tmp_path / "metrics.jsonl").write_text("nonsense\n" + lines)
    with pytest.raises(idn.UserError, match="line 1 is not JSON"):
        read_records(tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sample", "MOONS", "-n", "0"], "-n 0: expected at least 1"),
        (["sample", "MOONS", "--temperature", "-1"], "--temperature -1.0: expected a number above 0"),
        (["sample", "MOONS", "--out", "picture.jpg"], "expected a name that ends in .png"),
        (["sample", "MOONS", "--out", "/nowhere/x.png"], "there is no folder /nowhere"),
        (["interpolate", "MOONS", "--steps", "1"], "--steps 1: expected at least 2"),
        (["reconstruct", "IMAGES", "--data", "cifar10-sample", "-n", "100"], "has 64 samples, 100 are needed"),
        (["plot", "nowhere"], "no file or folder nowhere"),
    ],
)
def test_mistakes_end_with_one_line(words, message, moons, images, capsys):
    words = [{"IMAGES": str(images), "MOONS": str(moons)}.get(word, word) for word in words]
    assert main(words) == 2
    err = capsys.readouterr().err.strip().splitlines()[-1]
    assert err.startswith("idn: error: ") and message in err

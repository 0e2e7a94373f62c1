"""`idn sample`, `idn reconstruct`, `idn interpolate`: looking at what a flow has learned."""

from pathlib import Path
from typing import Annotated

import torch
import tyro

from idn import plots
from idn.data import toy
from idn.errors import UserError
from idn.files import write_bytes
from idn.models import Model, open_model
from idn.splits import Split, matching
from idn.streams import stream
from idn.views import decoded, density_grid, draw_samples, pixels, walk

ModelPath = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(help="a run's folder or a flow's file")]
Count = Annotated[int, tyro.conf.arg(name="n", aliases=("-n",), help="how many")]
Out = Annotated[Path | None, tyro.conf.arg(help="picture to write (default: in the run's folder, else here)")]
Seed = Annotated[int | None, tyro.conf.arg(help="seed of what is drawn (default: the run's)")]
Raw = Annotated[tyro.conf.FlagCreatePairsOff[bool], tyro.conf.arg(help="raw weights, not averaged ones")]
DataName = Annotated[str | None, tyro.conf.arg(help="where samples come from (default: what it was trained on)")]


def sample(
    model: ModelPath,
    n: Count = 64,
    temperature: Annotated[float, tyro.conf.arg(help="standard deviation of the latent normal")] = 1.0,
    out: Out = None,
    seed: Seed = None,
    raw: Raw = False,
) -> None:
    """Draw new images, or points, and write them as one picture."""
    if not temperature > 0:
        raise UserError(f"--temperature {temperature}: expected a number above 0")
    opened, target = prepare(model, raw, out, n, "samples.png")
    drawn = draw_samples(opened.flow, n, stream(opened.seed(seed), "samples"), temperature)
    title = f"{opened.title}: {n} samples" + (f" at temperature {temperature:g}" if temperature != 1 else "")
    if is_image(opened):
        finish(plots.sheet(pixels(drawn), title), target)
        return
    panels = {"samples": drawn.numpy()}
    if (name := opened.config.get("dataset")) in toy.NAMES:
        panels = {"data": toy.sample(str(name), n, stream(opened.seed(seed), "picture data")).numpy(), **panels}
    finish(plots.points(panels, title), target)


def reconstruct(
    model: ModelPath,
    data: DataName = None,
    n: Count = 8,
    split: Annotated[str, tyro.conf.arg(help="train, validation or test")] = "test",
    out: Out = None,
    seed: Seed = None,
    raw: Raw = False,
) -> None:
    """Encode data, decode the codes, and show how far the result is from where it began."""
    opened, target = prepare(model, raw, out, n, "reconstructions.png")
    x = some_data(opened, data, split, seed, n)
    with torch.no_grad():
        z, _ = opened.flow.encode(x)
    again = decoded(opened.flow, z)
    errors = (again - x).flatten(1).norm(dim=1) / x.flatten(1).norm(dim=1)
    worst = float(errors.max())
    print(
        f"relative error |decode(encode(x)) - x| / |x| of {n} samples: mean {float(errors.mean()):.1e}, max {worst:.1e}"
    )
    if is_image(opened):
        changed = int((pixels(again) != pixels(x)).sum())
        print(f"pixel values that differ: {changed} of {x.numel()}")
        picture = plots.reconstructions(pixels(x), pixels(again), worst)
    else:
        panels = {"data": x.cpu().numpy(), "latent": z.cpu().numpy(), "decoded": again.cpu().numpy()}
        picture = plots.points(panels, f"{opened.title}: largest relative error {worst:.1e}")
    finish(picture, target)


def interpolate(
    model: ModelPath,
    data: DataName = None,
    n: Count = 6,
    steps: Annotated[int, tyro.conf.arg(help="pictures on the way, both ends included")] = 9,
    split: Annotated[str, tyro.conf.arg(help="train, validation or test")] = "test",
    out: Out = None,
    seed: Seed = None,
    raw: Raw = False,
) -> None:
    """Walk between pairs of samples in the latent space and decode the way."""
    if steps < 2:
        raise UserError(f"--steps {steps}: expected at least 2, the two ends")
    opened, target = prepare(model, raw, out, n, "interpolations.png")
    flow = opened.flow
    x = some_data(opened, data, split, seed, 2 * n)
    with torch.no_grad():
        z, _ = flow.encode(x)
    ways = walk(z[:n], z[n:], steps)
    between = decoded(flow, ways.flatten(0, 1))
    title = f"{opened.title}: between samples of the {split} set"
    if is_image(opened):
        picture = plots.sheet(pixels(between), title, columns=steps)
    else:
        picture = plots.paths(density_grid(flow), between.view(n, steps, 2).cpu().numpy(), title)
    finish(picture, target)


def prepare(path: Path, raw: bool, out: Path | None, n: int, name: str) -> tuple[Model, Path]:
    """The model, and where the picture goes; what cannot work is refused before anything is computed."""
    if n < 1:
        raise UserError(f"-n {n}: expected at least 1")
    check_picture(out)
    opened = open_model(path, raw)
    if not is_image(opened) and opened.flow.shape != (2,):
        raise UserError(
            f"{opened.path} is a flow over {opened.flow.dims} dimensions: only images and planes can be drawn"
        )
    return opened, out or opened.beside(name)


def check_picture(out: Path | None) -> None:
    """A picture's name must say PNG, and its folder must be there."""
    if out is None:
        return
    if out.suffix.lower() != ".png":
        raise UserError(f"--out {out}: expected a name that ends in .png")
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {out.parent}")


def is_image(model: Model) -> bool:
    return len(model.flow.shape) == 3


def some_data(model: Model, data: str | None, split: str, seed: int | None, count: int) -> torch.Tensor:
    """The first samples of a split, on the flow's device."""
    part = matching(Split(model.dataset(data), split, model.seed(seed), limit=count), model.flow.shape)
    x = part.first(count)
    if len(x) < count:
        raise UserError(f"{part.dataset} {split} has {len(x)} samples, {count} are needed: lower -n")
    return x.to(model.flow.device)


def finish(picture: plots.Picture, target: Path) -> None:
    write_bytes(target, plots.png(picture))
    print(f"written to {target} ({picture.width} x {picture.height})")

"""Imported checkpoints compute what the published models compute, with raw and with averaged weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import idn
from idn.errors import UserError
from idn.reference import convert, import_checkpoint
from idn.reference.checkpoint import read_checkpoint
from idn.streams import stream
from tests.reference.published import DENSE_DEFAULTS, Published

HERE = Path(__file__).parent
# Raw weights use the file's u and v as they are; the average's norms are iterated to convergence.
Z_TOLERANCE = {False: 1e-4, True: 1e-3}
LOGDET_TOLERANCE = {False: 1e-3, True: 1e-2}

IDENSENET = {**DENSE_DEFAULTS, "learnable_concat": False}
IDENSENET_LC = DENSE_DEFAULTS
MNIST = {"data": "mnist", "coeff": 0.93}
SMALL = {"nblocks": "1-1"}

MODELS: dict[str, dict[str, Any]] = {
    "residual": SMALL,
    "residual mnist": MNIST,
    "residual elu without the fully connected end": {**SMALL, "act": "elu", "fc_end": False},
    "residual relu": {**SMALL, **MNIST, "act": "relu"},
    "residual identity": {**SMALL, **MNIST, "act": "identity"},
    "residual clipswish": {**SMALL, **MNIST, "act": "CLipSwish", "densenet": False},
    "residual other kernels": {**SMALL, **MNIST, "kernels": "3-3-1"},
    "residual without actnorm": {**SMALL, **MNIST, "actnorm": False},
    "residual without first_resblock": {**SMALL, **MNIST, "first_resblock": False},
    "residual of one scale": {**MNIST, "nblocks": "2"},
    "residual of more scales than the image has": {**MNIST, "nblocks": "1-1-1-1"},
    "residual factored out": {**MNIST, "factor_out": True},
    "residual squeezed first": {**MNIST, "imagesize": 8, "squeeze_first": True},
    "residual 12x12": {**SMALL, **MNIST, "imagesize": 12, "fc_end": False},
    "idensenet": {**IDENSENET, **SMALL},
    "idensenet mnist": {**IDENSENET, **MNIST},
    "idensenet lc": {**IDENSENET_LC, **SMALL},
    "idensenet lc mnist": {**IDENSENET_LC, **MNIST},
    "idensenet clipswish": {**IDENSENET, **MNIST, "act": "CLipSwish"},
    "idensenet lc clipswish": {**IDENSENET_LC, **SMALL, "act": "CLipSwish"},
    "idensenet lc clipswish mnist": {**IDENSENET_LC, **MNIST, "act": "CLipSwish"},
    "idensenet lc deep, other lip_coeff": {**IDENSENET_LC, **MNIST, **SMALL, "densenet_depth": 4, "lip_coeff": 0.9},
    "idensenet of depth 1": {**IDENSENET, **MNIST, **SMALL, "densenet_depth": 1},
    "idensenet elu": {**IDENSENET_LC, **MNIST, **SMALL, "act": "elu"},
    "idensenet factored out, squeezed first": {
        **IDENSENET_LC, **MNIST, "imagesize": 16, "nblocks": "1-1", "factor_out": True, "squeeze_first": True,
        "fc_end": False,
    },
    "toy residual": {"toy": True},
    "toy residual tanh with actnorm": {"toy": True, "act": "tanh", "actnorm": True},
    "toy idensenet": {"toy": True, **IDENSENET},
    "toy idensenet lc": {"toy": True, **IDENSENET_LC, "densenet_depth": 3},
    "toy idensenet lc clipswish": {"toy": True, **IDENSENET_LC, "act": "CLipSwish", "actnorm": True},
}  # fmt: skip


def check(published: Published, out: Path, emas: tuple[bool, ...] = (False, True)) -> None:
    x = torch.rand(1, *published.shape, generator=stream(0, "pixels"))
    x.view(-1)[:2] = torch.tensor([0.0, 0.99999])  # black and white, where MNIST's logit is steep
    for ema in emas:
        flow = idn.load(out, ema=ema)
        z, logdet = flow.encode(x, exact=True)
        expected_z, expected_logdet = published.expected(x, ema)
        assert (z - expected_z).abs().max() < Z_TOLERANCE[ema]
        assert (logdet - expected_logdet).abs().max() < LOGDET_TOLERANCE[ema]


@pytest.mark.parametrize("ema", [False, True])
def test_the_reference_file(tmp_path: Path, ema: bool) -> None:
    import_checkpoint(HERE / "resflow.pth", tmp_path / "flow.safetensors")
    expected = torch.load(HERE / "resflow.expected.pt", weights_only=True)
    flow, kind = idn.load(tmp_path / "flow.safetensors", ema=ema), "ema" if ema else "raw"
    z, logdet = flow.encode(expected["x"], exact=True)
    assert (z - expected[f"{kind}_z"]).abs().max() < Z_TOLERANCE[ema]
    assert (logdet - expected[f"{kind}_logdet"]).abs().max() < LOGDET_TOLERANCE[ema]
    log_prob = flow.log_prob(expected["x"], exact=True)
    assert (log_prob - expected[f"{kind}_logp"]).abs().max() < 2 * LOGDET_TOLERANCE[ema]
    assert (flow.decode(z) - expected["x"]).abs().max() < 1e-4


@pytest.mark.parametrize("ema", [False, True])
def test_the_published_models_of_these_tests_are_the_real_ones(ema: bool) -> None:
    """What the other tests compare with agrees with figures of the authors' own code."""
    checkpoint = read_checkpoint(HERE / "resflow.pth")
    expected = torch.load(HERE / "resflow.expected.pt", weights_only=True)
    published = Published(**checkpoint.args)
    published.model.load_state_dict(checkpoint.state)
    published.shadow = checkpoint.ema
    z, logdet = published.expected(expected["x"][:2], ema)
    kind = "ema" if ema else "raw"
    assert (z - expected[f"{kind}_z"][:2]).abs().max() < 1e-5
    assert (logdet - expected[f"{kind}_logdet"][:2]).abs().max() < 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_model(name: str, tmp_path: Path) -> None:
    published = Published(**MODELS[name])
    out = tmp_path / "flow.safetensors"
    import_checkpoint(published.save(tmp_path / "file.pth"), out)
    check(published, out)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize("package", ["lib", "resflows"])
@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code")
def test_every_kind_of_file(package: str, prefix: str, zipped: bool, tmp_path: Path) -> None:
    published = Published(**MODELS["toy idensenet lc clipswish"])
    path = published.save(tmp_path / "file.pth", package, prefix, zipped)
    import_checkpoint(path, tmp_path / "flow.safetensors")
    check(published, tmp_path / "flow.safetensors")


def test_published_code_need_not_exist(tmp_path: Path) -> None:
    path = Published(toy=True).save(tmp_path / "file.pth")
    with pytest.raises(ModuleNotFoundError):
        torch.load(path, weights_only=False)
    import_checkpoint(path, tmp_path / "flow.safetensors")


def test_without_an_average_both_loads_give_the_raw_weights(tmp_path: Path) -> None:
    published = Published(**MODELS["toy idensenet lc"])
    out = tmp_path / "flow.safetensors"
    import_checkpoint(published.save(tmp_path / "file.pth", ema=False), out)
    check(published, out, emas=(False,))
    x = torch.rand(3, 2, generator=stream(0, "points"))
    assert torch.equal(idn.load(out, ema=True).encode(x)[0], idn.load(out, ema=False).encode(x)[0])


@pytest.mark.parametrize(
    "name", ["residual mnist", "idensenet mnist", "idensenet lc clipswish mnist", "toy idensenet lc"]
)
def test_options_that_the_tensors_show_may_be_missing(name: str, tmp_path: Path) -> None:
    published = Published(**MODELS[name])
    complete = published.args
    kept = {"data", "coeff"}
    published.args = {option: value for option, value in complete.items() if option in kept}
    import_checkpoint(published.save(tmp_path / "file.pth"), tmp_path / "flow.safetensors")
    published.args = complete
    check(published, tmp_path / "flow.safetensors")


def test_the_summary_and_the_flow_of_an_import(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "flow.safetensors"
    import_checkpoint(Published(**MODELS["idensenet lc mnist"]).save(tmp_path / "file.pth"), out)
    assert "i-DenseNet+LC, 1x8x8, 2-2 blocks" in capsys.readouterr().out
    flow = idn.load(out)
    assert flow.config.learnable_concat and flow.config.logit_alpha == 1e-6 and flow.config.coeff == 0.93
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.pth", "flow.safetensors"]


def test_an_imported_flow_trains_and_samples(tmp_path: Path) -> None:
    raw, averaged = convert(Published(**MODELS["idensenet lc mnist"]).save(tmp_path / "file.pth"))
    assert averaged is not None
    raw.train()
    x = torch.rand(4, 1, 8, 8, generator=stream(0, "pixels"))
    raw(x, idn.Draws.seeded(0, "test")).log_prob.sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in raw.parameters())
    raw.update_norms()
    samples = averaged.sample(2, generator=stream(0, "samples"))
    assert samples.shape == (2, 1, 8, 8) and torch.isfinite(samples).all()


REFUSED: dict[str, Any] = {
    "block": "coupling", "task": "hybrid", "padding": 3, "fc": True, "fc_actnorm": True, "batchnorm": True,
    "quadratic": True, "learn_p": True, "vnorms": "222f", "act": "LeakyLSwish",
}  # fmt: skip


@pytest.mark.parametrize("option", REFUSED)
def test_models_that_ours_are_not(option: str, tmp_path: Path) -> None:
    published = Published(**MODELS["residual relu"])
    published.args[option] = REFUSED[option]
    with pytest.raises(UserError, match=f"file.pth: was trained with {option}="):
        import_checkpoint(published.save(tmp_path / "file.pth"), tmp_path / "flow.safetensors")
    assert not (tmp_path / "flow.safetensors").exists()


def test_a_branch_that_does_not_begin_with_an_activation(tmp_path: Path) -> None:
    path = Published(**MNIST, preact=False).save(tmp_path / "file.pth")
    with pytest.raises(UserError, match="was trained with preact=False"):
        convert(path)


@pytest.mark.parametrize(
    ("option", "claim", "message"),
    [
        ("idim", 64, "idim=64, but its tensors 12"),
        ("nblocks", "4-4", "nblocks='4-4', but its tensors '2-2'"),
        ("fc_idim", 128, "fc_idim=128, but its tensors 10"),
        ("coeff", "high", "coeff='high', expected a number"),
        ("coeff", 1.5, "coeff 1.5 must lie between 0 and 1"),
        ("factor_out", True, "has shape"),
    ],
)
def test_options_that_contradict_the_tensors(option: str, claim: object, message: str, tmp_path: Path) -> None:
    published = Published(**MNIST)
    published.args[option] = claim
    with pytest.raises(UserError, match=message):
        convert(published.save(tmp_path / "file.pth"))


JUNK = st.sampled_from([None, -1, 0, 3, 1e9, "", "text", [1], {}, float("nan"), True, (2, 2)])


@settings(max_examples=50)
@given(data=st.data(), toy=st.booleans())
def test_junk_in_options_or_tensors_is_a_user_error_or_harmless(
    data: st.DataObject, toy: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    published = Published(toy=toy, **IDENSENET_LC, **({} if toy else {**MNIST, **SMALL}))
    published.state = {name: tensor.clone() for name, tensor in published.state.items()}
    for _ in range(data.draw(st.integers(1, 2))):
        if data.draw(st.booleans()):
            published.args[data.draw(st.sampled_from(sorted(published.args)))] = data.draw(JUNK)
            continue
        name = data.draw(st.sampled_from(sorted(published.state)))
        tensor = published.state.pop(name)
        shape = data.draw(st.sampled_from([(), (1,), (0,), (3, 5), tuple(tensor.shape), (2, 3, 3, 3)]))
        changed = data.draw(st.sampled_from([name, f"{name}.1", f"module.{name}", name.replace("0", "7"), "x", ""]))
        published.state[changed] = torch.full(shape, data.draw(st.sampled_from([-1.0, 0.0, 1e9])))
    path = published.save(tmp_path_factory.getbasetemp() / "junk.pth", ema=False)
    try:
        convert(path)
    except UserError as error:
        assert str(error).startswith(str(path)) and "\n" not in str(error) and len(str(error)) < 500


def damage(published: Published, change: str) -> None:
    """Does one thing to the tensors of a checkpoint that should not be."""
    state, shadow, layer = published.state, published.shadow, "chain.1.nnet.0.network.0"
    match change:
        case "a tensor is missing":
            del state[f"{layer}.bias"]
        case "a tensor too many":
            state[f"{layer}.gain"] = torch.ones(1)
        case "another model":
            published.state = {"conv1.weight": torch.ones(3)}
        case "nothing":
            published.state = {}
        case "no blocks":
            published.state = {
                "chain.0.weight": torch.ones(2),
                "chain.0.bias": torch.ones(2),
                "chain.0.initialized": torch.ones(()),
            }
        case "another shape":
            state[f"{layer}.weight"] = torch.ones(7, 2)
        case "a layer too few":
            published.state = {name: tensor for name, tensor in state.items() if "chain.1.nnet.1." not in name}
        case "not finite":
            state[f"{layer}.bias"][1] = torch.nan
        case "no average of one":
            del shadow[f"{layer}.bias"]
        case "an average of nothing":
            shadow["chain.9.bias"] = torch.ones(1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("a tensor is missing", "'chain.1.nnet.0.network.0' holds scale, u, v, weight, which is no part"),
        ("a tensor too many", "'chain.1.nnet.0.network.0' holds bias, gain, scale, u, v, weight, which is no part"),
        ("another model", "'conv1' holds weight, which is no part"),
        ("nothing", "holds no chain of residual blocks"),
        ("no blocks", "holds no chain of residual blocks"),
        ("another shape", r"chain.1.nnet.0.network.0.weight has shape \(7, 2\), expected \(8, 2\)"),
        ("a layer too few", "chain.1 has 2 weights, but by its first block and options 3"),
        ("not finite", r"network.0.bias has values that are not finite"),
        ("no average of one", "the parameter 'chain.1.nnet.0.network.0.bias' has no average"),
        ("an average of nothing", "the average 'chain.9.bias' is of no parameter"),
    ],
)
def test_damaged_tensors(change: str, message: str, tmp_path: Path) -> None:
    published = Published(toy=True, **IDENSENET_LC)
    damage(published, change)
    path = published.save(tmp_path / "file.pth")
    with pytest.raises(UserError, match=message) as caught:
        convert(path)
    assert "file.pth" in str(caught.value) and "\n" not in str(caught.value)

"""The `idn` command: a table of commands, each a typed function in the file of its own subject."""

import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

import tyro

from idn.errors import UserError

COMMANDS = {
    "train": ("idn.train.commands:train", "train a flow on Ray workers"),
    "plan": ("idn.plan.command:plan", "time, memory and money of a run on other hardware"),
    "eval": ("idn.evaluate:eval_command", "bits per dimension or nats of a flow"),
    "sample": ("idn.sample:sample", "draw new images or points"),
    "reconstruct": ("idn.sample:reconstruct", "encode data, decode it again, show the difference"),
    "interpolate": ("idn.sample:interpolate", "walk between pairs of samples in the latent space"),
    "plot": ("idn.plot:plot", "density, learning curves, eta heat maps, norms"),
    "collect": ("idn.report.collect:collect", "copy the small artefacts of runs to a folder of results"),
    "report": ("idn.report.command:report", "one page from a folder of results: the paper's table and ours"),
    "certify": ("idn.certify:certify", "prove Lip(g) < 1 for every block of a flow"),
    "import": ("idn.reference:import_checkpoint", "turn a published checkpoint into a flow file"),
    "data prepare": ("idn.data.commands:prepare", "get a dataset, verify it, write shards"),
    "data info": ("idn.data.commands:info", "describe shards"),
    "data verify": ("idn.data.commands:verify", "check shards byte by byte"),
    "bench": ("idn.bench:bench", "speed and memory beside plain automatic differentiation"),
    "bench data": ("idn.data.commands:bench", "compare the stream's speed with stock loaders"),
}
"""Name -> (module:function, one line of help). Modules are imported only when their command is called."""


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["usage: idn COMMAND ... (idn COMMAND --help lists its options)", "", *lines])


def find_command(words: list[str]) -> tuple[str, list[str]]:
    """The command that the first one or two words name, and the words after it."""
    for length in (2, 1):
        if (name := " ".join(words[:length])) in COMMANDS and len(words) >= length:
            return name, words[length:]
    given = " ".join(words[:2])
    raise UserError(f"unknown command {given!r}; expected one of {', '.join(COMMANDS)}")


def load_command(name: str) -> Callable[..., Any]:
    module, _, function = COMMANDS[name][0].partition(":")
    return getattr(importlib.import_module(module), function)


def main(arguments: list[str] | None = None) -> int:
    """Runs one command. Bad input ends with one line and code 2; `--debug` shows where it came from."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0
    try:
        name, rest = find_command(words)
        command = load_command(name)
        # A command that takes words parses them itself: its options depend on the first ones.
        by_itself = list(inspect.signature(command).parameters) == ["argv"]
        result = command(rest) if by_itself else tyro.cli(command, prog=f"idn {name}", args=rest)
    except UserError as error:
        if debug:
            raise
        print(f"idn: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return result if isinstance(result, int) else 0

"""The command line of the main job."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import NoReturn

from pure_loopgrad.demo.config import QUICK, Config, InputError

DESCRIPTION = """Train a reconstruction through a loop over array elements, and compare what the gradient costs:
full graph, all but one iteration frozen, torch.utils.checkpoint, pure_loopgrad. Without --data the sinogram is
simulated from a retina image, with the physics that also reconstructs it. Started by torchrun in several processes, it
trains with the iterations spread over them, and compares the gradient with that of one."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong with an argument in one line, like all else; argparse would print the usage too."""

    def error(self, message: str) -> NoReturn:
        """Called by argparse.

        Raises:
            InputError: always.
        """
        raise InputError(f"{message} (--help lists the options)")


def parser() -> argparse.ArgumentParser:
    """The options; sizes have the defaults of `Config`."""
    result = Parser(prog="pure-loopgrad", description=DESCRIPTION)
    result.add_argument("--data", metavar="FILE.mat", help="a full-matrix capture; also finds its speed of sound")
    for field in fields(Config):
        if field.name != "data":
            option = f"--{field.name.replace('_', '-')}"
            default = field.metadata.get("default", field.default)
            result.add_argument(option, type=int, metavar="N", help=f"default {default}")
    result.add_argument("--quick", action="store_true", help="small sizes, under 30 s")
    result.add_argument("--out", type=Path, default=Path("demo-output"), help="folder for the pictures")
    result.add_argument("--json", action="store_true", help="print the numbers as JSON and nothing else")
    return result


def config_from(args: argparse.Namespace) -> Config:
    """Defaults, then those of --quick, then what was said."""
    said = {f.name: getattr(args, f.name) for f in fields(Config) if getattr(args, f.name) is not None}
    return Config(**{**(QUICK if args.quick else {}), **said})


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the job.

    Args:
        argv: arguments, without the program's name; those of the process by default.

    Returns:
        The exit status: 0, or 2 for bad input, which gets one line on stderr.
    """
    try:
        _run(parser().parse_args(argv))
    except InputError as error:
        return _refuse(str(error))
    except ModuleNotFoundError as error:
        return _refuse(f"the demo needs {error.name}: pip install 'pure_loopgrad[demo]'")
    except OSError as error:
        return _refuse(str(error))
    return 0


def _refuse(text: str) -> int:
    print(f"pure-loopgrad: {text}", file=sys.stderr)
    return 2


def _run(args: argparse.Namespace) -> None:
    config = config_from(args)
    # here and not above: without the extra `demo`, --help and the line about it must work
    from rich.console import Console

    from pure_loopgrad.demo import report
    from pure_loopgrad.demo.job import run

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # started by torchrun
        from pure_loopgrad.demo.sharded import run_sharded

        found = run_sharded(config)
        if found is not None:
            print(json.dumps(asdict(found)) if args.json else found)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=args.json)
    with console.status("reading the input") as status:
        result = run(config, lambda what, value: status.update(f"{what}: {value:,.4g}"))
    paths = report.write_pictures(result, args.out)
    if args.json:
        print(json.dumps({**result.numbers(), "pictures": [str(path) for path in paths]}, indent=1))
        return
    console.print(report.table(result.rows, result.n))
    console.print(report.summary(result), highlight=False)
    console.print("pictures: " + ", ".join(map(str, paths)), highlight=False, soft_wrap=True)

"""``python -m recsys_offload.train CONFIG [--dotted.name value ...]``: train a model from Parquet files."""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.logging import RichHandler

from recsys_offload.config import Config, load_config
from recsys_offload.config_help import print_help
from recsys_offload.faults import NonFiniteLossError
from recsys_offload.run_folder import RunFolder
from recsys_offload.stop_request import EXIT_CODE, StopRequested
from recsys_offload.summary import print_summary, write_summary
from recsys_offload.trainer import Trainer

USAGE = """\
usage: python -m recsys_offload.train CONFIG.yaml [--dotted.name VALUE ...]

Train a model as the YAML file says. Any setting can be given on the command line by its dotted name, as
`--train.batch_size 4096` or `--train.batch_size=4096`; lists and mappings as YAML or JSON. <name> stands for the name
of a feature, as in `--data.sparse.user_id.num_embeddings 1000`. Ctrl-C stops with a checkpoint; the same command with
`--run.folder FOLDER` goes on from it."""


def main(arguments: Sequence[str]) -> int:
    """Run the command line; returns the exit code: 0, 1 (the loss diverged), 2 (user error), 130 (interrupted)."""
    console = Console()
    if not arguments or "--help" in arguments or "-h" in arguments:
        print_help(Config, USAGE, console)
        return 0 if arguments else 2
    logging.basicConfig(
        level=logging.WARNING,
        format="%(message)s",
        handlers=[RichHandler(console=console, show_path=False, show_time=False)],
        force=True,  # an import has set up logging before
    )
    # TorchRec's models use a function that torch has renamed, which is nothing the user could act on.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    try:
        with RunFolder(load_config(arguments)) as run:
            console.print(f"Run folder: {run.path}", highlight=False, markup=False, soft_wrap=True)
            try:
                summary = Trainer(run, console).train()
            except StopRequested:
                again = shlex.join([sys.executable, "-m", "recsys_offload.train", str(run.path / "config.yaml")])
                console.print(
                    f"Stopped with a checkpoint. To go on: {again}", highlight=False, markup=False, soft_wrap=True
                )
                return EXIT_CODE
            write_summary(summary, run.records(), run.path)
            print_summary(summary, run.path, console)
    except (ValueError, OSError, MemoryError) as error:
        print("\n".join([f"error: {error}", *getattr(error, "__notes__", [])]), file=sys.stderr)
        return 2
    except NonFiniteLossError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted before training began", file=sys.stderr)
        return EXIT_CODE
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

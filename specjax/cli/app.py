"""The ``specjax`` program: its commands, its common options, and how errors become one line."""

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from specjax.cli.batch import batch
from specjax.cli.bench import bench
from specjax.cli.certify import certify
from specjax.cli.convert import convert
from specjax.cli.generate import generate
from specjax.cli.models import models, pull
from specjax.cli.options import Settings, Verbose, suggestion
from specjax.user_cache import keep_programs

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(models)
app.command()(pull)
app.command()(convert)
app.command()(certify)
app.command()(bench)
app.command()(batch)
app.command(context_settings={"allow_extra_args": True})(generate)  # it says itself what is wrong with them


def _version(asked: bool):
    if asked:
        import specjax

        print(f"specjax {specjax.__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
    verbose: Verbose = False,
):
    """Generate text with a language model in JAX, faster through speculative decoding and with the same distribution."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program and exits: 0 when all went well, 1 when something failed, 2 when the call itself was wrong.

    An error is one line on standard error; with ``--verbose`` its traceback comes too.

    Args:
      arguments: what follows the program's name; None takes the process's own.

    Raises:
      SystemExit: always.

    Example:
      >>> main(["generate", "--draft-max", "4"])
      Traceback (most recent call last):
      ...
      SystemExit: 2
    """
    settings = Settings()
    if arguments is None:
        # Somebody else's process decides itself what JAX keeps.
        keep_programs()
    try:
        code = app(args=arguments, prog_name="specjax", standalone_mode=False, obj=settings) or 0
    except typer.TyperException as error:
        code = error.exit_code
        # Asking for nothing prints the help, and the message of that is empty.
        if message := suggestion(getattr(error, "option_name", None)) or error.format_message().strip():
            _complain(message)
    except (typer.Abort, KeyboardInterrupt):
        _complain("interrupted")
        code = 130
    except BrokenPipeError:
        # The reader of our output has gone (`| head`); Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except (ValueError, OSError, RuntimeError) as error:
        if settings.verbose:
            traceback.print_exc()
        _complain(str(error))
        code = 1
    if settings.compilations is not None and settings.compilations.programs:
        print(f"specjax: {settings.compilations}", file=sys.stderr)
    sys.exit(code)


def _complain(message: str) -> None:
    print(f"specjax: {' '.join(message.split())}", file=sys.stderr)

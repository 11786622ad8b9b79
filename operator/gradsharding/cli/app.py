"""All commands on one page, and the last word on every error."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from gradsharding import __version__
from gradsharding.cli import aws_lambda, demo, exits, operator, plan, run, store, terminal, verify
from gradsharding.errors import GradsShardingError

app = typer.Typer(
    name="gradsharding",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
# Commands import what they need when they are called: --help answers at once.
app.command(epilog=run.EPILOG)(run.run)
app.command(epilog=plan.EPILOG)(plan.plan)
app.command(epilog=verify.EPILOG)(verify.verify)
app.command(epilog=store.EPILOG)(store.store)
app.command(epilog=demo.EPILOG)(demo.demo)
app.command(epilog=operator.EPILOG)(operator.operator)
app.add_typer(aws_lambda.app)


def _print_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"gradsharding {__version__}\n")
        raise typer.Exit


@app.callback(
    invoke_without_command=True,
    epilog="[bold]Exit status[/bold]  0 done · 2 bad manifest or usage · 3 the round failed · "
    "4 the store cannot be reached or refuses · 130 interrupted, run again to continue\n\n"
    "[bold]Begin with[/bold]  gradsharding store --dir s3 --bucket federation",
)
def _root(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001 - its callback does it
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[  # noqa: ARG001 - execute() has taken it out
        bool, typer.Option("--debug", help="Show tracebacks and the program's log. May stand anywhere.")
    ] = False,
) -> int:
    """Average the model updates of federated-learning clients, shard by shard, in small memory-capped functions.

    Clients put whole .safetensors or .npy files into an S3 bucket; a round reads them and leaves one mean beside them.
    """
    if context.invoked_subcommand is None:
        sys.stdout.write(context.get_help())
        return exits.INVALID
    return exits.DONE


def execute(arguments: list[str]) -> int:
    """Run one command; its exit status. Whatever goes wrong is one sentence on stderr, with --debug a traceback."""
    # Users are told to run the same again with --debug, and will put it last; typer wants it first.
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        with _log(debug):
            status = app(arguments, prog_name="gradsharding", standalone_mode=False)
    except BrokenPipeError:
        # Whoever read has left; the flush at exit would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exits.INTERNAL
    except ModuleNotFoundError:
        raise
    except (Exception, exits.Interrupted, KeyboardInterrupt) as error:  # noqa: BLE001 - users get a sentence
        if debug:
            terminal.show_traceback(error)
        return _last_word(error, debug)
    return status if isinstance(status, int) else exits.DONE


def _last_word(error: BaseException, debug: bool) -> int:
    status, _ = exits.status_and_reason(error)
    match error:
        case exits.Interrupted() | KeyboardInterrupt():
            terminal.complain("interrupted", str(error) or "nothing was changed")
        case typer.TyperException():
            terminal.complain("error", f"{error.format_message()} See {_command_path(error)} --help.")
        case GradsShardingError():
            terminal.complain("error", str(error))
        case _:
            what = f"{type(error).__name__}: {error}" if debug else type(error).__name__
            terminal.complain("bug", what if debug else f"{what}, run again with --debug")
    return status


def _command_path(error: typer.TyperException) -> str:
    context = getattr(error, "ctx", None)
    return context.command_path if context is not None else "gradsharding"


@contextmanager
def _log(debug: bool) -> Iterator[None]:
    """The log is for developers: without --debug nothing of it is shown, not even by Python's last resort."""
    log = logging.getLogger("gradsharding")
    handler = _EscapingHandler() if debug else logging.NullHandler()
    level = log.level
    log.addHandler(handler)
    if debug:
        log.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


class _EscapingHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        for line in self.format(record).splitlines():
            sys.stderr.write(terminal.printable(line) + "\n")

"""The ``windtunnel`` command: what it offers, and what its exit codes mean.

====  =============================================================================================================
code  meaning
====  =============================================================================================================
0     all went well
1     internal error: a bug in windtunnel, please report it (WINDTUNNEL_DEBUG=1 shows the traceback)
2     usage or configuration: an unknown flag or key, a value out of range, an output that cannot be written
3     unreadable input: a file that is missing, empty or malformed, or a server that does not answer
4     infeasible deployment: the model does not fit the GPU, or a request does not fit the KV cache
5     windtunnel diff: the two decided differently
99    the run finished, and an objective of --slo or a limit of --max-error was missed
130   interrupted (Ctrl-C)
====  =============================================================================================================
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from windtunnel import __version__
from windtunnel.cli.errors import EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_UNREADABLE, EXIT_USAGE, exit_code
from windtunnel.cli.lazy import Command, lazy_group
from windtunnel.cli.output import silence_stdout

COMMANDS = {
    "simulate": Command("windtunnel.cli.simulate", "simulate", "Run a workload through a simulated deployment."),
    "serve": Command("windtunnel.cli.serve", "serve", "Serve OpenAI clients: a mock deployment, or a real engine."),
    "fork": Command("windtunnel.cli.fork", "fork", "Look ahead: simulate a running engine's next seconds."),
    "plan": Command("windtunnel.cli.plan", "plan", "Find the cheapest deployment that keeps the objectives."),
    "memory": Command("windtunnel.cli.memory", "memory", "Plan GPU memory: the KV cache, and whether vLLM starts."),
    "ui": Command("windtunnel.cli.ui", "ui", "Turn knobs on a local page and see what they change."),
    "measure": Command("windtunnel.cli.measure", "measure", "Measure step times on this machine, for fit."),
    "fit": Command("windtunnel.cli.fit", "fit", "Fit a cost profile to measured steps, and state its error."),
    "compare": Command("windtunnel.cli.compare", "compare", "Compare variants on one workload, or saved runs."),
    "capacity": Command("windtunnel.cli.capacity", "capacity", "Find the largest rate that keeps the objectives."),
    "sweep": Command("windtunnel.cli.sweep", "sweep", "What if: many settings at once; which is best, which matters."),
    "optimize": Command("windtunnel.cli.optimize", "optimize", "Search settings for goodput per dollar; explain them."),
    "validate": Command("windtunnel.cli.validate", "validate", "Lay a prediction beside a live run: errors, and why."),
    "diff": Command("windtunnel.cli.diff", "diff", "Find the first step that two schedulers decide differently."),
    "explain": Command("windtunnel.cli.explain", "explain", "Say why a result is as it is, and what to turn."),
    "report": Command("windtunnel.cli.report", "report", "Turn a saved run into one HTML file or Markdown."),
    "trace": Command("windtunnel.cli.trace", "trace", "Turn a saved run into a Perfetto / Chrome trace."),
    "decisions": Command(
        "windtunnel.cli.decisions", "decisions", "Replay a case step by step and print each decision."
    ),
    "scenarios": Command("windtunnel.cli.lists", "scenarios", "List the scenarios that come with windtunnel."),
    "models": Command("windtunnel.cli.lists", "models", "List the bundled models."),
    "gpus": Command("windtunnel.cli.lists", "gpus", "List the known GPUs."),
    "profiles": Command("windtunnel.cli.profiles", "app", "List, show and compare cost profiles."),
    "workload": Command("windtunnel.cli.workload", "workload", "Describe a request trace."),
    "schema": Command(
        "windtunnel.cli.lists", "schema", "Print every key of a scenario file, as JSON Schema or tables."
    ),
}

EPILOG = """Exit codes: 0 ok, 1 internal error, 2 usage or configuration, 3 unreadable input,
4 infeasible deployment, 5 diff: they differ, 6 capacity: undecided,
99 SLO or --max-error breached, 130 interrupted."""

app = typer.Typer(
    cls=lazy_group(COMMANDS),
    name="windtunnel",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EPILOG,
)

_ClickException: type[Exception] = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)  # by name: typer carries click along, or depends on it, according to its version


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"windtunnel {__version__}")
        raise typer.Exit


@app.callback()
def windtunnel(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """A wind tunnel for LLM serving: simulate vLLM's scheduler, KV cache and latency before you buy or change a GPU.

    Start with:  windtunnel simulate chat-8b-h100
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; every expected error becomes one message on stderr."""
    arguments = [_with_dashes(argument) for argument in (sys.argv[1:] if argv is None else argv)]
    command: Callable[..., Any] = typer.main.get_command(app)
    _print_anything()
    try:
        code = int(command(arguments or ["--help"], prog_name="windtunnel", standalone_mode=False) or 0)
        sys.stdout.flush()
    except BrokenPipeError:
        silence_stdout()
        return 0
    except (KeyboardInterrupt, typer.Abort):
        if argv is None:  # the process ends now: a second Ctrl-C must not change how
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        code = EXIT_INTERRUPTED
    except Exception as error:
        if os.environ.get("WINDTUNNEL_DEBUG"):
            raise
        return _fail(*_explain(error))
    return _fail("interrupted", code) if code == EXIT_INTERRUPTED else code


def _print_anything() -> None:
    """Characters that the terminal's encoding lacks are written out (``\\u2013``) instead of stopping the program.

    A stream that the caller closed (``>&-``) takes everything and keeps nothing.
    """
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _explain(error: Exception) -> tuple[str, int]:
    """What to say about an exception, and the exit code that it stands for."""
    if isinstance(error, _ClickException):
        return _usage_message(error), EXIT_USAGE
    code = exit_code(error)
    if code != EXIT_INTERNAL:
        return str(error), code
    if isinstance(error, MemoryError):
        return (
            f"not enough memory: {str(error) or 'it is used up'}; ask for fewer requests (--num-prompts, --limit)",
            EXIT_USAGE,
        )
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}", EXIT_UNREADABLE
    if isinstance(error, OSError):
        return f"cannot write the output: {error.strerror or error}", EXIT_USAGE
    hint = "this is a bug in windtunnel; WINDTUNNEL_DEBUG=1 shows where"
    return f"{type(error).__name__}: {error} ({hint})", EXIT_INTERNAL


def _usage_message(error: Any) -> str:
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "windtunnel"
    return f"{error.format_message()}{_value_and_remedy(error)}\ntry '{path} --help'"


def _value_and_remedy(error: Any) -> str:
    """What was given for a flag, and what may be, where typer says only what it should have been."""
    tell = getattr(error.__cause__, "errors", None)
    if not callable(tell):
        return ""
    first = tell()[0]
    bounds = first.get("ctx") or {}
    remedies = [words.format(bounds[key]) for key, words in _REMEDIES.items() if key in bounds]
    return f", got {first['input']}{f': give {remedies[0]}' if remedies else ''}"


_REMEDIES = {"ge": "{} or more", "gt": "more than {}", "le": "{} or less", "lt": "less than {}"}
"""By the names that pydantic, which typer checks values with, has for bounds."""


def _fail(message: str, code: int) -> int:
    first, *rest = message.splitlines() or [""]
    print("\n".join([f"error: {first}", *(f"       {line}" for line in rest)]), file=sys.stderr)
    return code


def _with_dashes(argument: str) -> str:
    """vLLM reads ``--max_num_seqs`` as ``--max-num-seqs``, and so do we."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


if __name__ == "__main__":
    sys.exit(main())

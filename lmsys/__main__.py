"""`lmsys COMMAND` runs a command. `lmsys` alone shows this machine and what it can run.

This file is the script `lmsys` and `python -m lmsys`. It imports no torch itself, so that it starts at once: the module
of a command is imported when the command runs. To add a command, add it to `lmsys.commands.COMMANDS`.
"""

import argparse
import os
import runpy
import signal
import sys

from lmsys.commands import COMMANDS, USAGE, missing


def main() -> int:
    """Runs the module of the command that the first argument names, as `python -m` would, with the other arguments.

    Most commands end by SystemExit with a status of their own. For other commands this returns the exit status: 0, or
    USAGE if the command imports a package that is not installed. After Ctrl-C, and where the reader of stdout has gone,
    it is that of a program that SIGINT or SIGPIPE has ended.
    """
    lines = "\n".join(f"  {next(iter(command.examples)):48}{command.about}" for command in COMMANDS.values())
    parser = argparse.ArgumentParser(
        prog="lmsys",
        usage="lmsys [COMMAND ...]",
        description="\n\n".join([*(__doc__ or "").splitlines()[:1], lines]),  # python -OO has no docstrings
        epilog="lmsys COMMAND --help has examples of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", nargs="?", choices=COMMANDS, help=argparse.SUPPRESS)
    # If stdin, stdout or stderr is closed, its number (0, 1, 2) is free, and the next connection to a child process
    # would get it. The child would lose the connection, as its own stdin, stdout or stderr takes that number: `lmsys
    # check` then waited forever. So /dev/null takes the free numbers.
    opened = os.open(os.devnull, os.O_RDWR)  # gets the smallest free number
    while opened <= 2:
        os.set_inheritable(opened, True)
        opened = os.open(os.devnull, os.O_RDWR)
    os.close(opened)
    name = parser.parse_args(sys.argv[1:2]).command  # None: `lmsys` alone
    del sys.argv[1:2]  # the command parses the remaining words itself
    try:
        try:
            runpy.run_module(COMMANDS[name].module if name else "lmsys.here", run_name="__main__", alter_sys=True)
        finally:
            print(end="", flush=True)  # else Python would flush stdout later, and print a traceback if that fails
    except BrokenPipeError:  # its reader has gone, as in `lmsys | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print("lmsys: interrupted; what stands above is all that was done", file=sys.stderr)
        return 128 + signal.SIGINT
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module in ("", "lmsys"):  # a bug in lmsys, and not a package that the user could install
            raise
        print(missing(f"lmsys {name}" if name else "lmsys", module), file=sys.stderr)
        return USAGE
    return 0


if __name__ == "__main__":
    sys.exit(main())

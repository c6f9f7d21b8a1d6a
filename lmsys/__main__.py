"""`lmsys`: one door to every command. Alone it shows this machine and what it can run.

Imports no torch: a command is imported when it runs. To add a command, add it to `lmsys.commands.COMMANDS`.
"""

import argparse
import os
import runpy
import sys

from lmsys.commands import COMMANDS, USAGE, missing


def main() -> int:
    """Runs the command that the first word names, as `python -m` would; the remaining words are its arguments.

    Returns the exit status of a command that returns: 0, or USAGE where a package is missing that it imports.
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
    opened = os.open(os.devnull, os.O_RDWR)  # takes the least number that is free
    while opened <= 2:  # a closed stdin, stdout or stderr: what took its number would be lost in other processes
        os.set_inheritable(opened, True)
        opened = os.open(os.devnull, os.O_RDWR)
    os.close(opened)
    name = parser.parse_args(sys.argv[1:2]).command  # None: `lmsys` alone
    del sys.argv[1:2]  # the command parses the remaining words itself
    try:
        runpy.run_module(COMMANDS[name].module if name else "lmsys.here", run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module in ("", "lmsys"):  # a bug of ours, not a package to install
            raise
        print(missing(f"lmsys {name}" if name else "lmsys", module), file=sys.stderr)
        return USAGE
    return 0


if __name__ == "__main__":
    sys.exit(main())

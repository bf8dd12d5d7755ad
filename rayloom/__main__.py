"""The command `rayloom`, also as `python -m rayloom`."""

from __future__ import annotations

import sys

from rayloom import check_names

EXIT_REFUSED = 2


def main() -> None:
    """Run the command line.

    Exit if a module in the current directory hides a package, or if this directory was deleted.
    """
    try:
        # The command line imports the user's modules from the current directory.
        check_names(["", *sys.path])
    except ImportError as error:
        print(f"rayloom: {error}", file=sys.stderr)
        sys.exit(EXIT_REFUSED)
    from service.cli.main import main as run

    run()


if __name__ == "__main__":
    main()

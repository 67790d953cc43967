"""`python -m bench` is `mla`."""

import sys

from bench.requirements import missing

if __name__ == "__main__":
    try:
        from bench.cli import main
    except ModuleNotFoundError as error:  # here no installation has seen to what the command line itself needs
        print(f"error: {missing('python -m bench', error)}", file=sys.stderr)
        sys.exit(2)
    main()

"""`python -m bench` is `mla`."""

from bench.cli import main

if __name__ == "__main__":
    main()

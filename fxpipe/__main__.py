"""`python -m fxpipe` is the command `fxpipe`."""

from fxpipe.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()

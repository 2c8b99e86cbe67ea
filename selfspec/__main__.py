"""Lets `python -m selfspec` run the command line."""

from selfspec.cli.app import main

if __name__ == "__main__":
    main()

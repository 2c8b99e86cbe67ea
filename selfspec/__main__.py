"""Run the command line by `python -m selfspec`."""

from selfspec.cli.app import main

if __name__ == "__main__":
    main()

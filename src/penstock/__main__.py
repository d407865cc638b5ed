"""``python -m penstock``: the same as the command ``penstock``."""

from penstock.cli.app import main

if __name__ == "__main__":
    main()

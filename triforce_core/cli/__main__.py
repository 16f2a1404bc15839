"""`python -m triforce_core.cli`."""

from triforce_core.cli.app import main

if __name__ == "__main__":
    main()

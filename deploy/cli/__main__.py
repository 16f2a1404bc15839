"""`python -m deploy.cli`."""

from deploy.cli.app import main

if __name__ == "__main__":
    main()

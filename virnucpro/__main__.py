"""``python -m virnucpro`` is ``virnucpro``."""

from virnucpro.cli.main import main

if __name__ == "__main__":
    main()

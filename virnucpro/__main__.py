"""``python -m virnucpro`` is ``virnucpro``: nothing more is imported from the current folder."""

import os
import sys

import virnucpro

if __name__ == "__main__":
    is_safe = sys.flags.isolated or getattr(sys.flags, "safe_path", False)  # from Python 3.11 on
    if not is_safe and sys.path[0] != os.path.dirname(virnucpro.__path__[0]):  # noqa: PTH120
        del sys.path[0]  # the current folder, if the package itself was not found there
    from virnucpro.cli.launch import main

    main()

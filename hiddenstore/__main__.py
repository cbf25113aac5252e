"""``python -m hiddenstore``."""

import runpy

runpy.run_module("hiddenstore.cli", run_name="__main__", alter_sys=True)

"""Before any peer is imported: triton reads this once, when its kernels are defined."""

import os

os.environ["TRITON_INTERPRET"] = "1"

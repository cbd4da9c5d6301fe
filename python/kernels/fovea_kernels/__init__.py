"""GPU kernels of Fovea's most common calls, compiled ahead: with this package beside `fovea`, their first call compiles nothing.

There is nothing to import: the library finds `fovea.pack` here by itself; ``python -m fovea doctor`` says whether it did.
"""

import pathlib

#: The file; the variable FOVEA_PACK names another.
PACK = pathlib.Path(__file__).with_name("fovea.pack")

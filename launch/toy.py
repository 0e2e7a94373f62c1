"""ray job submit --working-dir . -- python launch/toy.py circles|checkerboard|moons|... [options of `idn train`]"""

import sys

from idn.cli import main

sys.exit(main(["train", *sys.argv[1:]]))

"""ray job submit --working-dir . -- python launch/mnist.py [options of `idn train mnist`]"""

import sys

from idn.cli import main

sys.exit(main(["train", "mnist", *sys.argv[1:]]))

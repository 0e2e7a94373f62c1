"""ray job submit --working-dir . -- python launch/cifar10.py [options of `idn train cifar10`]"""

import sys

from idn.cli import main

sys.exit(main(["train", "cifar10", *sys.argv[1:]]))

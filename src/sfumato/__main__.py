"""python -m sfumato: the command line, also for torchrun (torchrun --nproc-per-node 4 -m sfumato train ...)."""

from sfumato.cli import main

main()

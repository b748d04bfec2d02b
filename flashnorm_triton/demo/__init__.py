"""``flashnorm demo``: the shipped model, stock against patched, on whatever this machine has."""

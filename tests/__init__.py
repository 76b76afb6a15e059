"""Tests mirror the package."""

import os

# torch asks for the names of the hosts that connect, which nobody here needs; a resolver that
# does not answer would hold up each process for 5 s, now and then.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

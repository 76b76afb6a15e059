"""One thread of torch in each process of the tests.

The tests run side by side in processes, and many start processes of their own. With a pool of
threads in each, the threads wait for each other's cores: tests/runtime/test_parity.py takes 190
seconds of CPU with two threads and 70 with one. The variable is read when torch is imported, and
child processes inherit it.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

"""Imported last by the fork server: its objects stay until the end.

The garbage collector of a fork need not look at them, which would copy their pages.
"""

import gc

gc.collect()
gc.freeze()

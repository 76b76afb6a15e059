"""The machinery of `fxpipe.microbatch`: trees, values, specs, splitting, merging.

    tree    open and close containers, name the way to a leaf; what a user may say about one
    values  cut and join one tensor, DTensor or BlockMask; what other objects hide
    split   which leaves are cut, into how many rows each
    merge   one output out of one output of each microbatch

Users import from `fxpipe.microbatch`.
"""

__all__: list[str] = []

"""Rows divided into groups in every way that a grouped kernel's tiles can meet."""

import numpy as np

GROUPS = 3


def divisions(config):
    """Sizes of five groups and the first of three that are here.

    ``config`` has the number of rows ``m`` and a ``tiling``, or None.
    """
    m = config.m
    tile = config.tiling.m if config.tiling else 128
    return {
        "boundaries inside tiles": ([tile // 2, tile + 5, 3, tile, 7], 1),
        "boundaries on tiles": ([tile, tile, 0, 0, 0], 0),
        "several groups in a tile": ([3, 2, 1, 4, 2], 1),
        "one takes all": ([0, m, 0, 0, 0], 0),
        "one takes all, and is another's": ([m, 0, 0, 0, 0], 1),
        "empty groups": ([0, 0, tile + 1, 0, 0], 1),
        "no rows at all": ([0, 0, 0, 0, 0], 1),
        "every row has a group": ([5, 1, tile, 0, m - tile - 6], 2),
        "the last groups": ([1, 2, 3, 4, tile + 3], 2),
        "one row each": ([1, 1, 1, 1, 1], 0),
    }


def outside(config, sizes, offset):
    """Which rows are of no group that is here, bool ``[m]``."""
    ends = np.cumsum([0, *sizes])
    rows = np.ones(config.m, bool)
    rows[ends[offset] : ends[offset + GROUPS]] = False
    return rows

"""The import paths of the two systems that rlbench grew from: their scripts run with the package's name changed.

    import rlbench.compat.rlite as rlite                    # was: import rlite
    from rlbench.strategy import get_strategy               # was: from lightrft.strategy import get_strategy

Nothing here does anything of its own: each name is one of rlbench's, or is refused with the reason when it is built.
"""

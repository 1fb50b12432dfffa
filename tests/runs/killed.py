"""Runs that are killed, so that others can go on from what is left in their folders."""

import pytest

import fedman


class Killed(BaseException):
    pass


def die_after(number):
    """For `progress`: the end of a process after this round."""

    def die(record):
        if record["round"] == number:
            raise Killed

    return die


def run_killed(number, **keys):
    """`fedman.run`, killed after this round."""
    with pytest.raises(Killed):
        fedman.run(**keys, progress=die_after(number))

"""The tests of an op's mutants, as functions that a file of tests names."""

import pytest

from onepass.testing.mutants import copy_package, mutate

ERRORS = AssertionError, ValueError, RuntimeError, IndexError  # a mutation can make an invalid shape or grid


def mutant_tests(module, mutants, cases, judge_case, passing=None, errors=ERRORS):
    """Return two tests: each mutant fails one of the cases, and a copy of the package without a change passes those of `passing`.

    A mutant's row has what `mutate` takes. What follows there is handed to `cases`, which returns those to try, in order. Or
    `cases` is a list, and the row may end with the place there of the cheapest case that catches the mutant: it goes first.
    Raising counts as failing.
    """

    @pytest.mark.parametrize("name", mutants)
    def mutants_are_caught(name):
        change, more = mutants[name][:4], mutants[name][4:]
        tried = cases(*more) if callable(cases) else [*(cases[place] for place in more), *cases]
        assert _caught(mutate(*change, entry=module), tried, judge_case, errors), "no case catches it"

    def a_copy_without_a_change_passes():
        copy = copy_package(module)
        assert copy is not module
        for case in dict.fromkeys(case for row in mutants.values() for case in cases(*row[4:])) if passing is None else passing:
            report = judge_case(copy, case)
            assert report, f"{case}\n{report}"

    return mutants_are_caught, a_copy_without_a_change_passes


def mutants_of(entry, mutants, is_right):
    """Return the two tests where one check of a module is all, which raises, too, where something is wrong."""
    return mutant_tests(entry, mutants, [()], lambda module, _: is_right(module), [()], (*ERRORS, TypeError))


def _caught(mutant, cases, judge_case, errors):
    for case in cases:
        try:
            if judge_case(mutant, case):
                continue
        except Exception as error:
            if not isinstance(error, errors) and "programs wait for each other" not in str(error):
                raise
        return True
    return False
